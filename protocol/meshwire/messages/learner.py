"""Messages between a learner and its daemon, on the daemon's local endpoint: `Learner...` from the one, the rest to it.

A learner attaches with `meshwire.messages.local.Attach`. Then the daemon drives it from step to step: it gives it
rounds to apply, one at a time, and the word to start.
"""

from typing import Annotated

from pydantic import Field

from meshwire import limits
from meshwire.encoded_layout.lgc_autoencoder import GROUP_VALUES
from meshwire.message_base import Digest, Int64, Wire
from meshwire.messages.envelope import message
from meshwire.messages.job import JobSpec, LogValues, Member, Rank, Text
from meshwire.messages.local import AnyPath
from meshwire.messages.rounds import BatchSize, Bytes, Poison, Round, SampleBlock
from meshwire.model.manifest import ModelManifest
from meshwire.sync_modes.neighbours import NEIGHBOURS_MAX

EncoderWeights = Annotated[bytes, Field(max_length=limits.ENCODER_WEIGHTS_BYTES_MAX)]  # fp32, little-endian


LocalSteps = Annotated[int, Field(ge=1, le=limits.PERIOD_MAX)]
TurnNumber = Annotated[int, Field(ge=1, lt=limits.PERIOD_MAX)]
MIXED_SLOTS_MAX = 2 * max(NEIGHBOURS_MAX.values())  # of neighbours


@message("learner.welcome")
class LearnerWelcome(Wire):
    """Reply to a learner's `Attach`. The bound s and what goes with it stand in `spec.sync`; its period is the one that
    the job has begun with, and how long each is, the word to begin it says (C3)."""

    spec: JobSpec
    rank: Rank
    members: tuple[Member, ...]
    data_dir: AnyPath | None
    output_dir: AnyPath
    learner: Annotated[int, Field(ge=0, lt=limits.LEARNERS_MAX)] = 0  # which of `spec.learners` of this device (R6)


class SampleSpace(Wire):
    """One epoch of a prepared loader; equal on all members."""

    # samples, or batches if these are dealt whole; of several learners of a device (R6) groups of so many
    total: Annotated[int, Field(ge=1)]
    batch: BatchSize  # of them
    whole_batches: bool
    drop_last: bool


@message("learner.model")
class LearnerModel(Wire):
    """Request: the prepared model. The learner has sized the shared memory for it. Reply: `Done` when it is that of the
    others."""

    manifest: ModelManifest
    memory_bytes: int  # of the shared memory
    learner_bytes: Annotated[int, Field(ge=0)] = 0  # what the learner will hold besides: base, view, optimizer state
    samples: SampleSpace | None = None  # what a prepared loader reads


@message("learner.state")
class LearnerState(Wire):
    """Request: digests of this learner's start state by unit (J1). Reply: `StateTask`."""

    units: tuple[Digest, ...]


@message("learner.state.task")
class StateTask(Wire):
    """Load these units from `folder`, where they are files named by unit number: in all others its state is the one to
    begin from. Or take over what the process of before has kept in memory (J3)."""

    units: tuple[int, ...]
    folder: AnyPath
    round: Annotated[int, Field(ge=0)] = 0  # after which the state was read; 0: the start
    kept: bool = False  # it lies in memory


@message("learner.ready")
class LearnerReady(Wire):
    """Request: the state task is done. Reply: `Done`; `Start` follows when its rank computes."""


@message("learner.bucket")
class LearnerBucket(Wire):
    """Notice: this bucket of this step lies in the raw slot, multiplied by `weight` (W3).

    All buckets of a step carry the same weight, samples, hyperparameters and claim.
    """

    step: int
    bucket: int
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    samples: tuple[SampleBlock, ...] = ()
    hyperparameters: Bytes = b""
    claim: Annotated[int, Field(ge=0, le=limits.CLAIM_BATCHES_MAX)] = 0
    poison: Poison | None = None


@message("learner.sealed")
class LearnerSealed(Wire):
    """Notice: the backward pass of this step has ended, all buckets were sent."""

    step: int
    used: Bytes
    integers: tuple[Int64, ...]


@message("learner.applied")
class LearnerApplied(Wire):
    """Notice: `round` is in the base, or was void: the result slot is free (R1)."""

    round: Round


@message("learner.turn")
class LearnerTurn(Wire):
    """Notice: a turn of mixing within a period (R9) has begun; slots of turns before it may be written again. Answer:
    `TurnNews`."""

    round: Round  # that the period ends in
    turn: TurnNumber
    shown: bool  # what the own weights are apart from the base by lies in their slot; else that was not free


@message("learner.stepped")
class LearnerStepped(Wire):
    """Notice: `step` has ended, the learner stands at its boundary. Answer: the rounds to apply, then `Start`."""

    step: int
    samples: Annotated[int, Field(ge=0, lt=limits.SAMPLES_MAX)]
    step_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    exposed_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # of it: waiting for rounds, for Start, for samples


@message("learner.goal")
class LearnerGoal(Wire):
    """Notice: the script goes on until the job has had so many rounds (`mt.steps`)."""

    rounds: Annotated[int, Field(ge=0)]


@message("learner.log")
class LearnerLog(Wire):
    """Notice: values given to mt.log."""

    step: int
    values: LogValues


@message("learner.hash")
class LearnerHash(Wire):
    """Notice: digest of the base after `round`."""

    round: int
    sha256: Digest


@message("learner.encoder")
class LearnerEncoder(Wire):
    """Notice: what the autoencoder of an `EncoderTask` has learnt; or `error` says why nothing."""

    number: int
    weights: EncoderWeights = b""
    error: Text | None = None


@message("learner.barrier")
class LearnerBarrier(Wire):
    """Notice: it waits for every member's learner, and applies rounds meanwhile. Answer: `BarrierPassed`."""

    number: Annotated[int, Field(ge=0)]  # counted from 1; 0: the end of its part in the job


@message("learner.idle")
class LearnerIdle(Wire):
    """Notice: no step will follow for now (R5). Answer: rounds to apply as they are complete."""

    reason: Text
    finished: bool  # none will ever follow


@message("learner.back")
class LearnerBack(Wire):
    """Notice: no longer idle. Answer: the rounds to apply, then `Start` of the step that had not begun."""


@message("round.done")
class RoundDone(Wire):
    """Notice to the learner: apply `round`, whose means lie in the result slot unless it is void. In order, one at a
    time: the next one comes after its `LearnerApplied`."""

    round: Round
    step: int  # the learner's own that is in it; 0: none
    void: bool
    reason: Text  # of a void round
    overflow: bool  # of a GradScaler was all that made it void
    stop: bool  # V1 with --on-nan stop: the learner raises
    weight: float
    contributors: Annotated[int, Field(ge=0, lt=2**limits.MEMBERS_MAX)]  # bitmap by rank, as in a frame's header
    used: Bytes
    integers: tuple[Int64, ...]
    hyperparameters: Bytes  # O3: packed; empty when nobody sent any
    squared_norm: float  # O4: of the means of all parameters
    start: Annotated[int, Field(ge=0)] = 0  # R1: this step begins when the round is applied, without `Start`; 0: none
    local_steps: LocalSteps = 1  # of a period that begins on this base (R9), or passes that add up (O6)


class Shown(Wire):
    """What a neighbour's weights are apart from the base by lies in a slot."""

    slot: Annotated[int, Field(ge=1, le=MIXED_SLOTS_MAX)]
    weight: Annotated[float, Field(gt=0, le=1)]  # W_ij, of these weights in the mixture


@message("turn.news")
class TurnNews(Wire):
    """Notice to the learner: how far a turn of mixing is (R9). Each says all of it."""

    round: Round
    turn: TurnNumber
    shown: Annotated[tuple[Shown, ...], Field(max_length=MIXED_SLOTS_MAX)]
    awaited: Annotated[int, Field(ge=0, le=MIXED_SLOTS_MAX)]  # neighbours that may still show theirs
    sent: bool  # the own slot may be written again


@message("start")
class Start(Wire):
    """Notice to the learner: begin this step (R1). With s=0 a round that it is in says so itself."""

    step: int
    decided: Annotated[int, Field(ge=0)]  # rounds that this learner is in or was passed over in
    local_steps: LocalSteps = 1  # that it has, where it is a period (R9), or passes that add up (O6)


@message("period.end")
class EndPeriod(Wire):
    """Notice to the learner, whose step is a period: end it with the next local step, for others have ended theirs and
    do without the rest (R9)."""

    step: int


@message("step.lost")
class StepLost(Wire):
    """Notice to the learner: this step is in no round."""

    step: int
    reason: Text
    retry: bool  # its samples were in no bind either (R5): use them again


@message("grant")
class Grant(Wire):
    """Notice to the learner: these batches are its own too, each of one or more blocks of one epoch (X2).

    One comes when it begins, one with each complete round that it is in, and others when ranks have left.
    """

    batches: tuple[tuple[SampleBlock, ...], ...]
    step: Annotated[int, Field(ge=0)] = 0  # of the learner's, whose round is complete; 0: no round has brought them


@message("epoch.over")
class EpochOver(Wire):
    """Notice to the learner: every block of this epoch, and of all before it, is in a complete round (X4), or was held
    by a member that has finished."""

    epoch: int
    unused: int  # of the latter, in samples, or batches if these are dealt whole


@message("save")
class Save(Wire):
    """Notice to the learner: write the base with the optimizer's state into `folder`, at the first boundary at which it
    has applied `after_round` or a later one, in a period also between two local steps. Answer: `LearnerSaved`."""

    number: int
    after_round: Annotated[int, Field(ge=0)]
    folder: AnyPath
    digests: tuple[Digest, ...] = ()  # of the units of whoever asks: what is equal there is not written


@message("learner.saved")
class LearnerSaved(Wire):
    """Notice: the base after `round` lies in the folder, one file for each unit (J1); or `error` says why not."""

    number: int
    round: Annotated[int, Field(ge=0)]
    units: Annotated[int, Field(ge=0)]
    left_out: tuple[Annotated[int, Field(ge=0)], ...] = ()  # of them: equal to those whose digests it was told
    error: Text | None = None


@message("encoder.task")
class EncoderTask(Wire):
    """Notice to the learner, which stands at its boundary: train LGC's autoencoder. Answer: `LearnerEncoder`."""

    number: int
    channels: Annotated[int, Field(ge=1, le=GROUP_VALUES)]
    weights: EncoderWeights  # of now
    rows: Annotated[bytes, Field(max_length=limits.ENCODER_SAMPLE_BYTES_MAX)]  # fp32, ENCODER_ROW_VALUES in each


@message("barrier.passed")
class BarrierPassed(Wire):
    """Notice to the learner: all have reached it, and every round of before is applied here."""

    number: int
    error: Text | None  # why it cannot be passed


@message("waiting")
class Waiting(Wire):
    """Event or notice, about once a second while the learner is blocked: on what, and a sign of life."""

    reason: Text


@message("stop")
class Stop(Wire):
    """Notice to the learner: the job ends; raise in the training loop."""

    reason: Text


# All that a learner may say to its daemon once it has attached, as requests and as notices.
LEARNER_ASKS = (LearnerModel, LearnerState, LearnerReady)
LEARNER_TELLS = (
    LearnerApplied,
    LearnerBack,
    LearnerBarrier,
    LearnerBucket,
    LearnerEncoder,
    LearnerGoal,
    LearnerHash,
    LearnerIdle,
    LearnerLog,
    LearnerSaved,
    LearnerSealed,
    LearnerStepped,
    LearnerTurn,
)
