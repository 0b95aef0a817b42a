"""One process of a learner in virtual time: it draws what it is dealt, computes, contributes, applies, saves, or dies.

It talks to its daemon in the words of the real one, and leaves what it has computed in the memory between them.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwire.message_base import Wire
from meshwire.messages.learner import (
    EndPeriod,
    EpochOver,
    Grant,
    LearnerApplied,
    LearnerBack,
    LearnerBucket,
    LearnerHash,
    LearnerIdle,
    LearnerSaved,
    LearnerSealed,
    LearnerStepped,
    LearnerTurn,
    RoundDone,
    Save,
    Start,
    StepLost,
    TurnNews,
)
from meshwire.messages.rounds import Poison
from meshwire.samples.pool import Batch
from meshwire.sync_modes.mode import SyncSettings
from meshwire.sync_modes.neighbours import Turn, turns_in
from tests.sim.clusterdisk import State
from tests.sim.clusterexchange import MIXED_BYTES

if TYPE_CHECKING:
    from tests.sim.clusterdaemon import Daemon
    from tests.sim.clusterrounds import WatchedRounds

HASH_EVERY = 3  # rounds


class Deal:
    """Batches that the learner holds, handed out as the loader does (`meshtrain.train.data.deal`)."""

    def __init__(self, sync: SyncSettings) -> None:
        self._sync = sync
        self._queue: deque[Batch] = deque()
        self._unbound: list[Batch] = []
        self._bound: tuple[int, list[Batch]] | None = None
        self._granted = False
        self._over = -1
        self.epoch = 0

    def grant(self, batches: tuple[Batch, ...], step: int) -> None:
        self._granted = True
        self._queue = deque(sorted([*self._queue, *batches], key=lambda batch: batch[0].epoch))
        if self._bound is not None and self._bound[0] <= step:
            self._bound = None

    def epoch_over(self, epoch: int) -> None:
        self._over = max(self._over, epoch)

    def step_lost(self, step: int, retry: bool) -> None:
        if retry and self._bound is not None and self._bound[0] == step:
            self._queue.extendleft(reversed(self._bound[1]))
            self._bound = None

    def draw(self) -> Literal["drawn", "idle", "wait"]:
        """X4: idle at an epoch's end that others have to bring about; waiting for the round on its way."""
        while True:
            if self._drawable():
                self._unbound.append(self._queue.popleft())
                return "drawn"
            if self._over < self.epoch:
                if not self._queue:
                    assert not self._granted or self._bound is not None, "X2: a learner is never without samples"
                    return "wait"
                if self._sync.staleness == 0 or not self._sync.lockstep:
                    return "idle"
            self.epoch += 1

    def settled(self) -> bool:
        return self._drawable() or self._over >= self.epoch

    def bind(self, step: int) -> tuple[Batch, ...]:
        """What was drawn belongs to this step."""
        self._bound = step, self._unbound
        self._unbound = []
        return tuple(self._bound[1])

    @property
    def claim(self) -> int:
        return 2 * (self._sync.staleness + 1) + 1

    def _drawable(self) -> bool:
        return bool(self._queue) and self._queue[0][0].epoch <= self.epoch


class Learner:
    """`base` is the chain id of the history whose rounds up to `applied` are in it; `start` whose start these were
    applied to.

    Args:
        name: of this process, unlike any other's.

    Attributes:
        memory: that it was given when it was started.
    """

    def __init__(self, name: str, daemon: "Daemon") -> None:
        sync = daemon.world.sync
        self.name = name
        self._daemon = daemon
        self._histories = daemon.world.histories
        self._step_s = daemon.world.step_s[daemon.number]
        self.memory = daemon.maker.memory
        self._inbox: deque[tuple[RoundDone, bytes]] = deque()
        self._saves: list[Save] = []
        self._stepping = False
        self._waiting = False
        self._idle = False
        self._applying = False
        self._step = 0
        self._round = 0  # that it is for, unless others go on without it
        self._lockstep = sync.staleness == 0
        self._period = sync.period
        self._overlaps = sync.overlaps
        self._in_flight = 0  # with rounds that overlap, its own step that is in no round of its base
        self._takes_in = False  # it is in the middle of its period, where it applies that one's
        self._local_steps = max(1, sync.period)
        self._computing = 0  # void events of a period that ended early bear an earlier number
        self._unbound = False  # it computes, and no bucket is ready
        self._awaits_round = False  # with s=0 a step that is sealed ends with its round
        self._lost_step = 0
        self._gossip = sync.gossip
        self._turn: Turn | None = None  # of mixing, the newest that it has told
        self._is_free = True  # what it has shown may be written over
        self.deal = Deal(sync)
        self.rounds: WatchedRounds | None = None  # once it has a base
        self.alive = True
        self.base = b""
        self.start = b""
        self.applied = 0
        self.pause_s = 0.0  # before its next step
        self.hang_s = 0.0  # in its next step
        self.poison = False  # its next step
        self._poisons = False  # its step at hand, with rounds that overlap

    def hold(self, state: State) -> None:
        """It has this base, in the history of now."""
        before, self.memory.process = self.memory.process, self
        assert before is None or not before.alive or before is self, "J3: one process at a time writes into memory"
        self.rounds, self.applied, self.base = self._daemon.maker.watched, state.round, state.base
        self.start = state.start
        self._keep()

    def _keep(self) -> None:
        """The process after it finds what it has, unless it dies while a round is on its way into its base."""
        self.memory.kept.state, self.memory.kept.dirty = State(self.applied, self.base, self.start), False

    def die(self) -> None:
        self.alive = False

    def take(self, body: Wire, chain: bytes) -> None:
        """What its daemon says. `chain`: of the round, if it is one."""
        if not self.alive:
            return
        match body:
            case Grant(batches=batches, step=step):
                self.deal.grant(batches, step)
                self._more_samples()
            case EpochOver(epoch=epoch):
                self.deal.epoch_over(epoch)
                self._more_samples()
            case StepLost(step=step, retry=retry):
                self.deal.step_lost(step, retry)
                if step == self._in_flight:
                    self._in_flight = 0
                    self._go_on()
                if retry:
                    self._lost_step = step
                    self._end_lost_step()
            case RoundDone():
                self._inbox.append((body, chain))
                self._apply()
            case Start(step=step, decided=decided, local_steps=steps):
                self._start(step, decided, steps)
            case EndPeriod(step=step):
                self._end_early(step)
            case TurnNews():
                self._hear_turn(body)
            case Save():
                self._saves.append(body)
                self._give_state()
            case _:
                raise AssertionError(f"a learner is not told {type(body).__name__}")

    def _say(self, body: Wire) -> None:
        self._daemon.processes.say(self, body)

    def _give_state(self) -> None:
        """J1: its base, at a step boundary, and the round after which that was read."""
        stands = not self._stepping or self._takes_in
        if stands and not self._applying and not self._awaits_round:
            due = [save for save in self._saves if save.after_round <= self.applied]
            self._saves = [save for save in self._saves if save.after_round > self.applied]
            for save in due:
                self._daemon.disk.written[Path(save.folder)] = State(self.applied, self.base, self.start)
                self._say(LearnerSaved(number=save.number, round=self.applied, units=1))

    # Rounds

    def _apply(self) -> None:
        if self._inbox and (not self._stepping or self._takes_in) and not self._applying:
            self._look_into_slot()
            self._applying = self.memory.kept.dirty = True
            self._after(0.002, self._applied)

    def _look_into_slot(self) -> None:
        assert self.rounds is not None
        in_slot, given = self.rounds.exchange.in_slot, self._inbox[0][0].round
        assert in_slot == given, f"M1: it is given round {given}, and in the result slot lies {in_slot}"

    def _applied(self) -> None:
        self._look_into_slot()
        done, chain = self._inbox.popleft()
        assert done.round == self.applied + 1, "R1: rounds are applied in order"
        assert self._histories.before(chain) == self.base, "a round is applied to the base that it continues"
        self.applied, self.base = done.round, chain
        self._applying = False
        self._keep()
        self._say(LearnerApplied(round=done.round))
        if done.round % HASH_EVERY == 0:
            self._say(LearnerHash(round=done.round, sha256=2 * self.base))
        if self._in_flight == done.step:
            self._in_flight = 0
        if self._awaits_round and done.step == self._step:
            self._end_step(done.start, done.round, done.local_steps)
        self._go_on()
        self._give_state()
        self._apply()

    # Steps

    def _start(self, step: int, decided: int, local_steps: int) -> None:
        self._round, self._local_steps = decided + 1, local_steps
        self._daemon.world.begins_period(self.base, self.applied + 1, local_steps)
        assert not self._stepping, "R1: one step at a time"
        assert not self._awaits_round, "R1: with s=0 a step is over when its round is applied"
        assert not self._inbox, "R1: a step begins when all rounds are applied"
        self._stepping = True
        self._step = step
        self._begin()

    def _begin(self) -> None:
        if self.pause_s:
            pause_s, self.pause_s = self.pause_s, 0.0
            self._stepping = False
            self._say(LearnerIdle(reason="paused", finished=False))
            self._after(pause_s, self._back)
            self._apply()
            self._give_state()
            return
        match self.deal.draw():
            case "wait":
                self._waiting = True
            case "idle":
                self._idle, self._stepping = True, False
                self._say(LearnerIdle(reason=f"the end of epoch {self.deal.epoch}", finished=False))
                self._apply()
                self._give_state()
            case "drawn":
                self._compute()

    def _back(self) -> None:
        self._say(LearnerBack())

    def _more_samples(self) -> None:
        if self._waiting:
            self._waiting = False
            self._begin()
        elif self._idle and self.deal.settled():
            self._idle = False
            self._back()

    def _compute(self) -> None:
        forward_s = self._step_s * (self._local_steps / self._period if self._period else 0.5) + self.hang_s
        self.hang_s = 0.0
        poisoned, self.poison = self.poison, False
        self._unbound = True
        backward_s = 0.0 if self._period else self._step_s * 0.5  # what a period has changed is there all at once
        if self._overlaps:  # R9: half of a period's local steps later
            self._poisons = poisoned
            self._in_step(forward_s / 2, self._take_in)
            return
        for number in range(1, 1 + turns_in(self._local_steps, self._gossip)):
            at_s = forward_s * number * self._gossip / self._local_steps
            self._in_step(at_s, partial(self._begin_turn, Turn(self.applied + 1, number)))
        self._contribute(forward_s, backward_s, poisoned=poisoned)

    def _begin_turn(self, turn: Turn) -> None:
        """R9: what it shows says on which base it stands, and in which turn."""
        shown, self._is_free, self._turn = self._is_free, False, turn
        if shown:
            self.memory.slots.mixed(0)[:] = self._shows(turn, self.name)
        self._say(LearnerTurn(round=turn.round, turn=turn.number, shown=shown))

    def _shows(self, turn: Turn, name: str) -> bytes:
        text = f"{self.base.hex()} {self.start.hex()} {turn.round} {turn.number} {name}"
        return (hashlib.sha256(text.encode()).hexdigest() + name).encode().ljust(MIXED_BYTES, b".")

    def _hear_turn(self, news: TurnNews) -> None:
        """R9: what neighbours show is of the same turn, on the same base, and whole."""
        if self._turn != (news.round, news.turn):
            return
        self._is_free = news.sent
        in_period = self._stepping and news.round == self.applied + 1
        for one in news.shown if in_period else ():
            shown = bytes(self.memory.slots.mixed(one.slot))
            name = shown[64:].rstrip(b".").decode()
            assert name != self.name, "R9: who mixes does so with others"
            assert shown == self._shows(self._turn, name), f"R9: {self.name} is to mix what {name} has on another base"
            self._daemon.world.mixes((self.base, self.start, self._turn), self.name, name, one.weight)

    def _contribute(self, forward_s: float, backward_s: float, *, poisoned: bool) -> None:
        buckets = self._daemon.maker.buckets_in(self._round)
        for bucket in range(buckets):
            at_s = forward_s + bucket * backward_s / buckets
            self._in_step(at_s, partial(self._bucket, bucket, poisoned and bucket == buckets - 1))
        self._in_step(forward_s + backward_s, self._seal)

    def _take_in(self) -> None:
        """R9: it waits for the round of its period before, in the middle of the next one."""
        self._takes_in = True
        self._apply()
        self._give_state()
        self._go_on()

    def _go_on(self) -> None:
        if self._takes_in and not self._in_flight and not self._applying:
            self._takes_in = False
            self._contribute(self._step_s / 2, 0.0, poisoned=self._poisons)

    def _end_early(self, step: int) -> None:
        """R9: behind the local step at hand."""
        assert step <= self._step, "a period is called that has not begun"
        if self._unbound and step == self._step:
            self._computing += 1
            for bucket in range(self._daemon.maker.buckets_in(self._round)):
                self._in_step(self._step_s * 0.1, partial(self._bucket, bucket, False))
            self._in_step(self._step_s * 0.1, self._seal)

    def _in_step(self, delay_s: float, event: Callable[[], None]) -> None:
        self._after(delay_s, partial(self._unless_void, self._computing, event))

    def _unless_void(self, computing: int, event: Callable[[], None]) -> None:
        if computing == self._computing:
            event()

    def _bucket(self, bucket: int, poisoned: bool) -> None:
        poison = Poison(bucket=bucket, parameter="w", reason="not finite") if poisoned else None
        batches = self.deal.bind(self._step) if bucket == 0 else ()
        blocks = tuple(block for batch in batches for block in batch)
        name = f"{self.name}.{self._step}"
        if bucket == 0:
            self._unbound = False
            assert self.rounds is not None
            self._daemon.world.contributes(self.rounds, self.start)
            self.memory.slots.put(self._step, name)
        samples = sum(block.end - block.first for block in blocks)
        ready = LearnerBucket(
            step=self._step,
            bucket=bucket,
            weight=1.0 if bucket else float(samples),  # only the first one's is looked at (R2)
            samples=blocks,
            hyperparameters=name.encode(),
            claim=self.deal.claim,
            poison=poison,
        )
        self._say(ready)

    def _seal(self) -> None:
        self._stepping, self._awaits_round = False, self._lockstep
        self._in_flight = self._step if self._overlaps else 0
        self._say(LearnerSealed(step=self._step, used=bytes([1]), integers=(self._step,)))
        if self._lockstep:
            self._end_lost_step()
            self._apply()
        else:
            self._end_step(0)

    def _end_lost_step(self) -> None:
        """It is in no round, which would have ended it."""
        if self._awaits_round and self._lost_step == self._step:
            self._end_step(0)

    def _end_step(self, start: int, decided: int = 0, local_steps: int = 1) -> None:
        """`start`: the next step, where this round has said that it may begin; 0: its daemon will say so."""
        self._awaits_round = False
        self._say(LearnerStepped(step=self._step, samples=0, step_s=0.0, exposed_s=0.0))
        self._apply()
        self._give_state()
        if start:
            self._start(start, decided, local_steps)

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        self._daemon.later(delay_s, partial(self._alive, event))

    def _alive(self, event: Callable[[], None]) -> None:
        if self.alive:
            event()
