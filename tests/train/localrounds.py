"""The rounds of all members of a job at once, as plainly as the rules can be said: no time, no network, numpy means.

A test scripts what a network or a slow machine would do: see `hold`, `lose`, `pass_over` and `resize`. What a learner
does against the protocol is an AssertionError that names it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from meshwire.codecs.registry import parse_codec
from meshwire.message_base import Wire
from meshwire.messages.job import JobSpec
from meshwire.messages.learner import (
    BarrierPassed,
    EpochOver,
    Grant,
    LearnerApplied,
    LearnerBack,
    LearnerBarrier,
    LearnerBucket,
    LearnerIdle,
    LearnerSealed,
    LearnerStepped,
    RoundDone,
    SampleSpace,
    Start,
    StepLost,
)
from meshwire.messages.rounds import Bind, Poison
from meshwire.model.manifest import ModelManifest
from meshwire.model.plan import plan_buckets
from meshwire.model.plans_by_round import RoundPlans
from meshwire.samples.ledger import Ledger
from meshwire.sync_modes.settings_changes import SettingsChanges, local_steps

Values = NDArray[np.float32]


class Phase(Enum):
    """Where a learner is."""

    BOUNDARY = "at a boundary"
    COMPUTING = "computing, no bucket ready"
    BOUND = "in its backward pass"
    SEALED = "between backward() and the boundary"
    ABSENT = "absent"


@dataclass
class LocalLearner:
    """What the daemon knows of one learner (R0)."""

    rank: int
    phase: Phase = Phase.BOUNDARY
    step: int = 0
    base: int = 0
    applied: int = 0
    decided: int = 0
    aim: int = 0  # the round that its step is for, or was until it was lost
    pending: int | None = None  # the step that waits for its Start
    given: int = 0  # the newest round that was put into the result slot
    promised: int = 0  # the step that begins when its round is applied, without a Start; 0: none
    lost: bool = False  # what still comes of this step is ignored
    sealed: bool = False  # when it became absent
    buckets: list[LearnerBucket] = field(default_factory=list)  # of this step
    barrier: int | None = None
    barriers: int = 0
    finished: bool = False


@dataclass
class LocalRound:
    """One round. `means` and `done` (as its contributors get it, but for `step`) once it is complete."""

    binds: dict[int, LearnerBucket] = field(default_factory=dict)  # the first bucket of each
    steps: dict[int, int] = field(default_factory=dict)
    bases: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sums: dict[int, Values] = field(default_factory=dict)  # w*g
    sent: dict[int, int] = field(default_factory=dict)  # values
    poisons: dict[int, Poison] = field(default_factory=dict)
    seals: dict[int, LearnerSealed | None] = field(default_factory=dict)  # None: cut off before its end (V2)
    nulls: set[int] = field(default_factory=set)
    means: Values | None = None
    done: RoundDone | None = None


class LocalRounds:
    """Every input is followed by all that it makes possible, told through `notify`.

    Args:
        notify: sends a learner a notice.
        raw: the raw slot of a rank's step, in values.
        result: the result slot of a rank.
        promises: with s=0 a round says that the next step starts behind it.

    Attributes:
        complete: the newest complete round.
        rounds: all rounds, by number.
        starts: (rank, step, rounds applied then) of every Start, in order: the bases of all steps (R0).
    """

    def __init__(
        self,
        spec: JobSpec,
        members: int,
        notify: Callable[[int, Wire], None],
        raw: Callable[[int, int], Values],
        result: Callable[[int], Values],
        *,
        promises: bool = False,
    ) -> None:
        self._spec = spec
        self.changes: SettingsChanges = ()
        self._promises = promises and spec.sync.staleness == 0
        self._staleness = spec.sync.staleness
        self._notify = notify
        self._raw = raw
        self._result = result
        self._manifest: ModelManifest | None = None
        self._ledger: Ledger | None = None
        self._epoch = 0  # the oldest that is not over
        self._begun = False
        self._held: set[int] = set()
        self._losses: dict[tuple[int, int], bool] = {}
        self._passes: set[tuple[int, int]] = set()
        self._sizes: tuple[int, ...] = ()
        self.learners = [LocalLearner(rank) for rank in range(members)]
        self.rounds: dict[int, LocalRound] = {}
        self.complete = 0
        self.starts: list[tuple[int, int, int]] = []

    def begin(self, manifest: ModelManifest, samples: SampleSpace | None) -> None:
        """All members are ready."""
        self._manifest = manifest
        self._plans = RoundPlans(plan_buckets(manifest, self._spec.bucket_bytes, parse_codec(self._spec.codec)))
        self._begun = True
        if samples is not None:
            self._ledger = Ledger(samples, range(len(self.learners)), self._spec.sync)
            for learner in self.learners:
                self._notify(learner.rank, Grant(batches=self._ledger.batches(learner.rank)))
        for learner in self.learners:
            learner.pending = 1
        self._settle()

    # What a test scripts

    def hold(self, round_: int) -> None:
        """The results of `round_` come late: at `release`."""
        self._held.add(round_)

    def release(self, round_: int) -> None:
        """The results of `round_` come now."""
        self._held.remove(round_)
        self._settle()

    def lose(self, rank: int, step: int, *, retry: bool) -> None:
        """The rank's `step` gets lost: dropped before it binds (R5, retry), or cut off in its round (V2)."""
        self._losses[rank, step] = retry

    def pass_over(self, rank: int, round_: int) -> None:
        """The rank is late for `round_` and nulls it (R4): its step that computes then lands in a later round."""
        self._passes.add((rank, round_))
        self._settle()

    def resize(self, sizes: tuple[int, ...]) -> None:
        """Rank 0 sets these batch sizes with its next bind (X4a)."""
        self._sizes = sizes

    # What learners tell

    def take(self, rank: int, body: Wire) -> None:
        """One notice of a learner."""
        learner = self.learners[rank]
        assert self._begun or isinstance(body, LearnerBarrier | LearnerIdle), f"rank {rank} is not ready: {body}"
        assert not learner.finished, f"rank {rank} has finished: {body}"
        match body:
            case LearnerBucket():
                self._bucket(learner, body)
            case LearnerSealed():
                self._sealed(learner, body)
            case LearnerApplied(round=round_):
                self._applied(learner, round_)
            case LearnerStepped(step=step):
                at = f"rank {rank} has stepped step {step}, and is {learner.phase.value} of step {learner.step}"
                assert (learner.phase, learner.step) == (Phase.SEALED, step), at
                own = max((n for n, round_ in self.rounds.items() if round_.steps.get(rank) == step), default=0)
                assert self._staleness or learner.applied >= own, f"O1: before its round was applied: {at}"
                learner.phase, learner.pending = Phase.BOUNDARY, step + 1
                if learner.promised == step + 1:
                    assert learner.applied == learner.decided, f"R1: a promise holds whatever comes between: {at}"
                    self._begin_step(learner)
            case LearnerIdle(reason=reason, finished=finished):
                learner.finished = finished
                self._absent(learner, reason)
            case LearnerBack():
                assert learner.phase is Phase.ABSENT, f"rank {rank} is back, but was {learner.phase.value}"
                assert learner.barrier is None, f"rank {rank} is back, but in barrier {learner.barrier}"
                learner.phase = Phase.SEALED if learner.sealed else Phase.BOUNDARY
            case LearnerBarrier(number=number):
                self._enter_barrier(learner, number)
        self._settle()

    def _bucket(self, learner: LocalLearner, body: LearnerBucket) -> None:
        who = f"rank {learner.rank}, which is {learner.phase.value} of step {learner.step}"
        assert learner.phase in (Phase.COMPUTING, Phase.BOUND), f"bucket of step {body.step} from {who}"
        assert body.step == learner.step, f"bucket of step {body.step} from {who}"
        if learner.phase is Phase.COMPUTING:
            learner.aim = learner.decided + 1
        plan = self._plans.of(learner.aim)
        buckets = plan.buckets
        assert body.bucket == len(learner.buckets) < len(buckets), f"not in order: {body.bucket} of {who}"
        learner.buckets.append(body)
        for name in ("weight", "samples", "hyperparameters", "claim"):
            assert getattr(body, name) == getattr(learner.buckets[0], name), f"R2: one {name} a step: {who}"
        if learner.phase is Phase.COMPUTING:
            self._bind(learner)
        if learner.lost:
            return
        round_ = self.rounds[learner.decided]
        if body.poison is not None:
            round_.poisons.setdefault(learner.rank, body.poison)
        bucket = buckets[body.bucket]
        round_.sent[learner.rank] = round_.sent.get(learner.rank, 0) + bucket.count
        span = slice(bucket.start, bucket.start + bucket.count)
        values = self._raw(learner.rank, learner.step)[span]
        padding = np.ones(bucket.count, bool)
        for place in (plan.spans[index] for index in bucket.spans):
            padding[place.start - bucket.start : place.start - bucket.start + place.count] = False
        assert not values[padding].any(), f"C1: padding is zero in every contribution: bucket {body.bucket} of {who}"
        round_.sums[learner.rank][span] = values

    def _bind(self, learner: LocalLearner) -> None:
        """R2."""
        rank, step = learner.rank, learner.step
        learner.phase = Phase.BOUND
        retry = self._losses.pop((rank, step), None)
        learner.lost = retry is not None
        if retry:
            self._notify(rank, StepLost(step=step, reason="too late for every round", retry=True))
            return
        learner.decided += 1
        age = learner.decided - 1 - learner.base
        assert age <= self._staleness, f"R0: step {step} of rank {rank} would be of age {age}"
        round_ = self.rounds.setdefault(learner.decided, LocalRound())
        round_.binds[rank], round_.steps[rank], round_.bases[rank] = learner.buckets[0], step, learner.base
        round_.sums[rank] = np.zeros(self._plans.whole.total_values, np.float32)
        if rank == 0:
            round_.sizes[rank], self._sizes = self._sizes, ()
        if learner.lost:
            self._cut_off(learner, "it passed its deadline")
            self._notify(rank, StepLost(step=step, reason="it passed its deadline", retry=False))

    def _cut_off(self, learner: LocalLearner, reason: str) -> None:
        """V2: the round of a bound step is void."""
        round_ = self.rounds[learner.decided]
        round_.poisons.setdefault(learner.rank, Poison(bucket=0, parameter="", reason=reason))
        round_.seals[learner.rank] = None

    def _sealed(self, learner: LocalLearner, body: LearnerSealed) -> None:
        who = f"rank {learner.rank}, which is {learner.phase.value} of step {learner.step}"
        assert (learner.phase, learner.step) == (Phase.BOUND, body.step), f"seal of step {body.step} from {who}"
        buckets = self._plans.of(learner.aim).buckets
        assert len(learner.buckets) == len(buckets), f"seal after {len(learner.buckets)} buckets from {who}"
        assert self._manifest is not None
        assert len(body.used) == math.ceil(len(self._manifest.tensors) / 8)
        assert len(body.integers) == self._manifest.integer_values
        learner.phase = Phase.SEALED
        if not learner.lost:
            self.rounds[learner.decided].seals[learner.rank] = body

    def _applied(self, learner: LocalLearner, round_: int) -> None:
        who = f"rank {learner.rank}, which is {learner.phase.value} of step {learner.step}"
        assert round_ == learner.given == learner.applied + 1, f"R1: round {round_} was not given to {who}"
        phases = (Phase.SEALED, Phase.BOUNDARY, Phase.ABSENT, *((Phase.COMPUTING,) if self._spec.sync.overlaps else ()))
        assert learner.phase in phases, f"R1: round {round_} applied by {who}"
        learner.applied = round_

    def _absent(self, learner: LocalLearner, reason: str) -> None:
        """R5. A step that has begun and not bound begins again later; one in its backward pass is cut off (V2).

        One whose backward pass has ended goes on to its boundary when the learner is back from fetching samples.
        """
        learner.sealed = learner.phase is Phase.SEALED
        learner.promised = 0
        in_barrier = learner.sealed and learner.barrier is not None
        assert not in_barrier, f"rank {learner.rank} left before the boundary of its step {learner.step}: {reason}"
        if learner.phase is Phase.BOUND and not learner.lost:
            self._cut_off(learner, reason)
        if learner.phase is Phase.COMPUTING:
            learner.pending = learner.step
        learner.phase = Phase.ABSENT

    def _enter_barrier(self, learner: LocalLearner, number: int) -> None:
        who = f"rank {learner.rank}, which is {learner.phase.value} of step {learner.step}"
        assert learner.barrier is None, f"barrier {number} by {who} inside barrier {learner.barrier}"
        assert number in (0, learner.barriers + 1), f"barrier {number} after {learner.barriers} by {who}"
        learner.barrier = number
        learner.barriers = number or learner.barriers
        if self._begun and self._staleness:
            self._absent(learner, f"barrier {number}")

    # What follows

    def _settle(self) -> None:
        while (
            any(self._null(learner) for learner in self.learners)
            or self._complete_next()
            or self._tell_epoch_over()
            or self._pass_barrier()
            or any(self._advance(learner) for learner in self.learners)
        ):
            pass

    def _null(self, learner: LocalLearner) -> bool:
        following = learner.decided + 1
        if learner.barrier is not None and learner.phase is not Phase.ABSENT and following <= self._newest():
            self._absent(learner, "others have more steps to go to their barrier")
        if learner.phase is Phase.ABSENT:
            if following > self._newest():
                return False  # a bind is the call for absent members
        elif (learner.rank, following) not in self._passes or learner.phase is not Phase.COMPUTING:
            return False
        else:
            reach = learner.base + self._staleness
            assert following <= reach, f"R4: rank {learner.rank} can null up to {reach}, not {following}"
        self.rounds.setdefault(following, LocalRound()).nulls.add(learner.rank)
        learner.decided = following
        return True

    def _newest(self) -> int:
        """The newest round that anybody has bound."""
        return max((number for number, round_ in self.rounds.items() if round_.binds), default=0)

    def _complete_next(self) -> bool:
        number = self.complete + 1
        round_ = self.rounds.get(number)
        if round_ is None or number in self._held or len(round_.seals) + len(round_.nulls) < len(self.learners):
            return False
        self.complete = number
        round_.means = self._means(number, round_)
        round_.done = self._verdict(number, round_)
        if self._ledger is not None:
            granted = self._ledger.complete({rank: _bind(number, round_, rank) for rank in round_.binds})
            assert not isinstance(granted, str), f"round {number}: {granted}"
            for rank, batches in granted.items():
                self._notify(rank, Grant(batches=batches, step=round_.steps[rank]))
        return True

    def _means(self, number: int, round_: LocalRound) -> Values:
        """O1: sum(w*g) / sum(w), in fp32 and in rank order. NaN where nothing travels (T1)."""
        total = np.full(self._plans.whole.total_values, np.nan, np.float32)
        for bucket in self._plans.of(number).buckets:
            total[bucket.start : bucket.start + bucket.count] = 0
        for _, values in sorted(round_.sums.items()):
            total += values
        return total / np.float32(_weight(round_) or 1.0)

    def _verdict(self, number: int, round_: LocalRound) -> RoundDone:
        poisons = sorted(round_.poisons.items())
        told = [f"rank {rank}: {p.parameter}: {p.reason}" for rank, p in poisons]
        void = bool(poisons) or not round_.binds
        wrong = any(poison.parameter and not poison.overflow for _, poison in poisons)
        seals = [seal for seal in round_.seals.values() if seal is not None]
        used = 0
        for seal in seals:
            used |= int.from_bytes(seal.used)
        leader = max(round_.binds, key=lambda rank: (round_.steps[rank], -rank), default=None)
        return RoundDone(
            round=number,
            step=0,
            void=void,
            reason="; ".join(told) if round_.binds else "no member contributed",
            overflow=bool(poisons) and all(poison.overflow for _, poison in poisons),
            stop=wrong and self._spec.on_nan == "stop",
            weight=_weight(round_),
            contributors=sum(1 << rank for rank in round_.binds),
            used=used.to_bytes(len(seals[0].used) if seals else 0),
            integers=tuple(max(values) for values in zip(*(seal.integers for seal in seals), strict=True)),
            hyperparameters=b"" if leader is None else round_.binds[leader].hyperparameters,
            squared_norm=0.0 if void else self._squared_norm(number, round_),
        )

    def _squared_norm(self, number: int, round_: LocalRound) -> float:
        """O4: of the parameters' means, in double precision."""
        assert round_.means is not None
        assert self._manifest is not None
        kinds = [spec.kind for spec in self._manifest.tensors]
        means = round_.means.astype(np.float64)
        spans = [span for span in self._plans.of(number).spans if kinds[span.tensor] == "parameter"]
        return math.fsum(float(np.square(means[span.start : span.start + span.count]).sum()) for span in spans)

    def _tell_epoch_over(self) -> bool:
        """X4."""
        if self._ledger is None:
            return False
        away = {learner.rank for learner in self.learners if learner.finished or learner.barrier is not None}
        unused = self._ledger.over(self._epoch, away)
        if unused is None:
            return False
        for learner in self.learners:
            self._notify(learner.rank, EpochOver(epoch=self._epoch, unused=unused))
        self._epoch += 1
        return True

    def _pass_barrier(self) -> bool:
        """A flush, that all leave at one moment, with all rounds applied: who binds first finds nobody absent."""
        number = max((learner.barrier for learner in self.learners if learner.barrier is not None), default=None)
        if number is None:
            return False
        inside = [learner for learner in self.learners if learner.barrier == number]
        gone = [learner.rank for learner in self.learners if learner.finished or (number and learner.barrier == 0)]
        if number and gone:
            return self._leave_barrier(inside, f"barrier {number}: ranks {gone} have finished without it")
        if len(inside) + len(gone) < len(self.learners):
            return False
        if any(learner.applied < self._newest() for learner in inside):
            return False
        return self._leave_barrier(inside, None)

    def _leave_barrier(self, inside: Iterable[LocalLearner], error: str | None) -> bool:
        for learner in inside:
            assert learner.barrier is not None
            self._notify(learner.rank, BarrierPassed(number=learner.barrier, error=error))
            learner.barrier = None
            if learner.phase is Phase.ABSENT:
                learner.phase = Phase.BOUNDARY
        return True

    def visible(self, learner: LocalLearner) -> int:
        """The newest round that this learner may apply now (R8, R9)."""
        sync = self._spec.sync
        later = sync.visibility == "fixed" or (sync.overlaps and learner.phase is not Phase.COMPUTING)
        if not later or learner.phase is Phase.ABSENT:
            return self.complete
        return min(self.complete, max(learner.decided - self._staleness, 0))

    def _advance(self, learner: LocalLearner) -> bool:
        """The next round to apply, or the word to start (R1)."""
        if learner.finished or not self._begun or learner.given > learner.applied:
            return False
        following = learner.applied + 1
        if following <= self.visible(learner):
            round_ = self.rounds[following]
            assert round_.means is not None
            assert round_.done is not None
            self._result(learner.rank)[:] = np.nan if round_.done.void else round_.means
            learner.given = following
            own = round_.steps.get(learner.rank, 0)
            newest = own == learner.step and learner.phase is Phase.SEALED and learner.decided == following
            learner.promised = own + 1 if self._promises and own and newest else 0
            steps = local_steps(self._spec.sync, self.changes, following + 1)
            told = {"step": own, "start": learner.promised, "local_steps": steps}
            self._notify(learner.rank, round_.done.model_copy(update=told))
            return True
        ahead = learner.decided - learner.applied
        may_start = learner.phase is Phase.BOUNDARY and learner.barrier is None and ahead <= self._staleness
        if learner.pending is None or not may_start:
            return False
        self._begin_step(learner)
        steps = local_steps(self._spec.sync, self.changes, learner.applied + 1)
        self._notify(learner.rank, Start(step=learner.step, decided=learner.decided, local_steps=steps))
        return True

    def _begin_step(self, learner: LocalLearner) -> None:
        assert learner.pending is not None
        learner.phase, learner.step, learner.base = Phase.COMPUTING, learner.pending, learner.applied
        learner.pending, learner.promised, learner.buckets, learner.lost = None, 0, [], False
        self.starts.append((learner.rank, learner.step, learner.base))


def _weight(round_: LocalRound) -> float:
    return sum(round_.binds[rank].weight for rank in sorted(round_.binds))


def _bind(number: int, round_: LocalRound, rank: int) -> Bind:
    bucket = round_.binds[rank]
    return Bind(
        round=number,
        step=round_.steps[rank],
        base=round_.bases[rank],
        weight=bucket.weight,
        samples=bucket.samples,
        hyperparameters=bucket.hyperparameters,
        claim=bucket.claim,
        sizes=round_.sizes.get(rank, ()),
    )
