"""All rounds of one job on this daemon, from the first bind to the end, through every generation of the job."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from meshtraind.rounds.data_plane import DataPlaneFactory, RawSlots
from meshtraind.rounds.effects import EffectPerformer, RoundParts, Stage
from meshtraind.rounds.generation_change import GenerationChange, rounds_kept
from meshtraind.rounds.gossip import Gossip
from meshtraind.rounds.history import Entry, RoundHistory
from meshtraind.rounds.learner_inputs import LearnerInputs
from meshtraind.rounds.trace_recorder import RoundWitness, round_machine
from meshtraind.transport.round_link import RoundLink
from meshwire.codecs.registry import parse_codec
from meshwire.encoded_layout.projections import builds_on
from meshwire.frames.header import Header, Kind
from meshwire.message_base import Wire
from meshwire.messages.job import Generation, JobSpec, RankReport
from meshwire.messages.learner import SampleSpace
from meshwire.model.manifest import ModelManifest
from meshwire.model.plan import Plan
from meshwire.model.plans_by_round import RoundPlans
from meshwire.rounds.effects import Message
from meshwire.rounds.inputs import (
    BarrierSeen,
    CompleteAnnounced,
    MemberMessage,
    ResultReady,
    RoundDecoded,
    RoundTripMeasured,
    SpeedMeasured,
)
from meshwire.rounds.learner_state import RoundSettings
from meshwire.rounds.rounds_and_learner import JobRounds
from meshwire.rounds.stall import StallWatch
from meshwire.samples.grants import SampleGrants


@dataclass(frozen=True, slots=True)
class JobModel:
    """What is trained, as all members have agreed on it.

    Attributes:
        samples: what the learners' prepared loaders read; None without one.
    """

    spec: JobSpec
    manifest: ModelManifest
    plan: Plan
    samples: SampleSpace | None


@dataclass(frozen=True, slots=True)
class RoundsStart:
    """Where this member's rounds begin. It has no learner yet, and enters by `GenerationChange.enter`.

    Attributes:
        generation: in which.
        entry: after which round, with what.
    """

    rank: int
    generation: Generation
    entry: Entry


@dataclass(frozen=True, slots=True)
class RoundsPorts:
    """All that the rounds of a job have to do with outside of their daemon's decisions.

    Attributes:
        links: the way to each other member, by rank; live.
        slots: where the learner puts what it has computed.
        planes: makes what moves the bytes between slots and links.
    """

    links: Mapping[int, RoundLink]
    slots: RawSlots
    planes: DataPlaneFactory


class RoundsOwner(Protocol):
    """Whoever made the rounds of a job, and whom they concern: its learner, its members, its end."""

    def notify(self, body: Wire, /) -> None:
        """Sends the learner a notice."""

    def fail(self, reason: str, /) -> None:
        """Ends this device's part; called at most once for each cause."""

    def refuse(self, rank: int, text: str, /) -> None:
        """The member has broken the rules in the way that `text` says."""

    def round_complete(self, rounds: "Rounds", round_: int, /) -> None:
        """The next round is complete; called in order."""


class Rounds:
    """One job's rounds with all that they move: data plane, history, learner, samples.

    Args:
        witness: sees what the round machine is told and decides.
        rtt_s: to the farthest member.
        stall_s: as of `Timeouts`.

    Attributes:
        learner: what it does, and whether there is one.
        crossing: leads all of it from one generation into the next.
        closed: it goes on no more.
    """

    def __init__(
        self,
        model: JobModel,
        beginning: RoundsStart,
        ports: RoundsPorts,
        owner: RoundsOwner,
        witness: RoundWitness | None,
        *,
        rtt_s: float,
        stall_s: float,
    ) -> None:
        spec, plan, manifest = model.spec, model.plan, model.manifest
        rank, generation, entry = beginning.rank, beginning.generation, beginning.entry
        self._owner = owner
        self._samples = model.samples
        self._loop = asyncio.get_running_loop()
        staleness = spec.sync.staleness
        in_the_middle = not entry.anew
        first = None if in_the_middle else entry.complete + 1
        plane = ports.planes.make(rank, generation, first, host=self, binds=self)
        settings = RoundSettings(
            ranks=generation.ranks,
            rank=rank,
            buckets=len(plan.buckets),
            fewer=RoundPlans(plan).bucket_counts(),
            fewer_every=plan.travel.every if plan.travel is not None else 0,
            overlaps=spec.sync.overlaps,
            used_bytes=manifest.used_bytes,
            integers=manifest.integer_values,
            staleness=staleness,
            straggler=spec.sync.straggler,
            visibility=spec.sync.visibility,
            ends_early=spec.sync.ends_early,
            unapplied_max=rounds_kept(plane, spec, generation),
            rtt_s=rtt_s,
        )
        counted, learning = entry.follows(generation)
        samples = model.samples
        speeds = spec.prediction.speeds_of(generation.members) if spec.prediction is not None else {}
        grants = (
            SampleGrants(samples, rank, learning, spec.sync, entry.deal, speeds=speeds) if samples is not None else None
        )
        self._machine = round_machine(settings, witness, complete=entry.complete)
        job_rounds = JobRounds(self._machine, grants, spec.sync, spec.on_nan)
        links, slots = ports.links, ports.slots
        gossip = Gossip(spec, rank, self._machine, links, slots, self.notify) if spec.sync.gossip else None
        self._parts = RoundParts(spec, rank, job_rounds, plane, RoundHistory(entry), links, slots, gossip)
        self._performer = EffectPerformer(self._parts, generation.hash64(), self)
        self.crossing = GenerationChange(self._parts, self._performer, counted, learning)
        loadable_after = entry.complete + (builds_on(parse_codec(spec.codec), staleness) if in_the_middle else 0)
        self.learner = LearnerInputs(self._parts, self._performer, self, loadable_after)
        self.crossing.fence()
        self.learner.dead("its script has not loaded yet")
        self._stall = StallWatch(stall_s)
        self.closed = False

    @property
    def complete(self) -> int:
        """The newest round held completely (G5)."""
        return self._machine.complete

    @property
    def applied(self) -> int:
        """The newest round in the learner's base."""
        return self._machine.applied

    @property
    def contributions(self) -> int:
        """Rounds that this device's learners were in."""
        return sum(self._performer.stats.ages)

    @property
    def finished(self) -> bool:
        """The learner takes no further step."""
        return self._parts.job_rounds.finished

    @property
    def committed(self) -> int:
        """The newest round that every member has announced complete (G5)."""
        return self._performer.committed

    @property
    def history_samples(self) -> int:
        """In all complete rounds."""
        return self._parts.history.samples

    @property
    def hold_others_up(self) -> bool:
        """No more rounds can be kept for a learner that loads: all members wait for it (R5, M1)."""
        return self._machine.decided >= self._machine.applied + self._machine.settings.unapplied_max

    def chain_after(self, round_: int) -> bytes | None:
        """h_k of a complete round (G4); None when it is too long ago."""
        return self._parts.history.chain_after(round_)

    def entry(self) -> Entry:
        """Where who would go on from the newest complete round begins."""
        return self._performer.entry()

    @property
    def sample_space(self) -> SampleSpace | None:
        """What the prepared loaders read."""
        return self._samples

    @property
    def epochs_over(self) -> int:
        """How many epochs of the prepared loaders are over (X4)."""
        return self._parts.job_rounds.epochs_over

    def measures(self) -> dict[str, object]:
        """The fields of `Metrics` that are known here."""
        job_rounds = self._parts.job_rounds
        return {
            **self._performer.stats.values(),
            "samples": self.learner.samples,
            "ahead": max(0, self._machine.decided - self._machine.applied),
            "batch": job_rounds.batch * self._parts.spec.learners,
            "epochs": job_rounds.epochs,
            "finished": self.finished,
            "waiting_for": job_rounds.waiting(),
            "receipts": (self.complete + 1, self._parts.plane.receipts(self.complete + 1)),
        }

    def note_round_trip(self, rtt_s: float) -> None:
        """As it is now to the farthest member; what changes little is not worth a line in the trace."""
        known_s = self._machine.settings.rtt_s
        if not 0.8 * known_s <= rtt_s <= 1.25 * known_s:
            self._performer.handle(RoundTripMeasured(rtt_s))

    def stalled(self, reports: Mapping[int, RankReport]) -> tuple[int, str] | None:
        """To be asked about once a second: a member that could send and does not, and what is to be said of it."""
        round_, decided = self.complete + 1, self._machine.decided_by_all
        lacks = list(self._parts.plane.lacks(round_)) if decided >= round_ else []
        return self._stall.look(
            self._loop.time(),
            round_ if decided >= round_ and self._performer.stage is Stage.RUNNING else None,
            [(rank, after) for rank, _, after in lacks],
            {rank: report.metrics.receipts for rank, report in reports.items()},
            {rank: link.chunk_bytes_received for rank, link in self._parts.links.items()},
        )

    # Other members

    def takes(self, generation: int) -> bool:
        """G2: whether what comes in this generation is taken now."""
        return generation == self._performer.generation and self._performer.stage is not Stage.FENCED

    def message(self, sender: int, message: Message, *, behind: bool = False) -> None:
        """A round message of a member. `behind`: its learner is in no barrier."""
        self._performer.handle(MemberMessage(sender, message, behind))
        self._parts.plane.decided()

    def peer_complete(self, sender: int, complete: int) -> None:
        """G5: every frame says how far its sender is."""
        self._performer.handle(CompleteAnnounced(sender, complete))

    def peer_measured(self, report: RankReport) -> None:
        """A member's report, or this one's: how fast it computes, and whether its learner will go on."""
        finished = report.metrics.finished or report.exit_code is not None
        self._performer.handle(SpeedMeasured(report.rank, report.metrics.samples_per_s, finished))

    def peer_in_barrier(self, rank: int, *, inside: bool) -> None:
        """A member's learner, this one's too, waits for all others, or goes on."""
        self._performer.handle(BarrierSeen(rank, inside))

    def chunk_announced(self, sender: int, header: Header) -> memoryview | str | None:
        """Where an incoming chunk belongs, or a piece of a neighbour's weights."""
        if header.kind is Kind.GOSSIP:
            gossip = self._parts.gossip
            return gossip.announced(sender, header) if gossip is not None else "no weights are mixed in this job"
        return self._parts.plane.chunk_announced(sender, header)

    def chunk_received(self, sender: int, header: Header) -> None:
        """An incoming chunk is in its place, or a piece of a neighbour's weights."""
        if header.kind is Kind.GOSSIP:
            assert self._parts.gossip is not None
            self._parts.gossip.received(sender, header)
            return
        self._parts.plane.chunk_received(header)
        self.peer_complete(sender, header.complete)

    def close(self) -> None:
        """Stops the timer and lets go of links and memory."""
        self.closed = True
        self._performer.close()
        if self._parts.gossip is not None:
            self._parts.gossip.close()
        self._parts.plane.close()

    # What its parts say to whoever made it

    def notify(self, body: Wire, /) -> None:
        """Sends the learner a notice."""
        self._owner.notify(body)

    def fail(self, reason: str, /) -> None:
        """Ends this device's part."""
        self._owner.fail(reason)

    def refuse(self, rank: int, text: str, /) -> None:
        """A member has broken the rules."""
        self._owner.refuse(rank, text)

    def round_complete(self, round_: int, /) -> None:
        """The next round is complete."""
        self._owner.round_complete(self, round_)

    # What the data plane says and asks

    def chunk_broken(self, rank: int | None, text: str) -> None:
        """A member has sent what no encoder makes, or nobody is known to be to blame."""
        self._performer.broken(rank, text)

    def bound(self, round_: int, bitmap: int) -> tuple[int, float] | None:
        """R2: which of these are bound to a round, with which weight; None while one has not decided."""
        return self._machine.bound(round_, bitmap)

    def bucket_complete(
        self, round_: int, bucket: int, poisoned: bool, contributors: int, weight: float, squared_norm: float
    ) -> None:
        """All of a bucket is final here."""
        self._performer.handle(ResultReady(round_, bucket, contributors, weight, poisoned, squared_norm))

    def result_decoded(self, round_: int) -> None:
        """The means lie where the learner reads them."""
        self._performer.handle(RoundDecoded(round_))
