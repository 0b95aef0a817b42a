"""What `meshtrain`'s functions do inside a job: one learner, attached to its daemon, prepared, training, finished."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from meshtrain.client import Client
from meshtrain.errors import ConnectionLost, NotSupported, RequestError, UnexpectedReply, UsageError
from meshtrain.train.data.deal import Deal
from meshtrain.train.data.loader import DealtLoader, dealable
from meshtrain.train.data.ordering import LearnerPlace
from meshtrain.train.data.own_draws import NO_LOADER, STREAM, draw_apart
from meshtrain.train.data.step_samples import StepSamples
from meshtrain.train.data.stream_share import shared_stream
from meshtrain.train.device import device_of_learner, move_model
from meshtrain.train.link.channel import Channel
from meshtrain.train.link.environment import Environment, environment_of_job
from meshtrain.train.logged_values import numbers_of
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.optim.early_scheduler import warn_of_early_scheduler
from meshtrain.train.periods.inner_muon import what_is_muons
from meshtrain.train.periods.local_rates import local_steps_longer, what_is_longer
from meshtrain.train.single import local_data_dir
from meshtrain.train.step.engine import Engine
from meshtrain.train.step.preparation import check_optimizer, describe_model
from meshtrain.train.step.start import start_engine
from meshwire.codecs.registry import parse_codec
from meshwire.messages.learner import (
    BarrierPassed,
    EpochOver,
    Grant,
    LearnerBarrier,
    LearnerGoal,
    LearnerIdle,
    LearnerLog,
    LearnerWelcome,
)
from meshwire.messages.local import Attach

log = logging.getLogger("meshtrain")

M = TypeVar("M", bound=torch.nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
L = TypeVar("L")

PREPARED_BEFORE = (
    "mt.prepare was called before: give it all models and optimizers at once, as lists: "
    "models, optimizers, loader = mt.prepare([a, b], [optimizer_of_a, optimizer_of_b], loader)"
)


class LearnerSession:
    """The part of this process in the job that its daemon has started it for.

    `attach` makes one; a script's calls follow: `prepare` once, then training, then `finish`.
    """

    def __init__(self, client: Client, welcome: LearnerWelcome, environment: Environment) -> None:
        self._pid = os.getpid()
        self._channel = Channel(client, welcome.members)
        self._welcome = welcome
        self._environment = environment
        self._place = LearnerPlace(welcome.learner, welcome.spec.learners)
        self._device: torch.device | None = None
        self._prepared = False
        self._engine: Engine | None = None
        self._deal: Deal | None = None
        self._barriers = 0
        self._finished = False

    @classmethod
    def attach(cls, environment: Environment) -> "LearnerSession":
        """Calls the daemon. Raises ConnectionLost, RequestError, UnexpectedReply."""
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
            raise UnexpectedReply("the script's call", welcome)
        return cls(client, welcome, environment)

    # Preparation

    def prepare(self, model: M, optimizer: O, scaler: torch.amp.GradScaler | None = None) -> tuple[M, O]:
        """`mt.prepare` without a loader: every peer draws its own samples, by X6 (seeds by rank)."""
        self._check_unprepared()
        self._draw_apart(NO_LOADER)
        self._start(model, optimizer, scaler, None, "no loader")
        return model, optimizer

    def prepare_with_loader(
        self, model: M, optimizer: O, loader: L, scaler: torch.amp.GradScaler | None = None
    ) -> tuple[M, O, L]:
        """`mt.prepare` with a loader, whose samples are dealt to the peers."""
        self._check_unprepared()
        given = dealable(loader)
        if given is None:
            self._draw_apart(STREAM)
            self._start(model, optimizer, scaler, None, "an iterable data set")
            return model, optimizer, shared_stream(loader, self.rank, self.world_size)
        spec = self._welcome.spec
        deal = self._deal = Deal(given, self._devices, spec.seed, spec.sync, self._place)
        if self.rank == 0:
            warn_of_early_scheduler(optimizer, len(given), len(deal))
        self._channel.route(Grant, self._on_grant)
        self._channel.route(EpochOver, self._on_epoch_over)
        samples = self._start(model, optimizer, scaler, deal, deal.describe())
        assert self._engine is not None
        return model, optimizer, cast(L, DealtLoader(given, deal, samples, self.device, self._engine))

    def _check_unprepared(self) -> None:
        environment_of_job("mt.prepare")
        self._check_running()
        if self._prepared:
            raise UsageError(PREPARED_BEFORE)

    def _draw_apart(self, why: str) -> None:
        draw_apart(self._welcome.spec.seed, self.rank, why)

    def _start(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        deal: Deal | None,
        loader: str,
    ) -> StepSamples:
        """The peers agree, and training may begin. Returns what counts the samples that the loader hands out.

        Args:
            deal: of the loader, if it can be dealt.
            loader: described, for the comparison between peers.
        """
        spec = self._welcome.spec
        check_optimizer(optimizer, spec.sync, spec.scale_lr)
        if scaler is not None and isinstance(optimizer, JointOptimizer):
            raise NotSupported(
                "a GradScaler with several optimizers: its skipped steps could not be told apart. Use bfloat16, which "
                "needs none"
            )
        self._device = move_model(model, optimizer, device_of_learner(*self._place))
        prepared = describe_model(model, optimizer, spec.sync, parse_codec(spec.codec), spec.masks, loader)
        if prepared.growing is not None and spec.learners > 1:
            raise NotSupported("mt.Progressive with several learners on a device: submit without --learners")
        self._prepared = True
        if prepared.of_muon and self.rank == 0:
            log.warning("--sync %s: %s", spec.sync.text(), what_is_muons(model, prepared.of_muon))
        longer = what_is_longer(optimizer, self.world_size) if local_steps_longer(spec, prepared.of_muon) else None
        if longer is not None and self.rank == 0:
            log.warning("--sync %s: %s", spec.sync.text(), longer)
        samples = StepSamples(deal)
        self._engine = start_engine(prepared, scaler, samples, self._welcome, self._environment, self._channel)
        return samples

    def _on_grant(self, notice: Grant) -> None:
        assert self._deal is not None
        self._deal.grant(notice.batches, notice.step)

    def _on_epoch_over(self, notice: EpochOver) -> None:
        assert self._deal is not None
        self._deal.epoch_over(notice.epoch)
        if notice.unused and not self._finished:
            unit = "batches" if self._deal.space().whole_batches else "samples"
            unused = notice.unused * self._place.learners
            log.warning("epoch %d ends without %d %s that a peer held when it finished", notice.epoch + 1, unused, unit)

    # Training

    def log(self, values: Mapping[str, Any]) -> None:
        """Sends numbers to whoever watches the job. Raises UsageError for what is not a number."""
        self._check_running()
        numbers = numbers_of(values)
        if self._engine is not None and (rehearsal := self._engine.steps.rehearsal).on and not rehearsal.left:
            return
        step = self._engine.steps.number if self._engine is not None else 0
        self._channel.tell(LearnerLog(step=step, values=numbers))

    def no_sync(self) -> AbstractContextManager[None]:
        """`mt.no_sync()`: backward passes inside only accumulate. Before `prepare` nothing is sent in any case."""
        return self._engine.steps.no_sync() if self._engine is not None else nullcontext()

    def base(self) -> AbstractContextManager[None]:
        """`mt.base()`: inside, the model holds the base, as it does anyway before `prepare` and after `finish`."""
        return nullcontext() if self._engine is None or self._finished else self._engine.show_base()

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """`mt.clip_grad_norm_`: torch's own before `prepare` and after `finish`, else by the norm of the means.

        Raises UsageError where the codec keeps the momentum, or does not tell the norm.
        """
        if self._engine is None or self._finished:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return self._engine.clip_grad_norm_(parameters, max_norm)

    def steps(self, count: int) -> Iterator[int]:
        """Numbers of this learner's steps until the job has had the rounds that `count` steps make."""
        self._check_running()
        if self._engine is None:
            raise UsageError("mt.steps before mt.prepare: it counts the steps of what was prepared")
        rounds = self._welcome.spec.sync.rounds_of(max(0, count))
        self._channel.tell(LearnerGoal(rounds=rounds))
        while not self._finished and self._engine.boundary.decided < rounds:
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
        """`mt.finish()`: takes the last rounds, and tells the daemon that no step will follow. Later calls do nothing.

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
        """Place among the learners of all members that train: hubs have none, whoever came before or after them (H1).
        Those of one device follow each other (R6)."""
        before = sum(not member.hub for member in self._welcome.members[: self._welcome.rank])
        return before * self._place.learners + self._place.number

    @property
    def world_size(self) -> int:
        """Number of learners of the job's members that train."""
        return self._devices * self._place.learners

    @property
    def _devices(self) -> int:
        return sum(not member.hub for member in self._welcome.members)

    @property
    def device(self) -> torch.device:
        """Where the prepared model lies, before that the best device."""
        return self._device or device_of_learner(*self._place)

    @property
    def data_dir(self) -> Path:
        """What was given to --data, else as without a job."""
        told = self._welcome.data_dir
        return Path(told) if told is not None else local_data_dir()

    @property
    def output_dir(self) -> Path:
        """This rank's results. Of several learners on a device the first one's are the device's, and those of another
        lie below it."""
        folder = Path(self._welcome.output_dir)
        if self._place.number:
            folder /= f"learner{self._place.number + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _check_running(self) -> None:
        if self._finished:
            raise UsageError("mt.finish() was called before: this peer takes no further part in the job")
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked from the learner: call meshtrain's functions in the script itself"
            )
