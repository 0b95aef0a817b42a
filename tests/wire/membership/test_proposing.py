"""What the promises decide (G4, G7), whom a generation lists, and which of two generations is ahead: pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.membership import proposals as proposing
from meshwire.membership.lineage import Relation, ballot, keeps_history, relation
from meshwire.membership.proposal_checks import enter_wrong, list_wrong, number_wrong
from meshwire.membership.proposals import enter_message, keep, lies_on, roll_of, worst_linked
from meshwire.messages.generation import Holding, Standing
from meshwire.messages.job import Generation, Member

JOB = "j" + "0" * 11


def member(number: int, incarnation: int = 1) -> Member:
    return Member(device=f"{number + 1:064x}", incarnation=incarnation, name=f"peer{number}")


def generation(
    number: int, ranks: tuple[int, ...], proposer: int = 0, members: int = 4, root: int | None = None
) -> Generation:
    return Generation(
        job=JOB,
        number=number,
        proposer=member(proposer).device,
        parent=None,
        members=tuple(member(rank) for rank in range(members)),
        ranks=ranks,
        learning=ranks,
        root=root or number,
        counted=ranks,
    )


def chain(history: str, round_: int) -> bytes:
    return f"{history}{round_:>10}".encode().ljust(16)[:16]


def standing(number: int, complete: int, history: str = "a", kept: int = 99, linked: tuple[int, ...] = ()) -> Standing:
    """Of a member in generation `number`; 0: without history. Histories branch off after round 5."""
    rounds = range(max(0, complete - kept + 1), complete + 1)
    return Standing(
        generation=number or None,
        number=number,
        complete=complete if number else 0,
        chains=tuple(chain(history if round_ > 5 else "a", round_) for round_ in rounds) if number else (),
        samples=0,
        linked=linked,
    )


STANDINGS = st.dictionaries(
    st.integers(0, 7),
    st.builds(standing, st.integers(0, 3), st.integers(0, 12), st.sampled_from("ab"), kept=st.sampled_from([1, 3, 99])),
    min_size=1,
)


@given(STANDINGS, st.data())
def test_the_longest_of_the_newest_is_kept(standings: dict[int, Standing], data: st.DataObject) -> None:
    """G4, for any promises: nothing longer of g* exists, the source holds the cut, and exactly those reload whose
    rounds are not known to lie on what is kept."""
    proposer = data.draw(st.sampled_from(sorted(standings)))
    kept = keep(standings, proposer)
    histories = {rank: held for rank, held in standings.items() if held.generation is not None}
    if not histories:
        assert kept.reload == tuple(sorted(standings))
        assert kept.cut == 0
        return
    newest = max(held.number for held in histories.values())
    source = standings[kept.source]
    assert source.number == newest
    assert kept.cut == source.complete == max(held.complete for held in histories.values() if held.number == newest)
    assert kept.source not in kept.reload
    assert kept.chain == source.chains[-1]
    for rank, held in standings.items():
        assert (rank in kept.reload) == (not lies_on(held, source))
        if rank not in kept.reload:
            assert held.complete <= kept.cut


@given(STANDINGS, st.data())
def test_what_is_decided_passes_the_members_checks(standings: dict[int, Standing], data: st.DataObject) -> None:
    """Whoever promised finds what it promised in the commit."""
    proposer = data.draw(st.sampled_from(sorted(standings)))
    proposed = generation(9, tuple(sorted(standings)), proposer, members=8)
    enter = enter_message(proposed, standings, proposer)
    assert not [wrong for rank in standings if (wrong := enter_wrong(enter, proposed, rank, standings[rank]))]


def test_a_longer_history_of_an_older_generation_gives_way() -> None:
    """G4: it was left out; what it completed alone is not the history of the survivors."""
    kept = keep({0: standing(2, 8, "a"), 1: standing(1, 9, "b"), 2: standing(1, 8, "a")}, proposer=1)
    assert (kept.cut, kept.source, kept.reload) == (8, 0, (1,))


def test_equal_counts_are_no_equal_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: by the count of rounds alone a member that completed another round 8 would go on with it."""
    standings = {0: standing(2, 8, "a"), 1: standing(1, 8, "b")}
    assert keep(standings, proposer=0).reload == (1,)
    monkeypatch.setattr(proposing, "lies_on", lambda held, history: held.complete <= history.complete)
    assert keep(standings, proposer=0).reload == ()


@pytest.mark.parametrize("learning", [(), (0,)])
@pytest.mark.parametrize("awaited", [False, True])
def test_no_base_is_given_up_for_a_longer_history_of_which_nobody_has_one(
    learning: tuple[int, ...], awaited: bool
) -> None:
    """G4: peer0 was to be served round 9 by who has died since; peer1 and peer2 have entered after it, and only load.
    Where somebody may have what they are to load, and peer0's learner computes no more, he is waited for."""
    has: dict[str, object] = {}
    standings = {
        0: standing(1, 8).model_copy(update=has | {"holding": Holding(base=True, loads_after=8)}),
        1: standing(2, 9, kept=1).model_copy(update=has | {"holding": Holding(loads_after=9)}),
        2: standing(2, 9, kept=1).model_copy(update=has | {"holding": Holding(loads_after=9)}),
        3: standing(1, 7).model_copy(update=has | {"holding": Holding(loads_after=7)}),
    }
    proposed = generation(3, (0, 1, 2, 3), 1).model_copy(update={"learning": learning})
    enter = enter_message(proposed, standings, 1, awaited=awaited)
    if awaited:
        assert (enter.cut, enter.way) == (9, "on" if learning else "wait")
        return
    assert (enter.cut, enter.chain, enter.source, enter.way) == (8, chain("a", 8), 0, "on")
    assert enter.reload == (1, 2, 3)
    assert not [wrong for rank in standings if (wrong := enter_wrong(enter, proposed, rank, standings[rank]))]
    loads = {rank: held.model_copy(update={"holding": Holding(loads_after=9)}) for rank, held in standings.items()}
    assert enter_message(proposed, loads, 1, awaited=False).cut == 9, "nobody has a base"


def test_the_source_is_who_can_serve_most() -> None:
    """A member that was loaded at the cut knows no older rounds."""
    kept = keep({0: standing(2, 8, kept=1), 1: standing(2, 8), 2: standing(2, 6)}, proposer=0)
    assert (kept.source, kept.reload) == (1, ())
    assert keep({0: standing(2, 8), 1: standing(2, 8)}, proposer=1).source == 1


def test_a_round_that_chain_hashes_do_not_reach_is_loaded() -> None:
    assert not lies_on(standing(1, 3), standing(1, 8, kept=3))
    assert lies_on(standing(1, 6), standing(1, 8, kept=3))
    assert not lies_on(standing(1, 7, "b"), standing(1, 8, "a"))


def test_of_two_members_without_a_link_one_is_left_out() -> None:
    """G7: the one without history, else with fewer links, else of the higher rank; never the proposer."""
    everybody = (0, 1, 2, 3)
    linked = {rank: standing(1, 1, linked=everybody) for rank in everybody}
    assert worst_linked(linked, 0) is None
    one_missing = linked | {1: standing(1, 1, linked=(0, 2))}
    assert worst_linked(one_missing, 0) == (3, 1)
    two_missing = linked | {1: standing(1, 1, linked=(0,))}
    assert worst_linked(two_missing, 0) == (1, 2)
    newcomer = linked | {1: standing(0, 0, linked=(0, 2))}
    assert worst_linked(newcomer, 0) == (1, 3)
    assert worst_linked(linked | {0: standing(1, 1, linked=())}, 0) is None


def test_devices_return_to_their_rank_and_newcomers_get_the_next() -> None:
    """A rank is for life; whoever comes in loads first."""
    last = generation(3, (0, 1, 2))
    back, newcomer = member(1, incarnation=7), member(9)
    roll = roll_of(last, last, without={1}, joining=(newcomer, back, member(3)), learn={2}, rest={0})
    assert roll.members == (member(0), back, member(2), member(3), newcomer)
    assert (roll.ranks, roll.learning) == ((0, 1, 2, 3, 4), (2,))


def test_whoever_a_failed_proposal_left_out_is_counted_again() -> None:
    """It may still be in the generation that was entered."""
    roll = roll_of(generation(4, (0, 1)), generation(3, (0, 1, 2)), without={0}, joining=(), learn=(), rest=())
    assert (roll.ranks, roll.learning) == ((1, 2), (1, 2))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=2, max_size=6))
def test_proposals_have_one_order(proposals: list[tuple[int, int]]) -> None:
    """G2: the higher number, then the proposer's lower rank."""
    made = [generation(number, (0, 1, 2, 3), proposer) for number, proposer in proposals]
    ordered = sorted(made, key=ballot)
    keys = [(g.number, -int(g.proposer, 16)) for g in ordered]
    assert keys == sorted(keys)


def test_the_newer_root_is_ahead_whatever_else() -> None:
    """G4: entitled generations are one line; so the part that had a right to go on keeps what it has made."""
    entitled, provisional = generation(3, (0, 1, 2), 0), generation(9, (2, 3), 2, root=1)
    for ancestors in ((), (entitled.hash64(),)):
        assert relation(provisional, (), entitled, ancestors) is Relation.NEWER
        assert relation(entitled, ancestors, provisional, ()) is Relation.OLDER


def test_a_common_member_tells_which_generation_is_ahead() -> None:
    """It promised both, the higher ballot later; so the other can complete nothing any more (G3)."""
    older, newer = generation(4, (0, 1), 0, root=3), generation(5, (1, 2), 2, root=3)
    assert relation(older, (), newer, ()) is Relation.NEWER
    assert relation(newer, (), older, ()) is Relation.OLDER
    assert relation(older, (), older, ()) is Relation.SAME


def test_without_one_ancestors_tell_and_else_it_was_a_partition() -> None:
    older, newer = generation(4, (0, 1), 0, root=3), generation(5, (2, 3), 2, root=3)
    assert relation(older, (), newer, (older.hash64(),)) is Relation.NEWER
    assert relation(newer, (older.hash64(),), older, ()) is Relation.OLDER
    assert relation(older, (), newer, ()) is relation(newer, (), older, ()) is Relation.PARTED
    assert keeps_history(older, 11, newer, 10)
    assert keeps_history(older, 10, newer, 10), "the lowest device id"
    assert not keeps_history(newer, 10, older, 10)


def test_generations_that_cannot_be_are_named() -> None:
    good = generation(2, (0, 2))
    assert list_wrong(good) is None
    for change in (
        {"ranks": (2, 0)},
        {"ranks": (0, 9)},
        {"learning": (1,)},
        {"proposer": member(1).device},
        {"members": (member(0), member(1), member(0, 2))},
        {"root": 3},  # after it
        {"counted": ()},  # entitled, and nobody decides what follows
        {"counted": (0, 1)},  # it counts others than its members
        {"gone": (1,)},
        {"root": 1, "counted": (2, 0)},
        {"root": 1, "counted": (9,)},
        {"root": 1, "counted": (0,), "gone": (0,)},
    ):
        assert list_wrong(good.model_copy(update=change)), change
    assert number_wrong(2**31, 5)
    assert number_wrong(6, 5) is None
