"""How much memory a job takes on each member, from its model and settings alone (M1)."""

from dataclasses import dataclass, fields, replace
from typing import Annotated

from pydantic import Field

from meshwire import limits
from meshwire.codecs.registry import FP32, CodecSpec
from meshwire.collectives.strategy import Collective, collective_for
from meshwire.jobs.files import human_bytes
from meshwire.memory_layout.shared_slots import MemoryLayout, round_bytes
from meshwire.message_base import Wire
from meshwire.model.manifest import ModelManifest
from meshwire.model.plan import VALUE_BYTES
from meshwire.sync_modes.mode import SyncSettings

UNAPPLIED_BYTES_MAX = 1024 * limits.MIB
ROUND_OBJECTS_BYTES = 16 * limits.KIB  # a round's bookkeeping: what counts where the model is tiny

Bytes = Annotated[int, Field(ge=0)]


class ModelSize(Wire):
    """A prepared model and its optimizer, in bytes of the dtypes that they have.

    Attributes:
        parameters: that are trained.
        frozen: parameters without gradients, and buffers that take no part in rounds.
        buffers: that take part.
        optimizer: class of the optimizer.
        optimizer_state: once it has stepped.
        optimizer_known: whether that is known; else it is a guess, two values for each of a parameter's.
    """

    parameters: Bytes
    frozen: Bytes
    buffers: Bytes
    optimizer: str
    optimizer_state: Bytes
    optimizer_known: bool

    @property
    def optimizer_of_torch(self) -> str | None:
        """The optimizer's class, if it is one of torch.optim."""
        return self.optimizer if self.optimizer_known else None


class Measurement(Wire):
    """What a script has prepared; the dry run reads it from a file."""

    manifest: ModelManifest
    size: ModelSize


@dataclass(frozen=True, slots=True)
class Footprint:
    """One learner's memory and its daemon's, in bytes, by what it is for. Not in it: what the forward and backward
    passes need, the loader's batches, and the programs themselves. Parameters, view and optimizer state are counted
    once, whether they lie in memory that outlives the learner (J3) or not.

    Attributes:
        parameters: of the model; frozen ones too.
        view: a copy of those that are trained, where what the learner computes with differs from the base; with
            `,gossip=G` what mixing has changed of them is another.
        gradients: `p.grad` of those that are trained.
        own_gradients: the learner's own that no applied round has covered yet.
        optimizer: its state, and that of the outer one.
        twin: a copy of that state, which takes own gradients ahead while a view is made.
        buffers: in the model, and their value after the last round.
        masks: which weights are kept.
        raw_slots, result_slot: shared memory of learner and daemon.
        mixed: with `,gossip=G` (R9), what is shown to neighbours and what they show, in memory of learner and daemon.
        retained: encoded, in the daemon, until every member has the round.
        residuals: of the codec's error feedback, and what it turns vectors into shorter ones with, in the daemon.
    """

    parameters: int
    view: int
    gradients: int
    own_gradients: int
    optimizer: int
    twin: int
    buffers: int
    masks: int
    raw_slots: int
    result_slot: int
    mixed: int
    retained: int
    residuals: int

    @property
    def learner_bytes(self) -> int:
        """What the learner holds beside the shared memory."""
        model = self.parameters + self.gradients + self.buffers
        return model + self.view + self.own_gradients + self.optimizer + self.twin + self.masks

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        return sum(size for _, size in self.parts())

    def of_learners(self, learners: int) -> "Footprint":
        """That of several learners of one device (R6): its daemon's part is that of one."""
        own = {name: size * learners for name, size in self.parts() if name not in ("retained", "residuals")}
        return replace(self, **own)

    def parts(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of every part, in the order of the fields."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))


def footprint(
    size: ModelSize,
    values: int,
    encoded_bytes: int,
    coefficient: float,
    sync: SyncSettings,
    codec: CodecSpec = FP32,
    members: int = 1,
    transform_bytes: int = 0,
    mask_bytes: int = 0,
    topology: str | None = None,
) -> Footprint:
    """The memory of one member.

    Args:
        values: of a round's vector (`Plan.total_values`), which is fp32 in the slots.
        encoded_bytes: of one encoded vector, at most (`EncodedLayout.total_bytes`).
        coefficient: c (O2). With 0, or s=0, the model's parameters are the base itself. Otherwise the base lies beside
            them, and so do the gradients of the s+1 steps that can be uncovered at once: at a boundary d - a <= s (R1),
            and the step that then begins adds one. The view is made by a twin of the optimizer.
        sync: the bound s; and whether learners step on weights of their own, beside which lie the base (R9) and, with
            a bound, where the period began. The outer momentum is one value for each of a parameter's.
        codec, members, topology: what a daemon keeps depends on them; a learner's memory does not. Members: at most.
        transform_bytes: of a codec that sends a shorter vector (`RoundLayouts.transform_bytes`).
        mask_bytes: of a learner with masks (`meshwire.model.masks.mask_bytes`).
    """
    staleness = sync.staleness
    overlaid = size.parameters if coefficient and staleness else 0
    outer_state = size.parameters if sync.outer_momentum else 0
    layout = MemoryLayout.for_job(values, sync, codec)
    mixed = layout.total_bytes - layout.mixed_offset(0) if layout.mixed_slots else 0
    return Footprint(
        parameters=size.parameters + size.frozen,
        view=overlaid + (size.parameters if sync.period else 0) + (size.parameters if sync.gossip else 0),
        gradients=size.parameters,
        own_gradients=(staleness + 1) * overlaid,
        optimizer=size.optimizer_state + outer_state,
        twin=(outer_state if sync.period else size.optimizer_state) if overlaid else 0,
        buffers=2 * size.buffers,
        masks=mask_bytes,
        raw_slots=layout.result_offset,
        result_slot=layout.total_bytes - layout.result_offset - mixed,
        mixed=mixed,
        retained=retained_bytes(encoded_bytes, staleness, collective_for(codec, topology), members),
        residuals=residual_bytes(codec, values, staleness) + transform_bytes,
    )


def residual_bytes(codec: CodecSpec, values: int, staleness: int) -> int:
    """What error feedback keeps: a worker's residual as it is and as it was before each of the rounds that can be on
    their way, and an owner's for the shards that it has, which are the whole vector where a member is alone. In a
    gather and on the ring nobody owns any. A worker's momentum is kept like its residual."""
    vectors = 1 + codec.reduction.owner_feedback + codec.momentum
    return vectors * (staleness + 2) * VALUE_BYTES * values if codec.error_feedback else 0


def retained_bytes(encoded_bytes: int, staleness: int, collective: Collective, members: int = 1) -> int:
    """What a daemon keeps encoded while every learner computes.

    A learner takes part in the rounds up to s+1 after those that it has applied (R1), and one that is complete here may
    not be so everywhere (G5). A learner that is late has fewer rounds of its own and, in exchange, as many of the
    others'. For one that does not compute at all its daemon keeps more, up to a limit of its own.

    Args:
        members: of the job, at most; a gather keeps what each has sent.
    """
    of_one = round_bytes(encoded_bytes, staleness, collective, members)
    complete_bytes = of_one if collective.reduction.gathered else encoded_bytes
    return (staleness + 1) * of_one + complete_bytes


def unapplied_max(retained_round_bytes: int, staleness: int) -> int:
    """How many rounds a daemon keeps for a learner that does not apply them, more than s of them in any case.

    Args:
        retained_round_bytes: of one (`round_bytes`).
    """
    return max(2 * (staleness + 1), UNAPPLIED_BYTES_MAX // (retained_round_bytes + ROUND_OBJECTS_BYTES))


def fits(total_bytes: int, available_bytes: int) -> tuple[bool, str]:
    """Whether a member can hold it, and why, as words that follow its name."""
    needed, available = human_bytes(total_bytes), human_bytes(available_bytes)
    return total_bytes <= available_bytes, f"has {available} of memory, and the job takes {needed}"
