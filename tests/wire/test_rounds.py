"""The round machine, rule by rule, and in clusters in virtual time."""

from random import Random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.messages.rounds import Bind, Call, Null, Poison, Seal
from meshwire.roundevents import (
    Broadcast,
    Committed,
    Contribute,
    ContributeNothing,
    ContributePoison,
    Effect,
    LearnerCutOff,
    LearnerMayStart,
    ProtocolError,
    RoundComplete,
    StepDropped,
)
from meshwire.roundlearner import Phase, RoundSettings
from meshwire.rounds import RoundMachine
from meshwire.steptimes import DEADLINE_STEPS_MIN, StepTimes, percentile_95
from tests.sim.roundcluster import Cluster, Mishap, Timing

# One machine by hand.

Straggler = Literal["carry", "wait"]


def machine(
    *, members: int = 2, rank: int = 0, buckets: int = 2, s: int = 1, straggler: Straggler = "carry"
) -> RoundMachine:
    return RoundMachine(
        RoundSettings(
            members=members,
            rank=rank,
            buckets=buckets,
            used_bytes=1,
            integers=1,
            staleness=s,
            straggler=straggler,
            rtt_s=0.01,
        )
    )


def bind(round_: int, base: int = 0, weight: float = 1.0, step: int = 1, hyperparameters: bytes = b"") -> Bind:
    return Bind(round=round_, step=step, base=base, weight=weight, hyperparameters=hyperparameters)


def seal(round_: int, used: bytes = b"\x01", integers: tuple[int, ...] = (0,), poison: Poison | None = None) -> Seal:
    return Seal(round=round_, used=used, integers=integers, poison=poison)


NAN = Poison(bucket=1, parameter="layer.weight", reason="not finite")


def step(of: RoundMachine, number: int, at_s: float, until_s: float, weight: float = 1.0) -> list[Effect]:
    """A whole step; its buckets become ready at its end."""
    effects = of.start_step(number, at_s)
    for bucket in range(of.settings.buckets):
        effects += of.bucket_ready(number, bucket, until_s, weight=weight)
    return effects + of.seal(number, b"\x01", (0,), until_s)


def results(of: RoundMachine, round_: int, contributors: int, weight: float, now_s: float = 0.0) -> list[Effect]:
    effects: list[Effect] = []
    for bucket in range(of.settings.buckets):
        effects += of.result_ready(
            round_, bucket, now_s, contributors=contributors, weight=weight, poisoned=False, squared_norm=0.0
        )
    return effects


def alone(s: int, steps: int, step_s: float = 1.0) -> tuple[RoundMachine, float]:
    """A world of one that has made `steps` steps and is at a boundary."""
    one = machine(members=1, s=s)
    for number in range(1, steps + 1):
        step(one, number, number * step_s, (number + 1) * step_s)
        results(one, number, 1, 1.0, (number + 1) * step_s)
        one.learner_applied(number, (number + 1) * step_s)
    return one, (steps + 1) * step_s


def errors(effects: list[Effect]) -> list[ProtocolError]:
    return [effect for effect in effects if isinstance(effect, ProtocolError)]


def test_first_bucket_binds_the_step_and_fixes_its_weight() -> None:
    """R2: the first bucket of a step that becomes ready binds the whole step and fixes its weight."""
    one = machine()
    assert one.start_step(7, 0.0) == []
    first = one.bucket_ready(7, 1, 0.5, weight=4.0, hyperparameters=b"lr")
    expected = Bind(round=1, step=7, base=0, weight=4.0, hyperparameters=b"lr")
    assert first == [Broadcast(expected), Contribute(1, 1)]
    assert one.bucket_ready(7, 0, 0.6, weight=8.0) == [Contribute(1, 0)]
    assert one.seal(7, b"\x01", (3,), 0.7) == [Broadcast(seal(1, integers=(3,))), LearnerMayStart(0)]


def test_start_at_most_s_rounds_ahead() -> None:
    """R1: a learner applies every complete round first; it may then start iff d - a <= s."""
    one = machine(s=1)
    step(one, 1, 0.0, 1.0)
    step(one, 2, 1.0, 2.0)
    waits = "2 rounds ahead, 1 allowed: round 1 waits for rank 1: it has contributed to no round yet"
    assert one.may_start() == (False, waits)
    assert errors(one.start_step(3, 2.0))[0].rank == 0
    one.receive(1, bind(1), 2.0)
    one.receive(1, seal(1), 2.0)
    assert one.may_start()[1].endswith("round 1 waits for the results of 2 of 2 buckets")
    assert isinstance(results(one, 1, 0b11, 2.0)[0], RoundComplete)
    assert one.may_start() == (False, "rounds 1 to 1 are complete and to be applied first")
    assert one.learner_applied(1, 2.0) == [LearnerMayStart(1)]


def test_rounds_are_applied_in_order_at_a_boundary() -> None:
    """R1: rounds are applied at a step boundary, once, and only complete ones."""
    one, now_s = alone(s=1, steps=1)
    assert errors(one.learner_applied(1, now_s))
    assert errors(one.learner_applied(2, now_s))
    one.start_step(2, now_s)
    assert errors(one.learner_applied(1, now_s))
    assert one.applied == 1


def test_rounds_complete_in_order() -> None:
    """G3, R1: a round completes with every member's part and every result, and after its predecessors."""
    one = machine(s=1)
    step(one, 1, 0.0, 1.0)
    step(one, 2, 1.0, 2.0)
    for message in (bind(1), seal(1), bind(2), seal(2)):
        one.receive(1, message, 2.0)
    assert results(one, 2, 0b11, 2.0) == []
    assert one.result_ready(1, 0, 2.0, contributors=0b11, weight=2.0, poisoned=False, squared_norm=0.0) == []
    done = one.result_ready(1, 1, 2.0, contributors=0b11, weight=2.0, poisoned=False, squared_norm=0.0)
    assert [effect.round for effect in done if isinstance(effect, RoundComplete)] == [1, 2]


def test_late_learner_nulls_called_rounds_up_to_its_base_plus_s() -> None:
    """R4: a computing learner nulls round d+1 on a call iff d+1 <= b+s."""
    one = machine(s=2)
    one.start_step(1, 0.0)
    for round_ in (1, 2, 3):
        one.receive(1, bind(round_), 0.0)
        one.receive(1, seal(round_), 0.0)
    assert one.receive(1, Call(round=1), 0.1) == [Broadcast(Null(round=1)), ContributeNothing(1)]
    assert one.receive(1, Call(round=3), 0.2) == [Broadcast(Null(round=2)), ContributeNothing(2)]
    assert one.may_null() == (False, "its learner computes on base 0: rounds up to 2 can do without it (R4)")
    bound = one.bucket_ready(1, 0, 0.3, weight=1.0)
    assert bound[0] == Broadcast(bind(3)), "its age is s"
    assert not one.may_null()[0], "it has a bucket in round 3"


@pytest.mark.parametrize(("s", "straggler"), [(0, "carry"), (0, "wait"), (2, "wait")])
def test_lockstep_nulls_only_for_an_absent_learner(s: int, straggler: Straggler) -> None:
    """R7, R8, R5: a computing learner never nulls; an absent one nulls as soon as somebody has bound."""
    one = machine(s=s, straggler=straggler)
    one.start_step(1, 0.0)
    assert one.receive(1, bind(1), 0.1) == []
    assert one.receive(1, Call(round=1), 0.1) == []
    effects = one.absent("paused", 0.2)
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
        one.receive(1, bind(number, base=number - 1), 0.1)
        one.receive(1, seal(number), 0.1)
        results(one, number, 3, 2.0)
        one.peer_complete(1, number, 0.1)
        one.learner_applied(number, 0.1)
    late = DEADLINE_STEPS_MIN + 1
    one.start_step(late, 0.2)
    one.bucket_ready(late, 0, 0.2, weight=1.0)
    one.receive(1, bind(late, base=late - 1), 0.3)
    one.receive(1, seal(late), 0.3)
    assert ContributePoison(late, 1) in one.timer(9.0)
    for bucket in range(2):
        one.result_ready(late, bucket, 9.0, contributors=3, weight=2.0, poisoned=True, squared_norm=0.0)
    assert one.complete == late
    one.peer_complete(1, late, 9.0)
    assert one.receive(1, bind(late + 1, base=late), 9.1) == []
    one.seal(late, b"\x01", (0,), 9.2)
    one.learner_applied(late, 9.2)
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
    assert one.timer(1.9) == []
    assert one.timer(2.0) == [Broadcast(Call(round=1))]
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
        one.receive(1, message, 1.0)
    assert one.deadline() is None


def test_absent_learner_nulls_called_rounds_and_no_others() -> None:
    """R5: absent, a member nulls every called round; nobody starts an empty one."""
    one = machine(s=1)
    assert one.absent("idle", 0.0) == []
    one.receive(1, bind(1), 0.0)
    assert one.decided == 0
    assert one.receive(1, Call(round=1), 0.0) == [Broadcast(Null(round=1)), ContributeNothing(1)]
    assert one.may_start() == (False, "absent: idle")
    assert one.present(1.0) == [LearnerMayStart(0)]


def test_gradient_older_than_s_is_dropped_before_it_binds() -> None:
    """R5: a gradient that would land with age > s is dropped by its own daemon; late buckets are ignored."""
    one, now_s = alone_of_two(s=1)
    base = one.applied
    one.start_step(9, now_s)
    one.receive(1, bind(base + 1, base), now_s)
    one.receive(1, seal(base + 1), now_s)
    one.receive(1, bind(base + 2, base), now_s)
    one.receive(1, seal(base + 2), now_s)
    one.receive(1, Call(round=base + 2), now_s)
    assert one.decided == base + 1, "R4"
    cut = one.timer(one.deadline() or 0.0)
    assert isinstance(cut[0], LearnerCutOff)
    assert cut[0].round is None
    assert cut[1:] == [Broadcast(Null(round=base + 2)), ContributeNothing(base + 2)]
    late = one.bucket_ready(9, 0, now_s + 99, weight=1.0)
    assert late == [StepDropped(9, "its gradient would be of age 2, 1 allowed (R5)")]
    assert one.bucket_ready(9, 1, now_s + 99, weight=1.0) == []
    assert not one.may_start()[0]
    assert one.seal(9, b"\x01", (0,), now_s + 99) == []
    assert one.phase is Phase.BOUNDARY


def alone_of_two(s: int, steps: int = 5) -> tuple[RoundMachine, float]:
    """Two members that have made enough steps of one second for a step deadline (V2: 3 s)."""
    one = machine(s=s)
    for number in range(1, steps + 1):
        step(one, number, float(number), number + 1.0)
        one.receive(1, bind(number, number - 1), number + 1.0)
        one.receive(1, seal(number), number + 1.0)
        results(one, number, 0b11, 2.0, number + 1.0)
        one.peer_complete(1, number, number + 1.0)
        one.learner_applied(number, number + 1.0)
    assert one.committed == steps
    assert one.rounds_kept == 0
    return one, steps + 1.0


@pytest.mark.parametrize("s", [0, 2])
def test_bound_learner_past_its_deadline_makes_the_round_void(s: int) -> None:
    """V2: poison for the missing buckets, the round is void, and what still comes of the step is ignored."""
    one, now_s = alone_of_two(s)
    one.start_step(6, now_s)
    one.bucket_ready(6, 1, now_s + 1.0, weight=1.0)
    while (at_s := one.deadline()) is not None and at_s < now_s + 4.0:
        assert one.timer(at_s) == [Broadcast(Call(round=6))]
    assert at_s == now_s + 4.0, "3 x the 95th percentile after the bind"
    cut, poison, sealed = one.timer(at_s)[:3]
    assert isinstance(cut, LearnerCutOff)
    assert cut.round == 6
    assert poison == ContributePoison(6, 0)
    assert isinstance(sealed, Broadcast)
    assert isinstance(sealed.message, Seal)
    assert sealed.message.poison == Poison(
        bucket=0, parameter="", reason="step 6 passed its step deadline of 3.0 s (V2)"
    )
    assert one.bucket_ready(6, 0, at_s + 9.0, weight=1.0) == []
    one.seal(6, b"\x01", (0,), at_s + 9.0)
    assert one.phase is Phase.BOUNDARY


def test_waiting_for_peers_is_not_held_against_a_learner() -> None:
    """R5: a learner that R1 holds up has no deadline; it runs from the moment at which the next move is its own."""
    one, now_s = alone_of_two(s=1)
    step(one, 6, now_s, now_s + 1.0)
    step(one, 7, now_s + 1.0, now_s + 2.0)
    assert not one.may_start()[0]
    one.receive(1, Null(round=6), now_s + 2.0)
    while (at_s := one.deadline()) is not None:
        assert one.timer(at_s) == [Broadcast(Call(round=7))]
    results(one, 6, 0b01, 1.0, now_s + 50.0)
    assert one.deadline() == now_s + 53.0


def test_long_evaluation_in_lockstep_costs_nothing() -> None:
    """R5, R7: with s=0 a learner that is not bound has no deadline."""
    one, now_s = alone_of_two(s=0)
    assert one.deadline() is None
    one.start_step(6, now_s)
    assert one.deadline() is None
    bound = one.bucket_ready(6, 0, now_s + 1000.0, weight=1.0)
    assert bound == [Broadcast(bind(6, 5, step=6)), Contribute(6, 0)]
    assert one.deadline() == now_s + 1003.0


@pytest.mark.parametrize("ready", [0, 1, 2])
def test_bound_learner_that_dies_makes_the_round_void(ready: int) -> None:
    """V2: also when every bucket has left, for its seal has not. Without a bucket the step was not bound."""
    one = machine(s=1)
    one.start_step(1, 0.0)
    for bucket in range(ready):
        one.bucket_ready(1, bucket, 0.5, weight=1.0)
    effects = one.absent("died", 0.6)
    if not ready:
        assert effects == [StepDropped(1, "its learner is absent: died (R5)")]
        return
    assert [effect for effect in effects if isinstance(effect, ContributePoison)] == [ContributePoison(1, 1)][
        ready - 1 :
    ]
    one.receive(1, bind(1), 1.0)
    one.receive(1, seal(1), 1.0)
    complete = results(one, 1, 0b11, 2.0)[0]
    assert isinstance(complete, RoundComplete)
    assert complete.void
    assert complete.reason == "rank 0: its learner is absent: died (bucket 1)"


@pytest.mark.parametrize("source", ["own", "peer", "sum"])
def test_poison_makes_the_round_void(source: str) -> None:
    """V1: a poisoned bucket makes the round void, counted, with parameter, bucket and rank named."""
    one = machine(s=1)
    one.start_step(1, 0.0)
    one.bucket_ready(1, 0, 0.1, weight=1.0)
    own = one.bucket_ready(1, 1, 0.1, weight=1.0, poison=NAN if source == "own" else None)
    assert own == [ContributePoison(1, 1) if source == "own" else Contribute(1, 1)]
    one.seal(1, b"\x01", (0,), 0.3)
    one.receive(1, bind(1), 0.3)
    one.receive(1, seal(1, poison=NAN if source == "peer" else None), 0.3)
    one.result_ready(1, 0, 0.4, contributors=0b11, weight=2.0, poisoned=False, squared_norm=0.0)
    complete = one.result_ready(1, 1, 0.4, contributors=0, weight=0.0, poisoned=True, squared_norm=0.0)[0]
    assert isinstance(complete, RoundComplete)
    assert complete.void
    who = {"own": {0: NAN}, "peer": {1: NAN}, "sum": {}}[source]
    assert complete.poisons == who
    named = {rank: f"rank {rank}: layer.weight: not finite (bucket 1)" for rank in who}
    assert complete.reason == (next(iter(named.values())) if who else "the sum of bucket 1 is not finite")
    assert one.complete == 1


def test_a_complete_round_holds_what_the_optimizer_needs() -> None:
    """W3, O3, O5: weights add up, parameters used by anybody, integer maxima, hyperparameters of the largest step."""
    one = machine(members=3, s=1)
    one.start_step(5, 0.0)
    for bucket in (0, 1):
        one.bucket_ready(5, bucket, 0.0, weight=3.0, hyperparameters=b"mine")
    one.seal(5, b"\x01", (7,), 0.0)
    one.receive(1, bind(1, weight=2.0, step=5, hyperparameters=b"theirs"), 0.0)
    one.receive(1, seal(1, used=b"\x04", integers=(9,)), 0.0)
    one.receive(2, Null(round=1), 0.0)
    complete = results(one, 1, 0b011, 5.0)[0]
    assert isinstance(complete, RoundComplete)
    assert (complete.void, complete.contributors, complete.weight) == (False, 0b011, 5.0)
    assert (complete.used, complete.integers, complete.hyperparameters) == (b"\x05", (9,), b"mine")


def test_committed_is_what_every_member_has_announced() -> None:
    """G5: only then is anything freed."""
    one = machine(members=3, s=1)
    step(one, 1, 0.0, 1.0)
    for rank in (1, 2):
        one.receive(rank, bind(1), 1.0)
        one.receive(rank, seal(1), 1.0)
    results(one, 1, 0b111, 3.0)
    assert one.peer_complete(1, 1, 1.0) == []
    assert one.rounds_kept == 1
    assert one.peer_complete(2, 1, 1.0) == [Committed(1)]
    assert one.rounds_kept == 0
    assert one.peer_complete(2, 0, 1.0) == [], "control overtakes frames: an older counter is no error"


@pytest.mark.parametrize(("contributors", "weight"), [(0b01, 2.0), (0b11, 3.0)])
def test_results_must_show_what_the_binds_name(contributors: int, weight: float) -> None:
    """R2: one weight for each member and round, in every bucket and shard; otherwise the round never completes."""
    one = machine(s=1)
    step(one, 1, 0.0, 1.0)
    one.receive(1, bind(1), 1.0)
    one.receive(1, seal(1), 1.0)
    (error,) = results(one, 1, contributors, weight)
    assert isinstance(error, ProtocolError)
    assert error.rank is None
    assert one.complete == 0
    assert one.timer(9.0) == []


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
        assert not errors(one.receive(1, earlier, 0.0))
    kept = one.rounds_kept
    (error,) = one.receive(1, message, 0.0)
    assert isinstance(error, ProtocolError)
    assert error.rank == 1
    assert rule in error.text
    assert one.rounds_kept == kept


def test_complete_beyond_what_the_own_part_allows() -> None:
    """G3, G5: nobody can hold a round whole that this member has not ended."""
    one = machine()
    assert errors(one.peer_complete(1, 1, 0.0))[0].rank == 1
    assert one.committed == 0


def test_a_learner_that_breaks_the_contract_is_named() -> None:
    """Errors of the local learner and executor name the own rank and change nothing."""
    one = machine()
    assert errors(one.bucket_ready(1, 0, 0.0, weight=1.0))
    assert errors(one.seal(1, b"\x00", (0,), 0.0))
    assert errors(one.present(0.0))
    assert errors(one.result_ready(1, 0, 0.0, contributors=1, weight=1.0, poisoned=False, squared_norm=0.0))
    one.start_step(1, 0.0)
    assert errors(one.bucket_ready(1, 2, 0.0, weight=1.0))
    assert errors(one.bucket_ready(1, 0, 0.0, weight=float("nan")))
    assert errors(one.bucket_ready(1, 0, 0.0, weight=0.0))
    assert errors(one.bucket_ready(2, 0, 0.0, weight=1.0))
    assert errors(one.seal(1, b"\x00", (0,), 0.0))
    one.bucket_ready(1, 0, 0.0, weight=1.0)
    assert errors(one.bucket_ready(1, 0, 0.0, weight=1.0))
    assert errors(one.seal(1, b"\x00", (0,), 0.0)) == [ProtocolError(0, "seal of step 1 without its buckets [1]")]
    one.bucket_ready(1, 1, 0.0, weight=1.0)
    assert errors(one.seal(1, b"", (0,), 0.0))
    assert not errors(one.seal(1, b"\x00", (0,), 0.0))
    assert errors(one.result_ready(1, 2, 0.0, contributors=1, weight=1.0, poisoned=False, squared_norm=0.0))
    assert one.phase is Phase.BOUNDARY


MESSAGES = st.one_of(
    st.builds(bind, st.integers(1, 9), st.integers(0, 9), st.floats(0.1, 9.0)),
    st.builds(seal, st.integers(1, 9), st.binary(max_size=2), st.lists(st.integers(), max_size=2).map(tuple)),
    st.builds(lambda round_: Null(round=round_), st.integers(1, 9)),
    st.builds(lambda round_: Call(round=round_), st.integers(1, 2**32 - 1)),
    st.integers(0, 2**32 - 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2), MESSAGES), max_size=60), st.integers(0, 3), st.booleans())
def test_no_message_raises_or_makes_the_machine_grow(
    inputs: list[tuple[int, Bind | Seal | Null | Call | int]], s: int, absent: bool
) -> None:
    """Whatever two members send, nothing raises, the own decisions stay in order, and memory stays bounded."""
    one = machine(members=3, s=s)
    if absent:
        one.absent("idle", 0.0)
    for rank, sent in inputs:
        if isinstance(sent, int):
            one.peer_complete(rank, sent, 0.0)
        else:
            one.receive(rank, sent, 0.0)
        assert one.rounds_kept <= 3 * (s + 1)
        assert one.decided <= one.complete + s + 1


def test_step_deadline_formula() -> None:
    """V2: max of 3 x the 95th percentile and 2 s; none before five steps."""
    times = StepTimes()
    for _ in range(4):
        times.add(10.0)
        assert times.deadline_s() is None
    times.add(10.0)
    assert times.deadline_s() == 30.0
    assert percentile_95([float(n) for n in range(1, 101)]) == 95.0
    assert percentile_95([1.0]) == 1.0
    quick = StepTimes()
    for _ in range(5):
        quick.add(0.1)
    assert quick.deadline_s() == 2.0


def test_late_after_formula() -> None:
    """R3: one median step, at least 2 RTT."""
    times = StepTimes()
    assert times.late_after_s(0.01, 0.3) == 0.3
    for step_s in (1.0, 2.0, 9.0):
        times.add(step_s)
    assert times.late_after_s(0.01, 0.3) == 2.0
    assert times.late_after_s(1.5, 0.3) == 3.0


# Clusters.


def random_cluster(seed: int, members: int, s: int) -> Cluster:
    """Everything at random: speeds up to 1:6, delays up to a step, links, mishaps of every kind."""
    random = Random(seed)
    steps = random.randint(3, 14)
    buckets = random.randint(1, 4)
    mishaps = tuple(
        Mishap(
            rank=random.randrange(members),
            step=random.randint(1, steps),
            kind=random.choice(["idle", "die", "hang", "poison"]),
            bucket=random.randint(0, buckets),
            for_s=random.choice([0.0, 0.5, 3.0, 30.0]),
        )
        for _ in range(random.choice([0, 1, 2, 6]))
    )
    return Cluster(
        seed,
        members=members,
        staleness=s,
        steps=steps,
        straggler=random.choice(["carry", "carry", "wait"]),
        buckets=buckets,
        mishaps=mishaps,
        timing=Timing(
            step_s=tuple(random.choice([1.0, 1.0, 1.3, 3.0, 6.0]) for _ in range(members)),
            jitter=random.choice([0.0, 0.1, 0.5]),
            delay_s=(0.0, random.choice([0.001, 0.05, 1.0])),
            exchange_s=(0.0, random.choice([0.01, 0.3, 1.5])),
        ),
    )


@pytest.mark.parametrize("members", range(1, 7))
@pytest.mark.parametrize("s", range(5))
def test_every_schedule_keeps_the_rules_and_ends(s: int, members: int) -> None:
    """R0 to R8, V1, V2, G3, G5 at every event, and the progress argument: every learner makes all its steps."""
    for seed in range(8):
        random_cluster(seed * 1000 + s * 10 + members, members, s).run()


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("s", [1, 2, 4])
@pytest.mark.parametrize("exchange_s", [0.3, 1.5])
def test_equal_learners_share_every_round(members: int, s: int, exchange_s: float) -> None:
    """Equal learners with 10 % jitter make at most 1.05 rounds a step with at least 0.95 m contributors."""
    timing = Timing((1.0,) * members, 0.1, exchange_s=(0.8 * exchange_s, exchange_s))
    cluster = Cluster(1, members=members, staleness=s, steps=100, timing=timing).run()
    assert cluster.rounds <= 1.05 * cluster.steps
    assert cluster.mean_contributors >= 0.95 * members


@pytest.mark.parametrize(("s", "straggler"), [(0, "carry"), (0, "wait"), (1, "wait"), (3, "wait")])
def test_lockstep_has_every_member_in_every_round(s: int, straggler: Straggler) -> None:
    """R7, R8: BSP, and classic SSP, with one learner three times slower."""
    timing = Timing((1.0, 1.0, 3.0), 0.1)
    cluster = Cluster(2, members=3, staleness=s, steps=30, straggler=straggler, timing=timing).run()
    assert cluster.rounds == 30
    assert cluster.mean_contributors == 3
    assert cluster.calls == 0


def test_a_slow_learner_costs_the_others_nothing() -> None:
    """R4: one of three learners is 3x slower; with s=3 the others keep above 0.9 of their own speed."""
    steps = 60
    timing = Timing((1.0, 1.0, 3.0), 0.02, exchange_s=(0.5, 0.8))
    cluster = Cluster(3, members=3, staleness=3, steps=steps, timing=timing).run()
    assert max(learner.finished_s for learner in cluster.learners[:2]) <= steps / 0.9
    shared = [completion for round_, completion in cluster.completions.items() if round_ <= steps]
    assert sum(len(completion.binds) for completion in shared) / len(shared) >= 2.2


@pytest.mark.parametrize("kind", ["poison", "die", "hang"])
@pytest.mark.parametrize("s", [0, 2])
def test_a_mishap_after_the_bind_costs_one_round(s: int, kind: Literal["poison", "die", "hang"]) -> None:
    """V1, V2: the round that the step was bound to is void on all members; no member is lost."""
    mishap = Mishap(rank=1, step=20, kind=kind, bucket=1, for_s=30.0)
    timing = Timing((1.0,) * 3, 0.1)
    cluster = Cluster(4, members=3, staleness=s, steps=40, timing=timing, mishaps=(mishap,)).run()
    (void,) = cluster.void_rounds
    assert cluster.binds[void][1].step == 20
    assert len(cluster.cut_offs) == (kind == "hang")


def test_a_stopped_learner_is_passed_over_when_s_is_positive() -> None:
    """R5: stopped before it has bound, it is cut off at its step deadline; nothing is void."""
    mishap = Mishap(rank=1, step=20, kind="hang", bucket=0, for_s=30.0)
    timing = Timing((1.0,) * 3, 0.1)
    passed = Cluster(5, members=3, staleness=2, steps=40, timing=timing, mishaps=(mishap,)).run()
    assert [rank for rank, _ in passed.cut_offs] == [1]
    assert [(rank, dropped.step) for rank, dropped in passed.dropped] == [(1, 20)]
    assert not passed.void_rounds
    assert max(passed.learners[rank].finished_s for rank in (0, 2)) < 40 * 1.1 + 4.0

    waited = Cluster(5, members=3, staleness=0, steps=40, timing=timing, mishaps=(mishap,)).run()
    assert not waited.cut_offs
    assert not waited.dropped
    assert waited.mean_contributors == 3
