"""A cluster of round machines in virtual time: links, exchanges, learners and their mishaps, all from one seed.

Every rule that can be seen in one event is checked at that event; `run` checks the rest when nothing more can happen.
"""

import hashlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal, Self

from meshwire.messages.rounds import Bind, Call, Null, Poison
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
    StartStep,
    StepSealed,
    TimeReached,
)
from meshwire.rounds.learner_state import Phase, RoundSettings
from meshwire.rounds.machine import RoundMachine
from meshwire.sync_modes.mode import Straggler, Visibility

EVENTS_MAX = 400_000  # of one run: more is a livelock
VIRTUAL_S_MAX = 10_000.0


@dataclass(frozen=True)
class Mishap:
    """Something that befalls the learner of `rank` in its step `step`, counted from 1."""

    rank: int
    step: int
    kind: Literal["idle", "die", "leave", "hang", "poison", "overflow"]
    """idle: absent before the step. die: in front of bucket `bucket`, and started anew. hang: stopped there. leave:
    absent there; a step that was not bound begins again. poison, overflow: of that bucket."""
    bucket: int = 0
    for_s: float = 0.0


@dataclass(frozen=True)
class Timing:
    """Seconds of virtual time."""

    step_s: tuple[float, ...]
    """By rank."""
    jitter: float
    """A step takes step_s * (1 +- jitter)."""
    delay_s: tuple[float, float] = (0.0, 0.05)
    """Range of one message's way."""
    exchange_s: tuple[float, float] = (0.0, 0.3)
    """Range between the last member's part in a bucket and its result, on each member anew."""


class Learner:
    """What the cluster knows of one learner; `life` marks events of a former process, which are void."""

    def __init__(self) -> None:
        self.steps_begun = 0
        self.steps_ended = 0
        self.life = 0
        self.alive = True
        self.local_step_s = math.inf  # of a period that can end early: until the next of its local steps is over
        self.base = b""
        self.ready_to_apply: list[RoundComplete] = []
        self.finished_s = 0.0
        self.waits_since_s: float | None = None  # at a boundary, refused by R1
        self.flushed = 0  # rounds applied when it was last absent
        self.barrier: int | None = None  # the step in front of which it waits for all others
        self.entered: dict[int, dict[int, int]] = {}  # by barrier, rank: the last round decided there


class Cluster:
    """`members` daemons and learners. Build, `run`, then read the records."""

    def __init__(
        self,
        seed: int,
        *,
        members: int,
        staleness: int,
        steps: int,
        timing: Timing,
        straggler: Straggler = "carry",
        visibility: Visibility = "eager",
        unapplied_max: int = 1 << 30,
        buckets: int = 3,
        mishaps: tuple[Mishap, ...] = (),
        barriers: tuple[int, ...] = (),
        periods: bool = False,
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.members, self.staleness, self.steps, self.buckets = members, staleness, steps, buckets
        self.timing = timing
        self.mishaps = {(mishap.rank, mishap.step, mishap.kind): mishap for mishap in mishaps}
        self.barriers = barriers  # steps in front of which all learners wait for each other, and apply all rounds
        self.now_s = 0.0
        self._may_start = frozenset(range(members))  # ranks whose learners may begin a step
        self.learners = [Learner() for _ in range(members)]
        self.machines = [
            RoundMachine(
                RoundSettings(
                    ranks=tuple(range(members)),
                    rank=rank,
                    buckets=buckets,
                    used_bytes=1,
                    integers=1,
                    staleness=staleness,
                    straggler=straggler,
                    rtt_s=2 * timing.delay_s[1],
                    visibility=visibility,
                    unapplied_max=unapplied_max,
                    ends_early=periods,
                )
            )
            for rank in range(members)
        ]
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._exchanges: dict[tuple[int, int, int], dict[int, Effect]] = {}  # by generation, round, bucket
        self._armed_s: list[float | None] = [None] * members
        self._in_flight = 0  # messages and results on their way
        self.live = set(range(members))
        self.generations = [1] * members  # by rank: the one it is in
        self.unbound_max = 0  # rounds up to here were decided in a former generation, maybe by members that are lost
        # Records.
        self.binds: dict[int, dict[int, Bind]] = {}  # by round, rank
        self.first_weights: dict[tuple[int, int], float] = {}  # by rank, step: as given with the first bucket
        self.completions: dict[int, RoundComplete] = {}
        self.bases: dict[int, bytes] = {}
        self.nulls: list[tuple[int, int, Phase]] = []  # rank, round, phase
        self.calls = 0
        self.called: list[set[tuple[int, int]]] = [set() for _ in range(members)]  # by rank: (life, step) to end early
        self.cut_offs: list[tuple[int, LearnerCutOff]] = []
        self.dropped: list[tuple[int, StepDropped]] = []
        self.gone: set[int] = set()  # ranks that have finished
        self.poisoned_rounds: set[int] = set()
        self.unapplied_most = 0
        self.step_bases: list[list[tuple[int, int]]] = [[] for _ in range(members)]  # by rank: step, base
        self.waits_s: list[list[float]] = [[] for _ in range(members)]  # by rank: how long R1 refused each start
        self.errors: list[ProtocolError] = []

    # Running.

    def run(self) -> Self:
        """Until nothing more can happen. Asserts every rule on the way."""
        for rank in sorted(self.live):
            self._at_boundary(rank)
        events = 0
        while self._queue:
            self.now_s, _, event = heapq.heappop(self._queue)
            event()
            events += 1
            assert events < EVENTS_MAX, "livelock"
            assert self.now_s < VIRTUAL_S_MAX, f"no progress: {[machine.waiting() for machine in self.machines]}"
        self._check_end()
        return self

    def _at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), event))

    def _perform(self, rank: int, effects: list[Effect]) -> None:
        machine = self.machines[rank]
        for effect in effects:
            match effect:
                case Broadcast():
                    self._broadcast(rank, effect)
                case Contribute() | ContributePoison():
                    self._join_exchange(rank, effect.round, effect.bucket, effect)
                case ContributeNothing():
                    for bucket in range(self.buckets):
                        self._join_exchange(rank, effect.round, bucket, effect)
                case RoundComplete():
                    self._completed(rank, effect)
                case Committed():
                    self._committed(rank, effect.round)
                case LearnerCutOff():
                    self.cut_offs.append((rank, effect))
                case StepDropped():
                    self.dropped.append((rank, effect))
                    overdue = any(other == rank and cut_off.round is None for other, cut_off in self.cut_offs)
                    assert machine.phase is Phase.ABSENT or overdue, "R4: a null never makes a gradient too old"
                case PeriodCalled(step):
                    key = self.learners[rank].life, self.learners[rank].steps_begun
                    assert key not in self.called[rank], "R9: once is enough"
                    assert (key[1], machine.phase) == (step, Phase.COMPUTING)
                    self.called[rank].add(key)
                    self._at(0.0, partial(self._end_early, rank, key))
                case ProtocolError():
                    self.errors.append(effect)
        may_start, _ = machine.may_start()
        if may_start and rank not in self._may_start:
            self._at(0.0, partial(self._at_boundary, rank))
        self._may_start = self._may_start | {rank} if may_start else self._may_start - {rank}
        assert not self.errors, self.errors
        self._check(rank)
        self._arm(rank)

    def _arm(self, rank: int) -> None:
        deadline_s = self.machines[rank].deadline()
        if deadline_s is not None and deadline_s != self._armed_s[rank]:
            self._at(max(0.0, deadline_s - self.now_s), partial(self._timer, rank, deadline_s))
        self._armed_s[rank] = deadline_s

    def _timer(self, rank: int, deadline_s: float) -> None:
        if self._armed_s[rank] == deadline_s:
            self._armed_s[rank] = None
            self._perform(rank, self.machines[rank].handle(TimeReached(), max(self.now_s, deadline_s)))

    # Network.

    def _others(self, rank: int) -> list[int]:
        return [other for other in self.machines[rank].settings.ranks if other != rank]

    def _broadcast(self, rank: int, sent: Broadcast) -> None:
        self._record(rank, sent)
        for other in self._others(rank):
            self._send(rank, other, partial(self._receive, other, rank, sent))

    def _announce(self, rank: int) -> None:
        for other in self._others(rank):
            self._send(rank, other, partial(self._receive_complete, other, rank, self.machines[rank].complete))

    def _send(self, sender: int, receiver: int, event: Callable[[], None]) -> None:
        """Links keep the order."""
        arrival_s = max(
            self.now_s + self.random.uniform(*self.timing.delay_s), self._link_free_s.get((sender, receiver), 0.0)
        )
        self._link_free_s[sender, receiver] = arrival_s
        self._deliver(sender, receiver, arrival_s - self.now_s, event)

    def _deliver(self, sender: int, receiver: int, delay_s: float, event: Callable[[], None]) -> None:
        self._at(delay_s, partial(self._arrive, sender, receiver, self.generations[sender], event))
        self._in_flight += 1

    def _arrive(self, sender: int, receiver: int, generation: int, event: Callable[[], None]) -> None:
        self._in_flight -= 1
        if self._hears(sender, receiver, generation):
            event()

    def _hears(self, sender: int, receiver: int, generation: int) -> bool:
        return True

    def _receive(self, rank: int, sender: int, sent: Broadcast) -> None:
        self._perform(rank, self.machines[rank].handle(MessageReceived(sender, sent.message), self.now_s))

    def _receive_complete(self, rank: int, sender: int, complete: int) -> None:
        self._perform(rank, self.machines[rank].handle(CompleteAnnounced(sender, complete), self.now_s))

    def _join_exchange(self, rank: int, round_: int, bucket: int, part: Effect) -> None:
        key = self.generations[rank], round_, bucket
        ring = self.machines[rank].settings.ranks
        parts = self._exchanges.setdefault(key, {})
        assert rank not in parts, "one part for each member and bucket"
        parts[rank] = part
        if len(parts) < len(ring):
            return
        del self._exchanges[key]
        contributors = [other for other in parts if not isinstance(parts[other], ContributeNothing)]
        poisoned = any(isinstance(other, ContributePoison) for other in parts.values())
        if poisoned:
            self.poisoned_rounds.add(round_)
        for receiver in ring:
            event = partial(
                self._result,
                receiver,
                round_,
                bucket,
                sum(1 << other for other in contributors),
                sum(self.binds[round_][other].weight for other in contributors),
                poisoned,
            )
            self._deliver(rank, receiver, self.random.uniform(*self.timing.exchange_s), event)

    def _result(self, rank: int, round_: int, bucket: int, contributors: int, weight: float, poisoned: bool) -> None:
        self._perform(
            rank,
            self.machines[rank].handle(
                ResultReady(
                    round_,
                    bucket,
                    contributors=contributors,
                    weight=weight,
                    poisoned=poisoned,
                    squared_norm=0.0 if poisoned else round_ + bucket / 3,
                ),
                self.now_s,
            ),
        )

    # Learners.

    def _at_boundary(self, rank: int) -> None:
        """The learner applies what is complete, then begins its next step, goes idle, or has finished."""
        learner, machine = self.learners[rank], self.machines[rank]
        if not learner.alive or machine.phase not in (Phase.BOUNDARY, Phase.ABSENT):
            return
        if machine.applied < machine.visible:
            unapplied = [done.round for done in learner.ready_to_apply[:1]]
            assert unapplied == [machine.applied + 1], "R1: every round is applied, in order"
            while learner.ready_to_apply and learner.ready_to_apply[0].round <= machine.visible:
                last = learner.ready_to_apply.pop(0)
                self._apply(learner, last)
            self._perform(rank, machine.handle(RoundApplied(last.round), self.now_s))
        if learner.barrier is not None:
            self._leave_barrier(rank)
            return
        if machine.phase is Phase.ABSENT:
            return
        if learner.steps_ended == self.steps:
            learner.finished_s = self.now_s
            self._leave(rank, "finished", gone=True)
            return
        if idle := self.mishaps.pop((rank, learner.steps_begun + 1, "idle"), None):
            self._leave(rank, "idle")
            self._at(idle.for_s, partial(self._return, rank))
            return
        following = learner.steps_begun + 1
        if following in self.barriers and rank not in learner.entered.get(following, {}):
            self._enter_barrier(rank, following)
            return
        if learner.waits_since_s is None:
            learner.waits_since_s = self.now_s
        if machine.may_start()[0]:
            self.waits_s[rank].append(self.now_s - learner.waits_since_s)
            learner.waits_since_s = None
            self._begin_step(rank)

    def _leave(self, rank: int, reason: str, *, gone: bool = False) -> None:
        learner = self.learners[rank]
        learner.waits_since_s = None
        if gone:
            self.gone.add(rank)
        self._perform(rank, self.machines[rank].handle(LearnerAbsent(reason, gone=gone), self.now_s))
        self._at(0.0, partial(self._at_boundary, rank))  # it applies what was not visible to a present one

    def _return(self, rank: int) -> None:
        learner = self.learners[rank]
        learner.alive = True
        learner.flushed = self.machines[rank].applied
        self._perform(rank, self.machines[rank].handle(LearnerPresent(), self.now_s))
        self._at_boundary(rank)

    def _enter_barrier(self, rank: int, barrier: int) -> None:
        self.learners[rank].barrier = barrier
        self._leave(rank, "in a barrier")
        decided = self.machines[rank].decided
        self._entered(rank, rank, barrier, decided)
        for other in range(self.members):
            if other != rank:
                self._send(rank, other, partial(self._entered, other, rank, barrier, decided))

    def _entered(self, rank: int, entrant: int, barrier: int, decided: int) -> None:
        self.learners[rank].entered.setdefault(barrier, {})[entrant] = decided
        self._at_boundary(rank)

    def _leave_barrier(self, rank: int) -> None:
        learner = self.learners[rank]
        assert learner.barrier is not None
        entered = learner.entered[learner.barrier]
        if len(entered) == self.members and self.machines[rank].applied >= max(entered.values()):
            learner.barrier = None
            self._return(rank)

    def _begin_step(self, rank: int) -> None:
        learner, machine = self.learners[rank], self.machines[rank]
        ahead = machine.decided - machine.applied
        assert ahead <= self.staleness, "R1"
        if machine.settings.visibility == "fixed":
            assert machine.applied == max(learner.flushed, machine.decided - self.staleness), "R8"
        learner.steps_begun += 1
        step = learner.steps_begun
        self.step_bases[rank].append((step, machine.applied))
        self._perform(rank, machine.handle(StartStep(step), self.now_s))
        duration_s = self.timing.step_s[rank] * (1 + self.random.uniform(-self.timing.jitter, self.timing.jitter))
        forward_s = duration_s if machine.settings.ends_early else 0.4 * duration_s  # a period is in no bucket before
        at_s = forward_s
        hang = self.mishaps.get((rank, step, "hang"))
        die = self.mishaps.pop((rank, step, "die"), None) or self.mishaps.pop((rank, step, "leave"), None)
        order = self.random.sample(range(self.buckets), self.buckets)
        weight = float((5 * step + 7 * rank) % 9 + 1)
        learner.local_step_s = math.inf if hang or die else 0.1 * duration_s
        for position, bucket in enumerate(order):
            if hang and position == hang.bucket:
                at_s += hang.for_s
            if die and position == die.bucket:
                self._at(at_s, partial(self._die, rank, learner.life, die))
                return
            self._at(at_s, partial(self._bucket, rank, learner.life, step, bucket, weight + position, position == 0))
            at_s += (duration_s - forward_s) / self.buckets
        if die:
            self._at(at_s, partial(self._die, rank, learner.life, die))
            return
        self._at(at_s, partial(self._seal, rank, learner.life, step))

    def _end_early(self, rank: int, called: tuple[int, int]) -> None:
        """R9: behind the local step at hand its period ends. One that hangs or dies in it does not hear the call."""
        learner, step = self.learners[rank], called[1]
        computes = self.machines[rank].phase is Phase.COMPUTING and called == (learner.life, learner.steps_begun)
        if not computes or learner.local_step_s == math.inf:
            return
        learner.life += 1
        at_s = learner.local_step_s * self.random.random()
        for bucket in range(self.buckets):
            self._at(at_s, partial(self._bucket, rank, learner.life, step, bucket, 1.0, bucket == 0))
        self._at(at_s, partial(self._seal, rank, learner.life, step))

    def _bucket(self, rank: int, life: int, step: int, bucket: int, weight: float, first: bool) -> None:
        """A loader goes on drawing samples: the weight grows from bucket to bucket, and only the first counts (R2)."""
        if life != self.learners[rank].life:
            return
        if first:
            self.first_weights[rank, step] = weight
        poison = None
        for kind in ("poison", "overflow"):
            mishap = self.mishaps.get((rank, step, kind))
            if mishap and mishap.bucket == bucket:
                name = f"layer{bucket}.weight"
                poison = Poison(bucket=bucket, parameter=name, reason="not finite", overflow=kind == "overflow")
        self._perform(
            rank, self.machines[rank].handle(BucketReady(step, bucket, weight=weight, poison=poison), self.now_s)
        )

    def _seal(self, rank: int, life: int, step: int) -> None:
        if life != self.learners[rank].life:
            return
        self._perform(rank, self.machines[rank].handle(StepSealed(step, bytes([1 << rank]), (step,)), self.now_s))
        assert self.machines[rank].phase is Phase.BOUNDARY
        self.learners[rank].steps_ended += 1
        self._at_boundary(rank)

    def _die(self, rank: int, life: int, mishap: Mishap) -> None:
        learner = self.learners[rank]
        if life != learner.life:
            return
        learner.life += 1
        learner.alive = mishap.kind == "leave"
        machine = self.machines[rank]
        # With fixed visibility a learner's step n is in round n, so none is ever left out.
        begins_again = machine.phase is Phase.COMPUTING and (learner.alive or machine.settings.visibility == "fixed")
        self._leave(rank, "died" if mishap.kind == "die" else "idle")
        if begins_again:
            learner.steps_begun -= 1
        else:
            learner.steps_ended += 1
        self._at(mishap.for_s, partial(self._return, rank))

    def _completed(self, rank: int, completion: RoundComplete) -> None:
        expected = self.completions.setdefault(completion.round, completion)
        assert completion == expected, "V1, G3: a round is the same on all members"
        self.learners[rank].ready_to_apply.append(completion)
        self._announce(rank)
        self._at(0.0, partial(self._at_boundary, rank))

    def _apply(self, learner: Learner, completion: RoundComplete) -> None:
        if not completion.void:
            learner.base = hashlib.sha256(learner.base + repr(completion).encode()).digest()
        expected = self.bases.setdefault(completion.round, learner.base)
        assert learner.base == expected, "bases are equal at equal rounds"

    # Rules.

    def _record(self, rank: int, sent: Broadcast) -> None:
        machine = self.machines[rank]
        match sent.message:
            case Bind(round=round_, base=base, step=step, weight=weight) as bind:
                assert 0 <= round_ - 1 - base <= self.staleness, "R0"
                assert weight == self.first_weights[rank, step], "R2"
                assert rank not in self.binds.setdefault(round_, {}), "R2: one bind for each member and round"
                self.binds[round_][rank] = bind
            case Null(round=round_):
                assert self.binds.get(round_) or round_ <= self.unbound_max, "R3: no round starts empty"
                assert rank not in self.binds.get(round_, {}), "a member binds or nulls"
                self.nulls.append((rank, round_, machine.phase))
                self._check_null(rank, round_)
            case Call(round=round_):
                assert not machine.settings.lockstep, "R7, R8: no calls"
                assert rank in self.binds[round_], "R3: only a contributor calls"
                self.calls += 1

    def _check_null(self, rank: int, round_: int) -> None:
        machine = self.machines[rank]
        if machine.settings.lockstep:
            assert machine.phase is Phase.ABSENT, "R7, R8: a computing learner never nulls"
        if machine.settings.visibility == "fixed":
            assert rank in self.gone, "R8: only a learner that has gone is passed over"
        elif rank not in self.gone:
            assert round_ <= machine.applied + machine.settings.unapplied_max, "M1: what it can keep"

    def _committed(self, rank: int, round_: int) -> None:
        assert all(self.machines[other].complete >= round_ for other in self._others(rank)), "G5"

    def _check(self, rank: int) -> None:
        machine = self.machines[rank]
        assert machine.committed <= machine.complete <= machine.decided
        assert machine.applied <= machine.complete, "R1"
        assert machine.decided <= machine.complete + self.staleness + 1
        self.unapplied_most = max(self.unapplied_most, machine.decided - machine.applied)
        assert machine.rounds_kept <= 3 * (self.staleness + 1), "memory is bounded"
        self._check_progress()

    def _check_progress(self) -> None:
        """At the learner with the least d all rounds up to it are complete: it computes, or could, or is absent."""
        machines = [self.machines[rank] for rank in self.live]
        if self._in_flight or any(machine.phase is Phase.BOUND for machine in machines):
            return
        least = min(machine.decided for machine in machines)
        for machine in machines:
            if machine.decided == least:
                assert machine.complete == least, machine.waiting()
                assert least - machine.complete <= self.staleness

    def _check_end(self) -> None:
        machines = [self.machines[rank] for rank in sorted(self.live)]
        waits = [machine.may_start()[1] for machine in machines]
        assert all(machine.phase is Phase.ABSENT for machine in machines), f"deadlock: {waits}"
        last = max(machine.decided for machine in machines)
        for machine, learner in ((self.machines[rank], self.learners[rank]) for rank in sorted(self.live)):
            assert learner.steps_ended == self.steps
            assert machine.complete == machine.committed == machine.applied == machine.decided == last
            assert machine.rounds_kept == 0
            assert machine.deadline() is None
        assert not self._exchanges
        assert sorted(self.completions) == list(range(1, last + 1)), "rounds are counted without a gap"
        for round_, completion in self.completions.items():
            assert completion.binds == self.binds.get(round_, {}), "every contribution counts, once"
            assert math.isclose(
                completion.weight,
                sum(self.first_weights[rank, bind.step] for rank, bind in completion.binds.items()),
            ), "R2"
            assert completion.void == bool(completion.reason)
            assert completion.void or round_ not in self.poisoned_rounds, "V1"
            assert completion.binds or round_ <= self.unbound_max, "G6: no round is empty otherwise"
            assert completion.void == bool(completion.poisons or not completion.binds), (
                "V1, G6: what makes a round void"
            )
        contributed = Counter((rank, bind.step) for binds in self.binds.values() for rank, bind in binds.items())
        assert set(contributed.values()) <= {1}, "a step is contributed at most once"

    # Measures.

    @property
    def rounds(self) -> int:
        return len(self.completions)

    @property
    def mean_contributors(self) -> float:
        return sum(len(completion.binds) for completion in self.completions.values()) / self.rounds

    def mean_contributors_until(self, round_: int) -> float:
        """Of the rounds up to `round_`."""
        return sum(len(completion.binds) for k, completion in self.completions.items() if k <= round_) / round_

    def speed(self, rank: int) -> float:
        """Of what the learner would reach alone."""
        return self.steps * self.timing.step_s[rank] / self.learners[rank].finished_s

    @property
    def void_rounds(self) -> set[int]:
        return {round_ for round_, completion in self.completions.items() if completion.void}
