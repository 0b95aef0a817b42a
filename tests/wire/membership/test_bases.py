"""Who leaves its history for which: never a base for a history of which nobody has one (G4, J3)."""

from collections.abc import Callable

import pytest

from meshwire.membership.effects import (
    Effect,
    EnterGeneration,
    Fence,
    HistoryLeft,
    MembershipPhase,
    NobodyLearns,
)
from meshwire.membership.inputs import (
    CaughtUpToCut,
    LinkDown,
    LinkUp,
    MessageFrom,
    PeerGone,
    RequestMade,
    SteppedOut,
    TimerDue,
    WasAway,
)
from meshwire.membership.machine import Membership
from meshwire.membership.quorum import electorate_of
from meshwire.messages.generation import AskIn, Enter, Holding, Promised, Propose, Refused, Where, Wish
from meshwire.messages.job import Generation
from meshwire.timeouts import BASE_S
from tests.wire.membership.test_membership import (
    FIRST,
    HELD,
    JOB,
    MEMBERS,
    ONE,
    THREE,
    TIMEOUTS,
    TWO,
    alone,
    enter_of,
    entered,
    followed,
    following,
    kinds,
    machine,
    promise_of,
    provisional,
    sent,
    without_learner,
    word,
)

NEWER = following(2, 0, ranks=(0, 1), learning=(0,))  # peer1 loads, peer2 slept
LOADS = HELD.model_copy(update={"holding": Holding(loads_after=4)})


def where(generation: Generation, *, based: bool, samples: int = 50) -> Where:
    return Where(job=JOB, generation=generation, ancestors=(FIRST.hash64(),), samples=samples, based=based)


def told(effects: list[Effect], device: str) -> list[bool]:
    """What is said to a device of the base."""
    return [message.based for to, message in sent(effects, Where) if to == device]


def left_for(effects: list[Effect]) -> list[Where | None]:
    """For which history the own one is left, if it is."""
    return [effect.kept for effect in effects if isinstance(effect, HistoryLeft)]


def loading() -> Membership:
    """peer1, which loads in a generation in which peer0 alone computes; it knows nothing of peer2."""
    two = without_learner(1)
    two.handle(LinkDown(THREE, "silent"), 0.1)
    followed(two, NEWER, 0.5)
    two.handle(Holding(loads_after=4), 0.0)
    return two


@pytest.mark.parametrize("based", [False, True])
def test_nobody_leaves_a_base_for_a_newer_history_of_which_nobody_has_one(based: bool) -> None:
    """G4: whoever slept with the model finds one that only loads: it is told who has the model, and keeps it."""
    three = machine(2)
    effects = three.handle(MessageFrom(TWO, where(NEWER, based=based)), 1.0)
    assert (HistoryLeft in kinds(effects)) == based
    assert told(effects, TWO) == ([] if based else [True])


@pytest.mark.parametrize("other", [following(9, 1, ranks=(1,), learning=(), root=1), provisional(3, 1)])
def test_nor_for_one_of_its_own_root(other: Generation) -> None:
    """G4: neither more samples count nor a higher number where there is nothing to go on from."""
    three = machine(2)
    for device in (ONE, TWO):
        three.handle(LinkDown(device, "silent"), 1.0)
    three.handle(LinkUp(TWO, MEMBERS[1].incarnation), 2.0)
    effects = three.handle(MessageFrom(TWO, where(other, based=False, samples=10**6)), 2.0)
    assert HistoryLeft not in kinds(effects + three.handle(TimerDue(), 2.0 + 2 * TIMEOUTS.yield_s))


def test_who_has_no_base_yields_to_who_has() -> None:
    """G4: not at once, for peer0, who computes, may be back; nor is a word lost on it."""
    two = loading()
    two.handle(LinkDown(ONE, "silent"), 6.0)
    two.handle(LinkUp(THREE, MEMBERS[2].incarnation), 7.0)
    effects = two.handle(MessageFrom(THREE, where(FIRST, based=True)), 7.0)
    assert not {HistoryLeft, Where} & {*kinds(effects)}
    assert "joins generation 1" in two.waiting()
    assert two.deadline() == pytest.approx(6.0 + TIMEOUTS.yield_s)
    effects = two.handle(TimerDue(), 6.0 + TIMEOUTS.yield_s)
    assert left_for(effects) == [where(FIRST, based=True)]
    two.handle(LinkDown(THREE, "silent"), 12.0)


def test_who_slept_does_not_believe_what_may_be_of_before() -> None:
    """G4: what lay in its socket says where others were; they may have been lost since, with their base. A link that
    stays silent is closed a patience and a quarter later at most."""
    three = machine(2)
    three.handle(WasAway(), 100.0)
    assert HistoryLeft not in kinds(three.handle(MessageFrom(ONE, where(NEWER, based=True)), 100.1))
    lost = machine(2)
    lost.handle(WasAway(), 100.0)
    lost.handle(MessageFrom(ONE, where(NEWER, based=True)), 100.1)
    lost_s = 100.1 + 1.25 * TIMEOUTS.silence_s
    for device in (ONE, TWO):
        lost.handle(TimerDue(), lost_s)
        lost.handle(LinkDown(device, "silent"), lost_s)
    assert HistoryLeft not in kinds(lost.handle(TimerDue(), 104.0) + lost.handle(TimerDue(), 100.1 + TIMEOUTS.doubt_s))
    assert HistoryLeft not in kinds(three.handle(TimerDue(), lost_s))
    assert left_for(three.handle(TimerDue(), 100.0 + TIMEOUTS.doubt_s)) == [where(NEWER, based=True)]


def leaves_for_newer() -> tuple[Membership, Where]:
    """peer2, with its base, has slept once, and has just heard who went on."""
    made, kept = machine(2), where(NEWER, based=True)
    made.handle(WasAway(), 9.0)
    made.handle(MessageFrom(ONE, kept), 9.1)
    return made, kept


def leaves_for_apart() -> tuple[Membership, Where]:
    """peer0, with its base, has heard that peer1 went on provisionally, and has proposed to it in vain."""
    made, kept = alone(0), where(provisional(2, 1), based=True)
    ((_, proposed),) = sent(made.handle(LinkUp(TWO, MEMBERS[1].incarnation), 9.0), Propose)
    made.handle(HELD, 9.0)
    refused = Refused(job=JOB, generation=proposed.generation.hash64(), number=2, reason="it went on")
    made.handle(MessageFrom(TWO, kept), 9.1)
    made.handle(MessageFrom(TWO, refused), 9.1)
    made.handle(TimerDue(), 9.2 + TIMEOUTS.turn_s)
    return made, kept


def leaves_for_a_base() -> tuple[Membership, Where]:
    """peer1, which has none and has lost who had it, has met peer2, which slept with its own."""
    made, kept = loading(), where(FIRST, based=True)
    made.handle(LinkDown(ONE, "silent"), 6.0)
    made.handle(LinkUp(THREE, MEMBERS[2].incarnation), 9.0)
    made.handle(MessageFrom(THREE, kept), 9.0)
    return made, kept


@pytest.mark.parametrize("prepare", [leaves_for_newer, leaves_for_apart, leaves_for_a_base])
def test_no_wait_runs_out_while_a_machine_sleeps(prepare: Callable[[], tuple[Membership, Where]]) -> None:
    """G4: who was about to leave its history falls asleep. What it had heard is old when it wakes up: those that said
    it may be lost, with the base. It leaves when their links have held for as long as it takes to know."""
    sleeps, kept = prepare()
    assert HistoryLeft not in kinds(sleeps.handle(TimerDue(), 10.0))
    effects = sleeps.handle(WasAway(), 1000.0)
    effects += sleeps.handle(TimerDue(), 1000.0 + 1.25 * TIMEOUTS.silence_s)
    assert HistoryLeft not in kinds(effects)
    assert left_for(sleeps.handle(TimerDue(), 1000.0 + TIMEOUTS.doubt_s)) == [kept]


@pytest.mark.parametrize(("prepare", "asker"), [(leaves_for_newer, 0), (leaves_for_apart, 1), (leaves_for_a_base, 2)])
def test_nobody_leaves_for_where_somebody_was_who_asks_in(
    prepare: Callable[[], tuple[Membership, Where]], asker: int
) -> None:
    """G4: it is in no generation any more, and its own history was all that it knew of."""
    keeps, _ = prepare()
    asks = MEMBERS[asker]
    keeps.handle(MessageFrom(asks.device, AskIn(job=JOB, member=asks, linked=(keeps._state.me.device,))), 10.0)
    effects = keeps.handle(TimerDue(), 10.0 + TIMEOUTS.doubt_s) + keeps.handle(TimerDue(), 10.0 + TIMEOUTS.back_s)
    assert HistoryLeft not in kinds(effects)


def test_who_asks_in_has_no_base_any_more() -> None:
    """Where it said it was counts no more: each would leave its history for the other's."""
    two = loading()
    two.handle(LinkUp(THREE, MEMBERS[2].incarnation), 1.0)
    two.handle(MessageFrom(THREE, where(FIRST, based=True)), 1.0)
    two.handle(MessageFrom(THREE, AskIn(job=JOB, member=MEMBERS[2], linked=(TWO,))), 1.1)
    two.handle(LinkDown(ONE, "silent"), 6.0)
    assert HistoryLeft not in kinds(two.handle(TimerDue(), 6.0 + 2 * TIMEOUTS.yield_s))


@pytest.mark.parametrize("has", [Holding(base=True), Holding(saved=(2, b"s" * 16)), Holding(state=3)])
def test_who_has_a_base_in_memory_or_a_state_keeps_its_history(has: Holding) -> None:
    """J3: it can be gone on from, and the other history is of an older root: what was committed since is not in it."""
    two = loading()
    two.handle(has, 0.0)
    two.handle(LinkDown(ONE, "silent"), 6.0)
    two.handle(LinkUp(THREE, MEMBERS[2].incarnation), 7.0)
    effects = two.handle(MessageFrom(THREE, where(FIRST, based=True)), 7.0) + two.handle(TimerDue(), 60.0)
    assert HistoryLeft not in kinds(effects)
    assert told(effects, THREE) == ([True] if has.base else [])


@pytest.mark.parametrize("has", [Holding(loads_after=4, saved=(2, b"s" * 16)), Holding(loads_after=4, state=3)])
def test_who_cannot_go_back_alone_yields_to_a_base_of_its_own_root(has: Holding) -> None:
    """G4, J3: peer0, whose learner was lost, has gone on provisionally: it may not go back to what it has saved, for
    peer2 may have the base. peer1 went on apart with its own. If neither went over to the other, both would stay so."""
    one = alone(0)
    one.handle(RequestMade("rest"), 2.0)
    one.handle(has, 2.0)
    at_s = 1.0 + TIMEOUTS.relink_grace_s + TIMEOUTS.provisional_s
    (fence,) = [effect for effect in one.handle(TimerDue(), at_s) if isinstance(effect, Fence)]
    effects = one.handle(HELD.model_copy(update={"holding": has}), at_s)
    assert fence.generation.provisional
    assert [effect.enter.way for effect in effects if isinstance(effect, EnterGeneration)] == ["wait"]
    assert one.phase is MembershipPhase.RUNNING
    kept = where(provisional(2, 1), based=True, samples=1)
    at_s += TIMEOUTS.yield_s
    one.handle(LinkUp(TWO, MEMBERS[1].incarnation), at_s)
    assert left_for(one.handle(MessageFrom(TWO, kept), at_s)) == [kept]


def test_what_is_said_of_the_base_is_known() -> None:
    """One that computes is linked, and says that it is still there: else it may have gone on apart with its base."""
    two = loading()
    assert told(two.handle(LinkUp(THREE, MEMBERS[2].incarnation), 1.0), THREE) == [True]
    two.handle(LinkDown(ONE, "silent"), 6.0)
    two.handle(LinkDown(THREE, "silent"), 6.0)
    assert told(two.handle(LinkUp(THREE, MEMBERS[2].incarnation), 6.1), THREE) == [False]
    two.handle(LinkUp(ONE, MEMBERS[0].incarnation), 6.2)
    two.handle(LinkDown(THREE, "silent"), 6.2)
    assert told(two.handle(LinkUp(THREE, MEMBERS[2].incarnation), 6.2), THREE) == [False], "it has not said where it is"
    two.handle(MessageFrom(ONE, where(NEWER, based=True)), 6.2)
    two.handle(LinkDown(THREE, "silent"), 6.3)
    assert told(two.handle(LinkUp(THREE, MEMBERS[2].incarnation), 6.3), THREE) == [True]


@pytest.mark.parametrize("how", ["asks in", "leaves", "later"])
def test_who_has_left_has_no_base_of_this_history(how: str) -> None:
    two = loading()
    if how == "asks in":
        two.handle(MessageFrom(ONE, AskIn(job=JOB, member=MEMBERS[0], linked=())), 1.0)
    elif how == "leaves":
        two.handle(MessageFrom(ONE, Wish(job=JOB, kind="leave", returns=True)), 1.0)
    else:
        two.handle(MessageFrom(ONE, where(following(7, 0, ranks=(0,), learning=(0,), root=1), based=True)), 1.0)
    assert told(two.handle(LinkUp(THREE, MEMBERS[2].incarnation), 1.1), THREE) == [False]


def test_a_checkpoint_is_no_base_until_it_is_loaded() -> None:
    """G4, J3: peer0 and peer1 have lost their bases and go back; peer2, which slept with its own, keeps it until one of
    them computes. They tell it nothing again and again meanwhile, and do not yield to it."""
    back = following(2, 0, ranks=(0, 1), learning=())
    two = without_learner(1)
    two.handle(LinkDown(THREE, "silent"), 0.1)
    two.handle(MessageFrom(ONE, Propose(generation=back)), 0.5)
    two.handle(LOADS.model_copy(update={"holding": Holding(loads_after=4, saved=(2, b"s" * 16))}), 0.5)
    complete, chain = ((0, 2), (1, 2)), b"s" * 16
    enter = enter_of(back, cut=2, chain=chain, complete=complete, reload=(0, 1), way="back", counted=0, learning=())
    two.handle(MessageFrom(ONE, enter), 0.6)
    two.handle(CaughtUpToCut(), 0.6)
    two.handle(MessageFrom(ONE, entered(enter)), 0.7)
    assert two.phase is MembershipPhase.RUNNING
    assert told(two.handle(LinkUp(THREE, MEMBERS[2].incarnation), 1.0), THREE) == [False]
    effects = two.handle(MessageFrom(THREE, where(FIRST, based=True)), 1.1) + two.handle(TimerDue(), 60.0)
    assert not {HistoryLeft, Where} & {*kinds(effects)}
    computes = following(3, 0, ranks=(0, 1), learning=(1,))
    two.handle(MessageFrom(ONE, Propose(generation=computes)), 61.0)
    two.handle(HELD.model_copy(update={"complete": 2, "chains": (chain,)}), 61.0)
    enter = enter_of(computes, cut=2, chain=chain, complete=complete)
    assert told(two.handle(MessageFrom(ONE, enter), 61.1), THREE) == [True]


def test_who_asks_in_asks_those_that_have_a_base() -> None:
    """G7: a newer generation that waits for one can give it nothing."""
    three = machine(2, None)
    three.handle(MessageFrom(ONE, where(following(5, 0, ranks=(0,), learning=()), based=False)), 0.5)
    three.handle(MessageFrom(TWO, where(provisional(3, 1), based=True)), 0.5)
    assert [device for device, _ in sent(three.handle(TimerDue(), 1.0), AskIn)] == [TWO]


def test_who_leaves_from_outside_is_gone_and_told_where_the_others_are() -> None:
    """J5: it has laid the job down, for it asked in and heard of nobody who goes on: no generation follows from that of
    which it would hear. Nor has it a base that the others could wait for."""
    one = machine(0, provisional(5, 0))
    (one_told,) = sent(one.handle(MessageFrom(THREE, Wish(job=JOB, kind="leave")), 1.0), Where)
    assert one_told[0] == THREE
    assert (2, MEMBERS[2].incarnation) in one._state.gone(MEMBERS)
    assert not one.handle(MessageFrom(TWO, Wish(job=JOB, kind="leave", returns=True)), 1.0)


def test_nobody_comes_back_to_what_is_being_laid_down() -> None:
    """J5: who has lain down before this member would ask in where nobody is any more."""
    for way, hears in (("lost", False), ("on", True)):
        two, without = without_learner(1), following(2, 0, ranks=(0, 1), learning=())
        two.handle(MessageFrom(ONE, Propose(generation=without)), 1.0)
        two.handle(LOADS, 1.0)
        effects = two.handle(MessageFrom(ONE, enter_of(without, way=way, complete=((0, 4), (1, 4)))), 1.1)
        assert [device for device, _ in sent(effects, Where)] == ([THREE] if hears else [])


def proposes_alone(gone: bool, held: Holding | None = None) -> tuple[Membership, Generation, list[Effect]]:
    """peer0 and peer1 load, and know nothing of peer2 but perhaps that it is gone; peer0 proposes, and all promise."""
    one, held = machine(0), held or Holding(loads_after=4)
    one.handle(held, 0.0)
    one.handle(LinkDown(THREE, "closed"), 1.0)
    if gone:
        one.handle(PeerGone(THREE, MEMBERS[2].incarnation), 1.0)
    one.handle(RequestMade("rest"), 1.0)
    one.handle(MessageFrom(TWO, Wish(job=JOB, kind="rest")), 1.0)
    effects = one.handle(TimerDue(), 1.0 + TIMEOUTS.relink_grace_s)
    proposed = next(effect.generation for effect in effects if isinstance(effect, Fence))
    one.handle(HELD.model_copy(update={"holding": held}), 1.5)
    effects = one.handle(MessageFrom(TWO, promise_of(proposed, 1, holding=held)), 1.5)
    return one, proposed, effects + one.handle(MessageFrom(TWO, entered(word(effects))), 1.5)


def promised_again(
    one: Membership, entered: Generation, proposed: Generation, held: Holding, at_s: float
) -> list[Effect]:
    """Both that are here promise the generation that peer0 proposes next."""
    one.handle(HELD.model_copy(update={"holding": held}), at_s)
    votes = electorate_of(entered, entered=True)
    promise = promise_of(proposed, 1, holding=held, number=2, history=votes, votes=(votes,))
    standing = promise.standing.model_copy(update={"generation": entered.hash64()})
    return one.handle(MessageFrom(TWO, promise.model_copy(update={"standing": standing})), at_s)


@pytest.mark.parametrize("how", ["gone", "known to be gone later", "silent for a day"])
def test_no_job_ends_while_somebody_may_have_the_model(how: str) -> None:
    """J3: those that only load wait for who is silent, and say so; for a day at most."""
    one, proposed, effects = proposes_alone(how == "gone")
    assert (NobodyLearns(proposed, failed=False) in effects) == (how == "gone")
    if how == "gone":
        return
    assert one.phase is MembershipPhase.RUNNING
    assert one.waiting() == "peer2, who may have the model: nobody who is here does"
    at_s = 60.0
    if how == "silent for a day":
        assert Propose not in kinds(one.handle(TimerDue(), BASE_S / 2))
        at_s = one.deadline() or 0.0
        effects = one.handle(TimerDue(), at_s)
    else:
        effects = one.handle(PeerGone(THREE, MEMBERS[2].incarnation), at_s)
    ((_, again),) = sent(effects, Propose)
    effects = promised_again(one, proposed, again.generation, LOADS.holding, at_s)
    assert NobodyLearns(again.generation, failed=False) in effects


SAVED = Holding(loads_after=4, saved=(2, b"b" * 16))


def ways(effects: list[Effect]) -> list[str]:
    """How those go on that this member has told to enter."""
    return [message.way for _, message in sent(effects, Enter)]


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_nobody_goes_back_to_a_checkpoint_while_who_has_the_base_may_be_away_for_a_moment(how: str) -> None:
    """J3: a hiccup of the WiFi must not cost all rounds since the checkpoint. But who has ended has no base."""
    one, proposed, effects = proposes_alone(how == "gone", SAVED)
    assert ways(effects) == ["back" if how == "gone" else "wait"]
    if how == "gone":
        return
    assert one.phase is MembershipPhase.RUNNING
    assert one.waiting() == "peer2, who may have the model: nobody who is here does"
    at_s = one.deadline() or 0.0
    assert at_s == 1.5 + TIMEOUTS.missed_s, "nobody who is here has had the base since then"
    ((_, again),) = sent(one.handle(TimerDue(), at_s), Propose)
    assert ways(promised_again(one, proposed, again.generation, SAVED, at_s)) == ["back"]


def test_those_that_have_a_checkpoint_join_who_comes_back_with_the_base_of_their_last_rounds() -> None:
    """G4, J3: it is of an older root, but nothing was committed since."""
    one, proposed, _ = proposes_alone(False, SAVED)
    one.handle(LinkUp(THREE, MEMBERS[2].incarnation), 8.0)
    effects = one.handle(MessageFrom(THREE, where(FIRST, based=True)), 8.1)
    effects += one.handle(TimerDue(), 8.1 + TIMEOUTS.yield_s)
    assert proposed.root > FIRST.root
    assert [kept.generation for kept in left_for(effects) if kept is not None] == [FIRST]


def test_who_has_loaded_the_base_goes_on_without_those_that_compute() -> None:
    """Liveness: nobody who computed is here, but one that is ready to."""
    two = loading()
    two.handle(RequestMade("learn"), 5.0)
    two.handle(Holding(base=True), 0.0)
    two.handle(LinkDown(ONE, "silent"), 5.0)
    two.handle(TimerDue(), 5.0 + TIMEOUTS.relink_grace_s)
    effects = two.handle(TimerDue(), 5.0 + TIMEOUTS.relink_grace_s + TIMEOUTS.turn_s + TIMEOUTS.provisional_s)
    (generation,) = [effect.generation for effect in effects if isinstance(effect, Fence)]
    assert (generation.ranks, generation.learning, generation.provisional) == ((1,), (1,), True)


def test_promises_of_a_history_that_was_left_are_no_ancestors() -> None:
    """What others say of rounds that they give up follows from the generations that a history came after."""
    three = machine(2)
    left = following(3, 0)
    three.handle(MessageFrom(ONE, Propose(generation=left)), 1.0)
    three.handle(HELD, 1.0)
    three.handle(SteppedOut("its state is lost"), 1.1)
    taken = following(4, 1, ranks=(1, 2), learning=(1,), parent=NEWER.digest())
    three.handle(MessageFrom(TWO, Propose(generation=taken)), 2.0)
    three.handle(HELD.model_copy(update={"generation": None, "complete": 0, "chains": ()}), 2.0)
    three.handle(MessageFrom(TWO, enter_of(taken, source=1, complete=((1, 4), (2, 4)), reload=(2,))), 2.0)
    three.handle(CaughtUpToCut(), 2.1)
    ((_, said),) = sent(three.handle(LinkUp(ONE, MEMBERS[0].incarnation), 3.0), Where)
    assert said.ancestors == (NEWER.hash64(),)


@pytest.mark.parametrize("gone", [False, True])
def test_who_knows_a_newer_root_says_so_with_its_promise(gone: bool) -> None:
    """G4: peer0, started again, asks in where it has met the newer line; peer2, which keeps the base, is not entitled
    beside that, and hears which number to get over."""
    one = machine(0, None)
    newer = following(5, 1, ranks=(1,), learning=())
    one.handle(MessageFrom(TWO, where(newer, based=False)), 0.5)
    if gone:
        one.handle(PeerGone(TWO, MEMBERS[1].incarnation), 0.6)
    early = following(3, 2, ranks=(0, 2), learning=(2,))
    answers = one.handle(MessageFrom(THREE, Propose(generation=early)), 1.0)
    refusals = sent(answers, Refused)
    assert [refused.number for _, refused in refusals] == ([] if gone else [5])
    late = following(6, 2, ranks=(0, 2), learning=(2,))
    one.handle(MessageFrom(THREE, Propose(generation=late)), 1.1)
    nothing = HELD.model_copy(update={"generation": None, "complete": 0, "chains": ()})
    ((_, promised),) = sent(one.handle(nothing, 1.1), Promised)
    assert [vote.number for vote in promised.standing.votes if vote.entered] == ([] if gone else [5])
