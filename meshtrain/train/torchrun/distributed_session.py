"""What `meshtrain`'s functions do in a process that torchrun, Slurm or Ray Train has started.

It is one rank of several, which train over torch.distributed as a job does with `--sync bsp --codec fp32`.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.data.deal import Deal
from meshtrain.train.data.loader import DealtLoader, dealable
from meshtrain.train.data.own_draws import NO_LOADER, STREAM, draw_apart
from meshtrain.train.data.step_samples import StepSamples
from meshtrain.train.data.stream_share import shared_stream
from meshtrain.train.device import move_model
from meshtrain.train.logged_values import numbers_of
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.optim.early_scheduler import warn_of_early_scheduler
from meshtrain.train.optim.loss_scaling import LossScaling
from meshtrain.train.partial.progressive import Progressive
from meshtrain.train.session import PREPARED_BEFORE
from meshtrain.train.single import local_data_dir
from meshtrain.train.step.preparation import check_optimizer, describe_model
from meshtrain.train.torchrun.averages import BUCKET_BYTES
from meshtrain.train.torchrun.backward import AveragedBackward
from meshtrain.train.torchrun.common_start import begin_alike
from meshtrain.train.torchrun.launched import Launched, choose_device
from meshtrain.train.torchrun.rank_group import BARRIER, RankGroup, Reaching
from meshtrain.train.torchrun.whole_epochs import WholeEpochs
from meshwire.codecs.registry import parse_codec
from meshwire.memory_layout.shared_slots import JOB_VARIABLE, SCRIPT_OUTPUT_VARIABLE, SCRIPT_SEED_VARIABLE
from meshwire.model.plan import plan_buckets
from meshwire.sync_modes.mode import SyncSettings

log = logging.getLogger("meshtrain")

DEFAULT_SEED = 0  # the same order of samples in every run, unless a person asks for another one
IN_STEP = SyncSettings()  # bsp, equal shares
PLAIN = parse_codec("fp32")

M = TypeVar("M", bound=torch.nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
L = TypeVar("L")


class DistributedSession:
    """One rank of a script that was started several times. The process group is opened by what needs it first."""

    def __init__(self, told: Launched) -> None:
        self._pid = os.getpid()
        self._told = told
        self._chosen: torch.device | None = None
        self._device: torch.device | None = None
        self._group: RankGroup | None = None
        self._backward: AveragedBackward | None = None
        self._growing: Progressive | None = None
        self._barriers = 0
        self._finished = False

    # Preparation

    def prepare(self, model: M, optimizer: O, scaler: torch.amp.GradScaler | None = None) -> tuple[M, O]:
        """`mt.prepare` without a loader: every rank draws its own samples, by X6 (seeds by rank)."""
        group = self._open_for(model)
        draw_apart(_seed(group), group.rank, NO_LOADER)
        self._start(group, model, optimizer, scaler, None, "no loader")
        return model, optimizer

    def prepare_with_loader(
        self, model: M, optimizer: O, loader: L, scaler: torch.amp.GradScaler | None = None
    ) -> tuple[M, O, L]:
        """`mt.prepare` with a loader, whose samples are dealt to the ranks."""
        group = self._open_for(model)
        given, seed = dealable(loader), _seed(group)
        if given is None:
            draw_apart(seed, group.rank, STREAM)
            self._start(group, model, optimizer, scaler, None, "an iterable data set")
            return model, optimizer, shared_stream(loader, group.rank, group.size)
        deal = Deal(given, group.size, seed, IN_STEP)
        if group.rank == 0:
            warn_of_early_scheduler(optimizer, len(given), len(deal))
        samples = self._start(group, model, optimizer, scaler, deal, deal.describe())
        epochs = WholeEpochs(deal, group.rank, group.size)
        return model, optimizer, cast(L, DealtLoader(given, deal, samples, self.device, epochs))

    def _open_for(self, model: torch.nn.Module) -> RankGroup:
        self._check_running()
        if self._backward is not None:
            raise UsageError(PREPARED_BEFORE)
        if isinstance(model, DistributedDataParallel):
            raise UsageError(
                "mt.prepare averages the gradients, and so does DistributedDataParallel: give it the module inside "
                "(model.module), or leave mt.prepare out"
            )
        return self._open()

    def _open(self) -> RankGroup:
        if self._group is None:
            self._group = RankGroup(self._told, self._best_device())
        return self._group

    def _start(
        self,
        group: RankGroup,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        deal: Deal | None,
        loader: str,
    ) -> StepSamples:
        """Returns when training may begin. As `LearnerSession._start`."""
        if isinstance(optimizer, JointOptimizer):
            raise NotSupported("several optimizers in mt.prepare are for jobs, not for torchrun: use one, or DDP")
        check_optimizer(optimizer, IN_STEP)
        self._device = move_model(model, optimizer, self._best_device())
        prepared = describe_model(model, optimizer, IN_STEP, PLAIN, None, loader)
        try:
            plan = plan_buckets(prepared.tensors.manifest, BUCKET_BYTES, PLAIN)
        except ValueError as error:
            raise NotSupported(str(error)) from error
        scaling, samples = LossScaling(scaler), StepSamples(deal)
        begin_alike(group, prepared, scaling)
        self._growing = prepared.growing
        self._on_step(0)
        self._backward = AveragedBackward(
            prepared.tensors, plan, optimizer, group, samples, scaling, on_step=self._on_step
        )
        return samples

    def _on_step(self, steps: int) -> None:
        """So many steps are over."""
        if self._growing is not None:
            self._growing.enter_round(steps + 1)

    # Training

    def log(self, values: Mapping[str, Any]) -> None:
        """Rank 0 tells Python's logging, at its level INFO; in a job (P9), the job's log. Raises UsageError for what is
        not a number."""
        self._check_running()
        numbers = numbers_of(values)
        if self.rank != 0:
            return
        step = 1 + (self._backward.steps if self._backward is not None else 0)
        told = f"step {step}: {', '.join(f'{name} {value:.6g}' for name, value in numbers)}"
        if JOB_VARIABLE in os.environ:
            sys.stdout.write(f"{told}\n")
            sys.stdout.flush()
        else:
            log.info("%s", told)

    def no_sync(self) -> AbstractContextManager[None]:
        """`mt.no_sync()`: backward passes inside only accumulate."""
        return self._backward.no_sync() if self._backward is not None else nullcontext()

    def base(self) -> AbstractContextManager[None]:
        """`mt.base()`: the model always holds what all ranks have in common."""
        return nullcontext()

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """torch's own: `p.grad` holds the averages, the same on all ranks."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def steps(self, count: int) -> Iterator[int]:
        """Numbers of steps, until there have been `count`: all ranks take the same ones."""
        self._check_running()
        if self._backward is None:
            raise UsageError("mt.steps before mt.prepare: it counts the steps of what was prepared")
        while not self._finished and self._backward.steps < count:
            yield self._backward.steps + 1

    def barrier(self) -> None:
        """Returns when every rank has called it. Raises UsageError when one does something else."""
        self._check_running()
        if self._backward is not None and self._backward.sealed:
            raise UsageError("mt.barrier() between backward() and optimizer.step(): call it after the step")
        group = self._open()
        self._barriers += 1
        with Reaching(f"enters barrier {self._barriers}"):
            roll = group.call(BARRIER, self._barriers)
        roll.wait()

    def finish(self) -> None:
        """`mt.finish()`: model and optimizer are ordinary ones again. Nobody is waited for: the model holds the final
        state already. Later calls do nothing."""
        if self._finished or os.getpid() != self._pid:
            return
        self._finished = True
        steps = 0
        if self._backward is not None:
            steps = self._backward.steps
            self._backward.close()
        if self._group is not None:
            self._group.farewell(steps)

    def leave(self, *, failed: bool) -> None:
        """The process ends: so do the groups that were opened here.

        Args:
            failed: by an error; the other ranks are not waited for then.
        """
        if os.getpid() != self._pid:
            return
        if not failed:
            self.finish()
        if self._group is not None:
            self._group.close(linger=not failed)

    # Facts

    @property
    def rank(self) -> int:
        """As the launcher has said."""
        return self._told.rank

    @property
    def world_size(self) -> int:
        """As the launcher has said."""
        return self._told.world_size

    @property
    def device(self) -> torch.device:
        """Where the prepared model lies, before that this rank's own."""
        return self._device or self._best_device()

    @property
    def data_dir(self) -> Path:
        """As alone."""
        return local_data_dir()

    @property
    def output_dir(self) -> Path:
        """A job's (P9), else ./out/rankN, made when asked for: ranks may share a file system."""
        folder = Path(os.environ.get(SCRIPT_OUTPUT_VARIABLE) or Path("out", f"rank{self.rank}"))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _best_device(self) -> torch.device:
        if self._chosen is None:
            self._chosen = choose_device(self._told)
        return self._chosen

    def _check_running(self) -> None:
        if self._finished:
            raise UsageError("mt.finish() was called before: this rank takes no further part")
        if os.getpid() != self._pid:
            raise UsageError("this process was forked from the script: call meshtrain's functions in the script itself")


def _seed(group: RankGroup) -> int:
    """Of the order of samples: rank 0's wish, so that all have the same."""
    with Reaching("agrees on the seed"):
        told: str = group.from_first(os.environ.get(SCRIPT_SEED_VARIABLE, str(DEFAULT_SEED)))
    if not told.isdecimal() or int(told) >= 2**63:
        raise UsageError(f"{SCRIPT_SEED_VARIABLE}={told!r}: use a whole number from 0 to 2**63-1")
    return int(told)
