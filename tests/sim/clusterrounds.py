"""All rounds of one daemon of the cluster: the real round machine, ledger, turn and history, called as the daemon does.

`perform` and what follows it are `meshtraind.rounds.effects`, `fence` to `resume` are
`meshtraind.rounds.generation_change`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from meshtraind.rounds.effects import Stage
from meshtraind.rounds.history import Entry, RoundHistory, completion
from meshtraind.rounds.learner_turn import Turn, round_done
from meshtraind.rounds.sample_grants import Dealing
from meshwire.message_base import Wire
from meshwire.messages.generation import DealState, Enter, ServedRound, Standing
from meshwire.messages.job import Generation
from meshwire.messages.learner import StepLost
from meshwire.messages.rounds import Bind, Poison, SampleBlock
from meshwire.rounds.chain import chain
from meshwire.rounds.effects import (
    Broadcast,
    Committed,
    Contribute,
    ContributeNothing,
    ContributePoison,
    Effect,
    LearnerCutOff,
    Message,
    ProtocolError,
    RoundComplete,
    StepDropped,
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
from meshwire.rounds.learner import Phase, RoundSettings
from meshwire.rounds.machine import RoundMachine
from tests.sim.clusterexchange import Exchange, Part, Result
from tests.sim.clusterlearner import BUCKETS

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

LOADING = "it loads the state of the others"
RTT_S = 0.02


@dataclass(frozen=True, slots=True)
class News:
    """A round message of a member, or without one its report: each says how far its sender is."""

    generation: int
    complete: int
    message: Message | None


class Rounds:
    """Of one daemon, in one history.

    Args:
        later: runs an event on this device after a time.
        send: to all other members of the generation.
        notify: tells the learner.
        on_round: called with this and each complete round, in order.
    """

    def __init__(
        self,
        world: "Cluster",
        who: str,
        device: int,
        rank: int,
        generation: Generation,
        entry: Entry,
        *,
        loading: bool,
        later: Callable[[float, Callable[[], None]], None],
        send: Callable[[News | Part], None],
        notify: Callable[[Wire, bytes], None],
        on_round: Callable[["Rounds", int], None],
    ) -> None:
        self.world = world
        self.who, self.device = who, device
        self._rank = rank
        self._later = later
        self._send_all = send
        self._notify = notify
        self._on_round = on_round
        sync = world.sync
        self.machine = RoundMachine(
            RoundSettings(
                ranks=generation.ranks,
                rank=rank,
                buckets=BUCKETS,
                used_bytes=1,
                integers=1,
                staleness=sync.staleness,
                straggler=sync.straggler,
                visibility=sync.visibility,
                unapplied_max=world.unapplied_max,
                rtt_s=RTT_S,
            ),
            complete=entry.complete,
        )
        self.first = entry.complete  # its history begins after this round
        self.path = {entry.complete: entry.chain}  # chain ids by round
        self.history = RoundHistory(entry)
        self.turn = Turn(self.machine, self._tell, self._start_step, self._resume_learner)
        self.counted, self.learning = entry.follows(generation)
        self.dealing = Dealing(
            world.space,
            rank=rank,
            learning=self.learning,
            sync=sync,
            notify=self._tell,
            state=entry.deal,
        )
        self.exchange = Exchange(
            generation.ranks, rank, BUCKETS, entry.complete, send, self._result_ready, self._decoded
        )
        self.deal: DealState | None = None
        self.samples = 0
        self.generation = generation.hash64()
        self.stage = Stage.RUNNING
        self.closed = False
        self.committed = 0
        self.unsent: list[Message] = []
        self._own: dict[int, Bind] = {}
        self._pending: deque[Effect] = deque()
        self._performing = False
        self._forgotten = entry.complete
        self._keeps_unapplied = True
        self._armed_s: float | None = None
        self._overdue = False  # the step that is dropped may have been nulled without limit (R5)
        if loading:
            self.exchange.fence()
            self.stage = Stage.FENCED
            self.perform(self.machine.handle(FenceRaised(), world.now_s))
            self.dead("its script has not loaded yet")

    # The learner

    def begin(self) -> None:
        self.turn.wants_to_start(1)
        self.perform([])
        self.dealing.begin()

    def bucket(
        self, step: int, bucket: int, blocks: tuple[SampleBlock, ...], name: str, claim: int, poison: Poison | None
    ) -> None:
        if not self.closed:
            sizes = self.dealing.sizes() if self.machine.phase is Phase.COMPUTING else ()
            effects = self.machine.handle(
                BucketReady(
                    step,
                    bucket,
                    weight=float(sum(block.end - block.first for block in blocks)),
                    samples=blocks,
                    hyperparameters=name.encode(),
                    claim=claim,
                    sizes=sizes,
                    poison=poison,
                ),
                self.world.now_s,
            )
            self.perform(effects)

    def sealed(self, step: int) -> None:
        """Its step has ended with it."""
        if not self.closed:
            self.perform(self.machine.handle(StepSealed(step, bytes([1]), (step,)), self.world.now_s))
            assert self.turn.at_end(step)
            self.turn.wants_to_start(step + 1)
            self.perform([])

    def applied(self, round_: int) -> None:
        """As the learner says it."""
        if not self.closed:
            assert self.turn.holds(round_), "R1: it applies what it was given"
            effects = self.machine.handle(RoundApplied(round_), self.world.now_s)
            self.exchange.open_slot(round_ + 1)
            self.perform(effects)

    def idle(self, reason: str) -> None:
        if not self.closed:
            self.turn.idle()
            self.perform(self.machine.handle(LearnerAbsent(reason), self.world.now_s))

    def back(self) -> None:
        if not self.closed:
            self.perform(self.machine.handle(LearnerPresent(), self.world.now_s))

    def dead(self, reason: str, holds: int | None = None) -> None:
        self.turn.away()
        self.dealing.learner_lost()
        self._keeps_unapplied = holds is not None
        self.perform(
            self.machine.handle(LearnerAbsent(reason, gone=holds is None, holds=holds, rests=True), self.world.now_s)
        )

    @property
    def loads_after(self) -> int:
        """After which round, or a later one, a learner of now could load a state."""
        return self.machine.applied if self._keeps_unapplied else self.machine.complete

    @property
    def hold_others_up(self) -> bool:
        """No more rounds can be kept for a learner that is to come."""
        return self.machine.decided >= self.machine.applied + self.machine.settings.unapplied_max

    def entry(self) -> Entry:
        """Where who would go on from the newest complete round begins."""
        history = self.history
        return Entry(history.complete, history.chain, history.samples, self.dealing.state(), anew=True)

    def loads(self) -> int:
        self._keeps_unapplied = True
        self.perform(self.machine.handle(LearnerAbsent(LOADING, loading=True), self.world.now_s))
        return self.machine.applied

    def loaded(self, round_: int) -> None:
        effects = self.machine.handle(BaseLoaded(round_), self.world.now_s)
        self.exchange.open_slot(round_ + 1)
        self.turn.returned(round_)
        self.perform(effects)

    # Other members

    def takes(self, generation: int) -> bool:
        return generation == self.generation and self.stage is not Stage.FENCED

    def received(self, rank: int, body: News | Part) -> None:
        if self.closed or not self.takes(body.generation):
            return
        if isinstance(body, Part):
            self.exchange.receive(rank, body)
        elif body.message is not None:
            self.perform(self.machine.handle(MessageReceived(rank, body.message), self.world.now_s))
        self.perform(self.machine.handle(CompleteAnnounced(rank, body.complete), self.world.now_s))

    # From one generation to the next

    def fence(self) -> None:
        self.exchange.fence()
        self.stage, self.unsent = Stage.FENCED, []
        self.turn.fenced(self.machine.complete)
        self.perform(self.machine.handle(FenceRaised(), self.world.now_s))
        self._note_cut()

    def standing(self) -> Standing:
        history = self.history
        return Standing(
            generation=self.generation,
            number=0,
            complete=history.complete,
            chains=history.chains,
            samples=history.samples,
            linked=(),
            counted=self.counted,
            learning=self.learning,
        )

    def served_after(self, complete: int) -> tuple[tuple[ServedRound, list[Result]], ...]:
        """Raises KeyError when they are gone. Two at a time, as a message holds but some."""
        rounds = {round_: self.exchange.encoded(round_) for round_ in range(complete + 1, self.history.complete + 1)}
        served = self.history.served(complete, dict.fromkeys(rounds, (b"", 1)))[:2]
        return tuple((each, rounds[each.round]) for each in served)

    def take_served(self, served: ServedRound, results: list[Result]) -> None:
        done = completion(served)
        self.exchange.take_served(served.round, results)
        self.world.histories.served(self.path[served.round - 1], served.chain, done)
        self.path[served.round] = served.chain
        self.history.add_served(done, served.chain)
        self.perform(self.machine.handle(RoundServed(done), self.world.now_s))
        self._note_cut()

    def enter(self, generation: Generation, enter: Enter) -> None:
        self._count(enter.counted, enter.learning)
        self.generation, self.stage = enter.generation, Stage.ENTERED
        self.exchange.enter(generation.ranks, enter.cut)
        computes, now_s = self._rank in generation.learning, self.world.now_s
        self.perform(
            self.machine.handle(
                GenerationEntered(generation.ranks, enter.cut, dict(enter.complete), computes=computes), now_s
            )
        )

    def resume(self, generation: Generation) -> None:
        self._count(generation.number, generation.learning)
        self.world.histories.dealt(self.history.chain, self.generation, self.dealing.state())
        self.exchange.resume()
        self.stage = Stage.RUNNING
        unsent, self.unsent = self.unsent, []
        for message in unsent:
            self._send(message)

    def take_in(self) -> None:
        self.turn.taken_in()
        self.turn.wants_to_start(1)
        self.dealing.begin()
        self.perform([])

    def _count(self, number: int, learning: tuple[int, ...]) -> None:
        if number > self.counted:
            self.counted, self.learning = number, learning
            self.dealing.enter(learning)

    def _note_cut(self) -> None:
        self.deal, self.samples = self.dealing.state(), self.history.samples

    # Effects

    def perform(self, effects: list[Effect]) -> None:
        """Effects of effects are performed after those before them."""
        self._pending.extend(effects)
        if self._performing or self.closed:
            return
        self._performing = True
        while True:
            while self._pending:
                self._perform_one(self._pending.popleft())
            self.turn.advance()
            if not self._pending:
                break
        self._performing = False
        self._forget()
        self._arm()

    def _perform_one(self, effect: Effect) -> None:
        match effect:
            case Broadcast(message):
                self._broadcast(message)
            case Contribute(round_, bucket) | ContributePoison(round_, bucket):
                own = self._own[round_]
                name, poison = own.hyperparameters.decode(), isinstance(effect, ContributePoison)
                self._contribute(round_, bucket, name, own.weight, poison)
            case ContributeNothing(round_):
                for bucket in range(BUCKETS):
                    self._contribute(round_, bucket, "", 0.0, False)
            case RoundComplete():
                self._round_complete(effect)
            case Committed(round_):
                self.committed = round_
                self.world.check_committed(self, round_)
            case LearnerCutOff(round_, reason):
                self._overdue = round_ is None
                if round_ is not None:
                    self._tell(StepLost(step=self._own[round_].step, reason=reason, retry=False))
            case StepDropped(step, reason):
                if self.machine.phase is not Phase.ABSENT:
                    assert self._overdue, "R4: a null never makes a gradient too old"
                    self._tell(StepLost(step=step, reason=reason, retry=True))
            case ProtocolError(rank, text):
                raise AssertionError(f"{self.who}: honest daemons break no rule: rank {rank} {text}")

    def _broadcast(self, message: Message) -> None:
        if isinstance(message, Bind):
            self._own[message.round] = message
        if self.stage is Stage.RUNNING:
            self._send(message)
        elif self.stage is Stage.ENTERED:
            self.unsent.append(message)

    def _send(self, message: Message) -> None:
        self._send_all(News(self.generation, self.machine.complete, message))

    def _contribute(self, round_: int, bucket: int, name: str, weight: float, poison: bool) -> None:
        part = Part(self.generation, self.machine.complete, round_, bucket, name, weight, poison)
        self.exchange.contribute(part)

    def _round_complete(self, done: RoundComplete) -> None:
        own = self._own.pop(done.round, None)
        if done.round > self.history.complete:
            before = self.history.chain
            self.path[done.round] = chain(before, self.generation, done)
            self.world.histories.completed(before, self.generation, done, self.exchange.names(done.round))
            self.history.add(self.generation, done)
        self.turn.complete(round_done(done, own.step if own is not None else 0, on_nan="skip"))
        wrong = self.dealing.complete(done)
        assert not wrong, f"{self.who}: round {done.round}: {wrong}"
        self.world.histories.dealt(self.history.chain, self.generation, self.dealing.state())
        self.world.completed(self, done)
        self._on_round(self, done.round)

    def _forget(self) -> None:
        self.history.forget(self.committed)
        upto = min(self.committed, self.machine.applied) if self._keeps_unapplied else self.committed
        for round_ in range(self._forgotten + 1, upto + 1):
            self.exchange.forget(round_)
            self.turn.forget(round_)
        self._forgotten = max(self._forgotten, upto)

    def _arm(self) -> None:
        deadline_s = self.machine.deadline()
        if deadline_s is not None and deadline_s != self._armed_s:
            self._later(max(0.0, deadline_s - self.world.now_s), partial(self._timer, deadline_s))
        self._armed_s = deadline_s

    def _timer(self, deadline_s: float) -> None:
        if self._armed_s == deadline_s and not self.closed:
            self._armed_s = None
            self.perform(self.machine.handle(TimeReached(), max(self.world.now_s, deadline_s)))

    # Steps of the above

    def _tell(self, body: Wire) -> None:
        round_ = getattr(body, "round", None)
        self._notify(body, b"" if round_ is None else self.path[round_])

    def _start_step(self, step: int) -> None:
        self.perform(self.machine.handle(StartStep(step), self.world.now_s))

    def _resume_learner(self) -> None:
        if self.machine.phase is Phase.ABSENT:
            self.perform(self.machine.handle(LearnerPresent(), self.world.now_s))

    def _result_ready(self, round_: int, bucket: int, result: Result) -> None:
        self.perform(
            self.machine.handle(
                ResultReady(
                    round_,
                    bucket,
                    contributors=result.contributors,
                    weight=result.weight,
                    poisoned=result.poisoned,
                    squared_norm=0.0 if result.poisoned else float(round_ * 100 + bucket),
                ),
                self.world.now_s,
            )
        )

    def _decoded(self, round_: int) -> None:
        self.turn.decoded(round_)
        self.perform([])
