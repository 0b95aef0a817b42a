"""Makes the rounds of a job on this daemon: of a model that its learner has described, or that the others train."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshtraind.job_start.prepared import DescribedModel, check_travel
from meshtraind.learner.shared_memory import SharedMemory, SharedMemoryError
from meshtraind.rounds.history import Entry
from meshtraind.rounds.trace import Trace
from meshtraind.storage.job_record import Job
from meshtraind.transport.requests import RequestFailed
from meshtraind.transport.round_link import RoundLink
from meshwire.codecs.registry import parse_codec
from meshwire.jobs.lifecycle import job_number
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.messages.generation import Model
from meshwire.messages.job import Generation
from meshwire.messages.learner import SampleSpace
from meshwire.model.manifest import ModelManifest
from meshwire.model.plan import Plan, plan_buckets

if TYPE_CHECKING:
    from meshtraind.rounds.catchup import Beginning
    from meshtraind.rounds.driver import Rounds, RoundsOwner


class RoundsFactory:
    """Makes the rounds of one job, and makes them anew where this device's history is not kept; holds their trace, and
    the memory that they share with the learner.

    Args:
        links: the way to each other member, by rank; live.
        rtt_s: to the farthest member.
        stall_s: as of `Timeouts`.

    Attributes:
        manifest: of the model that is trained, once rounds were made.
        memory: of the rounds of now, or of those that are made next: the next process of the learner gets it.
    """

    def __init__(self, job: Job, links: Mapping[int, RoundLink], rtt_s: float, stall_s: float) -> None:
        self._job = job
        self._links = links
        self._rtt_s = rtt_s
        self._stall_s = stall_s
        self._trace: Trace | None = None
        self._plan_digest = b""
        self.memory = SharedMemory()
        self.manifest: ModelManifest

    def new_memory(self) -> None:
        """Gives the memory of now back, once the process that has it does; rounds that are made next have another."""
        self.memory.close()
        self.memory = SharedMemory()

    def first(
        self, owner: "RoundsOwner", prepared: DescribedModel, generation: Generation, beginning: Entry
    ) -> "Rounds":
        """Makes rounds where the job begins, in memory that the learner has made. Raises RequestFailed."""
        manifest, plan = prepared.manifest, prepared.plan
        try:
            self.memory.map(self._layout(plan))
            return self._make(owner, manifest, plan, prepared.samples, generation, beginning, trace_name="trace.jsonl")
        except (SharedMemoryError, ValueError) as error:
            raise RequestFailed(str(error)) from error

    def loading(self, owner: "RoundsOwner", generation: Generation, beginning: "Beginning") -> "Rounds":
        """Makes rounds at the cut of a later generation. Raises RequestFailed when the plan of the others is not
        computed here, or their memory cannot be had."""
        model = beginning.model
        check_travel(self._job.spec, model.manifest)
        trace = f"trace-{generation.number}.jsonl"
        entry, samples = beginning.entry, beginning.samples
        try:
            plan = plan_buckets(model.manifest, self._job.spec.bucket_bytes, parse_codec(self._job.spec.codec))
            if plan.digest() != model.plan:
                raise RequestFailed("the others plan their buckets differently: install the same version of meshtraind")
            self.memory.make(self._layout(plan))
            return self._make(owner, model.manifest, plan, samples, generation, entry, trace_name=trace)
        except (SharedMemoryError, OSError, MemoryError, ValueError) as error:
            raise RequestFailed(str(error)) from error

    def _layout(self, plan: Plan) -> MemoryLayout:
        return MemoryLayout.for_job(plan.total_values, self._job.spec.sync, parse_codec(self._job.spec.codec))

    def _make(
        self,
        owner: "RoundsOwner",
        manifest: ModelManifest,
        plan: Plan,
        samples: SampleSpace | None,
        generation: Generation,
        entry: Entry,
        *,
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
        planes = ExecutorFactory(settings, self._links, self.memory.result(), self._trace)
        return Rounds(
            JobModel(spec, manifest, plan, samples),
            RoundsStart(self._job.rank, generation, entry),
            RoundsPorts(self._links, self.memory, planes),
            owner,
            RoundRecorder(self._trace) if self._trace is not None else None,
            rtt_s=self._rtt_s,
            stall_s=self._stall_s,
        )

    def model(self) -> Model:
        """What a member without history is told."""
        return Model(job=self._job.spec.job, rank=self._job.rank, manifest=self.manifest, plan=self._plan_digest)

    def close(self) -> None:
        """Writes what is left of the trace."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None
