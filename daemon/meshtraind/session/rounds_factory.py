"""Makes the rounds of a job on this daemon: with all others at its start, or alone where it is taken in later."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.rounds.history import Entry
from meshtraind.rounds.trace import Trace
from meshtraind.startup.requests import check_travel
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import RequestFailed
from meshtraind.transport.round_link import RoundLink
from meshwire.codecs.registry import parse_codec
from meshwire.jobs.lifecycle import job_number
from meshwire.memory.shared_slots import MemoryLayout
from meshwire.message_base import Wire
from meshwire.messages.job import Generation
from meshwire.messages.learner import SampleSpace
from meshwire.messages.startup import Model
from meshwire.model.manifest import ModelManifest
from meshwire.model.plan import Plan, plan_buckets

if TYPE_CHECKING:
    from meshtraind.rounds.catchup import Beginning
    from meshtraind.rounds.driver import Rounds


class RoundsFactory:
    """Makes the rounds of one job, and made anew where this device's history is not kept; holds their trace.

    Args:
        links: the way to each other member, by rank; live.
        rtt_s: to the farthest member.
        stall_s: as of `Timeouts`.
        notify: sends the learner a notice.
        fail: ends this device's part with a reason.
        refuse: called with the rank of a member that has broken the rules, and how.
        on_round: called with the rounds and each complete one, in order.

    Attributes:
        manifest: of the model that is trained, once rounds were made.
    """

    def __init__(
        self,
        job: Job,
        links: Mapping[int, RoundLink],
        rtt_s: float,
        stall_s: float,
        notify: Callable[[Wire], None],
        fail: Callable[[str], None],
        refuse: Callable[[int, str], None],
        on_round: Callable[["Rounds", int], None] = lambda _, __: None,
    ) -> None:
        self._job = job
        self._links = links
        self._rtt_s = rtt_s
        self._stall_s = stall_s
        self._notify = notify
        self._fail = fail
        self._refuse = refuse
        self._on_round = on_round
        self._trace: Trace | None = None
        self._plan_digest = b""
        self.manifest: ModelManifest

    def first(
        self,
        manifest: ModelManifest,
        plan: Plan,
        samples: SampleSpace | None,
        memory: SharedMemory,
        generation: Generation,
        entry: Entry | None = None,
    ) -> "Rounds":
        """In the generation that begins the job. `entry`: after which round, if not before the first."""
        begins = entry or Entry()
        return self._make(manifest, plan, samples, memory, generation, begins, loading=False, trace_name="trace.jsonl")

    def loading(self, generation: Generation, beginning: "Beginning", memory: SharedMemory) -> "Rounds":
        """At the cut of a later one. Raises RequestFailed when the plan of the others is not computed here."""
        model = beginning.model
        check_travel(self._job.spec, model.manifest)
        plan = plan_buckets(model.manifest, self._job.spec.bucket_bytes, parse_codec(self._job.spec.codec))
        if plan.digest() != model.plan:
            raise RequestFailed("the others plan their buckets differently: install the same version of meshtraind")
        memory.make(MemoryLayout.for_bound(plan.total_values, self._job.spec.sync.staleness))
        trace = f"trace-{generation.number}.jsonl"
        entry, samples = beginning.entry, beginning.samples
        return self._make(model.manifest, plan, samples, memory, generation, entry, loading=True, trace_name=trace)

    def _make(
        self,
        manifest: ModelManifest,
        plan: Plan,
        samples: SampleSpace | None,
        memory: SharedMemory,
        generation: Generation,
        entry: Entry,
        *,
        loading: bool,
        trace_name: str,
    ) -> "Rounds":
        # numpy, which an idle daemon does not need
        from meshtraind.executor.factory import ExecutorFactory
        from meshtraind.executor.host import ExchangeSettings
        from meshtraind.rounds.driver import JobModel, Rounds, RoundsPorts, RoundsStart
        from meshtraind.rounds.trace_recorder import RoundRecorder

        self.close()
        self.manifest = manifest
        self._plan_digest = plan.digest()
        spec = self._job.spec
        self._trace = Trace(self._job.folder / trace_name) if spec.trace else None
        settings = ExchangeSettings(
            plan=plan,
            codec=spec.codec,
            topology=spec.topology,
            momentum=manifest.momentum,
            job=job_number(spec.job),
            seed=spec.seed,
            staleness=spec.sync.staleness,
        )
        planes = ExecutorFactory(settings, self._links, memory.result(), self._trace)
        return Rounds(
            JobModel(spec, manifest, plan, samples),
            RoundsStart(self._job.rank, generation, entry, loading),
            RoundsPorts(self._links, memory, planes),
            self,
            RoundRecorder(self._trace) if self._trace is not None else None,
            rtt_s=self._rtt_s,
            stall_s=self._stall_s,
        )

    # What the rounds say to whoever made them

    def notify(self, body: Wire, /) -> None:
        """Sends the learner a notice."""
        self._notify(body)

    def fail(self, reason: str, /) -> None:
        """Ends this device's part."""
        self._fail(reason)

    def refuse(self, rank: int, text: str, /) -> None:
        """A member has broken the rules."""
        self._refuse(rank, text)

    def round_complete(self, rounds: "Rounds", round_: int, /) -> None:
        """The next round is complete."""
        self._on_round(rounds, round_)

    def model(self) -> Model:
        """What a member without history is told."""
        return Model(job=self._job.spec.job, rank=self._job.rank, manifest=self.manifest, plan=self._plan_digest)

    def close(self) -> None:
        """Writes what is left of the trace."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None
