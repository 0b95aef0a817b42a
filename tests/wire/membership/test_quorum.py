"""Which part of the members may go on (G4, dynamic voting): never two of them apart."""

import itertools
from collections.abc import Collection, Mapping

from meshwire import limits
from meshwire.membership.quorum import Votes, is_entitled, newest_history
from meshwire.messages.generation import Electorate, Standing
from meshwire.messages.job import Generation, Member
from tests.computing import computing

JOB = "j" + "0" * 11
MEMBERS = tuple(Member(device=f"{n + 1:064x}", incarnation=n + 10, name=f"peer{n}") for n in range(5))
FIRST = computing(JOB, MEMBERS[0].device, MEMBERS)


def after(number: int, *ranks: int, root: int | None = None, **changes: object) -> Generation:
    update = {"number": number, "ranks": ranks, "learning": ranks, "counted": ranks, "root": root or number}
    return FIRST.model_copy(update={**update, "proposer": MEMBERS[ranks[0]].device, **changes})


def standing(votes: Votes, entered: Generation | None = FIRST) -> Standing:
    """Of a member whose history is that of the generation `entered`."""
    brought = None if entered is None else votes.history(entered)
    return Standing(
        generation=None if entered is None else entered.hash64(),
        number=0 if entered is None else entered.number,
        complete=0,
        chains=(),
        samples=0,
        linked=(),
        history=brought,
        votes=votes.told,
        forgot=votes.forgot,
    )


def part(*ranks: int, restarted: Collection[int] = ()) -> dict[int, int]:
    return {rank: 99 if rank in restarted else MEMBERS[rank].incarnation for rank in ranks}


def gone(*ranks: int) -> set[tuple[int, int]]:
    return {(rank, MEMBERS[rank].incarnation) for rank in ranks}


def entitled(
    here: Mapping[int, int], of: Generation = FIRST, lost: Collection[tuple[int, int]] = (), **told: Standing
) -> bool:
    """`told`: by members that have more to say than that they have entered it, by "rank0"."""
    standings = {rank: standing(Votes(of), of) for rank in here}
    standings |= {int(name[4:]): said for name, said in told.items()}
    return is_entitled(here, {rank: said for rank, said in standings.items() if rank in here}, lost)


def test_more_than_half_go_on_or_half_with_the_lowest_rank() -> None:
    """G4: of every way to cut five or four in two exactly one part is entitled."""
    for everybody in (range(5), range(4)):
        first = after(1, *everybody)
        for count in range(len(everybody) + 1):
            for ranks in itertools.combinations(everybody, count):
                others = [rank for rank in everybody if rank not in ranks]
                assert entitled(part(*ranks), first) != entitled(part(*others), first), ranks
    assert entitled(part(0, 3), after(1, 0, 1, 2, 3))


def test_only_who_holds_the_base_is_counted() -> None:
    """G4: who loads, forwards or has just come in decides nothing."""
    loading = after(2, 0, 1, 2, 3, 4, learning=(3,), counted=(3,))
    assert entitled(part(3), loading)
    assert not entitled(part(0, 1, 2, 4), loading)


def test_who_is_gone_helps_only_if_nobody_is_silent() -> None:
    """G4: it may have gone on with the silent ones before it went, where nobody who is here could see it."""
    assert not entitled(part(1), after(1, 0, 1))
    assert entitled(part(1), after(1, 0, 1), gone(0)), "two laptops, the other is gone: nobody else could have gone on"
    assert not entitled(part(2), after(1, 0, 1, 2), gone(0)), "1 may have gone on with 0"
    assert not entitled(part(1), after(1, 0, 1, 2), gone(0)), "2 may have, too"
    assert entitled(part(2), after(1, 0, 1, 2), gone(0, 1))
    assert entitled(part(1, 2), after(1, 0, 1, 2), gone(0))


def test_another_incarnation_has_no_vote_and_shows_that_the_one_before_is_gone() -> None:
    """G1: a daemon that was restarted does not know what it had promised."""
    assert not entitled(part(0, 1, 2, restarted=(0,)))
    assert entitled(part(0, 1, restarted=(0,)), after(1, 0, 1))


def test_the_newest_generation_that_anybody_entered_decides() -> None:
    """G4: three of the five went on without the others, two of those three decide now."""
    newer = after(2, 0, 1, 2)
    three = standing(Votes(newer), newer)
    assert not entitled(part(2, 3, 4), rank2=three)
    assert entitled(part(1, 2), rank1=three, rank2=three)


def test_whoever_has_given_its_history_up_still_votes_as_it_did() -> None:
    """Its promises outlive it; and those that lack the newest history are not entitled to go on from an older one."""
    newer = after(2, 0, 1, 2)
    without = standing(Votes(newer), None)
    assert entitled(part(0, 1, 2), rank0=standing(Votes(newer), newer), rank1=without, rank2=without)
    assert not entitled(part(1, 2, 3, 4), rank1=without, rank2=without)


def promised(*generations: Generation) -> Votes:
    votes = Votes(FIRST)
    for generation in generations:
        votes.promise(generation)
    return votes


def test_a_promise_counts_until_somebody_shows_that_it_came_to_nothing() -> None:
    """G4: 2 has promised a generation of 0, 1 and 2, which 0 and 1 may have entered."""
    hanging = after(2, 0, 1, 2)
    said = standing(promised(hanging))
    assert not entitled(part(2, 3, 4), rank2=said), "0 and 1 may be on, without the others"
    assert entitled(part(1, 2, 3), rank2=said), "1 has not promised it, and will not any more"
    of_one = standing(promised(after(2, 0, 1, 2, learning=(0,), counted=(0,))))
    assert not entitled(part(2, 3, 4), rank2=of_one)
    assert entitled(part(1, 2, 3), rank2=of_one), "nor is this one decided by 0, for 1 has not promised it"


def test_a_promise_that_all_here_have_given_needs_its_majority() -> None:
    """G4: with two of its three they are entitled; so is nobody else."""
    hanging = standing(promised(after(2, 0, 1, 2)))
    assert entitled(part(1, 2, 3), rank1=hanging, rank2=hanging)
    assert not entitled(part(2, 3, 4), rank2=hanging)


def test_a_proposer_that_gives_up_and_an_entitled_generation_settle_promises() -> None:
    hanging, newer = after(2, 0, 1, 2), after(3, 2, 3, 4)
    votes = promised(hanging)
    votes.withdraw(hanging)
    assert [vote.generation for vote in votes.told] == [FIRST.hash64()]
    votes = promised(hanging)
    votes.settle(newer)
    assert [vote.generation for vote in votes.told] == [newer.hash64()]


def test_what_not_all_that_count_have_entered_settles_nothing() -> None:
    """G4: 2 has entered a generation with 0, which was then gone: 0 may have promised another with 1 in its place."""
    first = after(1, 0, 1, 2)
    computing, loading = after(2, 0, 2), after(2, 0, 2, learning=(0,), counted=(0,))
    for newer in (computing, loading):
        votes = Votes(first)
        votes.promise(newer)
        assert not entitled(part(2), newer, gone(0), rank2=standing(votes, newer)), "1 is silent"
        assert entitled(part(2), newer, gone(0, 1), rank2=standing(votes, newer)), "nobody else is left"
        assert entitled(part(0, 2), newer, rank0=standing(votes, newer), rank2=standing(votes, newer))
        said = standing(votes, newer)
        votes.settle(newer)
        assert entitled(part(2), newer, gone(0), rank2=standing(votes, newer)), "0 had entered it"
        assert entitled(part(0, 2), newer, rank0=said, rank2=standing(votes, newer))
    newer = after(2, 0, 1, 2)
    votes = promised(newer)
    said = standing(votes, newer)
    votes.settle(newer)
    assert entitled(part(1, 2), newer, rank1=said), "2 knows that all three have entered it"
    assert not entitled(part(1, 2), newer, rank1=said, rank2=said), "of five"


def test_a_provisional_generation_settles_nothing() -> None:
    """G4: its electorate is that of its root, and those that are gone stay in the count."""
    hanging, alone = after(2, 0, 1, 2), after(3, 2, root=1, counted=(1, 2, 3, 4), gone=(0,))
    votes = promised(hanging, alone)
    votes.settle(alone)
    root, attempt = votes.told
    assert (root.number, root.gone, root.entered) == (1, (0,), True)
    assert (attempt.generation, attempt.entered) == (hanging.hash64(), False)
    assert not entitled(part(3, 4), alone), "two of five"
    assert entitled(part(2, 3, 4), alone)
    votes = Votes(after(5, 0, 1, 2))
    votes.settle(alone)
    assert votes.told[0].number == 5, "who was in a newer one remembers it"


def went_on_apart(first: Generation, root: Generation, settled: int, unsettled: int) -> list[Standing]:
    """What two members of `root` say, in the order of their ranks, once both have gone on provisionally: by a proposal
    of the one that has not heard that all have entered `root`, as the other one has."""
    votes = {rank: Votes(first) for rank in (settled, unsettled)}
    for rank in votes:
        votes[rank].promise(root)
    votes[settled].settle(root)
    told = votes[unsettled].history(root)
    counted = tuple(rank for rank, _ in told.counted)
    apart = after(19, *sorted(votes), root=told.number, counted=counted, learning=(settled,))
    for rank in votes:
        votes[rank].promise(apart)
        votes[rank].settle(apart)
    return [standing(votes[rank], apart) for rank in sorted(votes)]


def test_who_knows_that_a_root_is_settled_tells_of_it_in_a_provisional_generation_that_counts_others() -> None:
    """G4: 4 was left out of the first generation, and is taken in by the 14th, which is settled for 2 alone. Cut off, 4
    has both go on by those that counted when it was in last. So 0 comes in, and they are three of those five; but
    1 and 3 are two of the three that count, and on together."""
    root = after(14, 1, 2, 3, 4, learning=(1, 2, 3), counted=(1, 2, 3))
    two, four = went_on_apart(FIRST, root, settled=2, unsettled=4)
    one = standing(Votes(root), root)
    assert entitled(part(1, 3), root)
    assert not entitled(part(0, 2, 4), rank2=two, rank4=four), "one of three"
    assert entitled(part(0, 1, 2, 4), rank1=one, rank2=two, rank4=four), "two of three, and three of five"


def test_members_that_counted_before_a_root_do_not_go_on_apart_from_most_of_it() -> None:
    """G4: 0 and 1 counted before 2, 3 and 4 did, and 1 has heard that all have entered, 0 has not."""
    root = after(14, *range(5))
    zero, one = went_on_apart(after(1, 0, 1), root, settled=1, unsettled=0)
    assert not entitled(part(0, 1), rank0=zero, rank1=one), "two of five"
    assert entitled(part(0, 1, 2), rank0=zero, rank1=one, rank2=standing(Votes(root), root))


def test_a_provisional_generation_that_counts_as_its_root_does_is_told_alone() -> None:
    votes, alone = Votes(FIRST), after(3, 2, root=1, counted=(1, 2, 3, 4), gone=(0,))
    votes.settle(alone)
    assert [vote.generation for vote in votes.told] == [alone.hash64()]


def test_what_is_too_much_to_be_told_entitles_nobody() -> None:
    """The limit of promises: what is forgotten counts against those that are older."""
    attempts = [after(number, 0, 1, 2) for number in range(2, limits.ATTEMPTS_MAX + 3)]
    votes = promised(*attempts)
    assert (len(votes.told), votes.forgot) == (limits.ATTEMPTS_MAX + 1, 2)
    everybody = part(*range(5))
    assert not entitled(everybody, rank2=standing(votes))
    newer = after(3, 0, 1, 2, 3, 4)
    told = {rank: standing(votes if rank == 2 else Votes(newer), FIRST if rank == 2 else newer) for rank in everybody}
    assert is_entitled(everybody, told, ())


def test_of_histories_the_newest_generation_is_kept() -> None:
    def numbers(*standings: Standing) -> int | None:
        kept: Electorate | None = newest_history(standings)
        return None if kept is None else kept.number

    nothing = standing(Votes(None), None)
    newer = after(2, 0, 1, 2)
    assert numbers(nothing) is None
    assert numbers(nothing, standing(Votes(FIRST)), standing(Votes(newer), newer)) == 2
    assert not is_entitled(part(0), {0: nothing}, ())


def test_before_they_have_promised_it_is_asked_whether_they_can_be_entitled() -> None:
    """A proposal is made if what the others will say can make it so; their promises decide."""
    hanging = standing(promised(after(2, 0, 1, 2)))
    assert is_entitled(part(1, 2, 3), {2: hanging}, ()), "1 may not have promised it"
    assert is_entitled(part(0, 2, 3), {2: hanging}, ())
    assert not is_entitled(part(2, 3, 4), {2: hanging}, ())


def test_an_electorate_that_is_gone_lets_all_members_decide() -> None:
    """G4: else every part would be entitled, for in each of them nobody is missed."""
    of = after(5, 0, 1, 2, 3, learning=(2,), counted=(2,))
    for count in range(1, 4):
        for ranks in itertools.combinations((0, 1, 3), count):
            others = [rank for rank in (0, 1, 3) if rank not in ranks]
            here = entitled(part(*ranks), of, gone(2))
            assert not (here and others and entitled(part(*others), of, gone(2))), "never two of them apart"
    assert entitled(part(0, 1, 3), of, gone(2))
    assert entitled(part(1, 2, 3, restarted=[2]), of, gone(0)), "nobody else is left"
    assert not entitled(part(3, 2, restarted=[2]), of)
