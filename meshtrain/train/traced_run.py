"""The world of a script that `meshtrain whatif` runs: alone and unchanged, for a few steps that are timed, then ended.

What is seen are hooks that torch calls anyway: the model's forward pass has ended, a gradient is there, a backward pass
has ended, the optimizer has stepped. The last backward pass before a step is the one whose gradients a job would send.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple, NoReturn, TypeVar

import torch
from torch.autograd import Variable

from meshtrain.errors import UsageError
from meshtrain.train.dry_run import measured_model, write_whole
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.model.tensors import ModelTensors
from meshtrain.train.single import SingleProcess
from meshtrain.train.step.finite import write_scaled
from meshwire.codecs.registry import parse_codec
from meshwire.memory_layout.footprint import Measurement
from meshwire.memory_layout.shared_slots import (
    MEASURE_CODEC_VARIABLE,
    MEASURE_STEPS_VARIABLE,
    MEASURE_SYNC_VARIABLE,
    MEASURE_TOGETHER_VARIABLE,
    MEASURE_VARIABLE,
    WHY_NOT_SUFFIX,
)
from meshwire.planning.step_trace import WARM_UP_STEPS, StepTrace, TracedScript
from meshwire.sync_modes.mode import sync_settings

M = TypeVar("M", bound=torch.nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
L = TypeVar("L")

TRACED_S_MAX = 8.0  # of timed steps, if there is at least one
SEVERAL_OPTIMIZERS = (  # behind the script's name
    "gives mt.prepare several optimizers: which of their steps belong together is not known, so nothing can be "
    "predicted or chosen for such a script"
)
TOGETHER_S = 4.0  # of steps of several copies beside each other
GATE_TIMEOUT_S = 60.0  # in which all of them have come as far
POLL_S = 0.01
STEPS_KEPT_MAX = 1000
COPIES = 3  # of all gradients, of which the fastest counts


class TimedStep(NamedTuple):
    """What a step's parts took, in seconds of a clock that never goes back; `StepClock` makes one for each step.

    Attributes:
        passes: backward passes.
        ready_s: by tensor of the manifest, when its gradient was there, from the last pass's beginning.
    """

    before_s: float
    backward_s: float
    after_s: float
    passes: int
    ready_s: dict[int, float]


class StepClock:
    """Times the steps of a model that is trained as it always is.

    Args:
        on_step: is given each step once it is over.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: ModelTensors,
        on_step: Callable[[TimedStep], None],
    ) -> None:
        self._on_step = on_step
        self._device = next((tensor.device for _, _, tensor in tensors.kind("parameter")), torch.device("cpu"))
        self._forward_s: float | None = None
        self._task: int | None = None
        self._backward_s = self._end_s = 0.0
        self._passes = 0
        self._ready_s: dict[int, float] = {}
        model.register_forward_hook(self._forward_ended)
        for index, _, tensor in tensors.kind("parameter"):
            tensor.register_post_accumulate_grad_hook(self._gradient_hook(index))
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        self._begun_s = self._now_s()

    def _now_s(self) -> float:
        """With all that was asked for done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    def _forward_ended(self, *_: object) -> None:
        self._forward_s = self._now_s()

    def _gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._task = task
                self._passes += 1
                # Back to the end of the forward pass all belongs to it: the loss, and the loss's gradient.
                self._backward_s = self._forward_s if self._forward_s is not None else self._now_s()
                self._forward_s = None
                self._ready_s = {}
                Variable._execution_engine.queue_callback(self._backward_ended)
            self._ready_s[index] = time.perf_counter() - self._backward_s

        return on_gradient

    def _backward_ended(self) -> None:
        self._end_s = self._now_s()

    def _stepped(self) -> None:
        now_s = self._now_s()
        if self._passes and self._end_s >= self._backward_s:
            step = TimedStep(
                before_s=max(0.0, self._backward_s - self._begun_s),
                backward_s=self._end_s - self._backward_s,
                after_s=now_s - self._end_s,
                passes=self._passes,
                ready_s=self._ready_s,
            )
            self._passes, self._task = 0, None
            self._on_step(step)
        self._begun_s = self._now_s()


class Gate:
    """Where copies of a script wait for each other, so that each steps while all others do.

    Args:
        folder: that they share, in which each leaves a file.
    """

    def __init__(self, copies: int, folder: Path) -> None:
        self._copies, self._folder = copies, folder

    def pass_through(self) -> None:
        """Waits until all are here. Raises UsageError when that takes too long."""
        (self._folder / str(os.getpid())).touch()
        until_s = time.monotonic() + GATE_TIMEOUT_S
        while (here := len(list(self._folder.iterdir()))) < self._copies:
            if time.monotonic() > until_s:
                raise UsageError(
                    f"{here} of {self._copies} copies of this script have come to their first timed step in "
                    f"{GATE_TIMEOUT_S:.0f} s"
                )
            time.sleep(POLL_S)


class TracedProcess(SingleProcess):
    """A script runs alone for a few steps behind `mt.prepare`; what they took is written down, and it is ended.

    Args:
        file: where that is written, in a folder that this process may fill.
        steps: that are timed, at most.
        gate: before the first of them, where several copies are timed beside each other, all for TOGETHER_S.
    """

    def __init__(self, file: Path, steps: int, gate: Gate | None = None) -> None:
        super().__init__()
        self._file = file
        self._wanted = steps
        self._gate = gate
        self._skipped = 0
        self._steps: list[TimedStep] = []
        self._batch_size = 1
        self._measurement: Measurement | None = None
        self._tensors: ModelTensors | None = None
        self._until_s: float | None = None
        self._written = False

    @classmethod
    def take(cls) -> "TracedProcess | None":
        """The world that the environment asks for; None without such a wish."""
        told = os.environ.get(MEASURE_STEPS_VARIABLE)
        if not told:
            return None
        copies, _, folder = os.environ.get(MEASURE_TOGETHER_VARIABLE, "").partition(":")
        return cls(Path(os.environ[MEASURE_VARIABLE]), int(told), Gate(int(copies), Path(folder)) if copies else None)

    def prepare(self, model: M, optimizer: O, scaler: torch.amp.GradScaler | None = None) -> tuple[M, O]:
        """The same objects. Raises what it raises in a job."""
        if self._measurement is not None:
            raise UsageError("mt.prepare was called a second time: give it all models and optimizers at once, as lists")
        if isinstance(optimizer, JointOptimizer):
            self._end(SEVERAL_OPTIMIZERS)
        sync, codec = sync_settings(os.environ[MEASURE_SYNC_VARIABLE]), parse_codec(os.environ[MEASURE_CODEC_VARIABLE])
        self._measurement, self._tensors = measured_model(model, optimizer, sync, codec)
        prepared = super().prepare(model, optimizer, scaler)
        StepClock(model, optimizer, self._tensors, self._take_step)
        atexit.register(self._at_exit)
        return prepared

    def prepare_with_loader(
        self, model: M, optimizer: O, loader: L, scaler: torch.amp.GradScaler | None = None
    ) -> tuple[M, O, L]:
        """As `prepare`."""
        size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", 1)
        self._batch_size = size if isinstance(size, int) and size > 0 else 1
        return *self.prepare(model, optimizer, scaler), loader

    @property
    def output_dir(self) -> Path:
        """Away from the user's own folder: there are no results."""
        folder = self._file.with_name("out")
        folder.mkdir(exist_ok=True)
        return folder

    def _end(self, why: str) -> NoReturn:
        """Ends a script of which nothing can be told."""
        write_whole(self._file.with_suffix(WHY_NOT_SUFFIX), why)
        raise SystemExit(0)

    def _take_step(self, step: TimedStep) -> None:
        """Ends the script when it has seen enough."""
        if self._skipped < WARM_UP_STEPS:
            self._skipped += 1
            if self._skipped == WARM_UP_STEPS and self._gate is not None:
                self._gate.pass_through()
                self._until_s = time.monotonic() + TOGETHER_S
            return
        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + TRACED_S_MAX
        if len(self._steps) < STEPS_KEPT_MAX:
            self._steps.append(step)
        if (self._gate is None and len(self._steps) >= self._wanted) or now_s >= self._until_s:
            self._write()
            raise SystemExit(0)

    def _at_exit(self) -> None:
        """A script that ends earlier, and in order, has told what it can."""
        if self._steps and not self._written and getattr(sys, "last_value", None) is None:
            self._write()

    def _write(self) -> None:
        assert self._measurement is not None
        assert self._tensors is not None
        self._written = True
        steps = self._steps
        backward_s = median(step.backward_s for step in steps)
        trace = StepTrace(
            samples=self._batch_size * max(1, round(median(step.passes for step in steps))),
            steps=len(steps),
            threads=torch.get_num_threads(),
            device=str(next((each.device for _, _, each in self._tensors.kind("parameter")), torch.device("cpu"))),
            before_s=median(step.before_s for step in steps),
            backward_s=backward_s,
            after_s=median(step.after_s for step in steps),
            copy_s=_copy_s(self._tensors),
            ready=tuple(self._ready(index) for index in range(len(self._tensors.manifest.tensors))),
        )
        written = TracedScript(measurement=self._measurement, step=trace)
        write_whole(self._file, written.model_dump_json())

    def _ready(self, index: int) -> float:
        """At which part of the backward pass a tensor's gradient was there."""
        parts = [
            min(1.0, step.ready_s[index] / step.backward_s) if index in step.ready_s and step.backward_s else 1.0
            for step in self._steps
        ]
        return median(parts)


@torch.no_grad()
def _copy_s(tensors: ModelTensors) -> float:
    """Writing all gradients where a daemon finds them, as a job's hooks do."""
    values = [tensor.detach() for _, _, tensor in tensors.kind("parameter")]
    place = torch.zeros(max((tensor.numel() for tensor in values), default=0))
    fastest_s = float("inf")
    for _ in range(COPIES):
        began_s = time.perf_counter()
        for tensor in values:
            there = place[: tensor.numel()]
            if tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous():
                write_scaled(tensor.view(-1), 1.0, there)
            else:
                there.copy_(tensor.reshape(-1))
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return fastest_s
