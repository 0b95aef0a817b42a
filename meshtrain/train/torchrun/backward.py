"""The backward pass over torch.distributed: `p.grad` holds the averages over all ranks when `loss.backward()` returns.

A hook on each parameter hands its gradient over as soon as autograd has accumulated it, as in a job with `--sync bsp`
(`step/gradients.py`), whose rules these are: O1 (s=0), O5 (unused parameters, buffers), O6 (accumulation).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import Variable

from meshtrain.errors import NonFiniteGradient, NotSupported, UsageError
from meshtrain.train.data.step_samples import StepSamples
from meshtrain.train.model.frozen_check import FrozenCheck
from meshtrain.train.model.tensors import ModelTensors
from meshtrain.train.optim.lent_gradients import LentGradients
from meshtrain.train.optim.loss_scaling import UNKNOWN_SCALER, LossScaling, called_by_scaler
from meshtrain.train.step.buffers import ModelBuffers
from meshtrain.train.step.gradients import (
    BROKEN_BACKWARD,
    FAILED_BACKWARD,
    REENTRANT,
    SECOND_BACKWARD,
    SPARSE,
    UNSYNCHRONISED,
    inside_reentrant_checkpoint,
)
from meshtrain.train.torchrun.averages import GradientAverages
from meshtrain.train.torchrun.rank_group import STEP, RankGroup, Reaching, RollCall
from meshwire.model.plan import Plan

FIND_IT = "torch.autograd.set_detect_anomaly(True) names the operation; with float16 give mt.prepare a scaler"


class AveragedBackward:
    """The hooks of one model and of its optimizer's steps.

    Args:
        plan: of the model's values.
        samples: what the prepared loader has handed out: the weight of the next step.
        scaling: of the script's GradScaler. All ranks see the same overflows, so their scales stay equal.
        on_step: is told of each step that has ended, by its number.

    Attributes:
        steps: that have ended.
        sealed: a backward pass has brought averages, and `optimizer.step()` has not taken them yet.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        group: RankGroup,
        samples: StepSamples,
        scaling: LossScaling,
        on_step: Callable[[int], None],
    ) -> None:
        self._group = group
        self._samples = samples
        self._scaling = scaling
        self._on_step = on_step
        self._plan = plan
        self._averages = GradientAverages(tensors, plan, group)
        self._buffers = ModelBuffers(tensors, plan)
        self._frozen = FrozenCheck(tensors, optimizer)
        self._lent = LentGradients()
        self._specs = tensors.manifest.tensors
        self._parameters = {
            index: tensors.places[span.tensor].tensor()
            for index, span in enumerate(plan.spans)
            if self._specs[span.tensor].kind == "parameter"
        }
        self._lock = threading.RLock()  # a model on several devices has several backward threads
        self._paused = 0
        self._task: int | None = None  # autograd's id of the running synchronised pass
        self._roll: RollCall | None = None
        self._weight = 1.0
        self._accumulated = False
        self.steps = 0
        self.sealed = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in self._parameters.items()
        ]
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        scaling.watch(optimizer, self._end_step, self._scaler_updated)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate, as O6 (accumulation) has it."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def close(self) -> None:
        """Model and optimizer are ordinary ones again."""
        for hook in self._hooks:
            hook.remove()
        self._scaling.close()

    # The backward pass

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            with self._lock, torch.no_grad():
                if self._paused:
                    self._accumulated = True
                    return
                task = torch._C._current_graph_task_id()
                if self._task is None:
                    self._begin(task)
                elif task != self._task or index in self._averages.filled:
                    raise NotSupported(REENTRANT) if inside_reentrant_checkpoint() else UsageError(BROKEN_BACKWARD)
                self._write(index, parameter)
                if len(parameter._post_accumulate_grad_hooks or ()) == 1:
                    parameter.grad = None  # its memory serves the next one; the average takes its place
                self._averages.send_full()

        return on_gradient

    def _begin(self, task: int) -> None:
        if inside_reentrant_checkpoint():
            raise NotSupported(REENTRANT)
        if self.sealed:
            raise UsageError(SECOND_BACKWARD)
        self._task = task
        self._weight = self._samples.take(self.steps + 1).weight
        with Reaching(f"takes step {self.steps + 1}"):
            self._roll = self._group.call(STEP, self.steps + 1, self._weight)
        self._averages.begin(self._weight)
        Variable._execution_engine.queue_callback(self._finish)

    def _write(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise NotSupported(SPARSE.format(self._plan.spans[index].name))
        self._averages.write(index, gradient)

    @torch.no_grad()
    def _finish(self) -> None:
        """The end of the pass: everybody's averages are in `p.grad`, or None where nobody has used a parameter."""
        averages, roll = self._averages, self._roll
        assert roll is not None
        with self._lock:
            for index, parameter in self._parameters.items():
                if index in averages.filled:
                    continue
                if parameter.grad is not None:  # what it has accumulated before
                    self._write(index, parameter)
                else:
                    averages.leave_out(index)
            averages.send_full()
            self._buffers.write(averages.vector, self._weight, self._plan)
            called = roll.wait()
            averages.seal()
            used, integers = self._agree()
            averages.take(self.steps + 1, sum(each.weight for each in called))
            void = self._is_void()
            for index, parameter in self._parameters.items():
                if index in used:
                    self._lent.lend(parameter, averages.mean(index))
                else:
                    parameter.grad = None
            if void:
                self._buffers.restore()
            else:
                self._buffers.take(averages.vector, integers, self._plan)
            self._task = None
            self.sealed = True

    def _agree(self) -> tuple[set[int], tuple[int, ...]]:
        """Which parameters any rank has used, and the maxima of integer buffers, by O5."""
        own = [int(index in self._averages.filled) for index in self._parameters]
        with Reaching(f"waits for the end of step {self.steps + 1}"):
            largest = self._group.maxima([*own, *self._buffers.integers()])
        used = {index for index, any_ in zip(self._parameters, largest, strict=False) if any_}
        return used, tuple(largest[len(own) :])

    def _is_void(self) -> bool:
        """Whether a GradScaler is to skip this step, on all ranks, for all see the same sum.

        Raises NonFiniteGradient, on all of them, where there is no scaler, by V1 (non-finite values).
        """
        broken = self._averages.not_finite()
        if broken is None:
            return False
        if self._scaling.active:
            self._averages.vector.fill_(float("inf"))  # a buffer alone may have been it
            return True
        self._buffers.restore()
        ranks = [rank for rank, wrong in enumerate(self._group.of_all(self._averages.own_not_finite())) if wrong]
        whose = f"rank {', '.join(map(str, ranks))}" if ranks else "all ranks together"
        raise NonFiniteGradient(self.steps + 1, f"what {whose} has for {broken} holds NaN or infinity", FIND_IT)

    # The step

    def _before_step(self, _: object, arguments: tuple[object, ...], options: dict[str, object]) -> None:
        if not self._scaling.active and called_by_scaler():
            raise UsageError(UNKNOWN_SCALER)
        if arguments[1:] or options:
            return  # a closure may hold the backward pass
        self._check_step()

    def _check_step(self) -> None:
        self._frozen.check()
        if self._task is not None:
            raise UsageError(FAILED_BACKWARD)
        if self._accumulated and not self.sealed:
            raise UsageError(UNSYNCHRONISED)

    def _after_step(self, *_: object) -> None:
        self._check_step()
        self._end_step()

    def _end_step(self) -> None:
        """By the optimizer, or by a scaler that has skipped it."""
        if not self.sealed:
            return
        self.sealed = self._accumulated = False
        self.steps += 1
        self._on_step(self.steps)

    def _scaler_updated(self) -> None:
        """Its step was the end."""
