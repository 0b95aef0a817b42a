"""The rounds of one daemon of the cluster: those that ship, and what must be true of them, seen from where they talk.

What the machine is told and decides is seen by its witness, what goes to members by the links, parts by the exchange,
and the rest by whoever owns the rounds.
"""

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from meshtraind.executor.host import BindsOfRounds, RoundHost
from meshtraind.job_start.prepared import DescribedModel
from meshtraind.rounds.catchup import Beginning
from meshtraind.rounds.driver import JobModel, Rounds, RoundsOwner, RoundsPorts, RoundsStart
from meshtraind.rounds.history import Entry
from meshwire.codecs.registry import parse_codec
from meshwire.membership.lineage import rank_of
from meshwire.message_base import Wire
from meshwire.messages.generation import DealState, Model
from meshwire.messages.job import BlobRef, Generation, JobSpec, Prediction
from meshwire.model.fragments import manifest_under
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import Plan, plan_buckets
from meshwire.model.plans_by_round import RoundPlans
from meshwire.rounds.effects import Committed, Effect, LearnerCutOff, RoundComplete, StepDropped
from meshwire.rounds.inputs import GenerationEntered, Input, RoundServed
from meshwire.rounds.learner_state import Phase
from meshwire.rounds.machine import RoundMachine
from meshwire.sync_modes.mode import SyncSettings
from tests.sim.clusterdisk import Memory
from tests.sim.clusterexchange import Exchange, round_bytes

if TYPE_CHECKING:
    from tests.sim.clusterdaemon import Daemon

RTT_S = 0.02
STALL_S = 60.0
BUCKET_BYTES = 1024
MANIFEST = ModelManifest(
    tensors=(
        *(TensorSpec(name=name, shape=(BUCKET_BYTES // 4,), dtype="float32", kind="parameter") for name in "vw"),
        TensorSpec(name="steps", shape=(1,), dtype="int64", kind="buffer"),
    ),
    optimizer="SGD",
)
CODEC = "fp32"
CHECKPOINT_EVERY = "4r"


@cache
def described(sync: SyncSettings) -> tuple[ModelManifest, Plan]:
    """The model, with the parts of it that take turns in this mode (T1), and its buckets."""
    manifest = manifest_under(MANIFEST, sync)
    return manifest, plan_buckets(manifest, BUCKET_BYTES, parse_codec(CODEC))


@cache
def _plans(sync: SyncSettings) -> RoundPlans:
    return RoundPlans(described(sync)[1])


def buckets_in(round_: int, sync: SyncSettings) -> int:
    """How many buckets a round has."""
    return len(_plans(sync).of(round_).buckets)


def job_spec(job: str, submitter: str, sync: SyncSettings) -> JobSpec:
    """Two buckets of parameters and one integer."""
    return JobSpec(
        job=job,
        name="job",
        submitter=submitter,
        created_at_s=0.0,
        script="train.py",
        args=(),
        env=(),
        files=BlobRef(sha256=bytes(32), size_bytes=0),
        data=None,
        sync=sync,
        codec=CODEC,
        on_nan="skip",
        seed=0,
        bucket_bytes=BUCKET_BYTES,
        hash_every=0,
        trace=False,
        checkpoint_every=CHECKPOINT_EVERY,
    )


def predicted(devices: Sequence[str], speeds: Sequence[float]) -> Prediction:
    """What `submit` says where it has measured how fast each device trains alone."""
    return Prediction(
        samples_s=sum(speeds), alone_samples_s=max(speeds), speeds=tuple(zip(devices, speeds, strict=True))
    )


class WatchedRounds:
    """Of one daemon, in one history: their owner, their machine's witness, and who makes their exchange. Raises
    AssertionError, naming the rule, for what must not be.

    Attributes:
        shipped: the rounds themselves.
        machine, history, job_rounds: of these.
        path: chain ids by round, as they follow from what was completed and served.
        generation: by hash, of which its rounds must be.
    """

    def __init__(
        self,
        daemon: "Daemon",
        owner: RoundsOwner,
        rank: int,
        generation: Generation,
        entry: Entry,
    ) -> None:
        self.daemon, self.world = daemon, daemon.world
        self._owner = owner
        self.who, self.device = daemon.name, daemon.number
        self.first = entry.complete  # its history begins after this round
        self.path = {entry.complete: entry.chain}
        self.generation = generation.hash64()
        self.machine: RoundMachine
        self.exchange: Exchange
        self._done: dict[int, RoundComplete] = {}  # complete, and still to be counted
        self._due_s = math.inf  # of its timer
        self._told_s = self.world.now_s
        self._overdue = False  # the step that is dropped may have been nulled without limit (R5)
        model = JobModel(self.world.spec, *described(self.world.sync), self.world.space)
        start = RoundsStart(rank, generation, entry)
        ports = RoundsPorts(daemon.round_links, daemon.maker.memory, self)
        self.shipped = Rounds(model, start, ports, self, self, rtt_s=RTT_S, stall_s=STALL_S)
        self.history, self.job_rounds = self.shipped._parts.history, self.shipped._parts.job_rounds
        assert self.machine.settings.unapplied_max == self.world.unapplied_max

    def make(
        self, rank: int, generation: Generation, first: int | None, host: RoundHost, binds: BindsOfRounds
    ) -> Exchange:
        """Makes what stands in the place of the executor, as a `DataPlaneFactory` does."""
        self.exchange = Exchange(
            generation,
            rank,
            self.world.sync.staleness,
            partial(buckets_in, sync=self.world.sync),
            round_bytes(self.world.unapplied_max),
            self.daemon.round_links,
            host,
            binds,
            self._resumed,
        )
        return self.exchange

    @property
    def closed(self) -> bool:
        """They are of no history that is kept."""
        return self.shipped.closed

    # What is known of them

    @property
    def unsent(self) -> int:
        """Messages that wait until all have entered the generation."""
        return len(self.shipped._performer._unsent)

    def held(self) -> DealState:
        """What the ledger of samples holds after the newest round of the history."""
        deal = self.shipped.entry().deal
        assert deal is not None
        return deal

    # What their owner hears

    def notify(self, body: Wire, /) -> None:
        """Tells the learner."""
        self._owner.notify(body)

    def fail(self, reason: str, /) -> None:
        raise AssertionError(f"{self.who}: R1: {reason}")

    def refuse(self, rank: int, text: str, /) -> None:
        raise AssertionError(f"{self.who}: honest daemons break no rule: rank {rank} {text}")

    def round_complete(self, rounds: Rounds, round_: int, /) -> None:
        """The ledger of samples holds it, too."""
        done = self._done.pop(round_)
        assert rounds.chain_after(round_) == self.path[round_], f"G4: round {round_} stands in the history as it is"
        self.world.histories.dealt(self.history.chain, self.generation, self.held())
        self.world.completed(self, done)
        self._owner.round_complete(rounds, round_)

    def _resumed(self) -> None:
        """The ledger follows the generation, and nothing was sent in it yet."""
        self.world.histories.dealt(self.history.chain, self.generation, self.held())

    # What their machine is told and decides

    def began(self, machine: RoundMachine, complete: int) -> None:
        """Its own rounds have begun."""
        self.machine = machine

    def took(self, input_: Input, now_s: float, effects: Sequence[Effect]) -> None:
        """Nothing of it has been done yet."""
        late_s = now_s - max(self._due_s, self.daemon.woke_s)
        assert late_s <= 0.0 or self.closed, f"{self.who}: a timer is late by {late_s:.3f} s: {self.machine.waiting()}"
        if now_s > self._told_s and not self.closed:
            undone = [type(effect).__name__ for effect in self.shipped._performer._pending]
            assert not undone, f"{self.who}: {undone} was decided {now_s - self._told_s:.3f} s ago, and is not done"
        self._told_s = now_s
        deadline_s = self.machine.deadline()
        self._due_s = math.inf if deadline_s is None else deadline_s
        match input_:
            case GenerationEntered():
                assert self.daemon.generation is not None
                self.generation = self.exchange.generation
                assert self.generation == self.daemon.generation.hash64()
                changes = self.world.changes.get(self.generation, ())
                assert self.history.changes == self.exchange.changes
                assert self.history.changes == changes or self.world.liars, "C3: all go by the settings agreed on"
            case RoundServed(done):
                self._served(done)
        for effect in effects:
            match effect:
                case RoundComplete():
                    self._complete(effect)
                case Committed(round_):
                    self.world.check_committed(self, round_)
                case LearnerCutOff(round_):
                    self._overdue = round_ is None
                case StepDropped() if self.machine.phase is not Phase.ABSENT:  # else it went idle with nothing in hand
                    assert self._overdue, "R4: a null never makes a gradient too old"

    def _served(self, done: RoundComplete) -> None:
        chain_ = self.shipped.chain_after(done.round)
        assert chain_ is not None, f"G4: round {done.round} was served, and stands in no history"
        self.world.histories.served(self.path[done.round - 1], chain_, done)
        self.path[done.round] = chain_

    def _complete(self, done: RoundComplete) -> None:
        self._done[done.round] = done
        if done.round not in self.path:
            before = self.path[done.round - 1]
            names = self.exchange.names(done.round)
            self.path[done.round] = self.world.histories.completed(before, self.generation, done, names)


class SimulatedRounds:
    """Makes the rounds of one daemon, one history after the other: a `RoundsMaker` of the host that ships.

    Attributes:
        watched: the newest ones.
        memory: of these, or of those that are made next.
    """

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self.manifest, self._plan = described(daemon.world.sync)
        self.watched: WatchedRounds | None = None
        self.memory = Memory(daemon.world.sync.staleness)

    def buckets_in(self, round_: int) -> int:
        """How many a round has."""
        return buckets_in(round_, self._daemon.world.sync)

    def new_memory(self) -> None:
        self.memory = Memory(self._daemon.world.sync.staleness)

    def first(self, owner: RoundsOwner, prepared: DescribedModel, generation: Generation, beginning: Entry) -> Rounds:
        return self._make(owner, generation, beginning)

    def loading(self, owner: RoundsOwner, generation: Generation, beginning: Beginning) -> Rounds:
        assert beginning.model.plan == self._plan.digest()
        self._daemon.loads(beginning.entry)
        return self._make(owner, generation, beginning.entry)

    def _make(self, owner: RoundsOwner, generation: Generation, entry: Entry) -> Rounds:
        rank = rank_of(generation, self._daemon.member.device)
        assert rank is not None
        self.watched = WatchedRounds(self._daemon, owner, rank, generation, entry)
        return self.watched.shipped

    def model(self) -> Model:
        """The same for all."""
        return Model(job=self._daemon.world.spec.job, rank=0, manifest=self.manifest, plan=self._plan.digest())

    def close(self) -> None:
        """Nothing is written down."""
