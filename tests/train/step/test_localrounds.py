"""The reference rounds themselves: what the learner tests rest on."""

from typing import Any

import numpy as np
import pytest

from meshwire.message_base import Wire
from meshwire.messages.learner import (
    BarrierPassed,
    LearnerApplied,
    LearnerBack,
    LearnerBarrier,
    LearnerBucket,
    LearnerIdle,
    LearnerSealed,
    LearnerStepped,
    RoundDone,
    Start,
    StepLost,
)
from meshwire.messages.rounds import Poison
from meshwire.model.manifest import ModelManifest, TensorSpec
from tests.train.localdaemon import make_spec
from tests.train.localrounds import LocalRounds

MANIFEST = ModelManifest(
    tensors=(TensorSpec(name="w", shape=(3,), dtype="float32", kind="parameter"),), optimizer="sgd"
)


class Cluster:
    """Learners of one tensor, whose gradient in step j of rank r is j + r; they apply what they are given at once."""

    def __init__(self, members: int, **spec: Any) -> None:
        self.raw = {rank: np.zeros((2, 16), np.float32) for rank in range(members)}
        self.results = {rank: np.zeros(16, np.float32) for rank in range(members)}
        self.told: list[list[Wire]] = [[] for _ in range(members)]
        self.rounds = LocalRounds(
            make_spec(**spec),
            members,
            lambda rank, body: self.told[rank].append(body),
            lambda rank, step: self.raw[rank][step % 2],
            lambda rank: self.results[rank],
        )
        self.rounds.begin(MANIFEST, None)

    def news(self, rank: int) -> list[Wire]:
        """What the learner was told since the last time."""
        news, self.told[rank] = self.told[rank], []
        return news

    def backward(self, rank: int, step: int, weight: float = 1.0, poison: Poison | None = None) -> None:
        self.raw[rank][step % 2, :3] = (step + rank) * weight  # and zeros behind (C1)
        self.rounds.take(rank, LearnerBucket(step=step, bucket=0, weight=weight, poison=poison))
        self.rounds.take(rank, LearnerSealed(step=step, used=b"\x01", integers=()))

    def boundary(self, rank: int, step: int) -> list[Wire]:
        """The rest of the step, up to the Start of the next one, if that comes; all that was told meanwhile."""
        told = self.apply(rank)
        self.rounds.take(rank, LearnerStepped(step=step, samples=0, step_s=0.0, exposed_s=0.0))
        return told + self.apply(rank)

    def apply(self, rank: int) -> list[Wire]:
        told = []
        while news := self.news(rank):
            told += news
            for body in news:
                if isinstance(body, RoundDone):
                    self.rounds.take(rank, LearnerApplied(round=body.round))
        return told

    def step(self, rank: int, step: int) -> list[Wire]:
        self.backward(rank, step)
        return self.boundary(rank, step)


def brief(told: list[Wire]) -> list[str]:
    """RoundDone as its round and the own step in it, Start as its step and d."""
    names = []
    for body in told:
        match body:
            case RoundDone(round=round_, step=step, void=void):
                names.append(f"{'void' if void else 'round'} {round_} with {step}")
            case Start(step=step, decided=decided):
                names.append(f"start {step} at {decided}")
            case StepLost(step=step, retry=retry):
                names.append(f"lost {step} {retry}")
            case BarrierPassed(number=number):
                names.append(f"passed {number}")
            case _:
                names.append(type(body).__name__)
    return names


def test_lockstep_without_staleness() -> None:
    """R7, O1, O4."""
    cluster = Cluster(2)
    assert [brief(cluster.news(rank)) for rank in (0, 1)] == [["start 1 at 0"]] * 2
    cluster.backward(0, 1, weight=3.0)
    assert not cluster.news(0)
    cluster.backward(1, 1, weight=1.0)
    assert list(cluster.results[0][:3]) == [1.25] * 3
    done = cluster.told[0][0]
    assert isinstance(done, RoundDone)
    assert (done.weight, done.contributors, done.used, done.squared_norm) == (4.0, 3, b"\x01", 3 * 1.25**2)
    assert brief(cluster.boundary(0, 1)) == ["round 1 with 1", "start 2 at 1"]


def test_bound_holds_a_fast_learner_up() -> None:
    """R1: it starts iff d - a <= s; then the rounds are given one by one."""
    cluster = Cluster(2, sync="ssp:2", straggler="wait")
    assert brief(cluster.step(0, 1)) == ["start 1 at 0", "start 2 at 1"]
    assert brief(cluster.step(0, 2)) == ["start 3 at 2"]
    assert brief(cluster.step(0, 3)) == []
    cluster.step(1, 1)
    assert brief(cluster.apply(0)) == ["round 1 with 1", "start 4 at 3"]
    assert cluster.rounds.starts[-1] == (0, 4, 1)


def test_fixed_visibility() -> None:
    """R8: round k is applied exactly before step k+s+1, however early it is complete."""
    cluster = Cluster(1, sync="ssp:1", visibility="fixed")
    assert brief(cluster.step(0, 1)) == ["start 1 at 0", "start 2 at 1"]
    assert brief(cluster.step(0, 2)) == ["round 1 with 1", "start 3 at 2"]
    cluster.rounds.take(0, LearnerIdle(reason="", finished=False))
    assert brief(cluster.apply(0)) == ["round 2 with 2"], "a flush"
    cluster.rounds.take(0, LearnerBack())
    assert brief(cluster.apply(0)) == ["start 3 at 2"]


def test_held_round_comes_late() -> None:
    cluster = Cluster(1, sync="ssp:2")
    cluster.rounds.hold(1)
    for step in (1, 2):
        cluster.step(0, step)
    assert brief(cluster.step(0, 3)) == []
    cluster.rounds.release(1)
    assert brief(cluster.apply(0)) == ["round 1 with 1", "round 2 with 2", "round 3 with 3", "start 4 at 3"]


def test_passed_over_learner_lands_in_a_later_round() -> None:
    """R4."""
    cluster = Cluster(2, sync="ssp:1")
    cluster.rounds.pass_over(1, 1)
    assert brief(cluster.step(0, 1)) == ["start 1 at 0", "round 1 with 1", "start 2 at 1"]
    assert brief(cluster.step(1, 1)) == ["start 1 at 0", "round 1 with 0", "start 2 at 2"]
    assert brief(cluster.step(0, 2)) == ["round 2 with 2", "start 3 at 2"]
    with pytest.raises(AssertionError, match="R4"):
        cluster.rounds.pass_over(1, 3)  # its step 2 stands on base 1


def test_lost_steps() -> None:
    """R5: dropped before it binds. V2: cut off in its round, which is void."""
    cluster = Cluster(1, sync="ssp:1")
    cluster.rounds.lose(0, 1, retry=True)
    cluster.rounds.lose(0, 2, retry=False)
    assert brief(cluster.step(0, 1)) == ["start 1 at 0", "lost 1 True", "start 2 at 0"]
    assert brief(cluster.step(0, 2)) == ["lost 2 False", "void 1 with 2", "start 3 at 1"]


def test_poison_makes_a_round_void() -> None:
    """V1, O6: an overflow never stops."""
    cluster = Cluster(2)
    cluster.backward(0, 1)
    cluster.backward(1, 1, poison=Poison(bucket=0, parameter="w", reason="NaN"))
    done = cluster.told[0][-1]
    assert isinstance(done, RoundDone)
    assert (done.void, done.stop, done.overflow, done.reason) == (True, True, False, "rank 1: w: NaN")
    cluster.boundary(0, 1)
    cluster.boundary(1, 1)
    cluster.backward(0, 2)
    cluster.backward(1, 2, poison=Poison(bucket=0, parameter="w", reason="inf", overflow=True))
    done = cluster.told[0][-1]
    assert isinstance(done, RoundDone)
    assert (done.void, done.stop, done.overflow) == (True, False, True)


def test_idle_learner_is_passed_over() -> None:
    """R5: a bind is its call."""
    cluster = Cluster(2, sync="ssp:1", straggler="wait")
    cluster.rounds.take(1, LearnerIdle(reason="", finished=False))
    cluster.step(0, 1)
    cluster.step(0, 2)
    assert brief(cluster.apply(1)) == ["start 1 at 0", "round 1 with 0", "round 2 with 0"]
    cluster.rounds.take(1, LearnerBack())
    assert brief(cluster.step(1, 1)) == ["start 1 at 2", "start 2 at 3"]
    cluster.rounds.take(1, LearnerIdle(reason="", finished=True))
    assert brief(cluster.step(0, 3)) == ["round 3 with 3", "start 4 at 3"]


def test_barrier_is_a_flush() -> None:
    """All rounds are applied when it is passed, and the step that had not begun starts after it."""
    cluster = Cluster(2, sync="ssp:2", straggler="wait")
    cluster.step(0, 1)
    cluster.step(0, 2)
    cluster.rounds.take(0, LearnerBarrier(number=1))
    cluster.step(1, 1)
    assert brief(cluster.apply(0)) == ["round 1 with 1"]
    cluster.rounds.take(1, LearnerBarrier(number=1))
    assert brief(cluster.apply(0)) == ["round 2 with 2"]
    told = brief(cluster.apply(1))
    assert told == ["round 2 with 0", "passed 1", "start 2 at 2"]
    assert brief(cluster.apply(0)) == ["passed 1", "start 3 at 2"]


def test_disorder_is_told() -> None:
    bucket = LearnerBucket(step=1, bucket=0, weight=1.0)
    sealed = LearnerSealed(step=1, used=b"\x01", integers=())
    cluster = Cluster(1)
    for body, text in (
        (sealed, "seal of step 1"),
        (LearnerApplied(round=1), "was not given"),
        (LearnerBack(), "is back"),
        (LearnerBucket(step=2, bucket=0, weight=1.0), "bucket of step 2"),
        (LearnerStepped(step=1, samples=0, step_s=0.0, exposed_s=0.0), "has stepped"),
    ):
        with pytest.raises(AssertionError, match=text):
            cluster.rounds.take(0, body)
    cluster.rounds.take(0, bucket)
    with pytest.raises(AssertionError, match="not in order"):
        cluster.rounds.take(0, bucket)
    cluster = Cluster(1)
    cluster.backward(0, 1)
    with pytest.raises(AssertionError, match="O1"):
        cluster.rounds.take(0, LearnerStepped(step=1, samples=0, step_s=0.0, exposed_s=0.0))
