"""The round machine from one generation to the next, rule by rule (G2 to G6, J1). What follows: `tests/sim`."""

from collections.abc import Callable

import pytest

from meshwire.messages.rounds import Bind, Call, Null, Poison, Seal
from meshwire.rounds.effects import (
    Broadcast,
    Committed,
    Contribute,
    ContributeNothing,
    ContributePoison,
    Effect,
    ProtocolError,
    RoundComplete,
)
from meshwire.rounds.inputs import (
    BaseLoaded,
    BucketReady,
    CompleteAnnounced,
    FenceRaised,
    GenerationEntered,
    LearnerAbsent,
    LearnerPresent,
    MessageReceived,
    ResultReady,
    RoundApplied,
    RoundServed,
    StartStep,
    StepSealed,
    TimeReached,
)
from meshwire.rounds.learner_state import Phase, RoundSettings
from meshwire.rounds.machine import RoundMachine
from meshwire.sync_modes.mode import Straggler, Visibility

NAN = Poison(bucket=0, parameter="layer.weight", reason="not finite")


def machine(
    ranks: tuple[int, ...] = (0, 1, 2),
    rank: int = 0,
    *,
    s: int = 2,
    complete: int = 0,
    buckets: int = 2,
    straggler: Straggler = "carry",
    visibility: Visibility = "eager",
    unapplied_max: int = 1 << 30,
) -> RoundMachine:
    settings = RoundSettings(
        ranks=ranks,
        rank=rank,
        buckets=buckets,
        used_bytes=1,
        integers=0,
        staleness=s,
        straggler=straggler,
        rtt_s=0.01,
        visibility=visibility,
        unapplied_max=unapplied_max,
    )
    return RoundMachine(settings, complete=complete)


def bind(round_: int, base: int = 0, step: int = 1) -> Bind:
    return Bind(round=round_, step=step, base=base, weight=1.0)


def seal(round_: int, poison: Poison | None = None) -> Seal:
    return Seal(round=round_, used=b"\x01", poison=poison)


def step(of: RoundMachine, number: int, poison: Poison | None = None) -> list[Effect]:
    effects = of.handle(StartStep(number), 0.0)
    for bucket in range(of.settings.buckets):
        effects += of.handle(BucketReady(number, bucket, weight=1.0, poison=None if bucket else poison), 0.0)
    return effects + of.handle(StepSealed(number, b"\x01", ()), 0.0)


def whole(of: RoundMachine, round_: int, *, without: tuple[int, ...] = (), base: int = 0) -> list[Effect]:
    """The others' parts and all results of a round that this member has sealed."""
    effects: list[Effect] = []
    others = [rank for rank in of.settings.ranks if rank != of.settings.rank and rank not in without]
    for rank in others:
        effects += of.handle(MessageReceived(rank, bind(round_, base, step=round_)), 0.0)
        effects += of.handle(MessageReceived(rank, seal(round_)), 0.0)
    for rank in without:
        effects += of.handle(MessageReceived(rank, Null(round=round_)), 0.0)
    contributors = sum(1 << rank for rank in (*others, of.settings.rank))
    return effects + results(of, round_, contributors, float(len(others) + 1))


def results(of: RoundMachine, round_: int, contributors: int, weight: float) -> list[Effect]:
    effects: list[Effect] = []
    for bucket in range(of.settings.buckets):
        effects += of.handle(
            ResultReady(round_, bucket, contributors=contributors, weight=weight, poisoned=False, squared_norm=1.0), 0.0
        )
    return effects


def completed(effects: list[Effect]) -> list[RoundComplete]:
    return [effect for effect in effects if isinstance(effect, RoundComplete)]


def errors(effects: list[Effect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, ProtocolError)]


# G2: the fence.


def test_nothing_completes_in_the_fence() -> None:
    """G2: neither by what others say, nor by the own learner's seal, which may be all that a round still lacked."""
    one = machine((0, 1))
    one.handle(StartStep(1), 0.0)
    for bucket in (0, 1):
        one.handle(BucketReady(1, bucket, weight=1.0), 0.0)
    assert not completed(whole(one, 1))
    one.handle(FenceRaised(), 0.0)
    sealed = one.handle(StepSealed(1, b"\x01", ()), 0.0)
    assert sealed == [Broadcast(seal(1))], "the learner goes on; what is told is told again"
    assert (one.complete, one.phase) == (0, Phase.BOUNDARY)
    assert one.handle(GenerationEntered((0, 1), 0, {1: 0}), 0.0)[-1] == Broadcast(seal(1))
    assert completed(whole(one, 1))


def test_nobody_is_heard_in_the_fence() -> None:
    """G2: frames of the old generation are still on their way; they are no errors and change nothing."""
    one = machine((0, 1))
    step(one, 1)
    one.handle(FenceRaised(), 0.0)
    for message in (bind(1), seal(1), Call(round=1), Null(round=9)):
        assert one.handle(MessageReceived(1, message), 0.0) == []
    assert one.handle(CompleteAnnounced(1, 1), 0.0) == []
    assert results(one, 1, 3, 2.0) == []
    assert one.deadline() is None, "and no call is due"
    assert (one.complete, one.committed) == (0, 0)


# G4: what a member lacks.


def done(round_: int, binds: dict[int, Bind]) -> RoundComplete:
    return RoundComplete(round_, False, "", binds=binds, poisons={}, used=b"\x01", integers=(), squared_norm=1.0)


def test_a_laggard_is_served_up_to_the_cut() -> None:
    """G4, G6: the rounds that others hold are complete here too, in order, and no round after them."""
    one = machine((0, 1))
    step(one, 1)
    step(one, 2)
    step(one, 3)
    for round_ in (2, 3):  # of which it has everything, but not of round 1
        for message in (bind(1), seal(1)) if round_ == 2 else ():
            one.handle(MessageReceived(1, message), 0.0)
        one.handle(MessageReceived(1, bind(round_, step=round_)), 0.0)
        one.handle(MessageReceived(1, seal(round_)), 0.0)
        results(one, round_, 3, 2.0)
    one.handle(FenceRaised(), 0.0)
    served = done(1, {0: bind(1), 1: bind(1)})
    assert completed(one.handle(RoundServed(served), 0.0)) == [served]
    assert one.complete == 1, "the cut may be here, however much it holds itself"
    assert not errors(one.handle(GenerationEntered((0, 1), 1, {1: 1}), 0.0))
    assert one.complete == 1, "round 2 re-runs"


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (done(2, {0: bind(2), 1: bind(2)}), "the next one that it lacks is 1"),
        (done(1, {1: bind(1)}), "another history: the part of rank 0"),
        (done(1, {0: bind(1, step=4), 1: bind(1)}), "another history: the part of rank 0"),
        (done(1, {0: bind(1)}), "another history: the part of rank 1"),
        (done(1, {0: bind(1), 1: bind(1), 2: bind(1)}), "another history: the part of rank 2"),
    ],
)
def test_a_round_of_another_history_is_not_taken(served: RoundComplete, said: str) -> None:
    """G4: who was passed over must load anew, or its contribution would count nowhere and its view count on it."""
    one = machine()
    step(one, 1)
    one.handle(MessageReceived(1, bind(1)), 0.0)
    one.handle(MessageReceived(2, Null(round=1)), 0.0)
    one.handle(FenceRaised(), 0.0)
    (error,) = errors(one.handle(RoundServed(served), 0.0))
    assert said in error
    assert one.complete == 0


def test_nobody_is_served_a_round_that_needs_its_own_part() -> None:
    """G3, G2."""
    one = machine()
    assert "has not left" in errors(one.handle(RoundServed(done(1, {1: bind(1)})), 0.0))[0]
    one.handle(FenceRaised(), 0.0)
    assert "not added its part" in errors(one.handle(RoundServed(done(1, {1: bind(1)})), 0.0))[0]


# G6: entering.


def entering(one: RoundMachine, ranks: tuple[int, ...] = (0, 1), **completes: int) -> list[Effect]:
    one.handle(FenceRaised(), 0.0)
    return one.handle(
        GenerationEntered(ranks, one.complete, {int(rank[1:]): round_ for rank, round_ in completes.items()}), 0.0
    )


def at_boundary(one: RoundMachine) -> list[Effect]:
    return step(one, 1)


def half_bound(one: RoundMachine) -> list[Effect]:
    one.handle(StartStep(1), 0.0)
    return one.handle(BucketReady(1, 1, weight=1.0), 0.0)


def half_poisoned(one: RoundMachine) -> list[Effect]:
    one.handle(StartStep(1), 0.0)
    return one.handle(BucketReady(1, 1, weight=1.0, poison=NAN), 0.0)


def poisoned(one: RoundMachine) -> list[Effect]:
    return step(one, 1, poison=NAN)


def given_up(one: RoundMachine) -> list[Effect]:
    return half_bound(one) + one.handle(LearnerAbsent("it has finished", gone=True), 0.0)


def died(one: RoundMachine) -> list[Effect]:
    return half_bound(one) + one.handle(LearnerAbsent("it died", gone=True, rests=True), 0.0)


def passed_over(one: RoundMachine) -> list[Effect]:
    one.handle(LearnerAbsent("idle"), 0.0)
    one.handle(MessageReceived(2, bind(1)), 0.0)
    return one.handle(MessageReceived(2, Call(round=1)), 0.0)


def several(one: RoundMachine) -> list[Effect]:
    effects = step(one, 1, poison=NAN) + step(one, 2)
    one.handle(StartStep(3), 0.0)
    return effects + one.handle(BucketReady(3, 0, weight=1.0), 0.0)


def idle_and_computing(one: RoundMachine) -> list[Effect]:
    return one.handle(StartStep(1), 0.0)


@pytest.mark.parametrize(
    "before",
    [at_boundary, half_bound, half_poisoned, poisoned, given_up, died, passed_over, several, idle_and_computing],
    ids=lambda before: before.__name__,
)
@pytest.mark.parametrize("twice", [False, True])
def test_own_decisions_are_told_again(before: Callable[[RoundMachine], list[Effect]], twice: bool) -> None:
    """G6: rounds above the cut keep number, binding and bytes, in every state of the learner, also time and again."""
    one = machine()
    told = [
        effect
        for effect in before(one)
        if isinstance(effect, Contribute | ContributePoison | ContributeNothing | Broadcast)
        and not (isinstance(effect, Broadcast) and isinstance(effect.message, Call))
    ]
    phase, decided = one.phase, one.decided
    again = entering(one, (0, 1, 2) if twice else (0, 1))
    if twice:
        again = entering(one)
    assert again == told
    assert (one.phase, one.decided, one.complete) == (phase, decided, 0)


def test_who_computes_no_more_takes_back_what_it_had_bound() -> None:
    """X3: its samples were dealt to others when its rank left those that compute: no round above the cut has them."""
    one = machine()
    step(one, 1)
    one.handle(LearnerAbsent("it died", loading=True), 0.0)
    one.handle(FenceRaised(), 0.0)
    effects = one.handle(GenerationEntered((0, 1), 0, {}, computes=False), 0.0)
    assert effects == [Broadcast(Null(round=1)), ContributeNothing(1)]
    assert one.decided == 1
    one.handle(FenceRaised(), 0.0)
    assert one.handle(GenerationEntered((0, 1), 0, {}), 0.0) == effects, "and it stays taken back"


@pytest.mark.parametrize("s", [0, 2])
@pytest.mark.parametrize("ready", [1, 2])
def test_a_learner_that_dies_costs_the_others_no_round(s: int, ready: int) -> None:
    """V2, G6: what it had bound stays open, called or not, until its rank rests: then the round runs again without it.
    The others' parts are in it, and its samples are not, for they are dealt again (X3)."""
    one, other = machine(s=s), machine(rank=1, s=s)
    one.handle(StartStep(1), 0.0)
    for bucket in range(ready):
        for effect in one.handle(BucketReady(1, bucket, weight=1.0), 0.0):
            if isinstance(effect, Broadcast):
                other.handle(MessageReceived(0, effect.message), 0.0)
    step(other, 1)
    assert one.handle(LearnerAbsent("it died", gone=True, rests=True), 0.0) == [], "no poison, and no seal"
    for round_ in (1, 2) if s else (1,):
        for message in (bind(round_), seal(round_), Call(round=round_)):
            assert one.handle(MessageReceived(2, message), 0.0) == [], "nor can it null what comes after"
            other.handle(MessageReceived(2, message), 0.0)
    assert not one.may_null()[0]
    assert "V2" in one.may_null()[1]
    results(other, 1, 0b111, 3.0)
    assert other.complete == 0, "its seal is all that the round lacks"
    one.handle(LearnerAbsent("it loads the state of the others", loading=True), 0.0)
    one.handle(FenceRaised(), 0.0)
    other.handle(FenceRaised(), 0.0)
    nulled = one.handle(GenerationEntered((0, 1, 2), 0, {}, computes=False), 0.0)
    assert nulled == [Broadcast(Null(round=1)), ContributeNothing(1)]
    other.handle(GenerationEntered((0, 1, 2), 0, {}), 0.0)
    for each, rank in ((one, 1), (other, 0)):
        each.handle(MessageReceived(rank, bind(1) if rank else Null(round=1)), 0.0)
        each.handle(MessageReceived(rank, seal(1)), 0.0) if rank else []
        each.handle(MessageReceived(2, bind(1)), 0.0)
        each.handle(MessageReceived(2, seal(1)), 0.0)
        (complete,) = completed(results(each, 1, 0b110, 2.0))
        assert (complete.void, complete.contributors) == (False, 0b110)


def test_a_step_goes_on_in_the_next_generation() -> None:
    """G6: a learner that computes knows nothing of it."""
    one = machine()
    half_bound(one)
    one.handle(FenceRaised(), 0.0)
    assert one.handle(BucketReady(1, 0, weight=1.0), 0.0) == [Contribute(1, 0)], "in the fence: kept"
    assert one.handle(GenerationEntered((0, 1), 0, {}), 0.0) == [Broadcast(bind(1)), Contribute(1, 1), Contribute(1, 0)]
    assert one.handle(StepSealed(1, b"\x01", ()), 0.0)[0] == Broadcast(seal(1))
    (complete,) = completed(whole(one, 1))
    assert complete.contributors == 0b11


def test_the_others_begin_anew_at_the_cut() -> None:
    """G6: what was known of rounds above it is forgotten, and of who has left; the rest tell theirs again."""
    one = machine()
    step(one, 1)
    for rank in (1, 2):
        one.handle(MessageReceived(rank, bind(1)), 0.0)
        one.handle(MessageReceived(rank, seal(1)), 0.0)
    entering(one, (0, 2))
    assert one.waiting().startswith("round 1 waits for rank 2")
    assert one.settings.ranks == (0, 2)
    (complete,) = completed(whole(one, 1))
    assert complete.contributors == 0b101


def test_a_round_that_nobody_is_left_in_is_void() -> None:
    """G6: whoever nulled it tells so again, which is a call of it (R3): an absent member follows, and it ends."""
    one, other = machine(s=1, rank=0), machine(s=1, rank=1)
    for each in (one, other):
        each.handle(LearnerAbsent("idle"), 0.0)
    for message in (bind(1), seal(1), bind(2), seal(2), Call(round=2)):
        one.handle(MessageReceived(2, message), 0.0)  # rank 1 never hears of them: rank 2 is lost
    assert (one.decided, other.decided) == (2, 0)
    one.handle(LearnerPresent(), 0.0)
    assert not one.may_start()[0], "without an end of round 1 it could never go on"
    told = entering(one)
    assert entering(other) == []
    replies = [
        effect
        for message in told
        if isinstance(message, Broadcast)
        for effect in other.handle(MessageReceived(0, message.message), 0.0)
    ]
    assert replies == [Broadcast(Null(round=1)), ContributeNothing(1), Broadcast(Null(round=2)), ContributeNothing(2)]
    for round_ in (1, 2):
        one.handle(MessageReceived(1, Null(round=round_)), 0.0)
        (complete,) = completed(results(one, round_, 0, 0.0))
        assert (complete.void, complete.reason, complete.binds) == (True, "no member contributed", {})
        assert completed(results(other, round_, 0, 0.0)) == [complete]
    one.handle(RoundApplied(2), 0.0)
    assert one.may_start()[0]


@pytest.mark.parametrize("s", [0, 2])
def test_a_computing_learner_binds_the_round_that_nobody_is_left_in(s: int) -> None:
    """R7: with s=0 it never nulls; its contribution gives the round its weight."""
    other = machine((0, 1), rank=1, s=s)
    other.handle(StartStep(1), 0.0)
    entering(other)
    told = other.handle(MessageReceived(0, Null(round=1)), 0.0)
    bound = other.handle(BucketReady(1, 0, weight=1.0), 0.0)[0]
    assert (told == [], bound) == (s == 0, Broadcast(bind(1 if s == 0 else 2)))


def test_nobody_remembers_old_calls() -> None:
    """G6, R3: a round whose contributors are lost is not nulled for them; own contributions are called anew."""
    one = machine(s=2)
    one.handle(StartStep(1), 0.0)
    for message in (bind(1), seal(1), Call(round=1)):
        one.handle(MessageReceived(2, message), 0.0)
    assert one.decided == 1
    entering(one)
    assert one.handle(LearnerAbsent("idle"), 0.0)[1:] == [], "round 1 is decided already, and no later one is called"

    one = machine(s=2)
    step(one, 1)
    one.handle(TimeReached(), one.deadline() or 0.0)
    assert one.deadline() is None, "it has called"
    entering(one)
    assert one.deadline() is not None
    assert one.handle(TimeReached(), one.deadline() or 0.0) == [Broadcast(Call(round=1))]


def test_a_null_that_is_told_again_calls_the_own_contributions_before_it() -> None:
    """R3: one call covers all older rounds, and whoever receives the null takes it for one: no other is sent."""
    one = machine(s=2)
    step(one, 1)
    one.handle(StartStep(2), 0.0)
    for message in (bind(1), seal(1), bind(2), Call(round=2)):
        one.handle(MessageReceived(2, message), 0.0)
    assert one.decided == 2
    told = entering(one)
    assert [effect.message for effect in told if isinstance(effect, Broadcast)] == [bind(1), seal(1), Null(round=2)]
    assert one.handle(TimeReached(), 100.0) == []


def test_what_laggards_lack_is_not_committed() -> None:
    """G5: the source holds it until they have announced it; a member that is new needs nothing of before the cut."""
    one = machine()
    for round_ in (1, 2):
        step(one, round_)
        whole(one, round_, base=round_ - 1)
        one.handle(RoundApplied(round_), 0.0)
    one.handle(CompleteAnnounced(1, 1), 0.0)
    one.handle(CompleteAnnounced(2, 0), 0.0)
    assert (one.complete, one.committed) == (2, 1), "whoever has bound round 2 on base 1 holds round 1"
    entering(one, (0, 1, 3), r1=1)
    assert one.committed == 1, "rank 2 has left, rank 3 is new"
    assert one.handle(CompleteAnnounced(1, 2), 0.0) == [Committed(2)]
    assert one.rounds_kept == 0


@pytest.mark.parametrize(
    ("ranks", "cut", "said"), [((0, 1), 1, "holds the rounds up to 0 (G6)"), ((1, 2), 0, "ranks (1, 2) (G2)")]
)
def test_entering_with_another_history_is_refused(ranks: tuple[int, ...], cut: int, said: str) -> None:
    one = machine()
    step(one, 1)
    one.handle(FenceRaised(), 0.0)
    (error,) = errors(one.handle(GenerationEntered(ranks, cut, {}), 0.0))
    assert said in error
    assert one.settings.ranks == (0, 1, 2)


# J1: learners that load.


def test_a_newcomer_begins_at_the_cut() -> None:
    """J1: its daemon is a member at once, nulls while its learner loads, and keeps what follows for it."""
    one = machine((0, 1, 4), rank=4, complete=7, unapplied_max=3)
    assert (one.complete, one.applied, one.decided, one.committed) == (7, 7, 7, 7)
    one.handle(LearnerAbsent("loading", loading=True), 0.0)
    for round_ in (8, 9):
        one.handle(MessageReceived(0, bind(round_, base=round_ - 1)), 0.0)
        one.handle(MessageReceived(0, seal(round_)), 0.0)
        assert one.handle(MessageReceived(1, Null(round=round_)), 0.0) == [
            Broadcast(Null(round=round_)),
            ContributeNothing(round_),
        ]
        assert completed(results(one, round_, 1, 1.0))
    assert one.may_null() == (True, "its learner has applied 7: rounds up to 10 can be kept for it")
    assert errors(one.handle(BaseLoaded(10), 0.0))
    assert errors(one.handle(BaseLoaded(6), 0.0))
    assert not errors(one.handle(BaseLoaded(8), 0.0))
    assert one.applied == 8
    assert not errors(one.handle(RoundApplied(9), 0.0))
    entering(one, (0, 1, 4))
    assert one.handle(LearnerPresent(), 0.0) == []
    assert one.may_start()[0]
    assert step(one, 1)[0] == Broadcast(Bind(round=10, step=1, base=9, weight=1.0))


def test_a_dead_learner_loads_anew() -> None:
    """R5, J1: while it is gone nothing is kept for it; once another one loads, all from there on."""
    one = machine((0, 1), s=1, unapplied_max=2)
    one.handle(LearnerAbsent("dead", gone=True), 0.0)
    for round_ in range(1, 6):
        one.handle(MessageReceived(1, bind(round_, base=round_ - 1)), 0.0)
        one.handle(MessageReceived(1, seal(round_)), 0.0)
        one.handle(MessageReceived(1, Call(round=round_)), 0.0)
        assert completed(results(one, round_, 2, 1.0))
    assert errors(one.handle(BaseLoaded(5), 0.0))
    one.handle(LearnerAbsent("loading", loading=True), 0.0)
    assert (one.applied, one.complete) == (5, 5)
    one.handle(LearnerAbsent("still loading", loading=True), 0.0)
    assert one.may_null() == (True, "no gradient is due; rounds up to 7 are in reach (R5)")


def test_what_follows_the_base_in_memory_is_kept_for_the_next_learner() -> None:
    """J3: rounds go on without it; it holds what the one before has applied, and applies the rest."""
    one = machine((0, 1), s=1, unapplied_max=3)
    one.handle(LearnerAbsent("killed", holds=0), 0.0)
    for round_ in range(1, 4):
        one.handle(MessageReceived(1, bind(round_, base=round_ - 1)), 0.0)
        one.handle(MessageReceived(1, seal(round_)), 0.0)
        one.handle(MessageReceived(1, Call(round=round_)), 0.0)
        assert completed(results(one, round_, 2, 1.0)), "it holds nobody up"
    assert (one.applied, one.complete) == (0, 3)
    assert one.may_null() == (False, "its learner has applied 0: rounds up to 3 can be kept for it")
    one.handle(LearnerAbsent("it loads", loading=True), 0.0)
    assert one.applied == 0, "not what is complete when it comes"
    assert not errors(one.handle(BaseLoaded(1), 0.0)), "the one before had applied a round that nobody had heard of"
    assert not errors(one.handle(RoundApplied(2), 0.0))


def test_fixed_visibility_passes_over_a_learner_that_loads() -> None:
    """R8: that it is not among those that compute does not depend on the clock, the generation says so."""
    one = machine((0, 1), s=1, straggler="wait", visibility="fixed")
    one.handle(LearnerAbsent("loading", loading=True), 0.0)
    assert one.handle(MessageReceived(1, bind(1)), 0.0) == [Broadcast(Null(round=1)), ContributeNothing(1)]


def test_who_is_about_to_begin_nulls_nothing() -> None:
    """G9: others have begun in the generation, and its learner is to be in the first round as well."""
    one = machine((0, 1), s=0)
    one.handle(LearnerAbsent("it loads", loading=True), 0.0)
    assert not errors(one.handle(BaseLoaded(0), 0.0))
    one.handle(FenceRaised(), 0.0)
    one.handle(GenerationEntered((0, 1), 0, {}), 0.0)
    assert one.handle(MessageReceived(1, bind(1)), 0.0) == []
    assert one.may_null() == (False, "its learner begins when all have entered the generation (G9)")
    one.handle(FenceRaised(), 0.0)
    entered = one.handle(GenerationEntered((0, 1), 0, {}, computes=False), 0.0)
    assert entered == []
    assert one.may_null()[0], "it rests in this one"
