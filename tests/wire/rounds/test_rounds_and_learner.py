"""What one daemon decides in a job's rounds, by hand: what the learner is told, and what follows for its samples."""

import pytest

from meshwire.messages.learner import (
    Grant,
    LearnerApplied,
    LearnerBucket,
    LearnerSealed,
    LearnerStepped,
    RoundDone,
    SampleSpace,
    Start,
)
from meshwire.messages.rounds import Bind, SampleBlock, Seal
from meshwire.rounds.effects import (
    DecodeRound,
    JobEffect,
    LearnerBrokeRules,
    RoundComplete,
    RoundCounted,
    RoundForgotten,
    SamplesDealt,
    TellLearner,
)
from meshwire.rounds.inputs import (
    CompleteAnnounced,
    JobInput,
    LearnerBegins,
    LearnerDied,
    LearnerGone,
    LearningChanged,
    MemberMessage,
    ResultReady,
    RoundDecoded,
)
from meshwire.rounds.learner import RoundSettings
from meshwire.rounds.machine import RoundMachine
from meshwire.rounds.rounds_and_learner import JobRounds
from meshwire.samples.grants import SampleGrants
from meshwire.samples.pool import Batch
from meshwire.sync_modes.mode import sync_settings

SPACE = SampleSpace(total=1000, batch=4, whole_batches=False, drop_last=False)


class Member:
    """Rank 0 of two, with s=1 and one bucket; rank 1 is what the test says."""

    def __init__(self) -> None:
        sync = sync_settings("ssp:1")
        settings = RoundSettings(
            ranks=(0, 1),
            rank=0,
            buckets=1,
            used_bytes=1,
            integers=0,
            staleness=1,
            straggler="carry",
            rtt_s=0.01,
        )
        self.grants = SampleGrants(SPACE, 0, (0, 1), sync)
        self.rounds = JobRounds(RoundMachine(settings), self.grants, sync, "stop")
        (granted,) = [each for each in self.told(LearnerBegins()) if isinstance(each, Grant)]
        self.batches = list(granted.batches)

    def effects(self, *inputs: JobInput) -> list[JobEffect]:
        return [effect for input_ in inputs for effect in self.rounds.handle(input_, 1.0)]

    def told(self, *inputs: JobInput) -> list[object]:
        return [effect.notice for effect in self.effects(*inputs) if isinstance(effect, TellLearner)]

    def steps(self, number: int) -> list[object]:
        """A whole step of the learner on its next batch; what it is told then."""
        batch = self.batches.pop(0)
        return self.told(
            LearnerBucket(step=number, bucket=0, weight=4.0, samples=batch, claim=9),
            LearnerSealed(step=number, used=b"\x01", integers=()),
            LearnerStepped(step=number, samples=4, step_s=1.0, exposed_s=0.0),
        )

    def other_decides(self, round_: int, batch: Batch = (), base: int = 0) -> None:
        bind = Bind(round=round_, step=round_, base=base, weight=4.0, samples=batch, claim=9)
        seal = Seal(round=round_, used=b"\x01", integers=())
        self.effects(MemberMessage(1, bind, behind=True), MemberMessage(1, seal, behind=True))


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
    decode, start, grant = rounds.handle(LearnerBegins(), 0.0)
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
