"""All rounds of one daemon of the cluster: the real `JobRounds` and history, called as the daemon does.

`handle` and what follows it are `meshtraind.rounds.effects`, `fence` to `resume` are
`meshtraind.rounds.generation_change`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from meshtraind.rounds.effects import Stage
from meshtraind.rounds.history import Entry, RoundHistory, completion
from meshwire.message_base import Wire
from meshwire.messages.generation import DealState, Enter, ServedRound, Standing
from meshwire.messages.job import Generation
from meshwire.messages.learner import (
    LearnerApplied,
    LearnerBack,
    LearnerBucket,
    LearnerIdle,
    LearnerSealed,
    LearnerStepped,
    RoundDone,
)
from meshwire.messages.rounds import Poison, SampleBlock
from meshwire.rounds.chain import chain
from meshwire.rounds.effects import (
    Broadcast,
    Committed,
    Contribute,
    ContributeNothing,
    ContributePoison,
    DecodeRound,
    JobEffect,
    LearnerBrokeRules,
    LearnerCutOff,
    Message,
    ProtocolError,
    RoundComplete,
    RoundCounted,
    RoundForgotten,
    SamplesDealt,
    StepDropped,
    TellLearner,
)
from meshwire.rounds.inputs import (
    BaseLoaded,
    CompleteAnnounced,
    FenceRaised,
    GenerationEntered,
    JobInput,
    LearnerBegins,
    LearnerDied,
    LearnerLoads,
    LearnerTakenIn,
    LearningChanged,
    MemberMessage,
    ResultReady,
    RoundDecoded,
    RoundServed,
    TimeReached,
)
from meshwire.rounds.learner import RoundSettings
from meshwire.rounds.machine import RoundMachine
from meshwire.rounds.rounds_and_learner import JobRounds
from meshwire.samples.grants import SampleGrants
from tests.sim.clusterexchange import Exchange, Part, Result
from tests.sim.clusterlearner import BUCKETS

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

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
        settings = RoundSettings(
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
        )
        self.machine = RoundMachine(settings, complete=entry.complete)
        self.first = entry.complete  # its history begins after this round
        self.path = {entry.complete: entry.chain}  # chain ids by round
        self.history = RoundHistory(entry)
        self.counted, self.learning = entry.follows(generation)
        grants = SampleGrants(world.space, rank, self.learning, sync, entry.deal)
        self.job_rounds = JobRounds(self.machine, grants, sync, "skip")
        self.deal_now = self.job_rounds.deal()
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
        self._pending: deque[JobEffect] = deque()
        self._performing = False
        self._armed_s: float | None = None
        self._overdue = False  # the step that is dropped may have been nulled without limit (R5)
        if loading:
            self.exchange.fence()
            self.stage = Stage.FENCED
            self.handle(FenceRaised())
            self.dead("its script has not loaded yet")

    # The learner

    def begin(self) -> None:
        self.handle(LearnerBegins())

    def bucket(
        self, step: int, bucket: int, blocks: tuple[SampleBlock, ...], name: str, claim: int, poison: Poison | None
    ) -> None:
        if not self.closed:
            samples = sum(block.end - block.first for block in blocks)
            weight = 1.0 if bucket else float(samples)  # only the first one's is looked at (R2)
            ready = LearnerBucket(
                step=step,
                bucket=bucket,
                weight=weight,
                samples=blocks,
                hyperparameters=name.encode(),
                claim=claim,
                poison=poison,
            )
            self.handle(ready)

    def sealed(self, step: int) -> None:
        """Its step has ended with it."""
        if not self.closed:
            self.handle(LearnerSealed(step=step, used=bytes([1]), integers=(step,)))
            self.handle(LearnerStepped(step=step, samples=0, step_s=0.0, exposed_s=0.0))

    def applied(self, round_: int) -> None:
        """As the learner says it."""
        if not self.closed:
            self.handle(LearnerApplied(round=round_))

    def idle(self, reason: str) -> None:
        if not self.closed:
            self.handle(LearnerIdle(reason=reason, finished=False))

    def back(self) -> None:
        if not self.closed:
            self.handle(LearnerBack())

    def dead(self, reason: str, holds: int | None = None) -> None:
        self.handle(LearnerDied(reason, holds))

    @property
    def loads_after(self) -> int:
        """After which round, or a later one, a learner of now could load a state."""
        return self.job_rounds.loads_after()

    @property
    def hold_others_up(self) -> bool:
        """No more rounds can be kept for a learner that is to come."""
        return self.machine.decided >= self.machine.applied + self.machine.settings.unapplied_max

    def entry(self) -> Entry:
        """Where who would go on from the newest complete round begins."""
        history = self.history
        return Entry(history.complete, history.chain, history.samples, self.deal_now, anew=True)

    def loads(self) -> int:
        self.handle(LearnerLoads())
        return self.machine.applied

    def loaded(self, round_: int) -> None:
        self.handle(BaseLoaded(round_))

    # Other members

    def takes(self, generation: int) -> bool:
        return generation == self.generation and self.stage is not Stage.FENCED

    def received(self, rank: int, body: News | Part) -> None:
        if self.closed or not self.takes(body.generation):
            return
        if isinstance(body, Part):
            self.exchange.receive(rank, body)
        elif body.message is not None:
            self.handle(MemberMessage(rank, body.message, behind=False))
        self.handle(CompleteAnnounced(rank, body.complete))

    # From one generation to the next

    def fence(self) -> None:
        self.exchange.fence()
        self.stage, self.unsent = Stage.FENCED, []
        self.handle(FenceRaised())
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
        self.handle(RoundServed(done))
        self._note_cut()

    def enter(self, generation: Generation, enter: Enter) -> None:
        self._count(enter.counted, enter.learning)
        self.generation, self.stage = enter.generation, Stage.ENTERED
        self.exchange.enter(generation.ranks, enter.cut)
        computes = self._rank in generation.learning
        self.handle(GenerationEntered(generation.ranks, enter.cut, dict(enter.complete), computes=computes))

    def resume(self, generation: Generation) -> None:
        self._count(generation.number, generation.learning)
        self.world.histories.dealt(self.history.chain, self.generation, self.held())
        self.exchange.resume()
        self.stage = Stage.RUNNING
        unsent, self.unsent = self.unsent, []
        for message in unsent:
            self._send(message)

    def take_in(self) -> None:
        self.handle(LearnerTakenIn())

    def _count(self, number: int, learning: tuple[int, ...]) -> None:
        if number > self.counted:
            self.counted, self.learning = number, learning
            self.handle(LearningChanged(learning))

    def _note_cut(self) -> None:
        self.deal, self.samples = self.deal_now, self.history.samples

    # Effects

    def handle(self, input_: JobInput, at_s: float | None = None) -> None:
        """Effects of effects are performed after those before them."""
        self._pending.extend(self.job_rounds.handle(input_, self.world.now_s if at_s is None else at_s))
        if self._performing or self.closed:
            return
        self._performing = True
        while self._pending:
            self._perform_one(self._pending.popleft())
        self._performing = False
        self._arm()

    def _perform_one(self, effect: JobEffect) -> None:
        match effect:
            case Broadcast(message):
                self._broadcast(message)
            case Contribute(round_, bucket) | ContributePoison(round_, bucket):
                own = self.machine.own_bind(round_)
                name, poison = own.hyperparameters.decode(), isinstance(effect, ContributePoison)
                self._contribute(round_, bucket, name, own.weight, poison)
            case ContributeNothing(round_):
                for bucket in range(BUCKETS):
                    self._contribute(round_, bucket, "", 0.0, False)
            case RoundComplete():
                self._round_complete(effect)
            case RoundCounted(round_, deal):
                self.deal_now = deal
                self.world.histories.dealt(self.history.chain, self.generation, self.held())
                self.world.completed(self, self._counted)
                self._on_round(self, round_)
            case SamplesDealt(deal):
                self.deal_now = deal
            case DecodeRound(round_):
                self.exchange.open_slot(round_)
            case Committed(round_):
                self.committed = round_
                self.history.forget(round_)
                self.world.check_committed(self, round_)
            case RoundForgotten(round_):
                self.exchange.forget(round_)
            case TellLearner(notice):
                round_of = notice.round if isinstance(notice, RoundDone) else None
                self._notify(notice, b"" if round_of is None else self.path[round_of])
            case LearnerCutOff(round_):
                self._overdue = round_ is None
            case StepDropped():
                assert self._overdue, "R4: a null never makes a gradient too old"
            case LearnerBrokeRules(text):
                raise AssertionError(f"{self.who}: R1: {text}")
            case ProtocolError(rank, text):
                raise AssertionError(f"{self.who}: honest daemons break no rule: rank {rank} {text}")

    def _broadcast(self, message: Message) -> None:
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
        if done.round > self.history.complete:
            before = self.history.chain
            self.path[done.round] = chain(before, self.generation, done)
            self.world.histories.completed(before, self.generation, done, self.exchange.names(done.round))
            self.history.add(self.generation, done)
        self._counted = done

    def held(self) -> DealState:
        """What the ledger of samples holds after the newest round of the history."""
        assert self.deal_now is not None
        return self.deal_now

    def _arm(self) -> None:
        deadline_s = self.machine.deadline()
        if deadline_s is not None and deadline_s != self._armed_s:
            self._later(max(0.0, deadline_s - self.world.now_s), partial(self._timer, deadline_s))
        self._armed_s = deadline_s

    def _timer(self, deadline_s: float) -> None:
        if self._armed_s == deadline_s and not self.closed:
            self._armed_s = None
            self.handle(TimeReached(), max(self.world.now_s, deadline_s))

    # What the exchange says

    def _result_ready(self, round_: int, bucket: int, result: Result) -> None:
        squared_norm = 0.0 if result.poisoned else float(round_ * 100 + bucket)
        self.handle(ResultReady(round_, bucket, result.contributors, result.weight, result.poisoned, squared_norm))

    def _decoded(self, round_: int) -> None:
        self.handle(RoundDecoded(round_))
