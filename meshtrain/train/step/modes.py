"""Puts an engine together: the parts that every mode of `--sync` has, and those of its own.

Two kinds of mode exist. With `bsp`, `ssp:S` and `demo` each backward pass is a round of gradients; with `local:H` and
its kin a round is of what H local steps have changed (R9, period). Each function below makes the parts in the order in
which values pass through them: into the contribution, into the base, then the boundary, then what the script calls.
"""

from dataclasses import dataclass

from meshtrain.train.data.step_samples import StepSamples
from meshtrain.train.link.channel import Channel
from meshtrain.train.link.neighbour_slots import NeighbourSlots
from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.model.state import ReplicaState, RoundProgress
from meshtrain.train.optim.clipping import UntouchedGradients, refusal_to_clip
from meshtrain.train.optim.frozen_variance import FrozenVariance
from meshtrain.train.optim.leader_options import LeaderOptions
from meshtrain.train.optim.lent_gradients import LentGradients
from meshtrain.train.optim.loss_scaling import LossScaling
from meshtrain.train.optim.momentum_handover import WithoutMomentum
from meshtrain.train.optim.optimizer_step import OptimizerStep
from meshtrain.train.optim.own_steps import OwnSteps
from meshtrain.train.optim.sign_sgd import OnSigns
from meshtrain.train.optim.stale_view import StaleView
from meshtrain.train.partial.progressive import Progressive
from meshtrain.train.periods.central_average import CentralAverage
from meshtrain.train.periods.fragment_weights import FragmentWeights
from meshtrain.train.periods.inner_muon import WithMuon
from meshtrain.train.periods.local_rates import LongerSteps
from meshtrain.train.periods.local_weights import LocalWeights
from meshtrain.train.periods.mixed_weights import MixedWeights
from meshtrain.train.step.base import Base
from meshtrain.train.step.boundary import StepBoundary
from meshtrain.train.step.buffers import BuffersAhead, ModelBuffers
from meshtrain.train.step.contribution import StepContribution
from meshtrain.train.step.engine import Engine
from meshtrain.train.step.gradient_step import GradientStep
from meshtrain.train.step.gradients import GradientHooks
from meshtrain.train.step.local_step import LocalStep, PeriodWeights
from meshtrain.train.step.mask_growth import MaskGrowth
from meshtrain.train.step.means import RoundMeans
from meshtrain.train.step.saving import StateSaver
from meshwire.codecs.spec import CodecSpec
from meshwire.messages.learner import EndPeriod
from meshwire.sync_modes.mode import SyncSettings


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of, whatever its mode.

    Attributes:
        state: of model and optimizer, which hold the base.
        options: of the script's optimizer, those that it had at `mt.prepare`.
        means: where the means of rounds are.
        samples: what the loader has handed out.
        scaling: of the script's GradScaler.
        growing: the part of the model that grows; None without one.
        kept: where the base lies, if it is to outlive this process (J3, kept base).
        channel: to the daemon.
        sync: how the members of the job keep in step.
        coefficient: c, of what the learner's own gradients that no round has covered would change (O2, base and view).
        codec: of the job.
        hash_every: rounds between two hashes of the base; 0: at the end only.
        members: devices that train.
        learners: of each device (R6).
        longer: local steps take longer rates where the optimizer divides by the size of gradients (O13).
    """

    state: ReplicaState
    options: LeaderOptions
    means: RoundMeans
    samples: StepSamples
    scaling: LossScaling
    growing: Progressive | None
    kept: NoKeptState
    channel: Channel
    sync: SyncSettings
    coefficient: float
    codec: CodecSpec
    hash_every: int
    members: int
    learners: int = 1
    longer: bool = True


def build_engine(parts: EngineParts, progress: RoundProgress) -> Engine:
    """The engine of a learner whose model and optimizer hold the base after `progress.round`.

    From now on the hooks are in place, `optimizer.step()` is the engine's, and what the daemon says is heard.
    """
    state = parts.state
    parts.means.masks.begin([state.optimizer] if state.outer is None else [state.optimizer, state.outer])
    return _local_rounds(parts, progress) if parts.sync.period else _gradient_rounds(parts, progress)


def _gradient_rounds(parts: EngineParts, progress: RoundProgress) -> Engine:
    """Each backward pass is a round of gradients, which the script's own optimizer takes into the base."""
    means, staleness, scaling = parts.means, parts.sync.staleness, parts.scaling
    step = _base_step(parts)
    buffers = _buffers(parts)
    own_steps = OwnSteps(means.parameters(), step, parts.options, parts.coefficient)
    view = StaleView(means.parameters(), own_steps, parts.kept)
    contribution = StepContribution(means, buffers, parts.samples, parts.options, parts.channel, "gradient")
    base = Base(step, means, buffers, view, parts.options, parts.kept, parts.channel, parts.hash_every)
    untouched = _untouched(means)
    saver = StateSaver(parts.state, base, scaling, parts.channel)
    lent = LentGradients()
    boundary = _boundary(parts, base, contribution, untouched, lent, saver)
    hooks = GradientHooks(base, contribution, view, scaling, untouched, lent, staleness)
    steps = GradientStep(hooks, base, contribution, boundary, scaling, untouched, lent, staleness)
    saver.go_on_from(progress)
    parts.kept.begin(view.beside, buffers.watched, saver)
    return _engine(parts, base, contribution, boundary, steps)


def _local_rounds(parts: EngineParts, progress: RoundProgress) -> Engine:
    """The script's optimizer steps on local weights; the outer one takes the mean of their changes into the base."""
    means, scaling, outer = parts.means, parts.scaling, parts.state.outer
    assert outer is not None
    buffers = _buffers(parts)
    outer_step = OptimizerStep(outer)
    weights = _local_weights(parts, outer_step)
    # Options of the script's optimizer are its learner's own, as its state is; those of the outer one are constant.
    contribution = StepContribution(means, buffers, parts.samples, None, parts.channel, "change by local steps")
    base = Base(outer_step, means, buffers, weights, parts.options, parts.kept, parts.channel, parts.hash_every)
    saver = StateSaver(parts.state, base, scaling, parts.channel)
    boundary = _boundary(parts, base, contribution, _untouched(means), LentGradients(), saver)
    growth = MaskGrowth(base, scaling)
    optimizer, muon = parts.state.optimizer, parts.state.muon
    own = OptimizerStep(optimizer) if muon is None else WithMuon(optimizer, muon)
    if parts.longer:
        LongerSteps(own, base, parts.members, parts.learners)
    steps = LocalStep(own, base, contribution, boundary, weights, growth, scaling, parts.sync)
    parts.channel.route(EndPeriod, steps.end_early)
    saver.go_on_from(progress)
    base.contributors = min(base.contributors, parts.members)  # the job may be gone on with by fewer
    parts.kept.begin(weights.beside, buffers.watched, saver)
    return _engine(parts, base, contribution, boundary, steps)


def _buffers(parts: EngineParts) -> ModelBuffers:
    kind = BuffersAhead if parts.sync.staleness else ModelBuffers
    return kind(parts.means.tensors, parts.means.plan)


def _local_weights(parts: EngineParts, outer_step: OptimizerStep) -> PeriodWeights:
    """What local steps move."""
    parameters = parts.means.parameters()
    if parts.sync.fragments:
        drawn = parts.means if parts.sync.random else None
        return FragmentWeights(parameters, parts.means.positions_of_rounds(parts.sync.fragments), drawn, parts.kept)
    own = OwnSteps(parameters, outer_step, parts.options, parts.coefficient)
    if parts.sync.gossip:
        around = NeighbourSlots(parts.means.slots, parts.means.places_of_parameters(), parts.channel)
        return MixedWeights(parameters, own, parts.kept, around, parts.sync.gossip)
    if parts.sync.central:
        return CentralAverage(parameters, own, parts.kept, parts.learners)
    return LocalWeights(parameters, own, parts.kept)


def _base_step(parts: EngineParts) -> OptimizerStep:
    """How the script's optimizer steps on a mean."""
    optimizer, momentum = parts.state.optimizer, parts.means.tensors.manifest.momentum
    if momentum is not None:
        return WithoutMomentum(optimizer, parts.means.coded_parameters(), momentum)
    if parts.codec.of_momentum:
        return FrozenVariance(optimizer, parts.codec.warmup)
    return OnSigns(optimizer) if parts.sync.signs else OptimizerStep(optimizer)


def _untouched(means: RoundMeans) -> UntouchedGradients:
    return UntouchedGradients([(spec.name, tensor) for _, spec, tensor in means.tensors.kind("parameter")])


def _boundary(
    parts: EngineParts,
    base: Base,
    contribution: StepContribution,
    untouched: UntouchedGradients,
    lent: LentGradients,
    saver: StateSaver,
) -> StepBoundary:
    return StepBoundary(
        base,
        contribution,
        untouched,
        lent,
        saver,
        parts.growing,
        parts.channel,
        absent_in_barriers=parts.sync.staleness > 0,
    )


def _engine(
    parts: EngineParts,
    base: Base,
    contribution: StepContribution,
    boundary: StepBoundary,
    steps: GradientStep | LocalStep,
) -> Engine:
    return Engine(
        base,
        contribution,
        boundary,
        steps,
        parts.channel,
        clip_refusal=refusal_to_clip(parts.codec),
        # Under a bound rounds go on without who has finished. Of parts that take turns others may have rounds left,
        # which this one, where it came late, is not in.
        flushes=parts.sync.staleness > 0 or parts.sync.fragments > 1,
        base_apart=bool(parts.sync.staleness or parts.sync.period),
    )
