"""What a learner has prepared at the beginning of a job: its model with the bucket plan, and whether that fits here."""

import asyncio
from dataclasses import dataclass

from meshtraind.machine.facts import memory_bytes
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import RequestFailed
from meshwire.codecs.registry import FP16, parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.encoded_layout.budget import budget_of
from meshwire.encoded_layout.by_round import RoundLayouts
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.memory_layout.footprint import fits, residual_bytes, retained_bytes
from meshwire.messages.job import JobSpec
from meshwire.messages.learner import LearnerModel, SampleSpace
from meshwire.model.manifest import ModelManifest
from meshwire.model.plan import Plan, plan_buckets
from meshwire.model.schedule import refusal
from meshwire.samples.epochs import rounds_per_epoch
from meshwire.sync_modes.codec_for_mode import suits


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """What is trained, as a learner here has described it.

    Attributes:
        samples: what the prepared loader reads, if there is one.
    """

    manifest: ModelManifest
    plan: Plan
    samples: SampleSpace | None


async def described_model(job: Job, body: LearnerModel) -> DescribedModel:
    """Plans the buckets. Raises RequestFailed, with a text for the script, where this model cannot be trained so."""
    spec = job.spec
    check_travel(spec, body.manifest)
    plan = await asyncio.to_thread(plan_buckets, body.manifest, spec.bucket_bytes, parse_codec(spec.codec))
    _check_fits(job, body, plan)
    if body.samples is not None:
        batches = [body.samples.batch] * len(job.counted)
        try:
            rounds_per_epoch(body.samples.total, batches, drop_last=body.samples.drop_last)
        except ValueError as error:
            raise RequestFailed(str(error)) from None
    return DescribedModel(body.manifest, plan, body.samples)


def check_travel(spec: JobSpec, manifest: ModelManifest) -> None:
    """Refuses what does not go with a model whose vector changes its length (T1, travel). The learner has looked, too;
    a model may also come from another member. Raises RequestFailed."""
    why = refusal(spec.sync, parse_codec(spec.codec)) if manifest.travel is not None else None
    if why is not None:
        raise RequestFailed(f"not all of this model's values travel in every round, which does not go with {why}")


def _check_fits(job: Job, body: LearnerModel, plan: Plan) -> None:
    """Refuses a job that this machine cannot hold (M1, memory): it would swap, and all others wait for it; and a
    budget of the codec's that is too small for the model. Raises RequestFailed."""
    spec = job.spec
    codec, staleness = parse_codec(spec.codec), spec.sync.staleness
    try:
        budget_of(plan, EncodedLayout(plan, codec))
    except ValueError as error:
        raise RequestFailed(str(error)) from None
    layouts = RoundLayouts(plan, codec)
    members_max = spec.peers_max or len(job.members)
    retained = retained_bytes(layouts.bytes_max, staleness, collective_for(codec, spec.topology), members_max)
    retained += residual_bytes(codec, plan.total_values, staleness) + layouts.transform_bytes(staleness)
    enough, reason = fits(body.learner_bytes + body.memory_bytes + retained, memory_bytes())
    if not enough:
        name = job.members[job.rank].name
        other = ", --codec fp16," if suits(spec.sync, FP16) else ""
        other += " --sync bsp," if spec.sync.period else ""
        raise RequestFailed(
            f"{name} {reason} (`meshtrain submit --dry-run` shows the parts): submit with a smaller bound"
            f"{other} or without it (--on)"
        )
