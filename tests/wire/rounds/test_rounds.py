"""The round machine, rule by rule. What follows from the rules together: `tests/sim`."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.messages.rounds import Bind, Call, Null, Poison, SampleBlock, Seal
from meshwire.rounds.effects import (
    Broadcast,
    Committed,
    Contribute,
    ContributeNothing,
    ContributePoison,
    Effect,
    LearnerCutOff,
    PeriodCalled,
    ProtocolError,
    RoundComplete,
    StepDropped,
)
from meshwire.rounds.inputs import (
    BucketReady,
    CompleteAnnounced,
    LearnerAbsent,
    LearnerPresent,
    MessageReceived,
    ResultReady,
    RoundApplied,
    RoundTripMeasured,
    StartStep,
    StepSealed,
    TimeReached,
)
from meshwire.rounds.learner_state import (
    DEADLINE_STEPS_MIN,
    HANGS_AFTER_S,
    Phase,
    RoundSettings,
    StepTimes,
    hangs_after_s,
    percentile_95,
)
from meshwire.rounds.machine import RoundMachine
from meshwire.sync_modes.mode import Straggler, Visibility

# One machine by hand.


def machine(
    *,
    members: int = 2,
    rank: int = 0,
    buckets: int = 2,
    s: int = 1,
    straggler: Straggler = "carry",
    visibility: Visibility = "eager",
    unapplied_max: int = 1 << 30,
    ends_early: bool = False,
    overlaps: bool = False,
) -> RoundMachine:
    return RoundMachine(
        RoundSettings(
            ranks=tuple(range(members)),
            rank=rank,
            buckets=buckets,
            used_bytes=1,
            integers=1,
            staleness=s,
            straggler=straggler,
            rtt_s=0.01,
            visibility=visibility,
            unapplied_max=unapplied_max,
            ends_early=ends_early,
            overlaps=overlaps,
        )
    )


def bind(round_: int, base: int = 0, weight: float = 1.0, step: int = 1, hyperparameters: bytes = b"") -> Bind:
    return Bind(round=round_, step=step, base=base, weight=weight, hyperparameters=hyperparameters)


def seal(round_: int, used: bytes = b"\x01", integers: tuple[int, ...] = (0,), poison: Poison | None = None) -> Seal:
    return Seal(round=round_, used=used, integers=integers, poison=poison)


NAN = Poison(bucket=1, parameter="layer.weight", reason="not finite")


def step(of: RoundMachine, number: int, at_s: float, until_s: float, weight: float = 1.0) -> list[Effect]:
    """A whole step; its buckets become ready at its end."""
    effects = of.handle(StartStep(number), at_s)
    for bucket in range(of.settings.buckets):
        effects += of.handle(BucketReady(number, bucket, weight=weight), until_s)
    return effects + of.handle(StepSealed(number, b"\x01", (0,)), until_s)


def results(of: RoundMachine, round_: int, contributors: int, weight: float, now_s: float = 0.0) -> list[Effect]:
    effects: list[Effect] = []
    for bucket in range(of.settings.buckets):
        effects += of.handle(
            ResultReady(round_, bucket, contributors=contributors, weight=weight, poisoned=False, squared_norm=0.0),
            now_s,
        )
    return effects


def alone(s: int, steps: int, step_s: float = 1.0) -> tuple[RoundMachine, float]:
    """A world of one that has made `steps` steps and is at a boundary."""
    one = machine(members=1, s=s)
    for number in range(1, steps + 1):
        step(one, number, number * step_s, (number + 1) * step_s)
        results(one, number, 1, 1.0, (number + 1) * step_s)
        one.handle(RoundApplied(number), (number + 1) * step_s)
    return one, (steps + 1) * step_s


def errors(effects: list[Effect]) -> list[ProtocolError]:
    return [effect for effect in effects if isinstance(effect, ProtocolError)]


def test_first_bucket_binds_the_step_and_fixes_its_weight() -> None:
    """R2: the first bucket of a step that becomes ready binds the whole step and fixes its weight."""
    one = machine()
    assert one.handle(StartStep(7), 0.0) == []
    first = one.handle(BucketReady(7, 1, weight=4.0, hyperparameters=b"lr"), 0.5)
    expected = Bind(round=1, step=7, base=0, weight=4.0, hyperparameters=b"lr")
    assert first == [Broadcast(expected), Contribute(1, 1)]
    assert one.handle(BucketReady(7, 0, weight=8.0), 0.6) == [Contribute(1, 0)]
    assert one.handle(StepSealed(7, b"\x01", (3,)), 0.7) == [Broadcast(seal(1, integers=(3,)))]


def test_start_at_most_s_rounds_ahead() -> None:
    """R1: a learner applies every complete round first; it may then start iff d - a <= s."""
    one = machine(s=1)
    step(one, 1, 0.0, 1.0)
    step(one, 2, 1.0, 2.0)
    waits = "2 rounds ahead, 1 allowed: round 1 waits for rank 1: it has contributed to no round yet"
    assert one.may_start() == (False, waits)
    assert errors(one.handle(StartStep(3), 2.0))[0].rank == 0
    one.handle(MessageReceived(1, bind(1)), 2.0)
    one.handle(MessageReceived(1, seal(1)), 2.0)
    assert one.may_start()[1].endswith("round 1 waits for the results of 2 of 2 buckets")
    assert isinstance(results(one, 1, 0b11, 2.0)[0], RoundComplete)
    assert one.may_start() == (False, "it has applied 0 of the 1 rounds that are to be applied first")
    assert one.handle(RoundApplied(1), 2.0) == []
    assert one.may_start()[0]


def test_rounds_are_applied_in_order_at_a_boundary() -> None:
    """R1: rounds are applied at a step boundary, once, and only complete ones."""
    one, now_s = alone(s=1, steps=1)
    assert errors(one.handle(RoundApplied(1), now_s))
    assert errors(one.handle(RoundApplied(2), now_s))
    one.handle(StartStep(2), now_s)
    assert errors(one.handle(RoundApplied(1), now_s))
    assert one.applied == 1


def test_rounds_complete_in_order() -> None:
    """G3, R1: a round completes with every member's part and every result, and after its predecessors."""
    one = machine(s=1)
    step(one, 1, 0.0, 1.0)
    step(one, 2, 1.0, 2.0)
    for message in (bind(1), seal(1), bind(2), seal(2)):
        one.handle(MessageReceived(1, message), 2.0)
    assert results(one, 2, 0b11, 2.0) == []
    assert one.handle(ResultReady(1, 0, contributors=0b11, weight=2.0, poisoned=False, squared_norm=0.0), 2.0) == []
    done = one.handle(ResultReady(1, 1, contributors=0b11, weight=2.0, poisoned=False, squared_norm=0.0), 2.0)
    assert [effect.round for effect in done if isinstance(effect, RoundComplete)] == [1, 2]


def test_late_learner_nulls_called_rounds_up_to_its_base_plus_s() -> None:
    """R4: a computing learner nulls round d+1 on a call iff d+1 <= b+s."""
    one = machine(s=2)
    one.handle(StartStep(1), 0.0)
    for round_ in (1, 2, 3):
        one.handle(MessageReceived(1, bind(round_)), 0.0)
        one.handle(MessageReceived(1, seal(round_)), 0.0)
    assert one.handle(MessageReceived(1, Call(round=1)), 0.1) == [Broadcast(Null(round=1)), ContributeNothing(1)]
    assert one.handle(MessageReceived(1, Call(round=3)), 0.2) == [Broadcast(Null(round=2)), ContributeNothing(2)]
    assert one.may_null() == (False, "its learner computes on base 0: rounds up to 2 can do without it (R4)")
    bound = one.handle(BucketReady(1, 0, weight=1.0), 0.3)
    assert bound[0] == Broadcast(bind(3)), "its age is s"
    assert not one.may_null()[0], "it has a bucket in round 3"


@pytest.mark.parametrize(("s", "straggler"), [(0, "carry"), (0, "wait"), (2, "wait")])
def test_lockstep_nulls_only_for_an_absent_learner(s: int, straggler: Straggler) -> None:
    """R7, R8, R5: a computing learner never nulls; an absent one nulls as soon as somebody has bound."""
    one = machine(s=s, straggler=straggler)
    one.handle(StartStep(1), 0.0)
    assert one.handle(MessageReceived(1, bind(1)), 0.1) == []
    assert one.handle(MessageReceived(1, Call(round=1)), 0.1) == []
    effects = one.handle(LearnerAbsent("paused"), 0.2)
    assert effects == [
        StepDropped(1, "its learner is absent: paused (R5)"),
        Broadcast(Null(round=1)),
        ContributeNothing(1),
    ]


def test_lockstep_waits_for_a_learner_after_its_void_round() -> None:
    """V2, R7: at s=0 a step past its deadline costs its round, not the member: the next round waits for its learner."""
    one = machine(s=0)
    for number in range(1, DEADLINE_STEPS_MIN + 1):
        step(one, number, 0.0, 0.1)
        one.handle(MessageReceived(1, bind(number, base=number - 1)), 0.1)
        one.handle(MessageReceived(1, seal(number)), 0.1)
        results(one, number, 3, 2.0)
        one.handle(CompleteAnnounced(1, number), 0.1)
        one.handle(RoundApplied(number), 0.1)
    late = DEADLINE_STEPS_MIN + 1
    one.handle(StartStep(late), 0.2)
    one.handle(BucketReady(late, 0, weight=1.0), 0.2)
    one.handle(MessageReceived(1, bind(late, base=late - 1)), 0.3)
    one.handle(MessageReceived(1, seal(late)), 0.3)
    assert ContributePoison(late, 1) in one.handle(TimeReached(), 9.0)
    for bucket in range(2):
        one.handle(ResultReady(late, bucket, contributors=3, weight=2.0, poisoned=True, squared_norm=0.0), 9.0)
    assert one.complete == late
    one.handle(CompleteAnnounced(1, late), 9.0)
    assert one.handle(MessageReceived(1, bind(late + 1, base=late)), 9.1) == []
    one.handle(StepSealed(late, b"\x01", (0,)), 9.2)
    one.handle(RoundApplied(late), 9.2)
    assert Broadcast(bind(late + 1, base=late, step=late + 1)) in step(one, late + 1, 9.2, 9.3)


@pytest.mark.parametrize(("s", "straggler"), [(0, "carry"), (2, "wait")])
def test_lockstep_sends_no_call(s: int, straggler: Straggler) -> None:
    """R8: `wait` = no calls; with s=0 they could move nobody either."""
    one = machine(s=s, straggler=straggler)
    for number in range(1, s + 2):
        assert not [e for e in step(one, number, number, number + 1.0) if e == Broadcast(Call(round=1))]
    assert not one.may_start()[0]
    assert one.deadline() is None


def test_call_when_late_or_blocked() -> None:
    """R3: a contributor calls one median step after its bind, or when its learner is blocked on the round."""
    one = machine(s=1)
    effects = step(one, 1, 0.0, 1.0)
    assert one.deadline() == 2.0
    assert one.handle(TimeReached(), 1.9) == []
    assert one.handle(TimeReached(), 2.0) == [Broadcast(Call(round=1))]
    assert one.deadline() is None

    one = machine(s=1)
    effects = step(one, 1, 0.0, 1.0)
    effects += step(one, 2, 1.0, 1.5)
    assert effects[-1] == Broadcast(Call(round=1)), "it calls what blocks it, and no newer round"
    assert one.deadline() == 1.5 + 1.0, "the call of round 2 (the median was one second when it bound)"


def test_a_called_round_is_not_called_again() -> None:
    """R3: a call goes to all members, so one is enough."""
    one = machine(members=3, s=1)
    step(one, 1, 0.0, 1.0)
    for message in (bind(1), seal(1), Call(round=1)):
        one.handle(MessageReceived(1, message), 1.0)
    assert one.deadline() is None


def test_absent_learner_nulls_called_rounds_and_no_others() -> None:
    """R5: absent, a member nulls every called round; nobody starts an empty one."""
    one = machine(s=1)
    assert one.handle(LearnerAbsent("idle"), 0.0) == []
    one.handle(MessageReceived(1, bind(1)), 0.0)
    assert one.decided == 0
    assert one.handle(MessageReceived(1, Call(round=1)), 0.0) == [Broadcast(Null(round=1)), ContributeNothing(1)]
    assert one.may_start() == (False, "absent: idle")
    assert one.handle(LearnerPresent(), 1.0) == []
    assert one.may_start()[0]


def test_gradient_older_than_s_is_dropped_before_it_binds() -> None:
    """R5: a gradient that would land with age > s is dropped by its own daemon; late buckets are ignored."""
    one, now_s = alone_of_two(s=1)
    base = one.applied
    one.handle(StartStep(9), now_s)
    one.handle(MessageReceived(1, bind(base + 1, base)), now_s)
    one.handle(MessageReceived(1, seal(base + 1)), now_s)
    one.handle(MessageReceived(1, bind(base + 2, base)), now_s)
    one.handle(MessageReceived(1, seal(base + 2)), now_s)
    one.handle(MessageReceived(1, Call(round=base + 2)), now_s)
    assert one.decided == base + 1, "R4"
    cut = one.handle(TimeReached(), one.deadline() or 0.0)
    assert isinstance(cut[0], LearnerCutOff)
    assert cut[0].round is None
    assert cut[1:] == [Broadcast(Null(round=base + 2)), ContributeNothing(base + 2)]
    late = one.handle(BucketReady(9, 0, weight=1.0), now_s + 99)
    assert late == [StepDropped(9, "its gradient would be of age 2, 1 allowed (R5)")]
    assert one.handle(BucketReady(9, 1, weight=1.0), now_s + 99) == []
    assert not one.may_start()[0]
    assert one.handle(StepSealed(9, b"\x01", (0,)), now_s + 99) == []
    assert one.phase is Phase.BOUNDARY


def alone_of_two(s: int, steps: int = 5, *, ends_early: bool = False) -> tuple[RoundMachine, float]:
    """Two members that have made enough steps of one second for a step deadline (V2: 3 s)."""
    one = machine(s=s, ends_early=ends_early)
    for number in range(1, steps + 1):
        step(one, number, float(number), number + 1.0)
        one.handle(MessageReceived(1, bind(number, number - 1)), number + 1.0)
        one.handle(MessageReceived(1, seal(number)), number + 1.0)
        results(one, number, 0b11, 2.0, number + 1.0)
        one.handle(CompleteAnnounced(1, number), number + 1.0)
        one.handle(RoundApplied(number), number + 1.0)
    assert one.committed == steps
    assert one.rounds_kept == 0
    return one, steps + 1.0


def test_a_called_period_is_ended_and_not_passed_over() -> None:
    """R9: whoever has ended its own period calls the round; who computes is asked once, and nulls nothing."""
    one = machine(s=2, ends_early=True)
    one.handle(StartStep(1), 0.0)
    one.handle(MessageReceived(1, bind(1)), 0.5)
    assert one.handle(MessageReceived(1, Call(round=1)), 0.5) == [PeriodCalled(1)]
    one.handle(MessageReceived(1, seal(1)), 0.6)
    one.handle(MessageReceived(1, bind(2)), 0.9)
    assert one.handle(MessageReceived(1, Call(round=2)), 0.9) == [], "one word is enough"
    assert one.decided == 0
    bound = one.handle(BucketReady(1, 0, weight=3.0), 1.0)
    assert isinstance(bound[0], Broadcast)
    assert (one.decided, one.may_null()[0]) == (1, False)
    one.handle(BucketReady(1, 1, weight=3.0), 1.0)
    one.handle(StepSealed(1, b"\x01", (0,)), 1.0)
    assert one.handle(StartStep(2), 1.1) == [PeriodCalled(2)], "round 2 was called before it began"
    one.handle(LearnerAbsent("paused"), 1.2)
    one.handle(LearnerPresent(), 1.3)
    assert one.decided == 2, "R5: passed over meanwhile"
    one.handle(MessageReceived(1, seal(2)), 1.3)
    one.handle(MessageReceived(1, bind(3)), 1.3)
    one.handle(MessageReceived(1, Call(round=3)), 1.3)
    assert one.handle(StartStep(2), 1.4) == [PeriodCalled(2)], "begun again, under its number"


def test_a_round_that_overlaps_is_applied_within_the_next_period_and_not_before() -> None:
    """R9: however soon it is complete, the next period begins without it; its steps then say when."""
    one = machine(s=1, straggler="wait", overlaps=True)
    step(one, 1, 0.0, 1.0)
    one.handle(MessageReceived(1, bind(1)), 1.0)
    one.handle(MessageReceived(1, seal(1)), 1.0)
    results(one, 1, 0b11, 2.0, 1.0)
    assert (one.complete, one.visible) == (1, 0)
    assert isinstance(one.handle(RoundApplied(1), 1.0)[0], ProtocolError)
    assert one.may_start()[0]
    one.handle(StartStep(2), 1.1)
    assert one.visible == 1
    assert not [each for each in one.handle(RoundApplied(1), 1.5) if isinstance(each, ProtocolError)]
    bound = one.handle(BucketReady(2, 0, weight=1.0), 2.0)
    assert isinstance(bound[0], Broadcast)
    assert isinstance(bound[0].message, Bind)
    assert (bound[0].message.round, bound[0].message.base) == (2, 0), "R0: of when the period began"
    one.handle(BucketReady(2, 1, weight=1.0), 2.0)
    one.handle(StepSealed(2, b"\x01", (0,)), 2.0)
    assert one.may_start()[0], "round 2 is on its way"


def test_without_overlap_no_round_is_applied_within_a_step() -> None:
    one = machine(members=1, s=1, straggler="wait")
    step(one, 1, 0.0, 1.0)
    one.handle(StartStep(2), 1.0)
    results(one, 1, 0b1, 1.0, 1.5)
    assert isinstance(one.handle(RoundApplied(1), 1.5)[0], ProtocolError)


def test_a_period_that_has_ended_is_called_at_once() -> None:
    """R3, R9: as soon as a call does not cross the binds of those that are as fast."""
    one = machine(s=2, ends_early=True)
    step(one, 1, 0.0, 1.0)
    assert one.deadline() == 1.0 + 2 * 0.01
    assert one.handle(TimeReached(), 1.02) == [Broadcast(Call(round=1))]


def test_a_learner_that_does_not_end_its_period_is_passed_over_at_its_deadline() -> None:
    """R5: nobody waits for it longer than for any other."""
    one = alone_of_two(s=1, ends_early=True)[0]
    one.handle(StartStep(6), 6.0)
    one.handle(MessageReceived(1, bind(6, 5)), 7.0)
    assert one.handle(MessageReceived(1, Call(round=6)), 7.0) == [PeriodCalled(6)]
    cut = one.handle(TimeReached(), one.deadline() or 0.0)
    assert isinstance(cut[0], LearnerCutOff)
    assert cut[1:] == [Broadcast(Null(round=6)), ContributeNothing(6)]


@pytest.mark.parametrize("s", [0, 2])
def test_bound_learner_past_its_deadline_makes_the_round_void(s: int) -> None:
    """V2: poison for the missing buckets, the round is void, and what still comes of the step is ignored."""
    one, now_s = alone_of_two(s)
    one.handle(StartStep(6), now_s)
    one.handle(BucketReady(6, 1, weight=1.0), now_s + 1.0)
    while (at_s := one.deadline()) is not None and at_s < now_s + 4.0:
        assert one.handle(TimeReached(), at_s) == [Broadcast(Call(round=6))]
    assert at_s == now_s + 4.0, "3 x the 95th percentile after the bind"
    cut, poison, sealed = one.handle(TimeReached(), at_s)[:3]
    assert isinstance(cut, LearnerCutOff)
    assert cut.round == 6
    assert poison == ContributePoison(6, 0)
    assert isinstance(sealed, Broadcast)
    assert isinstance(sealed.message, Seal)
    assert sealed.message.poison == Poison(
        bucket=0, parameter="", reason="step 6 passed its step deadline of 3.0 s (V2)"
    )
    assert one.handle(BucketReady(6, 0, weight=1.0), at_s + 9.0) == []
    one.handle(StepSealed(6, b"\x01", (0,)), at_s + 9.0)
    assert one.phase is Phase.BOUNDARY


def test_waiting_for_peers_is_not_held_against_a_learner() -> None:
    """R5: a learner that R1 holds up has no deadline; it runs from the moment at which the next move is its own."""
    one, now_s = alone_of_two(s=1)
    step(one, 6, now_s, now_s + 1.0)
    step(one, 7, now_s + 1.0, now_s + 2.0)
    assert not one.may_start()[0]
    one.handle(MessageReceived(1, Null(round=6)), now_s + 2.0)
    while (at_s := one.deadline()) is not None:
        assert one.handle(TimeReached(), at_s) == [Broadcast(Call(round=7))]
    results(one, 6, 0b01, 1.0, now_s + 50.0)
    assert one.deadline() == now_s + 53.0


@pytest.mark.parametrize("s", [0, 2])
def test_a_learner_that_hangs_in_its_first_steps_is_noticed(s: int) -> None:
    """V2, R5: they predict no deadline, so whoever makes no move in one of them is measured by a fixed time. Between
    two steps it may wait for others, for as long as it takes."""
    one = machine(s=s)
    assert one.hangs_since_s is None, "round 1 has not begun"
    one.handle(StartStep(1), 7.0)
    assert one.hangs_since_s == 7.0, "it hangs before its backward pass"
    one.handle(BucketReady(1, 0, weight=1.0), 8.0)
    assert one.hangs_since_s == 8.0, "it hangs in it"
    one.handle(BucketReady(1, 1, weight=1.0), 9.0)
    one.handle(StepSealed(1, b"\x01", (0,)), 9.0)
    assert (one.hangs_since_s is None) is (s == 0), "R1 holds it up"
    one.handle(MessageReceived(1, bind(1)), 10.0)
    one.handle(MessageReceived(1, seal(1)), 10.0)
    results(one, 1, 0b11, 2.0, 11.0)
    assert one.hangs_since_s == (11.0 if s == 0 else 9.0), "it is to apply the round"
    one.handle(RoundApplied(1), 12.0)
    assert one.hangs_since_s == 12.0
    one.handle(LearnerAbsent("it waits for samples"), 13.0)
    assert one.hangs_since_s is None


@pytest.mark.parametrize("s", [0, 2])
def test_a_learner_that_has_made_its_first_steps_hangs_only_where_its_step_was_given_up(s: int) -> None:
    """V2: with s=0 each further round would wait for it. R7: an evaluation may take any time."""
    one, now_s = alone_of_two(s)
    one.handle(StartStep(6), now_s)
    assert one.hangs_since_s is None
    one.handle(BucketReady(6, 0, weight=1.0), now_s + 1.0)
    assert one.hangs_since_s is None
    while one.phase is not Phase.GIVEN_UP:
        one.handle(TimeReached(), one.deadline() or 0.0)
    assert one.hangs_since_s == now_s + 1.0
    one.handle(LearnerAbsent("its process has ended", gone=True), now_s + 2.0)
    one.handle(LearnerAbsent("it loads", loading=True), now_s + 3.0)
    one.handle(LearnerPresent(), now_s + 4.0)
    first_steps_s = None if s == 0 else now_s + 4.0  # with s=0 R1 holds it up: round 6 is not complete
    assert one.hangs_since_s == first_steps_s, "J3: another process has first steps, too"


def test_a_period_may_take_as_long_as_its_steps() -> None:
    """R9: nothing is heard of a period before it ends."""
    assert hangs_after_s(1) == HANGS_AFTER_S
    assert hangs_after_s(500) > 8 * 3600


def test_long_evaluation_in_lockstep_costs_nothing() -> None:
    """R5, R7: with s=0 a learner that is not bound has no deadline."""
    one, now_s = alone_of_two(s=0)
    assert one.deadline() is None
    one.handle(StartStep(6), now_s)
    assert one.deadline() is None
    bound = one.handle(BucketReady(6, 0, weight=1.0), now_s + 1000.0)
    assert bound == [Broadcast(bind(6, 5, step=6)), Contribute(6, 0)]
    assert one.deadline() == now_s + 1003.0


@pytest.mark.parametrize("ready", [0, 1, 2])
def test_bound_learner_that_goes_idle_makes_the_round_void(ready: int) -> None:
    """V2: also when every bucket has left, for its seal has not. Without a bucket the step was not bound."""
    one = machine(s=1)
    one.handle(StartStep(1), 0.0)
    for bucket in range(ready):
        one.handle(BucketReady(1, bucket, weight=1.0), 0.5)
    effects = one.handle(LearnerAbsent("idle"), 0.6)
    if not ready:
        assert effects == [StepDropped(1, "its learner is absent: idle (R5)")]
        return
    assert [effect for effect in effects if isinstance(effect, ContributePoison)] == [ContributePoison(1, 1)][
        ready - 1 :
    ]
    one.handle(MessageReceived(1, bind(1)), 1.0)
    one.handle(MessageReceived(1, seal(1)), 1.0)
    complete = results(one, 1, 0b11, 2.0)[0]
    assert isinstance(complete, RoundComplete)
    assert complete.void
    assert complete.reason == "rank 0: its learner is absent: idle"


@pytest.mark.parametrize("source", ["own", "peer", "sum"])
def test_poison_makes_the_round_void(source: str) -> None:
    """V1: a poisoned bucket makes the round void, counted, with parameter, bucket and rank named."""
    one = machine(s=1)
    one.handle(StartStep(1), 0.0)
    one.handle(BucketReady(1, 0, weight=1.0), 0.1)
    own = one.handle(BucketReady(1, 1, weight=1.0, poison=NAN if source == "own" else None), 0.1)
    assert own == [ContributePoison(1, 1) if source == "own" else Contribute(1, 1)]
    one.handle(StepSealed(1, b"\x01", (0,)), 0.3)
    one.handle(MessageReceived(1, bind(1)), 0.3)
    one.handle(MessageReceived(1, seal(1, poison=NAN if source == "peer" else None)), 0.3)
    one.handle(ResultReady(1, 0, contributors=0b11, weight=2.0, poisoned=False, squared_norm=0.0), 0.4)
    complete = one.handle(ResultReady(1, 1, contributors=0, weight=0.0, poisoned=True, squared_norm=0.0), 0.4)[0]
    assert isinstance(complete, RoundComplete)
    assert complete.void
    who = {"own": {0: NAN}, "peer": {1: NAN}, "sum": {}}[source]
    assert complete.poisons == who
    named = {rank: f"rank {rank}: layer.weight: not finite" for rank in who}
    assert complete.reason == (next(iter(named.values())) if who else "the sum of bucket 1 is not finite")
    assert one.complete == 1


def test_a_complete_round_holds_what_the_optimizer_needs() -> None:
    """W3, O3, O5: weights add up, parameters used by anybody, integer maxima, hyperparameters of the largest step."""
    one = machine(members=3, s=1)
    one.handle(StartStep(5), 0.0)
    for bucket in (0, 1):
        one.handle(BucketReady(5, bucket, weight=3.0, hyperparameters=b"mine"), 0.0)
    one.handle(StepSealed(5, b"\x01", (7,)), 0.0)
    one.handle(MessageReceived(1, bind(1, weight=2.0, step=5, hyperparameters=b"theirs")), 0.0)
    one.handle(MessageReceived(1, seal(1, used=b"\x04", integers=(9,))), 0.0)
    one.handle(MessageReceived(2, Null(round=1)), 0.0)
    complete = results(one, 1, 0b011, 5.0)[0]
    assert isinstance(complete, RoundComplete)
    assert (complete.void, complete.contributors, complete.weight) == (False, 0b011, 5.0)
    assert (complete.used, complete.integers, complete.hyperparameters) == (b"\x05", (9,), b"mine")


def test_committed_is_what_every_member_has_announced() -> None:
    """G5: only then is anything freed."""
    one = machine(members=3, s=1)
    step(one, 1, 0.0, 1.0)
    for rank in (1, 2):
        one.handle(MessageReceived(rank, bind(1)), 1.0)
        one.handle(MessageReceived(rank, seal(1)), 1.0)
    results(one, 1, 0b111, 3.0)
    assert one.handle(CompleteAnnounced(1, 1), 1.0) == []
    assert one.rounds_kept == 1
    assert one.handle(CompleteAnnounced(2, 1), 1.0) == [Committed(1)]
    assert one.rounds_kept == 0
    assert one.handle(CompleteAnnounced(2, 0), 1.0) == [], "control overtakes frames: an older counter is no error"


@pytest.mark.parametrize(("contributors", "weight"), [(0b01, 2.0), (0b11, 3.0)])
def test_results_must_show_what_the_binds_name(contributors: int, weight: float) -> None:
    """R2: one weight for each member and round, in every bucket and shard; otherwise the round never completes."""
    one = machine(s=1)
    step(one, 1, 0.0, 1.0)
    one.handle(MessageReceived(1, bind(1)), 1.0)
    one.handle(MessageReceived(1, seal(1)), 1.0)
    (error,) = results(one, 1, contributors, weight)
    assert isinstance(error, ProtocolError)
    assert error.rank is None
    assert one.complete == 0
    assert one.handle(TimeReached(), 9.0) == []


BOUND = bind(1)
SEALED = (bind(1), seal(1))


@pytest.mark.parametrize(
    ("before", "message", "rule"),
    [
        ((), bind(2), "R2"),
        ((), Null(round=2), "R2"),
        ((BOUND,), bind(1), "R2"),
        ((BOUND,), bind(2), "R2"),
        ((BOUND,), Null(round=1), "R2"),
        ((Null(round=1),), bind(1), "R2"),
        ((Null(round=1),), Null(round=1), "R2"),
        ((), bind(1, base=1), "R0"),
        ((*SEALED, bind(2), seal(2)), bind(3), "R0"),
        ((*SEALED, bind(2), seal(2)), bind(3, base=1), "G3"),
        ((*SEALED, Null(round=2)), Null(round=3), "R3"),
        ((), seal(1), "W2"),
        (SEALED, seal(1), "W2"),
        ((BOUND,), seal(2), "W2"),
        ((BOUND,), seal(1, used=b""), "manifest"),
        ((BOUND,), seal(1, integers=()), "manifest"),
        ((), Call(round=1), "R3"),
        ((Null(round=1),), Call(round=1), "R3"),
    ],
)
def test_messages_that_break_the_rules(before: tuple[Bind | Seal | Null, ...], message: Bind, rule: str) -> None:
    """R0, R2, R3, G3, W2: refused with the member named, and nothing changes."""
    one = machine(s=1)
    for earlier in before:
        assert not errors(one.handle(MessageReceived(1, earlier), 0.0))
    kept = one.rounds_kept
    (error,) = one.handle(MessageReceived(1, message), 0.0)
    assert isinstance(error, ProtocolError)
    assert error.rank == 1
    assert rule in error.text
    assert one.rounds_kept == kept


def test_complete_beyond_what_the_own_part_allows() -> None:
    """G3, G5: nobody can hold a round whole that this member has not ended."""
    one = machine()
    assert errors(one.handle(CompleteAnnounced(1, 1), 0.0))[0].rank == 1
    assert one.committed == 0


def test_a_learner_that_breaks_the_contract_is_named() -> None:
    """Errors of the local learner and executor name the own rank and change nothing."""
    one = machine()
    assert errors(one.handle(BucketReady(1, 0, weight=1.0), 0.0))
    assert errors(one.handle(StepSealed(1, b"\x00", (0,)), 0.0))
    assert errors(one.handle(LearnerPresent(), 0.0))
    assert errors(one.handle(ResultReady(1, 0, contributors=1, weight=1.0, poisoned=False, squared_norm=0.0), 0.0))
    one.handle(StartStep(1), 0.0)
    assert errors(one.handle(BucketReady(1, 2, weight=1.0), 0.0))
    assert errors(one.handle(BucketReady(1, 0, weight=float("nan")), 0.0))
    assert errors(one.handle(BucketReady(1, 0, weight=0.0), 0.0))
    assert errors(one.handle(BucketReady(2, 0, weight=1.0), 0.0))
    assert errors(one.handle(StepSealed(1, b"\x00", (0,)), 0.0))
    one.handle(BucketReady(1, 0, weight=1.0), 0.0)
    assert errors(one.handle(BucketReady(1, 0, weight=1.0), 0.0))
    assert errors(one.handle(StepSealed(1, b"\x00", (0,)), 0.0)) == [
        ProtocolError(0, "seal of step 1 without its buckets [1]")
    ]
    one.handle(BucketReady(1, 1, weight=1.0), 0.0)
    assert errors(one.handle(StepSealed(1, b"", (0,)), 0.0))
    assert not errors(one.handle(StepSealed(1, b"\x00", (0,)), 0.0))
    assert errors(one.handle(ResultReady(1, 2, contributors=1, weight=1.0, poisoned=False, squared_norm=0.0), 0.0))
    assert one.phase is Phase.BOUNDARY


def other(of: RoundMachine, *rounds: int, base: int = 0) -> None:
    """Rank 1 contributes to these rounds."""
    for round_ in rounds:
        for message in (bind(round_, base, step=round_), seal(round_)):
            assert not errors(of.handle(MessageReceived(1, message), 0.0))


def test_fixed_visibility_is_a_function_of_the_step() -> None:
    """R8: round k is visible exactly at the start of step k+s+1, however early it is complete."""
    one = machine(s=1, straggler="wait", visibility="fixed")
    step(one, 1, 0.0, 1.0)
    other(one, 1)
    results(one, 1, 0b11, 2.0)
    assert (one.complete, one.visible) == (1, 0)
    assert errors(one.handle(RoundApplied(1), 1.0)), "no earlier"
    assert one.may_start()[0]
    one.handle(StartStep(2), 1.0)
    for bucket in (0, 1):
        one.handle(BucketReady(2, bucket, weight=1.0), 1.0)
    assert one.visible == 1, "its result may be laid out while the step is still computed"
    assert errors(one.handle(RoundApplied(1), 1.0)), "R1: and applied at the boundary"
    one.handle(StepSealed(2, b"\x01", (0,)), 2.0)
    assert one.may_start() == (False, "it has applied 0 of the 1 rounds that are to be applied first"), "no later"
    assert one.handle(RoundApplied(1), 2.0) == []
    assert one.may_start()[0]
    step(one, 3, 2.0, 3.0)
    assert one.may_start()[1].startswith("2 rounds ahead, 1 allowed: round 2 waits for rank 1")


def test_fixed_visibility_is_lifted_for_a_flush() -> None:
    """R8: an absent learner is brought up to date, begins its next step on that, and never goes back."""
    one = machine(s=2, straggler="wait", visibility="fixed")
    for number in (1, 2):
        step(one, number, number, number + 1.0)
        other(one, number)
        results(one, number, 0b11, 2.0)
    assert (one.complete, one.visible) == (2, 0)
    one.handle(LearnerAbsent("in a barrier"), 3.0)
    assert one.visible == 2
    assert not errors(one.handle(RoundApplied(2), 3.0))
    assert one.handle(MessageReceived(1, bind(3, 2, step=3)), 3.0) == [Committed(2)], (
        "fixed: it is not passed over, it will be back"
    )
    assert one.may_null() == (False, "its learner is absent, and every round waits for it (R8)")
    assert one.handle(LearnerPresent(), 3.0) == []
    assert one.may_start()[0]
    bound = step(one, 3, 3.0, 4.0)[0]
    assert bound == Broadcast(bind(3, 2, step=3))
    assert one.visible == 1
    assert one.may_start()[0]


def test_fixed_visibility_passes_over_who_has_gone() -> None:
    """R5, R8: the others go on without a learner that has finished; `absent` again says that an absent one has."""
    one = machine(s=1, straggler="wait", visibility="fixed")
    one.handle(LearnerAbsent("in a barrier"), 0.0)
    assert one.handle(MessageReceived(1, bind(1)), 0.0) == []
    assert one.handle(LearnerAbsent("finished", gone=True), 1.0) == [Broadcast(Null(round=1)), ContributeNothing(1)]
    assert one.may_start() == (False, "absent: finished")


@pytest.mark.parametrize("gone", [False, True])
def test_an_absent_learner_is_passed_over_as_far_as_its_rounds_can_be_kept(gone: bool) -> None:
    """R5, M1: no further than `unapplied_max` rounds beyond those it has applied, unless none will ever be."""
    one = machine(s=1, unapplied_max=3)
    one.handle(LearnerAbsent("stopped", gone=gone), 0.0)
    for number in range(1, 6):
        one.handle(MessageReceived(1, bind(number, base=number - 1)), 0.0)
        one.handle(MessageReceived(1, seal(number)), 0.0)
        one.handle(MessageReceived(1, Call(round=number)), 0.0)
        if one.decided == number:
            results(one, number, 0b10, 1.0)
            one.handle(CompleteAnnounced(1, number), 0.0)
        if not gone and number == 4:
            break
    if gone:
        assert one.complete == 5
        return
    assert one.decided == 3
    assert one.may_null() == (False, "its learner has applied 0: rounds up to 3 can be kept for it")
    assert one.handle(RoundApplied(1), 1.0) == [Broadcast(Null(round=4)), ContributeNothing(4)]


def test_a_bind_carries_what_goes_with_it() -> None:
    """X1, X2, X4a: sample blocks, the claim and batch sizes are those of the first bucket."""
    one = machine()
    block = SampleBlock(epoch=0, first=0, end=8)
    one.handle(StartStep(1), 0.0)
    (sent, _) = one.handle(BucketReady(1, 0, weight=8.0, samples=(block,), claim=3, sizes=(8, 4)), 0.0)
    assert sent == Broadcast(Bind(round=1, step=1, base=0, weight=8.0, samples=(block,), claim=3, sizes=(8, 4)))
    assert one.handle(BucketReady(1, 1, weight=8.0, claim=9), 0.0) == [Contribute(1, 1)]


def test_a_step_that_was_left_begins_again_under_its_number() -> None:
    """R5: a learner that goes idle in a step without a gradient has it dropped; begun again, its buckets count."""
    one = machine(s=1)
    one.handle(StartStep(4), 0.0)
    assert one.handle(LearnerAbsent("waits for samples"), 0.1) == [
        StepDropped(4, "its learner is absent: waits for samples (R5)")
    ]
    assert one.handle(BucketReady(4, 0, weight=1.0), 0.2) == [], "of the first try"
    one.handle(LearnerPresent(), 1.0)
    assert Broadcast(bind(1, step=4)) in step(one, 4, 1.0, 2.0)


@pytest.mark.parametrize("ready", [0, 1])
def test_a_learner_goes_on_after_it_was_cut_off(ready: int) -> None:
    """V2, R5: nulls moved d while its step was given up; at its boundary it catches up, and its next step counts."""
    one, now_s = alone_of_two(s=2)
    one.handle(StartStep(6), now_s)
    for bucket in range(ready):
        one.handle(BucketReady(6, bucket, weight=1.0), now_s)
    for number in (6, 7, 8):
        one.handle(MessageReceived(1, bind(number, base=5, step=number)), now_s)
        one.handle(MessageReceived(1, seal(number)), now_s)
    one.handle(MessageReceived(1, Call(round=8)), now_s)
    while one.phase in (Phase.COMPUTING, Phase.BOUND) and one.decided < 8:
        one.handle(TimeReached(), one.deadline() or 0.0)
    assert one.decided == 8
    later_s = now_s + 100.0
    if not ready:
        assert isinstance(one.handle(BucketReady(6, 0, weight=1.0), later_s)[0], StepDropped)
    one.handle(BucketReady(6, 1, weight=1.0), later_s)
    assert not errors(one.handle(StepSealed(6, b"\x01", (0,)), later_s))
    assert one.may_start()[1].startswith("3 rounds ahead, 2 allowed: round 6 waits for the results")
    for number in (6, 7, 8):
        for bucket in range(2):
            void = number == 6 and ready == 1
            contributors, weight = (0b11, 2.0) if void else (0b10, 1.0)
            one.handle(
                ResultReady(number, bucket, contributors=contributors, weight=weight, poisoned=void, squared_norm=0.0),
                later_s,
            )
    assert one.handle(RoundApplied(8), later_s) == []
    assert one.may_start()[0]
    assert Broadcast(bind(9, base=8, step=7)) in step(one, 7, later_s, later_s + 1.0)


def test_waiting_says_for_whom_and_why() -> None:
    """What a daemon can know of the others: computing in the round, not yet in it, or results on their way."""
    one = machine(members=4, s=1)
    step(one, 1, 0.0, 1.0)
    one.handle(MessageReceived(1, bind(1, step=3)), 1.0)
    one.handle(MessageReceived(2, bind(1, step=2)), 1.0)
    one.handle(MessageReceived(2, seal(1)), 1.0)
    one.handle(MessageReceived(3, Null(round=1)), 1.0)
    assert one.waiting() == "round 1 waits for rank 1: it computes step 3 on base 0"
    one.handle(MessageReceived(1, seal(1)), 1.0)
    assert one.waiting() == "round 1 waits for the results of 2 of 2 buckets"
    results(one, 1, 0b111, 3.0)
    late = (
        "rank 1: its last contribution is of step 3, to round 1; rank 2: its last contribution is of step 2, to round 1"
    )
    assert one.waiting() == (
        f"round 2 waits for rank 0: its last contribution is of step 1, to round 1; {late}; "
        "rank 3: it has contributed to no round yet"
    )


def test_the_squared_norm_of_a_round() -> None:
    """O4: of all buckets, rounded once; of a void round it means nothing."""
    for poisoned in (False, True):
        one = machine(s=1)
        step(one, 1, 0.0, 1.0)
        other(one, 1)
        one.handle(ResultReady(1, 1, contributors=0b11, weight=2.0, poisoned=False, squared_norm=1e-16), 0.0)
        (done,) = one.handle(ResultReady(1, 0, contributors=0b11, weight=2.0, poisoned=poisoned, squared_norm=1.0), 0.0)
        assert isinstance(done, RoundComplete)
        assert done.squared_norm == (0.0 if poisoned else 1.0 + 1e-16)


OVERFLOW = Poison(bucket=0, parameter="layer.weight", reason="the scaled gradient is not finite", overflow=True)
LOST = Poison(bucket=0, parameter="", reason="its learner is absent")


@pytest.mark.parametrize(
    ("own", "theirs", "overflow", "not_finite"),
    [
        ((OVERFLOW,), None, True, False),
        ((OVERFLOW, OVERFLOW), OVERFLOW, True, False),
        ((OVERFLOW, NAN), None, False, True),
        ((NAN, OVERFLOW), None, False, True),
        ((OVERFLOW,), NAN, False, True),
        ((OVERFLOW,), LOST, False, False),
        ((), LOST, False, False),
    ],
)
def test_what_made_a_round_void(
    own: tuple[Poison, ...], theirs: Poison | None, overflow: bool, not_finite: bool
) -> None:
    """O6, V1, V2: an overflow of a scaler and a lost learner are no error; a gradient that is not finite is one."""
    one = machine(s=1)
    one.handle(StartStep(1), 0.0)
    for bucket in range(2):
        one.handle(BucketReady(1, bucket, weight=1.0, poison=own[bucket] if bucket < len(own) else None), 0.0)
    one.handle(StepSealed(1, b"\x01", (0,)), 0.0)
    one.handle(MessageReceived(1, bind(1)), 0.0)
    one.handle(MessageReceived(1, seal(1, poison=theirs)), 0.0)
    one.handle(ResultReady(1, 0, contributors=0b11, weight=2.0, poisoned=True, squared_norm=0.0), 0.0)
    (done,) = one.handle(ResultReady(1, 1, contributors=0b11, weight=2.0, poisoned=False, squared_norm=0.0), 0.0)
    assert isinstance(done, RoundComplete)
    assert done.void
    assert (done.overflow, done.not_finite) == (overflow, not_finite)


INT64 = st.integers(-(2**63), 2**63 - 1)
MESSAGES = st.one_of(
    st.builds(bind, st.integers(1, 9), st.integers(0, 9), st.floats(0.1, 9.0)),
    st.builds(
        seal,
        st.integers(1, 9),
        st.binary(max_size=2),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=2).map(tuple),
    ),
    st.builds(lambda round_: Null(round=round_), st.integers(1, 9)),
    st.builds(lambda round_: Call(round=round_), st.integers(1, 2**32 - 1)),
    st.integers(0, 2**32 - 1),
)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(1, 2), MESSAGES), max_size=60), st.integers(0, 3), st.booleans())
def test_no_message_raises_or_makes_the_machine_grow(
    inputs: list[tuple[int, Bind | Seal | Null | Call | int]], s: int, absent: bool
) -> None:
    """Whatever two members send, nothing raises, the own decisions stay in order, and memory stays bounded."""
    one = machine(members=3, s=s)
    if absent:
        one.handle(LearnerAbsent("idle"), 0.0)
    for rank, sent in inputs:
        if isinstance(sent, int):
            one.handle(CompleteAnnounced(rank, sent), 0.0)
        else:
            one.handle(MessageReceived(rank, sent), 0.0)
        assert one.rounds_kept <= 3 * (s + 1)
        assert one.decided <= one.complete + s + 1


def test_step_deadline_formula() -> None:
    """V2: max of 3 x the 95th percentile and 2 s; none before five steps."""
    times = StepTimes()
    for _ in range(4):
        times.add(10.0)
        assert times.deadline_s is None
    times.add(10.0)
    assert times.deadline_s == 30.0
    assert percentile_95([float(n) for n in range(1, 101)]) == 95.0
    assert percentile_95([1.0]) == 1.0
    quick = StepTimes()
    for _ in range(5):
        quick.add(0.1)
    assert quick.deadline_s == 2.0


def test_a_longer_period_may_take_so_much_longer() -> None:
    """R3, R5, R9, C3: what was measured of a period is of each of its steps; or who obeys would be late for it."""
    times = StepTimes()
    times.local_steps = 4
    for _ in range(6):
        times.add(8.0)
    assert (times.deadline_s, times.late_after_s(0.01, 0.0)) == (24.0, 8.0)
    times.local_steps = 16
    assert (times.deadline_s, times.late_after_s(0.01, 0.0)) == (96.0, 32.0)
    times.add(32.0)
    times.local_steps = 1
    assert (times.deadline_s, times.late_after_s(0.01, 0.0)) == (6.0, 2.0)
    one, now_s = alone_of_two(s=1)
    one.handle(StartStep(6, local_steps=50), now_s)
    assert one.local_steps == 50
    assert one.deadline() == now_s + 150.0


def test_what_a_deadline_does_not_learn_from() -> None:
    """V2: neither the first step, which compiles and allocates, nor how long a stopped one was stopped."""
    times = StepTimes()
    for step_s in (60.0, 1.0, 1.0, 1.0, 1.0):
        times.add(step_s)
    assert times.deadline_s == 3.0
    times.add(600.0)
    assert times.deadline_s == 9.0, "it counts as 3 s: what is slower for good is found out by and by"


def test_late_after_formula() -> None:
    """R3: one median step, at least 2 RTT."""
    times = StepTimes()
    assert times.late_after_s(0.01, 0.3) == 0.3
    times.add(7.0)
    assert times.late_after_s(0.01, 0.3) == 7.0, "the first step stands in for the median"
    for step_s in (1.0, 2.0, 9.0):
        times.add(step_s)
    assert times.late_after_s(0.01, 0.3) == 2.0
    assert times.late_after_s(1.5, 0.3) == 3.0


def test_calls_follow_the_round_trip_of_now() -> None:
    """R3: no call before a bind and its answer can have been on their ways."""
    one = machine(s=1)
    one.handle(RoundTripMeasured(3.0), 0.0)
    one.handle(StartStep(1), 0.0)
    one.handle(BucketReady(1, 0, weight=1.0), 0.1)
    assert one.deadline() == pytest.approx(6.1)


def test_a_round_to_which_nobody_contributed_stops_nobody() -> None:
    """G6, V1: it is void by its number alone. With `--on-nan stop` it ended the scripts of all."""
    nobody = RoundComplete(
        3, True, "no member contributed", binds={}, poisons={}, used=b"", integers=(), squared_norm=0.0
    )
    assert not nobody.not_finite
    assert replace(nobody, binds={0: bind(3)}).not_finite, "a sum that is not finite"
