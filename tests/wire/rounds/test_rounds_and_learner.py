"""What one daemon decides in a job's rounds, by hand: what the learner is told, and what follows for its samples."""

import pytest

from meshwire.messages.learner import (
    Grant,
    LearnerApplied,
    LearnerBack,
    LearnerBucket,
    LearnerIdle,
    LearnerSealed,
    LearnerStepped,
    RoundDone,
    SampleSpace,
    Start,
    StepLost,
)
from meshwire.messages.rounds import Bind, SampleBlock, Seal
from meshwire.rounds.effects import (
    Committed,
    DecodeRound,
    Effect,
    JobEffect,
    LearnerBrokeRules,
    ProtocolError,
    RoundComplete,
    RoundCounted,
    RoundForgotten,
    SamplesDealt,
    TellLearner,
)
from meshwire.rounds.inputs import (
    BaseLoaded,
    CompleteAnnounced,
    FenceRaised,
    GenerationEntered,
    JobInput,
    LearnerDied,
    LearnerGone,
    LearnerLoads,
    LearnerParts,
    LearnerTakenIn,
    LearningChanged,
    MemberMessage,
    ResultReady,
    RoundDecoded,
    RoundServed,
    SettingsChanged,
)
from meshwire.rounds.learner_state import Phase, RoundSettings
from meshwire.rounds.machine import RoundMachine
from meshwire.rounds.rounds_and_learner import JobRounds
from meshwire.samples.grants import SampleGrants
from meshwire.samples.pool import Batch
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.settings_changes import SettingsChange

SPACE = SampleSpace(total=1000, batch=4, whole_batches=False, drop_last=False)


BEGINS = (LearnerDied("it has not loaded yet", None), LearnerLoads(), BaseLoaded(0), LearnerTakenIn())


class Member:
    """Rank 0 of two, with one bucket; rank 1 is what the test says."""

    def __init__(self, staleness: int = 1, sync: str | None = None, *, overlaps: bool = False) -> None:
        sync = "local:2,stream=1,tau=1" if overlaps else sync
        settings_ = sync_settings(sync or (f"ssp:{staleness}" if staleness else "bsp"))
        settings = RoundSettings(
            ranks=(0, 1),
            rank=0,
            buckets=1,
            used_bytes=1,
            integers=0,
            staleness=staleness,
            straggler="wait" if overlaps else "carry",
            rtt_s=0.01,
            overlaps=overlaps,
        )
        self.grants = SampleGrants(SPACE, 0, (0, 1), settings_)
        self.rounds = JobRounds(RoundMachine(settings), self.grants, settings_, "stop")
        (granted,) = [each for each in self.told(*BEGINS) if isinstance(each, Grant)]
        self.batches = list(granted.batches)

    def effects(self, *inputs: JobInput) -> list[JobEffect]:
        return [effect for input_ in inputs for effect in self.rounds.handle(input_, 1.0)]

    def told(self, *inputs: JobInput) -> list[object]:
        return [effect.notice for effect in self.effects(*inputs) if isinstance(effect, TellLearner)]

    def steps(self, number: int) -> list[object]:
        """A whole step of the learner on its next batch; what it is told then."""
        return self.told(*self.backward(number), ended(number))

    def backward(self, number: int) -> list[JobInput]:
        """The backward pass of a step on its next batch."""
        batch = self.batches.pop(0)
        return [
            LearnerBucket(step=number, bucket=0, weight=4.0, samples=batch, claim=9),
            LearnerSealed(step=number, used=b"\x01", integers=()),
        ]

    def whole_round(self, number: int) -> RoundDone:
        """With s=0: both contribute, and the learner waits in its backward pass for what is returned."""
        self.effects(*self.backward(number))
        self.other_decides(number, base=number - 1)
        self.effects(result(number))
        (done,) = self.told(RoundDecoded(number))
        assert isinstance(done, RoundDone)
        return done

    def other_decides(self, round_: int, batch: Batch = (), base: int = 0) -> None:
        bind = Bind(round=round_, step=round_, base=base, weight=4.0, samples=batch, claim=9)
        seal = Seal(round=round_, used=b"\x01", integers=())
        self.effects(MemberMessage(1, bind, behind=True), MemberMessage(1, seal, behind=True))


def ended(step: int) -> LearnerStepped:
    return LearnerStepped(step=step, samples=4, step_s=1.0, exposed_s=0.0)


def result(round_: int) -> ResultReady:
    return ResultReady(round_, 0, contributors=0b11, weight=8.0, poisoned=False, squared_norm=1.0)


@pytest.fixture
def member() -> Member:
    return Member()


def test_the_first_step_starts_with_its_samples() -> None:
    """R1, X2: the result slot is opened for the first round, and then there is nothing to wait for."""
    sync = sync_settings("bsp")
    settings = RoundSettings(
        ranks=(0,), rank=0, buckets=1, used_bytes=1, integers=0, staleness=0, straggler="wait", rtt_s=0.0
    )
    rounds = JobRounds(RoundMachine(settings), SampleGrants(SPACE, 0, (0,), sync), sync, "stop")
    decode, grant, start = [each for input_ in BEGINS for each in rounds.handle(input_, 0.0)]
    assert (decode, start) == (DecodeRound(1), TellLearner(Start(step=1, decided=0)))
    assert isinstance(grant, TellLearner)
    assert isinstance(grant.notice, Grant)


def test_each_of_two_rounds_that_complete_at_once_has_its_own_ledger(member: Member) -> None:
    """X3, J1: whoever goes on from the first of them needs what was dealt then, not what the second one changed."""
    assert member.steps(1) == [Start(step=2, decided=1)]
    assert member.steps(2) == [], "R1: it is s+1 ahead"
    other = [member.grants._ledger.batches(1)[at] for at in range(2)]
    for round_, batch in enumerate(other, 1):
        member.other_decides(round_, batch)
    assert member.effects(result(2)) == []
    effects = member.effects(result(1))
    ends = [effect for effect in effects if isinstance(effect, RoundComplete | RoundCounted)]
    assert [(type(end), end.round) for end in ends] == [
        (RoundComplete, 1),
        (RoundCounted, 1),
        (RoundComplete, 2),
        (RoundCounted, 2),
    ]
    first, second = (end.deal for end in ends if isinstance(end, RoundCounted))
    assert first is not None
    assert second == member.rounds.deal()
    assert {batch for rank, batch in first.held if rank == 1} >= {other[1]}, "the second is covered later"
    assert not {batch for _, batch in first.held} & {other[0]}
    assert not {batch for _, batch in member.rounds.deal().held} & {*other}  # type: ignore[union-attr]


def test_a_round_is_given_when_it_is_decoded_and_forgotten_when_all_hold_it(member: Member) -> None:
    """R1, M1, G5: one result slot; what it holds is given, applied, and then the next one has it."""
    member.steps(1)
    member.other_decides(1)
    assert not any(isinstance(told, RoundDone) for told in member.told(result(1)))
    member.steps(2)
    (done,) = member.told(RoundDecoded(1))
    assert isinstance(done, RoundDone)
    assert (done.round, done.step, done.weight) == (1, 1, 8.0)
    effects = member.effects(LearnerApplied(round=1))
    assert effects == [DecodeRound(2), TellLearner(Start(step=3, decided=2))]
    assert member.effects(CompleteAnnounced(1, 1))[-1] == RoundForgotten(1)


def test_a_learner_is_told_how_many_steps_its_period_has() -> None:
    """C3, R9: with the word to begin it, or with the round that promises it; and it holds batches for them."""
    changes = (SettingsChange(first=3, period=100), SettingsChange(first=4, period=2))
    member = Member(0, sync="local:2")
    member.effects(SettingsChanged(changes))
    assert [member.rounds._local_steps(round_) for round_ in (1, 2, 3, 4, 5)] == [2, 2, 100, 2, 2]
    done = member.whole_round(1)
    assert (done.start, done.local_steps) == (2, 2)
    member.told(LearnerApplied(round=1), ended(1))
    assert member.rounds.machine.local_steps == 2
    done = member.whole_round(2)
    assert (done.start, done.local_steps) == (3, 100)
    member.told(LearnerApplied(round=2), ended(2))
    assert member.rounds.machine.local_steps == 100
    assert len(member.grants._ledger.batches(0)) >= 201, "as if it had claimed for periods of 100"
    member.effects(LearnerIdle(reason="it pauses", finished=False))
    start = next(told for told in member.told(LearnerBack()) if isinstance(told, Start))
    assert (start.step, start.local_steps) == (3, 100)


def test_a_learner_that_died_is_told_nothing(member: Member) -> None:
    """J3, R5: its process cannot hear that its step is lost; and without a base in memory nothing is kept for it."""
    effects = member.effects(LearnerDied("its process has ended", None))
    assert not any(isinstance(effect, TellLearner) for effect in effects)
    assert not member.rounds.keeps_unapplied
    assert member.told(LearnerGone("its script has ended")) == []
    assert member.rounds.finished


def test_a_round_that_was_not_given_cannot_be_applied(member: Member) -> None:
    """R1."""
    assert member.effects(LearnerApplied(round=1)) == [
        LearnerBrokeRules("the learner has applied round 1, which it was not given")
    ]


def test_the_ledger_follows_those_who_compute(member: Member) -> None:
    """X3: what the other held is granted again, and the ledger is told anew, between two rounds."""
    held = member.grants._ledger.batches(1)
    dealt, grant = member.effects(LearningChanged((0,)))
    assert isinstance(dealt, SamplesDealt)
    assert dealt.deal == member.rounds.deal()
    assert isinstance(grant, TellLearner)
    assert isinstance(grant.notice, Grant)
    returned: list[SampleBlock] = [block for batch in held for block in batch]
    assert [block for batch in grant.notice.batches for block in batch][: len(returned)] == returned


def test_with_s0_the_next_step_starts_with_the_round() -> None:
    """R1, R7: the learner is told once a step, and its next one counts from the end of this one on."""
    member = Member(staleness=0)
    for step in (1, 2, 3):
        assert member.whole_round(step).start == step + 1
        assert member.effects(LearnerApplied(round=step)) == [DecodeRound(step + 1)]
        assert member.rounds.machine.phase is Phase.BOUNDARY
        assert member.told(ended(step)) == []
        assert (member.rounds.machine.phase, member.rounds.machine.step) == (Phase.COMPUTING, step + 1)


def test_with_a_bound_no_round_brings_a_promise(member: Member) -> None:
    """R1: with s > 0 a learner is often told to start before its round is there."""
    member.effects(*member.backward(1))
    member.other_decides(1)
    member.effects(result(1))
    (done,) = member.told(RoundDecoded(1))
    assert isinstance(done, RoundDone)
    assert done.start == 0


def test_a_learner_that_parts_is_promised_nothing() -> None:
    """V2: it stays at its boundary. One that was promised its step before ends that first, which is in no round."""
    member = Member(staleness=0)
    assert member.whole_round(1).start == 2
    member.effects(LearnerApplied(round=1), FenceRaised(), LearnerParts("it moves"))
    assert member.told(ended(1)) == []
    assert member.rounds.machine.step == 2
    assert member.told(*member.backward(2)) == [StepLost(step=2, reason="it moves", retry=True)]
    assert member.told(ended(2)) == []
    assert member.rounds.machine.phase is Phase.ABSENT
    other = Member(staleness=0)
    other.effects(*other.backward(1))
    other.other_decides(1)
    other.effects(result(1), LearnerParts("it moves"))
    (done,) = other.told(RoundDecoded(1))
    assert isinstance(done, RoundDone)
    assert done.start == 0


def test_a_round_that_overlaps_is_given_within_the_next_period() -> None:
    """R9: not at the boundary before it, though it is complete and decoded there."""
    member = Member(overlaps=True)
    member.effects(*member.backward(1))
    member.other_decides(1)
    assert not [told for told in member.told(result(1), RoundDecoded(1)) if isinstance(told, RoundDone)]
    start, done = member.told(ended(1))
    assert start == Start(step=2, decided=1, local_steps=2)
    assert isinstance(done, RoundDone)
    assert (done.round, done.step) == (1, 1)
    assert member.effects(LearnerApplied(round=1)) == [DecodeRound(2)]


def test_a_learner_that_parts_waits_for_no_round_within_its_period() -> None:
    """R9, V2: it goes on to its boundary; a round that is never complete would hold it up for ever."""
    member = Member(overlaps=True)
    assert member.steps(1) == [Start(step=2, decided=1, local_steps=2)]
    assert member.told(FenceRaised(), LearnerParts("it moves")) == [StepLost(step=1, reason="it moves", retry=False)]
    assert all(isinstance(told, StepLost) for told in member.steps(2))
    assert member.rounds.machine.phase is Phase.ABSENT


def test_one_that_goes_idle_before_its_step_ends_is_told_anew() -> None:
    """R5: others may go on without it meanwhile, and it applies their rounds before its next step."""
    member = Member(staleness=0)
    assert member.whole_round(1).start == 2
    member.effects(LearnerIdle(reason="no samples", finished=False), LearnerBack(), LearnerApplied(round=1))
    assert member.told(ended(1)) == [Start(step=2, decided=1)]


def test_nothing_overtakes_a_promise() -> None:
    """R1, G3: a round to which this member has not added its part is neither complete nor served, whatever generation
    is entered between its round and the end of its step."""
    member = Member(staleness=0)
    assert member.whole_round(1).start == 2
    bind = Bind(round=2, step=2, base=1, weight=4.0, claim=9)
    later = RoundComplete(
        round=2, void=False, reason="", binds={1: bind}, poisons={}, used=b"\x01", integers=(), squared_norm=1.0
    )
    (refused,) = member.effects(FenceRaised(), RoundServed(later))
    assert isinstance(refused, ProtocolError)
    assert "(G3)" in refused.text
    member.effects(GenerationEntered((0, 1), 1, {0: 1, 1: 1}))
    member.effects(MemberMessage(1, bind, behind=True), LearnerApplied(round=1))
    assert not [effect for effect in member.effects(ended(1)) if isinstance(effect, ProtocolError | TellLearner)]
    assert (member.rounds.machine.phase, member.rounds.machine.step) == (Phase.COMPUTING, 2)


def test_a_counter_that_says_nothing_new_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """G5: it comes with every frame, chunks included. One that says more, or what cannot be, is looked at."""
    member = Member(staleness=0)
    member.whole_round(1)
    heard: list[CompleteAnnounced] = []
    handle = member.rounds.machine.handle

    def counted(input_: CompleteAnnounced, now_s: float) -> list[Effect]:
        heard.append(input_)
        return handle(input_, now_s)

    monkeypatch.setattr(member.rounds.machine, "handle", counted)
    assert member.effects(CompleteAnnounced(1, 0), CompleteAnnounced(1, 0)) == []
    assert heard == []
    assert any(isinstance(effect, Committed) for effect in member.effects(CompleteAnnounced(1, 1)))
    assert member.effects(CompleteAnnounced(1, 1)) == []
    (wrong,) = member.effects(CompleteAnnounced(1, 2))
    assert isinstance(wrong, ProtocolError)
    assert heard == [CompleteAnnounced(1, 1), CompleteAnnounced(1, 2)]
