"""G10: who broke the protocol is left out, on whose word, and when it may come back; and when a machine cannot tell."""

from typing import Any

import pytest

from meshwire import limits
from meshwire.membership.effects import Effect, MembershipPhase, Send, Shunned
from meshwire.membership.inputs import LinkDown, LinkUp, MessageFrom, PeerGone, RequestMade, TimerDue, ViolationSeen
from meshwire.membership.machine import Membership
from meshwire.membership.proposals import lies_about_settings, told_other_settings
from meshwire.membership.quorum import electorate_of
from meshwire.messages.envelope import Envelope, Role, decode, encode
from meshwire.messages.generation import Accuse, AskIn, Enter, Entered, Promised, Propose, Refused, Where, Wish
from meshwire.messages.group import GroupWorld
from meshwire.messages.job import Generation
from meshwire.rounds.stall import StallWatch
from meshwire.sync_modes.settings_changes import SettingsChange, SettingsChanges
from tests.computing import computing
from tests.wire.membership.test_membership import (
    FIRST,
    HELD,
    JOB,
    MEMBERS,
    ONE,
    THREE,
    TIMEOUTS,
    TWO,
    enter_of,
    entered,
    following,
    machine,
    promise_of,
    sent,
    word,
)

TURN_S = TIMEOUTS.turn_s


def accuse(device: str, violations: int = 1) -> Accuse:
    return Accuse(job=JOB, device=device, reason="NaN", violations=violations)


def shunned(effects: list[Effect]) -> list[str]:
    return [effect.device for effect in effects if isinstance(effect, Shunned)]


def proposed(effects: list[Effect]) -> Generation:
    """The one generation that is proposed, alone if it is to nobody."""
    generations = {generation.generation for _, generation in sent(effects, Propose)}
    (only,) = generations
    assert isinstance(only, Generation)
    return only


def pair(rank: int = 0) -> Membership:
    """One of two members."""
    first = computing(JOB, ONE, MEMBERS[:2])
    made = Membership(MEMBERS[rank], JOB, TIMEOUTS, 0.0, generation=first, known=[ONE, TWO])
    made.handle(LinkUp(MEMBERS[1 - rank].device, MEMBERS[1 - rank].incarnation), 0.0)
    return made


def test_who_broke_the_protocol_is_left_out_at_once_and_all_are_told_why() -> None:
    one = machine(0)
    effects = one.handle(ViolationSeen(THREE, "NaN"), 1.0)
    assert shunned(effects) == [THREE]
    assert {device for device, _ in sent(effects, Accuse)} == {TWO, THREE}
    assert proposed(effects).ranks == (0, 1)
    assert "peer2 was refused: NaN" not in one.waiting(), "it waits for promises now"
    assert one.refuses(THREE)
    assert not shunned(one.handle(ViolationSeen(THREE, "again"), 1.1)), (
        "what else it sent in that generation does not count"
    )


def test_the_lowest_rank_that_is_not_refused_proposes_and_the_word_of_one_is_enough() -> None:
    """On a ring one member alone sees what its neighbour sends."""
    two = machine(1)
    effects = two.handle(MessageFrom(THREE, accuse(ONE)), 1.0)
    assert shunned(effects) == [ONE]
    assert proposed(effects).ranks == (1, 2)


def test_a_proposal_of_or_with_a_refused_member_is_not_promised_and_its_proposer_is_told() -> None:
    three = machine(2)
    three.handle(ViolationSeen(TWO, "NaN"), 1.0)
    effects = three.handle(MessageFrom(ONE, Propose(generation=following(9, 0))), 1.1)
    assert [device for device, _ in sent(effects, Accuse)] == [ONE]
    assert [device for device, _ in sent(effects, Refused)] == [ONE]
    assert not sent(three.handle(MessageFrom(TWO, Propose(generation=following(9, 1))), 1.2), Entered)
    assert three.promised is not None
    assert TWO not in {member.device for member in three.promised.live.values()}


def test_one_that_says_no_to_a_refused_member_is_not_left_out_for_that() -> None:
    """G7: the proposer hears why, and proposes without the refused one."""
    one = machine(0)
    first = proposed(
        one.handle(LinkDown(THREE, "closed"), 1.0) + one.handle(LinkUp(THREE, MEMBERS[2].incarnation), 1.1)
    )
    one.handle(HELD, 1.1)
    effects = one.handle(MessageFrom(TWO, accuse(THREE)), 1.2)
    assert first.ranks == (0, 1, 2)
    assert proposed(effects).ranks == (0, 1)


def test_its_history_never_replaces_theirs() -> None:
    one = machine(0)
    one.handle(ViolationSeen(THREE, "NaN"), 1.0)
    before = one.generation
    later = following(50, 2, ranks=(2,), learning=(2,))
    assert not one.handle(MessageFrom(THREE, Where(job=JOB, generation=later, ancestors=(), samples=10**9)), 1.1)
    assert one.generation == before


def left_out(violations: int) -> Membership:
    """The others run without the third, which has broken the protocol so often."""
    one = machine(0)
    for number in range(violations):
        now_s = 1.0 + number * 100.0
        without = proposed(one.handle(ViolationSeen(THREE, "NaN"), now_s))
        assert without.ranks == (0, 1)
        enter(one, without, now_s)
        if number < violations - 1:
            back = proposed(one.handle(MessageFrom(THREE, ask()), now_s + 90.0))
            assert back.ranks == (0, 1, 2)
            one.handle(HELD, now_s + 90.0)
            decided = electorate_of(without, entered=True)
            newest = {"number": without.number, "generation": without.hash64(), "history": decided, "votes": (decided,)}
            one.handle(MessageFrom(TWO, promise(back, 1, **newest)), now_s + 90.0)
            nothing = {"generation": None, "number": 0, "complete": 0, "chains": (), "history": None}
            told = word(one.handle(MessageFrom(THREE, promise(back, 2, **nothing)), now_s + 90.0))
            one.handle(MessageFrom(TWO, entered(told)), now_s + 90.0)
            one.handle(MessageFrom(THREE, entered(told)), now_s + 90.0)
    return one


def promise(of: Generation, rank: int, **standing: Any) -> Promised:
    promised = promise_of(of, rank)
    return promised.model_copy(update={"standing": promised.standing.model_copy(update=standing)})


def enter(one: Membership, generation: Generation, now_s: float) -> None:
    one.handle(HELD, now_s)
    told = word(one.handle(MessageFrom(TWO, promise_of(generation, 1)), now_s))
    one.handle(MessageFrom(TWO, entered(told)), now_s)


def ask() -> AskIn:
    return AskIn(job=JOB, member=MEMBERS[2], linked=(ONE, TWO))


def test_it_may_ask_in_again_after_a_while_that_doubles() -> None:
    one = left_out(1)
    pardon_s = TIMEOUTS.pardon_s(1)
    effects = one.handle(MessageFrom(THREE, ask()), 1.0 + pardon_s - 0.1)
    assert not sent(effects, Propose)
    assert [told.device for _, told in sent(effects, Accuse)] == [THREE], "it is told why, for it may not know"
    assert proposed(one.handle(MessageFrom(THREE, ask()), 1.0 + pardon_s)).ranks == (0, 1, 2)
    twice = left_out(2)
    assert not sent(twice.handle(MessageFrom(THREE, ask()), 101.0 + pardon_s), Propose)
    assert sent(twice.handle(MessageFrom(THREE, ask()), 101.0 + 2 * pardon_s), Propose)


def test_after_three_violations_it_stays_out() -> None:
    one = left_out(limits.VIOLATIONS_MAX)
    assert not sent(one.handle(MessageFrom(THREE, ask()), 1e9), Propose)
    assert one.refuses(THREE)


def test_who_alone_speaks_against_one_after_the_other_is_the_liar() -> None:
    """If one member lies it is in every accusation; so a liar gets one honest member out, and not the next."""
    made = machine(1)
    assert proposed(made.handle(MessageFrom(THREE, accuse(ONE)), 1.0)).ranks == (1, 2)
    assert shunned(made.handle(MessageFrom(THREE, accuse(TWO)), 1.1)) == [THREE], (
        "this one knows that it has done nothing"
    )
    assert not made.refuses(ONE)


def test_the_second_accusation_of_one_member_alone_falls_back_on_it() -> None:
    members = (*MEMBERS, MEMBERS[0].model_copy(update={"device": f"{9:064x}", "name": "peer3"}))
    first = computing(JOB, ONE, members)
    made = Membership(members[0], JOB, TIMEOUTS, 0.0, generation=first, known=[])
    for member in members[1:]:
        made.handle(LinkUp(member.device, member.incarnation), 0.0)
    liar = members[3].device
    assert shunned(made.handle(MessageFrom(liar, accuse(TWO)), 1.0)) == [TWO]
    effects = made.handle(MessageFrom(liar, accuse(THREE)), 1.1)
    assert shunned(effects) == [liar]
    assert not made.refuses(TWO), "its word does not count any more"
    assert not made.refuses(THREE)


def test_of_two_that_accuse_each_other_the_word_of_the_lower_rank_counts() -> None:
    """In whatever order the others hear of it, they go on with the same one."""
    members = (*MEMBERS, MEMBERS[0].model_copy(update={"device": f"{9:064x}", "name": "peer3"}))
    first = computing(JOB, ONE, members)
    for order in ((TWO, THREE), (THREE, TWO)):
        made = Membership(members[3], JOB, TIMEOUTS, 0.0, generation=first, known=[])
        for member in members[:3]:
            made.handle(LinkUp(member.device, member.incarnation), 0.0)
        for accuser in order:
            made.handle(MessageFrom(accuser, accuse(THREE if accuser == TWO else TWO)), 1.0)
        assert made.refuses(THREE)
        assert not made.refuses(TWO)


def test_of_two_the_one_that_was_not_accused_goes_on_alone() -> None:
    """The refused one counts as gone: one of two is no minority. It waits a turn, for the other may accuse it, too."""
    one = pair()
    assert not sent(one.handle(ViolationSeen(TWO, "NaN"), 1.0), Propose)
    one.handle(TimerDue(), 1.0 + TURN_S)
    assert one.promised is not None
    assert one.promised.ranks == (0,)


def test_the_refused_count_as_gone_for_those_that_refused_them() -> None:
    """With the other one gone, too, the one that is left goes on at once, though two of three counted."""
    two = machine(1)
    two.handle(PeerGone(ONE, MEMBERS[0].incarnation), 1.0)
    two.handle(LinkDown(ONE, "refused"), 1.0)
    two.handle(ViolationSeen(THREE, "NaN"), 1.01)
    two.handle(TimerDue(), 1.1 + TIMEOUTS.relink_grace_s + 4 * TURN_S)
    assert two.promised is not None
    assert two.promised.ranks == (1,)
    assert not two.promised.provisional


@pytest.mark.parametrize("rank", [0, 1])
def test_two_that_accuse_each_other_wait_for_a_person(rank: int) -> None:
    """Nobody can tell who is right: the job pauses, and says on both what to do."""
    made, other = pair(rank), (TWO, ONE)[rank]
    effects = made.handle(ViolationSeen(other, "NaN"), 1.0) + made.handle(
        MessageFrom(other, accuse((ONE, TWO)[rank])), 1.01
    )
    effects += made.handle(TimerDue(), 1000.0)
    assert not sent(effects, Propose)
    assert made.promised is not None
    assert made.promised.number == 1
    assert "say of each other that they broke the protocol" in made.waiting()
    assert "`meshtrain leave`" in made.waiting()
    assert "`meshtrain cancel`" in made.waiting()
    made.handle(MessageFrom(other, Wish(job=JOB, kind="leave")), 1001.0)
    made.handle(TimerDue(), 1001.0 + 2 * TURN_S)
    assert made.promised.ranks == (rank,), "a person took the other out"


def test_what_was_said_on_another_link_is_said_again() -> None:
    one = machine(0)
    one.handle(ViolationSeen(THREE, "NaN"), 1.0)
    one.handle(LinkDown(TWO, "closed"), 1.1)
    effects = one.handle(LinkUp(TWO, MEMBERS[1].incarnation), 1.2)
    assert [told.device for device, told in sent(effects, Accuse) if device == TWO] == [THREE]


def test_strangers_accuse_nobody() -> None:
    one = machine(0)
    stranger = f"{7:064x}"
    one.handle(LinkUp(stranger, 1), 0.5)
    effects = one.handle(MessageFrom(stranger, accuse(TWO)), 1.0)
    assert not [effect for effect in effects if isinstance(effect, Shunned | Send)]
    assert one.generation == FIRST


# Who sends nothing


class Watched:
    """Looks every second."""

    def __init__(self) -> None:
        self.watch = StallWatch(30.0)
        self.now_s = 0.0

    def look(self, seconds: int, **seen: Any) -> tuple[int, str] | None:
        fields: dict[str, Any] = {
            "round_": 5,
            "lacks": [(2, 1)],
            "receipts": {2: (5, 1)},
            "chunk_bytes": {2: 100},
        } | seen
        for _ in range(seconds):
            self.now_s += 1.0
            if found := self.watch.look(self.now_s, **fields):
                return found
        return None


def test_who_has_all_that_it_needs_and_sends_nothing_is_named() -> None:
    watched = Watched()
    assert watched.look(30) is None
    assert watched.look(1) == (2, "round 5: it has all that it needs, and has sent nothing for 30 s")


@pytest.mark.parametrize(
    "seen",
    [
        {"round_": None},  # somebody computes
        {"receipts": {2: (5, 0)}},  # it waits for another
        {"receipts": {2: (4, 3)}},  # in the round before
        {"receipts": {}},
        {"lacks": []},
    ],
)
def test_who_cannot_send_yet_is_not_named(seen: dict[str, Any]) -> None:
    watched = Watched()
    assert watched.look(100, **seen) is None


@pytest.mark.parametrize("seen", [{"lacks": [(2, 0)], "receipts": {}}, {"receipts": {2: (6, 0)}}])
def test_the_own_part_needs_nothing_and_later_rounds_need_this_one(seen: dict[str, Any]) -> None:
    assert Watched().look(32, **seen) is not None


def test_a_slow_link_is_no_stall() -> None:
    """Bytes are moving, however few."""
    watched = Watched()
    for come in range(10):
        assert watched.look(29, chunk_bytes={2: come}) is None


def test_a_machine_that_slept_names_nobody() -> None:
    watched = Watched()
    assert watched.look(20) is None
    watched.now_s += 1000.0
    assert watched.look(20) is None


def split(rank: int, *, at_s: float = 1.0) -> tuple[Membership, Generation]:
    """A member that goes by its proposer's word, that of the first member, to enter a generation of all."""
    made = machine(rank)
    generation = following(2, 0)
    made.handle(MessageFrom(ONE, Propose(generation=generation)), at_s)
    made.handle(HELD, at_s)
    made.handle(MessageFrom(ONE, enter_of(generation)), at_s)
    return made, generation


def test_who_says_that_it_goes_by_another_word_is_refused_by_who_has_told_it() -> None:
    """G10: the proposer knows; rounds do not go on with it."""
    one = machine(0)
    one.handle(RequestMade("rest"), 1.0)
    effects = one.handle(HELD, 1.0)
    for device, rank in ((TWO, 1), (THREE, 2)):
        assert one.promised is not None
        effects = one.handle(MessageFrom(device, promise_of(one.promised, rank)), 1.0)
    told = word(effects)
    one.handle(MessageFrom(TWO, entered(told)), 1.1)
    effects = one.handle(MessageFrom(THREE, entered(told.model_copy(update={"cut": 3}))), 1.1)
    assert shunned(effects) == [THREE]
    assert proposed(effects).ranks == (0, 1)


def test_a_proposer_that_goes_by_another_word_than_it_has_told_is_refused_at_once() -> None:
    two, generation = split(1)
    assert not shunned(two.handle(MessageFrom(THREE, entered(enter_of(generation))), 1.1))
    assert shunned(two.handle(MessageFrom(ONE, entered(enter_of(generation, cut=3))), 1.2)) == [ONE]


@pytest.mark.parametrize("early", [False, True])
def test_of_a_third_one_that_was_told_otherwise_the_proposers_word_is_waited_for(early: bool) -> None:
    """G10: it may lie itself, and then its proposer says so. One that says nothing has told two members different
    words, and both of them refuse it."""
    two, generation = split(1)
    other = entered(enter_of(generation, cut=3))
    two.handle(MessageFrom(ONE, entered(enter_of(generation))), 1.1)
    assert not shunned(two.handle(MessageFrom(THREE, other), 1.2))
    assert two.phase is MembershipPhase.ENTERED
    assert "peer2 to enter generation 2" in two.waiting()
    at_s = 1.2 + TIMEOUTS.answer_s
    assert two.deadline() == pytest.approx(at_s)
    assert not shunned(two.handle(TimerDue(), at_s - 0.1))
    if early:
        effects = two.handle(MessageFrom(ONE, accuse(THREE)), at_s - 0.1)
        assert shunned(effects) == [THREE]
        assert not shunned(two.handle(TimerDue(), at_s)), "its proposer has explained it"
    else:
        effects = two.handle(TimerDue(), at_s)
        assert shunned(effects) == [ONE]
        assert proposed(effects).ranks == (1, 2)


def test_a_word_that_is_heard_before_the_own_one_is_compared_as_well() -> None:
    """And a second one of the same member takes nothing back."""
    two, generation = machine(1), following(2, 0)
    two.handle(MessageFrom(ONE, Propose(generation=generation)), 1.0)
    two.handle(HELD, 1.0)
    told = enter_of(generation)
    two.handle(MessageFrom(THREE, entered(told.model_copy(update={"cut": 3}))), 1.0)
    two.handle(MessageFrom(ONE, told), 1.0)
    two.handle(MessageFrom(ONE, entered(told)), 1.1)
    two.handle(MessageFrom(THREE, entered(told)), 1.2)
    assert two.phase is MembershipPhase.ENTERED
    assert shunned(two.handle(TimerDue(), 1.0 + TIMEOUTS.answer_s)) == [ONE]


INT8 = SettingsChange(first=6, codec="int8")


@pytest.mark.parametrize(
    ("own", "second", "third", "liar"),
    [
        ((), (), (INT8,), THREE),
        ((), (INT8,), (), TWO),
        ((INT8,), (INT8,), (), THREE),
        ((INT8,), (INT8,), (INT8.model_copy(update={"codec": "int4"}),), THREE),
        ((), (INT8.model_copy(update={"first": 40}),), (), None),
    ],
)
def test_a_promise_with_settings_that_its_history_has_not_is_refused_before_anybody_is_told_to_enter(
    own: SettingsChanges, second: SettingsChanges, third: SettingsChanges, liar: str | None
) -> None:
    """C3: else an honest member would refuse the proposer, by whose word it would go over within what it may have
    bound. What nobody can have bound yet does no harm."""
    one = machine(0)
    one.handle(RequestMade("rest"), 1.0)
    assert one.promised is not None
    one.handle(HELD.model_copy(update={"changes": own, "ahead": 3, "complete": 4}), 1.0)
    effects = []
    for device, rank, changes in ((TWO, 1, second), (THREE, 2, third)):
        # the second is ahead, so the history that is kept is its own
        complete = {"complete": 5, "chains": (b"d" * 16, b"e" * 16)} if rank == 1 else {}
        said = promise_of(one.promised, rank, changes=changes, ahead=3, **complete)
        effects = one.handle(MessageFrom(device, said), 1.0)
    assert shunned(effects) == ([] if liar is None else [liar])
    assert bool(sent(effects, Enter)) == (liar is None)
    if liar is not None:
        assert sorted(proposed(effects).ranks) == [rank for rank in range(3) if MEMBERS[rank].device != liar]


def test_a_proposer_that_was_not_in_that_generation_leaves_it_to_who_was() -> None:
    """Of two that tell of different settings it cannot know which one lies."""
    source, other = promise_of(FIRST, 1, changes=(INT8,), ahead=3).standing, promise_of(FIRST, 2, ahead=3).standing
    standings = {0: HELD.model_copy(update={"generation": 77}), 1: source, 2: other}
    enter = enter_of(following(2, 0), source=1, changes=(INT8,))
    assert told_other_settings(enter, standings) == 2
    assert lies_about_settings(2, 1, standings, 0) is None
    assert lies_about_settings(2, 1, {**standings, 0: other}, 0) == 1
    assert lies_about_settings(2, 1, {**standings, 0: source}, 0) == 2
    assert told_other_settings(enter.model_copy(update={"reload": (2,)}), standings) is None


def test_a_word_is_the_same_behind_the_wire() -> None:
    """Else honest members would take each other for liars: by how it was made, or by what is left out as usual."""
    made = [
        enter_of(following(2, 0)),
        enter_of(
            following(2, 0), changes=(INT8, SettingsChange(first=9, period=4, by="plan")), reload=(1,), way="back"
        ),
        enter_of(
            following(2, 0), world=GroupWorld(number=2, restarts=1, ranks=(0, 1), why="bert was lost"), given=True
        ),
    ]
    for enter in made:
        came = decode(encode(Envelope(Role.NOTICE, 0, enter)))
        assert isinstance(came, Envelope)
        assert isinstance(came.body, Enter)
        assert came.body.digest() == enter.digest()
    assert len({enter.digest() for enter in made}) == 3
