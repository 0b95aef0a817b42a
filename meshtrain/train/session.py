"""One learner in a job: attached to its daemon, then prepared, then training, then finished."""

import logging
import math
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from meshtrain.client import Client
from meshtrain.errors import ConnectionLost, NotSupported, RequestError, UsageError
from meshtrain.train.data.deal import Deal, SampleWaits
from meshtrain.train.data.loader import DealtLoader, dealable
from meshtrain.train.device import best_device, move_model
from meshtrain.train.environment import Environment
from meshtrain.train.link.channel import Channel
from meshtrain.train.link.shared_slots import SharedSlots
from meshtrain.train.model import masks as masked
from meshtrain.train.model import optimizers, progressive, tensors
from meshtrain.train.model.kept_state import KeptState, NoKeptState
from meshtrain.train.model.memory import learner_bytes
from meshtrain.train.model.state import ReplicaState, RoundProgress
from meshtrain.train.optim import momentum_handover as handover
from meshtrain.train.optim import sign_sgd as signs
from meshtrain.train.optim.amp import LossScaling
from meshtrain.train.optim.clipping import checked, refusal_to_clip
from meshtrain.train.optim.outer_optimizer import outer_optimizer
from meshtrain.train.single import local_data_dir
from meshtrain.train.step.engine import Engine, EngineSettings
from meshtrain.train.step.means import RoundMeans
from meshtrain.train.step.step_samples import StepSamples
from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.messages.learner import (
    BarrierPassed,
    EpochOver,
    Grant,
    LearnerBarrier,
    LearnerIdle,
    LearnerLog,
    LearnerModel,
    LearnerReady,
    LearnerState,
    LearnerWelcome,
    SampleSpace,
    StateTask,
    StepLost,
)
from meshwire.messages.local import Attach
from meshwire.model.masks import NOT_BOTH
from meshwire.model.plan import plan_buckets
from meshwire.model.plans_by_round import RoundPlans
from meshwire.model.schedule import refusal
from meshwire.samples.epochs import epoch_seed
from meshwire.sync.mode import own_coefficient

log = logging.getLogger("meshtrain")

M = TypeVar("M", bound=torch.nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
L = TypeVar("L")


class LearnerSession:
    """What `meshtrain`'s functions do inside a job."""

    def __init__(self, client: Client, welcome: LearnerWelcome, memory_fd: int, kept_fd: int | None = None) -> None:
        self._pid = os.getpid()
        self._channel = Channel(client)
        self._welcome = welcome
        self._memory_fd = memory_fd
        self._kept_fd = kept_fd
        self._drawn = StepSamples()
        self._device: torch.device | None = None
        self._prepared = False
        self._engine: Engine | None = None
        self._deal: Deal | None = None
        self._barriers = 0
        self._finished = False

    @classmethod
    def attach(cls, environment: Environment) -> "LearnerSession":
        """Calls the daemon. Raises ConnectionLost, RequestError."""
        attach = Attach(
            token=environment.token,
            role="learner",
            job=environment.job,
            pid=os.getpid(),
            torch=torch.__version__,
        )
        try:
            client, welcome = Client.attach(environment.endpoint, attach)
        except OSError as error:
            raise ConnectionLost(f"the daemon that started this script does not answer: {error}") from error
        if not isinstance(welcome, LearnerWelcome):
            client.close()
            raise ConnectionLost(f"the daemon answered with {type(welcome).__name__}: it is of another version")
        return cls(client, welcome, environment.memory_fd, environment.kept_fd)

    # Preparation

    def prepare(self, model: M, optimizer: O, scaler: torch.amp.GradScaler | None = None) -> tuple[M, O]:
        """Without a loader: every peer draws its own samples (X6)."""
        self._check_unprepared()
        self._draw_apart("no loader was given to mt.prepare")
        self._join(model, optimizer, scaler, "no loader")
        return model, optimizer

    def prepare_with_loader(
        self, model: M, optimizer: O, loader: L, scaler: torch.amp.GradScaler | None = None
    ) -> tuple[M, O, L]:
        """With the loader whose samples are dealt."""
        self._check_unprepared()
        given = dealable(loader)
        if given is None:
            self._draw_apart("the loader reads an IterableDataset")
            self._join(model, optimizer, scaler, "an iterable data set")
            return model, optimizer, loader
        spec = self._welcome.spec
        deal = self._deal = Deal(given, self.world_size, spec.seed, spec.sync)
        self._check_schedule(optimizer, given, deal)
        self._channel.route(Grant, lambda notice: deal.grant(notice.batches, notice.step))
        self._channel.route(EpochOver, lambda notice: self._epoch_over(deal, notice))
        self._drawn.start_counting(deal.bind)
        self._join(model, optimizer, scaler, deal.describe(), deal.space())
        waits = SampleWaits(self._channel.wait, self._end_epoch, self._end_period)
        dealt = DealtLoader(given, deal, self._drawn.add, self.device, waits)
        return model, optimizer, cast(L, dealt)

    def _check_unprepared(self) -> None:
        self._check_running()
        if self._prepared:
            raise UsageError(
                "mt.prepare was called before: a job trains one model with one optimizer; put several models into one "
                "nn.ModuleDict and prepare that"
            )

    def _check_schedule(self, optimizer: torch.optim.Optimizer, given: DataLoader[Any], deal: Deal) -> None:
        """A schedule by the steps of one machine ends in the middle, for each peer takes fewer."""
        if "initial_lr" in optimizer.param_groups[0] and len(given) != len(deal) and self.rank == 0:
            log.warning(
                "a learning rate scheduler was made before mt.prepare: if it counts steps by len(loader), it expects "
                "%d in an epoch, and each device takes %d; make it after mt.prepare, with the loader that this returns",
                len(given),
                len(deal),
            )

    def _draw_apart(self, why: str) -> None:
        """X6: equal seeds would give all peers the same samples."""
        seed = epoch_seed(self._welcome.spec.seed, self.rank)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        log.warning(
            "%s: this device draws its own samples, and each step weighs the same. torch, numpy and random are seeded "
            "by its rank; where the script or its data set seeds or orders samples itself, all devices get the same "
            "ones: use mt.rank() in the seed, or every mt.world_size()-th sample from mt.rank() on",
            why,
        )

    def _join(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        described: str,
        samples: SampleSpace | None = None,
    ) -> None:
        optimizers.check(optimizer)
        if self._welcome.spec.sync.signs:
            signs.check(optimizer)
        self._device = move_model(model, optimizer, best_device())
        specs, places = tensors.collect(model)
        layout = optimizers.describe(optimizer, specs, places)
        codec = parse_codec(self._welcome.spec.codec)
        momentum = handover.momentum_of(optimizer) if codec.momentum else None
        growing, masks = progressive.find(model), self._welcome.spec.masks
        if growing is not None and masks is not None:
            raise NotSupported(NOT_BOTH)
        travel = masked.travel(specs, masks) if growing is None else growing.travel(specs, places)
        if growing is not None and (reason := refusal(self._welcome.spec.sync, codec)):
            raise NotSupported(f"mt.Progressive with {reason}")
        built = tensors.build(model, f"{layout}; loader: {described}", momentum, travel)
        self._prepared = True
        size_bytes = len(built.manifest.pack())
        if size_bytes > limits.MODEL_BYTES_MAX:
            raise NotSupported(
                f"the description of this model's {len(built.manifest.tensors)} tensors has {size_bytes} bytes, "
                f"at most {limits.MODEL_BYTES_MAX} are possible: use fewer tensors, or shorter names of modules"
            )
        sync = self._welcome.spec.sync
        coefficient = own_coefficient(sync.own, self.world_size) if sync.staleness else 0.0
        plan = plan_buckets(built.manifest, self._welcome.spec.bucket_bytes, codec)
        slots = SharedSlots(self._memory_fd, plan, sync.staleness)
        self._ask(
            LearnerModel(
                manifest=built.manifest,
                memory_bytes=slots.layout.total_bytes,
                learner_bytes=learner_bytes(built, optimizer, coefficient, sync, masks),
                samples=samples,
            ),
            "agreement on the model",
        )
        means = RoundMeans(built, RoundPlans(plan), slots, masked.Masks(built, masks))
        outer = outer_optimizer(sync.local, means.parameters()) if sync.local else None
        state = ReplicaState(built, optimizer, means.masks, outer)
        kept = self._kept(means, optimizer)
        self._engine = Engine(
            state,
            self._take_over(state, kept),
            means,
            self._channel,
            self._drawn,
            LossScaling(scaler),
            EngineSettings(
                staleness=sync.staleness,
                absent_in_barriers=sync.staleness > 0 or (self._deal is not None and not sync.lockstep),
                coefficient=coefficient,
                hash_every=self._welcome.spec.hash_every,
                period=sync.period,
                signs=sync.signs,
            ),
            self._with_names,
            growing.enter_round if growing is not None else lambda _: None,
            kept,
        )
        self._channel.route(StepLost, self._step_lost)
        self._engine.boundary.wait_start()

    def _step_lost(self, notice: StepLost) -> None:
        assert self._engine is not None
        self._engine.lost(notice)
        if self._deal is not None:
            self._deal.step_lost(notice.step, notice.retry)

    def _epoch_over(self, deal: Deal, notice: EpochOver) -> None:
        deal.epoch_over(notice.epoch)
        if notice.unused and not self._finished:
            unit = "batches" if deal.space().whole_batches else "samples"
            log.warning(
                "epoch %d ends without %d %s that a peer held when it finished", notice.epoch + 1, notice.unused, unit
            )

    def _end_period(self) -> bool:
        """R9: local steps so far become a round."""
        assert self._engine is not None
        return self._engine.steps.end_period()

    def _end_epoch(self, epoch: int) -> None:
        """X4: this peer has used all that it has of an epoch; it may get more, of a peer that is lost."""
        assert self._engine is not None
        assert self._deal is not None
        self._engine.boundary.idle(
            f"the samples of epoch {epoch + 1} are used up", self._deal.settled, f"the end of epoch {epoch + 1}"
        )

    def _kept(self, means: RoundMeans, optimizer: torch.optim.Optimizer) -> NoKeptState:
        """J3: on the CPU the base can outlive this process, but for masks and the weights of a period."""
        spec = self._welcome.spec
        if self._kept_fd is None or self.device.type != "cpu" or spec.sync.period or spec.masks is not None:
            return NoKeptState()
        frozen = [tensor for _, _, tensor in means.tensors.kind("frozen")]
        return KeptState(self._kept_fd, means.parameters(), frozen, optimizer)

    def _take_over(self, state: ReplicaState, kept: NoKeptState) -> RoundProgress:
        """The start that all peers have in common, or where the job is now (J1)."""
        task = self._ask(LearnerState(units=state.digests()), "comparison of the start states")
        if not isinstance(task, StateTask):
            raise ConnectionLost(f"the daemon answered with {type(task).__name__}: it is of another version")
        progress = RoundProgress()
        if task.kept:
            progress = kept.take_over(state.tensor, task.round)
        elif task.write:
            state.export(task.units, Path(task.folder))
        else:
            progress = state.load(task.units, Path(task.folder), task.round)
        self._ask(LearnerReady(), f"the start of round {task.round + 1}")
        return progress

    def _ask(self, body: Any, name: str) -> Any:
        return self._channel.ask(body, name, lambda reason: log.debug("%s: %s", name, reason))

    # Training

    def log(self, values: Mapping[str, Any]) -> None:
        """Sends numbers to whoever watches the job. Raises UsageError for what is not a number."""
        self._check_running()
        if len(values) > limits.LOG_VALUES_MAX or max(map(len, values), default=0) > limits.LOG_NAME_CHARS_MAX:
            raise UsageError(
                f"mt.log takes at most {limits.LOG_VALUES_MAX} numbers at a time, with names of at most "
                f"{limits.LOG_NAME_CHARS_MAX} characters: write the rest into a file in mt.output_dir()"
            )
        numbers = []
        for name, value in values.items():
            try:
                numbers.append((name, float(value.detach() if isinstance(value, torch.Tensor) else value)))
            except (TypeError, ValueError, RuntimeError) as error:
                raise UsageError(f"mt.log({name}=...): not one number: {error}") from error
        step = self._engine.steps.number if self._engine is not None else 0
        self._channel.tell(LearnerLog(step=step, values=tuple(numbers)))

    def no_sync(self) -> AbstractContextManager[None]:
        """O6. Before `prepare` nothing is sent in any case."""
        return self._engine.steps.no_sync() if self._engine is not None else nullcontext()

    def base(self) -> AbstractContextManager[None]:
        """O7: with s=0 and no period the model itself is the base; so it is before `prepare` and after `finish`."""
        sync = self._welcome.spec.sync
        if self._engine is None or self._finished or not (sync.staleness or sync.local):
            return nullcontext()
        return self._engine.boundary.base()

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """O4. Before `prepare` and after `finish` torch's own.

        Raises UsageError where the codec keeps the momentum, or does not tell the norm.
        """
        if self._engine is None or self._finished:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        instead = refusal_to_clip(parse_codec(self._welcome.spec.codec))
        if instead is not None and math.isfinite(checked(max_norm)):
            raise UsageError(instead)
        return self._engine.steps.clip_grad_norm_(parameters, max_norm)

    def steps(self, count: int) -> Iterator[int]:
        """Numbers of this learner's steps until the job has had `count` rounds."""
        self._check_running()
        if self._engine is None:
            raise UsageError("mt.steps before mt.prepare: it counts the rounds of what was prepared")
        while not self._finished and self._engine.boundary.decided < count:
            yield self._engine.steps.number

    def barrier(self) -> None:
        """Returns when every peer's learner has entered its barrier of the same number."""
        self._check_running()
        self._barriers += 1
        if self._engine is not None:
            self._engine.barrier(self._barriers)
        else:
            self._barrier_unprepared(self._barriers)

    def _barrier_unprepared(self, number: int) -> None:
        passed: list[BarrierPassed] = []
        self._channel.route(BarrierPassed, passed.append)
        self._channel.tell(LearnerBarrier(number=number))
        self._channel.wait(lambda: bool(passed), f"barrier {number}")
        if passed[0].error is not None:
            raise RequestError(passed[0].error)

    def finish(self) -> None:
        """Takes the last rounds, and tells the daemon that no step will follow (R5). Later calls do nothing.

        From then on model and optimizer are ordinary ones again, and the model holds the base. A script that ends by an
        error does not wait for the last rounds.
        """
        if self._finished or os.getpid() != self._pid:
            return
        self._finished = True
        engine = self._engine
        try:
            if engine is not None:
                if not self._channel.stopped and sys.exc_info()[0] is None:
                    engine.flush()
                self._channel.tell(LearnerIdle(reason="it has finished", finished=True))
                engine.tell_last_hash()
        finally:
            self._channel.close()
            if engine is not None:
                engine.close()

    # Facts

    @property
    def rank(self) -> int:
        """Index in the job's members."""
        return self._welcome.rank

    @property
    def world_size(self) -> int:
        """Number of the job's members."""
        return len(self._welcome.members)

    @property
    def device(self) -> torch.device:
        """Where the prepared model lies, before that the best device."""
        return self._device or best_device()

    @property
    def data_dir(self) -> Path:
        """What was given to --data, else as without a job."""
        told = self._welcome.data_dir
        return Path(told) if told is not None else local_data_dir()

    @property
    def output_dir(self) -> Path:
        """This rank's results."""
        folder = Path(self._welcome.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _check_running(self) -> None:
        if self._finished:
            raise UsageError("mt.finish() was called before: this peer takes no further part in the job")
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked from the learner: call meshtrain's functions in the script itself"
            )

    def _with_names(self, reason: str) -> str:
        """V1 wants the peer's name; a round's verdict knows ranks."""
        members = self._welcome.members

        def named(match: re.Match[str]) -> str:
            rank = int(match[1])
            return f"rank {rank} ({members[rank].name}):" if rank < len(members) else match[0]

        return re.sub(r"\brank (\d+):", named, reason)
