"""From `mt.prepare` to the first step: the peers compare model and start state, and the engine is put together.

At the job's start as in a job that runs: the daemon compares the model with that of the others, gets the state to begin
from where this one differs, and says when the first step may begin.
"""

from contextlib import ExitStack
from pathlib import Path

import torch

from meshtrain.errors import UnexpectedReply
from meshtrain.train.data.step_samples import StepSamples
from meshtrain.train.link.channel import Channel
from meshtrain.train.link.environment import Environment
from meshtrain.train.link.shared_slots import SharedSlots
from meshtrain.train.model.kept_state import KeptState, NoKeptState
from meshtrain.train.model.memory_needs import learner_bytes
from meshtrain.train.model.state import ReplicaState, RoundProgress
from meshtrain.train.optim.leader_options import LeaderOptions
from meshtrain.train.optim.loss_scaling import LossScaling
from meshtrain.train.optim.scaled_rates import ScaledRates
from meshtrain.train.partial.drawn_values import drawn_values
from meshtrain.train.partial.masks import Masks
from meshtrain.train.periods.inner_muon import inner_muon
from meshtrain.train.periods.local_rates import local_steps_longer
from meshtrain.train.periods.outer_optimizer import outer_optimizer
from meshtrain.train.step.engine import Engine
from meshtrain.train.step.means import RoundMeans
from meshtrain.train.step.modes import EngineParts, build_engine
from meshtrain.train.step.preparation import PreparedModel
from meshwire.codecs.registry import parse_codec
from meshwire.messages.job import JobSpec
from meshwire.messages.learner import LearnerModel, LearnerState, LearnerWelcome, StateTask
from meshwire.model.plan import plan_buckets
from meshwire.model.plans_by_round import RoundPlans
from meshwire.sync_modes.mode import own_coefficient


def start_engine(
    prepared: PreparedModel,
    scaler: torch.amp.GradScaler | None,
    samples: StepSamples,
    welcome: LearnerWelcome,
    environment: Environment,
    channel: Channel,
) -> Engine:
    """Returns when the first step may begin, with the model as it is to compute with; or, where the job's first epochs
    are over, when their rehearsal may.

    Args:
        prepared: what takes part.
        scaler: given to `mt.prepare`.
        samples: counts what the prepared loader hands out.
        welcome: the job, and who takes part.
        environment: the shared memory.

    Raises:
        RequestError: a peer has another model, or a peer has failed.
        ConnectionLost, JobStopped, MeshtrainError.
    """
    spec, tensors = welcome.spec, prepared.tensors
    sync = spec.sync
    members = sum(not one.hub for one in welcome.members)
    coefficient = own_coefficient(sync.own, members) if sync.staleness else 0.0
    codec = parse_codec(spec.codec)
    plan = plan_buckets(tensors.manifest, spec.bucket_bytes, codec)
    slots = SharedSlots(environment.memory_fd, plan, sync, codec)
    model = LearnerModel(
        manifest=tensors.manifest,
        memory_bytes=slots.layout.total_bytes,
        learner_bytes=learner_bytes(
            tensors, prepared.optimizer, coefficient, sync, spec.masks, of_muon=prepared.of_muon
        ),
        samples=samples.space,
    )
    channel.ask(model, "agreement on the model")
    means = RoundMeans(
        tensors, RoundPlans(plan), slots, Masks(tensors, spec.masks), drawn_values(tensors.manifest, sync, spec.seed)
    )
    outer = outer_optimizer(sync, means.parameters()) if sync.period else None
    muon = inner_muon(prepared.optimizer, prepared.of_muon)
    state = ReplicaState(tensors, prepared.optimizer, means.masks, outer, muon)
    kept = _kept_state(environment.kept_fd, spec, means, state)
    rates = ScaledRates(spec.scale_lr, samples.space, spec.learners)
    # A saved state may hold more: what its writer's scheduler has added.
    options = LeaderOptions(prepared.optimizer, rates)
    progress = _agree_on_state(channel, state, kept)
    parts = EngineParts(
        state=state,
        options=options,
        means=means,
        samples=samples,
        scaling=LossScaling(scaler),
        growing=prepared.growing,
        kept=kept,
        channel=channel,
        sync=sync,
        coefficient=coefficient,
        codec=codec,
        hash_every=spec.hash_every,
        members=members,
        learners=spec.learners,
        longer=local_steps_longer(spec, prepared.of_muon),
    )
    engine = build_engine(parts, progress)
    with ExitStack() as undo:
        undo.callback(engine.close)  # the job may end before: the model is an ordinary one then
        channel.look()  # which epochs are over comes with the state
        if samples.behind:
            engine.enter_later()
        else:
            engine.enter()
        undo.pop_all()
    return engine


def _agree_on_state(channel: Channel, state: ReplicaState, kept: NoKeptState) -> RoundProgress:
    """Model and optimizer become what all peers have in common: the giver's at the start (G9), or where the job is now,
    by J1 (unit of transfer)."""
    task = channel.ask(LearnerState(units=state.digests()), "comparison of the start states")
    if not isinstance(task, StateTask):
        raise UnexpectedReply("the comparison of the start states", task)
    progress = RoundProgress()
    if task.kept:
        progress = kept.take_over(state.tensor, task.round)
    else:
        progress = state.load(task.units, Path(task.folder), task.round)
    return progress


def _kept_state(descriptor: int | None, spec: JobSpec, means: RoundMeans, state: ReplicaState) -> NoKeptState:
    """On the CPU the base can outlive this process, by J3 (kept base), but for masks."""
    parameters = means.parameters()
    on_cpu = all(tensor.device.type == "cpu" for tensor in parameters)
    if descriptor is None or not on_cpu or spec.masks is not None:
        return NoKeptState()
    frozen = [tensor for _, _, tensor in means.tensors.kind("frozen")]
    return KeptState(descriptor, parameters, frozen, state.optimizers)
