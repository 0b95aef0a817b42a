"""What a learner asks for before round 1: model, plan and start state agreed with all members, memory mapped."""

import asyncio
from collections.abc import Mapping

from meshtraind.learner.shared_memory import SharedMemory, SharedMemoryError
from meshtraind.learner.software import memory_bytes
from meshtraind.rounds.history import Entry
from meshtraind.startup.agreement import Agreement
from meshtraind.startup.resume import Resuming
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.cleanup import STATE
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import Connection, Emit, RequestFailed
from meshwire.codecs.registry import FP16, parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.layout.budget import budget_of
from meshwire.layout.by_round import RoundLayouts
from meshwire.layout.encoded import EncodedLayout
from meshwire.memory_layout.footprint import fits, residual_bytes, retained_bytes
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.messages.job import JobSpec
from meshwire.messages.learner import LearnerModel, LearnerState, SampleSpace, StateTask
from meshwire.messages.startup import Model
from meshwire.model.manifest import ModelManifest
from meshwire.model.plan import Plan, plan_buckets
from meshwire.model.schedule import refusal
from meshwire.sync_modes.codec_for_mode import suits

PREPARED_TWICE = "meshtrain.prepare was called twice; call it once in a script"


def check_travel(spec: JobSpec, manifest: ModelManifest) -> None:
    """Refuses what does not go with a model whose vector changes its length (T1, travel). The learner has looked, too;
    a model may also come from another member. Raises RequestFailed."""
    why = refusal(spec.sync, parse_codec(spec.codec)) if manifest.travel is not None else None
    if why is not None:
        raise RequestFailed(f"not all of this model's values travel in every round, which does not go with {why}")


class Preparation:
    """Answers what one learner asks for before round 1: model, state, readiness, each once.

    Every method raises RequestFailed with a text for the script.

    Attributes:
        manifest, plan: None until the model was given.
        samples: what the prepared loader reads, if there is one.
        entry: the round after which the job begins, if it goes on from a checkpoint.
    """

    def __init__(
        self,
        job: Job,
        links: Mapping[int, Connection],
        memory: SharedMemory,
        agreement: Agreement,
        store: BlobStore,
    ) -> None:
        self.manifest: ModelManifest | None = None
        self.plan: Plan | None = None
        self.samples: SampleSpace | None = None
        self.entry: Entry | None = None
        self._resuming: Resuming | None = None
        self._job = job
        self._links = links
        self._memory = memory
        self._agreement = agreement
        self._store = store
        self._folder = job.folder / STATE

    async def model(self, body: LearnerModel, emit: Emit) -> None:
        """Returns when all members have the same model and plan."""
        if self.manifest is not None:
            raise RequestFailed(PREPARED_TWICE)
        self.manifest = body.manifest
        self.samples = body.samples
        spec = self._job.spec
        check_travel(spec, body.manifest)
        self.plan = await asyncio.to_thread(plan_buckets, body.manifest, spec.bucket_bytes, parse_codec(spec.codec))
        self._check_fits(body, self.plan)
        try:
            self._memory.map(MemoryLayout.for_bound(self.plan.total_values, spec.sync.staleness))
        except SharedMemoryError as error:
            raise RequestFailed(str(error)) from error
        if spec.resume is not None:
            self._resuming = await asyncio.to_thread(Resuming, self._job.folder, spec.resume)
            self.entry = self._resuming.entry(body)
        own = Model(job=spec.job, rank=self._job.rank, manifest=body.manifest, plan=self.plan.digest())
        await self._agreement.agree_on_model(own, emit)

    def _check_fits(self, body: LearnerModel, plan: Plan) -> None:
        """Refuses a job that this machine cannot hold (M1, memory): it would swap, and all others wait for it; and a
        budget of the codec's that is too small for the model. Raises RequestFailed."""
        spec = self._job.spec
        codec, staleness = parse_codec(spec.codec), spec.sync.staleness
        try:
            budget_of(plan, EncodedLayout(plan, codec))
        except ValueError as error:
            raise RequestFailed(str(error)) from None
        layouts = RoundLayouts(plan, codec)
        members_max = spec.peers_max or len(self._job.members)
        retained = retained_bytes(layouts.bytes_max, staleness, collective_for(codec, spec.topology), members_max)
        retained += residual_bytes(codec, plan.total_values, staleness) + layouts.transform_bytes(staleness)
        enough, reason = fits(body.learner_bytes + body.memory_bytes + retained, memory_bytes())
        if not enough:
            name = self._job.members[self._job.rank].name
            other = ", --codec fp16," if suits(spec.sync, FP16) else ""
            raise RequestFailed(
                f"{name} {reason} (`meshtrain submit --dry-run` shows the parts): submit with a smaller bound"
                f"{other} or without it (--on)"
            )

    async def state(self, body: LearnerState, emit: Emit) -> StateTask:
        """What the learner has to write (the giver) or to load, so that all start equal (J1)."""
        if self._resuming is not None:
            return self._resuming.task(body)
        return await self._agreement.agree_on_state(body.units, self._folder, self._links, self._store, emit)

    async def ready(self, emit: Emit) -> None:
        """Returns when every member's learner has its state."""
        await self._agreement.ready(self._folder, self._store, emit)
