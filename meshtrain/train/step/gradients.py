"""The backward pass: a hook on each parameter hands its gradient over as soon as autograd has accumulated it.

A gradient is copied into its place in shared memory, and a bucket leaves as soon as it and all before it are full: the
exchange of the last layers runs while gradients of earlier layers are still computed (wait-free backpropagation:
Poseidon, Zhang et al. 2017, arXiv 1706.03292, section 3; DDP's bucketing is the same idea). With s=0 the end of
`backward()` waits for the round, and `p.grad` holds the means when it returns, by O1 (s=0).
"""

import sys
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from types import CodeType

import torch
from torch.autograd import Variable
from torch.utils.checkpoint import CheckpointFunction

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.optim.clipping import UntouchedGradients
from meshtrain.train.optim.lent_gradients import LentGradients
from meshtrain.train.optim.loss_scaling import LossScaling
from meshtrain.train.optim.stale_view import StaleView
from meshtrain.train.step.base import Base
from meshtrain.train.step.contribution import StepContribution
from meshwire.messages.learner import RoundDone

REENTRANT_CODE: CodeType = CheckpointFunction.backward.__code__


class GradientHooks:
    """Contributes the gradients of one model, one round per synchronised backward pass.

    Args:
        view: keeps the gradients whose round is not applied yet (s > 0).
        scaling: by what a GradScaler has multiplied them.
        untouched: remembers them, to see whether the script changes them before `optimizer.step()`.
        lent: with s=0 the means that they have become.
        staleness: the bound s.

    Attributes:
        idle: while it is set, gradients stay where they are.
        unstepped: a backward pass has ended whose gradients wait for later ones (O6), and the script has not called
            `optimizer.step()` behind it.
    """

    def __init__(
        self,
        base: Base,
        contribution: StepContribution,
        view: StaleView,
        scaling: LossScaling,
        untouched: UntouchedGradients,
        lent: LentGradients,
        staleness: int,
    ) -> None:
        self._base = base
        self._contribution = contribution
        self._view = view
        self._scaling = scaling
        self._untouched = untouched
        self._lent = lent
        self._staleness = staleness
        self._spans = base.means.plan.spans
        self._places = base.means.tensors.places
        self._lock = threading.RLock()  # a model on several devices has several backward threads
        self._paused = 0
        self.idle = self.unstepped = False
        self._last = True  # of the running pass: the contribution leaves with it
        self._reached: set[int] = set()  # spans, by the running pass
        self._scale = 1.0
        self._task: int | None = None  # autograd's id of the running synchronised pass
        self._accumulated = False
        self._hooks = [
            self._parameter(index).register_post_accumulate_grad_hook(self._hook(index))
            for index in self._contribution.trained
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate, as O6 (accumulation) has it."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def check_synchronised(self) -> None:
        """Called before the optimizer steps. Raises UsageError when it would step on gradients of this peer alone."""
        if self._task is not None:
            raise UsageError(FAILED_BACKWARD)
        if self._accumulated and not (self._contribution.sealed or self.unstepped):
            raise UsageError(UNSYNCHRONISED)

    def next_step(self) -> None:
        """The step has ended."""
        self._untouched.forget()
        self._task = None
        self._accumulated = False

    def next_pass(self) -> None:
        """The script has stepped behind a pass whose gradients wait for later ones."""
        self._untouched.forget()
        self.unstepped = self._accumulated = False

    def contribute_early(self) -> RoundDone | None:
        """What earlier passes have left becomes the contribution, for no further pass will follow soon. Returns its
        round, whose means are in the result slot; None: the step is lost."""
        contribution = self._contribution
        self._lent.own_all()
        contribution.begin(last=False)
        for index in contribution.spans:
            contribution.leave_out(index)
        contribution.seal(overflows=self._scaling.active)
        contribution.sealed = True
        return contribution.wait_round()

    def close(self) -> None:
        """Removes the hooks; gradients are the script's own."""
        self._lent.own_all()
        for hook in self._hooks:
            hook.remove()

    # The backward pass

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            with self._lock, torch.no_grad():
                if self.idle:
                    return
                if self._paused:
                    self._lent.own(parameter)
                    self._accumulated = True
                    return
                task = torch._C._current_graph_task_id()
                if self._task is None:
                    self._begin(task)
                elif task != self._task or index in self._reached:
                    self._refuse_second()
                if index in self._contribution.spans:
                    self._write(index, parameter)
                    self._release(parameter)
                if self._last:
                    self._contribution.send_full(overflows=self._scaling.active)

        return on_gradient

    def _begin(self, task: int) -> None:
        if inside_reentrant_checkpoint():
            raise NotSupported(REENTRANT)
        if self._contribution.sealed or self.unstepped:
            raise UsageError(SECOND_BACKWARD)
        self._task = task
        self._scale = self._scaling.current_scale()
        self._last = self._contribution.is_last
        self._reached.clear()
        if self._last:
            self._contribution.begin()
        else:
            self._contribution.hold()
        Variable._execution_engine.queue_callback(self._finish)

    def _refuse_second(self) -> None:
        if inside_reentrant_checkpoint():
            raise NotSupported(REENTRANT)
        raise UsageError(BROKEN_BACKWARD)

    def _write(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise NotSupported(SPARSE.format(self._spans[index].name))
        added = self._base.step.contributed(parameter, gradient, self._scale)
        assert added is not None
        self._add(index, added)

    def _add(self, index: int, values: torch.Tensor) -> None:
        self._reached.add(index)
        add = self._contribution.write if self._last else self._contribution.keep
        add(index, values, self._scale)

    def _release(self, parameter: torch.Tensor) -> None:
        """With s=0 the mean takes the gradient's place, and this memory serves the next gradient: it is in the cache,
        and need not be asked for again. A hook of the script on the same parameter may still look at it."""
        if self._last and self._staleness == 0 and len(parameter._post_accumulate_grad_hooks or ()) == 1:
            parameter.grad = None

    # Its end

    @torch.no_grad()
    def _finish(self) -> None:
        contribution = self._contribution
        with self._lock:
            anothers = self._of_other_optimizers()
            for index in contribution.spans:
                if index in anothers:
                    contribution.leave_out(index)
                elif index not in self._reached:
                    self._fill_unreached(index)
            if not self._last:
                self._task, self.unstepped = None, True
                self._untouched.remember()
                return
            contribution.seal(overflows=self._scaling.active)
            if self._staleness == 0:
                self._take_round()
            elif not contribution.poisoned:  # what is not finite would spread over the view, and from there for ever
                self._view.keep(contribution.step, self._scale, contribution.hyperparameters)
                contribution.keep_buffers()
            self._task = None
            contribution.sealed = True
            self._untouched.remember()

    def _of_other_optimizers(self) -> Set[int]:
        """Spans of optimizers of whose parameters this pass has reached none: it is not theirs (O11)."""
        joint = self._base.step.optimizer
        if not isinstance(joint, JointOptimizer) or self._accumulated:
            return frozenset()
        owners = {index: joint.owner(self._parameter(index)) for index in self._contribution.spans}
        reached = {owners[index] for index in self._contribution.filled}
        return {index for index, owner in owners.items() if owner not in reached}

    def _fill_unreached(self, index: int) -> None:
        """A parameter that this pass did not reach counts with what it has accumulated, else with zero."""
        parameter = self._parameter(index)
        if parameter.grad is not None:
            self._write(index, parameter)
        elif (added := self._base.step.contributed(parameter, None, self._scale)) is not None:
            self._add(index, added)
        elif self._last:
            self._contribution.leave_out(index)

    def _take_round(self) -> None:
        """By O1 (s=0) `p.grad` becomes the average; None after a void round, and in a lost step."""
        base = self._base
        done = self._contribution.wait_round()
        if done is None:
            self._forget_gradients()
            return
        self._contribution.done = done
        if done.void:
            base.buffers.restore()
            self._forget_gradients()
        base.check(done)
        if done.void:
            return
        base.decide_masks(done)
        if base.buffers.watched:
            base.kept.dirty()  # they are of the new round from here on
        for parameter, mean in base.means.by_parameter(done):
            if mean is None:
                parameter.grad = None
                continue
            self._lent.lend(parameter, mean)
            if self._scaling.active:
                assert parameter.grad is not None
                parameter.grad.mul_(self._scale)
        base.buffers.take(base.means.slots.result, done.integers, base.means.plans.of(done.round))

    def _forget_gradients(self) -> None:
        """A GradScaler must see an overflow on every peer, so that all of them skip the step and shrink alike."""
        for parameter in self._base.means.parameters():
            parameter.grad = torch.full_like(parameter, float("inf")) if self._scaling.active else None

    def _parameter(self, index: int) -> torch.Tensor:
        return self._places[self._spans[index].tensor].tensor()


UNSYNCHRONISED = (
    "optimizer.step() after backward passes under mt.no_sync() only: run the last backward() of a step outside of it"
)
SECOND_BACKWARD = (
    "a second backward() before optimizer.step(): to accumulate gradients, run all but the last backward() of a step "
    "under `with mt.no_sync():`"
)
FAILED_BACKWARD = "optimizer.step() after a backward pass that failed: this step cannot be completed"
BROKEN_BACKWARD = (
    "an earlier backward pass of this step failed when part of its gradients had been sent already, or runs at the "
    "same time in another thread: this step cannot be completed"
)
SPARSE = "{} has a sparse gradient, which cannot be averaged: use sparse=False in its module"
REENTRANT = (
    "activation checkpointing with use_reentrant=True runs a backward pass inside the backward pass, and its gradients "
    "cannot be told from complete ones: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


def inside_reentrant_checkpoint() -> bool:
    """Whether this hook was called from the backward pass that such a checkpoint starts: it stands on the stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is REENTRANT_CODE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
