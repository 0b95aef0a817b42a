"""The step boundary, in place of the optimizer's `step`: rounds go into the base until the next step may start.

The daemon decides which rounds and when: the learner applies what it is given until it is told to start (R1).
"""

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshtrain.errors import MeshtrainError, RequestError, UsageError
from meshtrain.train import clipping
from meshtrain.train.applying import BaseParts
from meshtrain.train.channel import Channel
from meshtrain.train.gradients import Gradients, StepParts
from meshtrain.train.saving import Saving
from meshwire.messages.learner import (
    BarrierPassed,
    LearnerBack,
    LearnerBarrier,
    LearnerIdle,
    LearnerStepped,
    RoundDone,
    Start,
)

SCALER_CODE = torch.amp.GradScaler.step.__code__


class Boundary:
    """One learner's. From its creation on, `optimizer.step()` is this.

    Args:
        original: the optimizer's own `step`.

    Attributes:
        decided: rounds that this learner was in or was passed over in, when its step began.
    """

    def __init__(
        self,
        base: BaseParts,
        step: StepParts,
        original: Callable[..., Any],
        gradients: Gradients,
        saving: Saving,
        channel: Channel,
    ) -> None:
        self._base = base
        self._step_parts = step
        self._original = original
        self._applying = step.applying
        self._gradients = gradients
        self._saving = saving
        self._channel = channel
        self._staleness = step.staleness
        self._optimizer = base.optimizer
        tensors = base.means.tensors
        self._frozen = [(spec.name, tensor) for _, spec, tensor in tensors.kind("frozen")]
        self._known = {id(tensor) for _, _, tensor in tensors.kind("parameter", "frozen")}
        self._bases = 0  # contexts of `base` that are open
        self._started = 0
        self._passed: BarrierPassed | None = None
        self._changes_gradients = False  # the script does, between backward() and step(): only s=0 allows it
        self._closed = False
        self._began_s = time.monotonic()
        self._waited_before_s = channel.waited_s
        self.decided = 0
        channel.route(Start, self._on_start)
        channel.route(BarrierPassed, self._on_passed)
        self._replace_step()
        step.scaling.watch(base.optimizer, self._after_scaler, step.untouched.remember)

    def _replace_step(self) -> None:
        optimizer, original = self._optimizer, self._original

        @functools.wraps(original)
        def step(closure: Callable[[], Any] | None = None) -> Any:
            # For learning rate schedulers: with s>0 the first steps apply nothing, and are steps all the same.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            if self._closed:
                return original(closure)
            return self._step(closure)

        # As a scheduler marks a step that it watches: whenever it is made, it leaves this one in place.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._before = optimizer.__dict__.get("step")
        optimizer.step = step  # type: ignore[method-assign]
        self._replacement = step

    def close(self) -> None:
        """The optimizer steps as it did before."""
        self._closed = True
        self._step_parts.scaling.close()
        if self._optimizer.__dict__.get("step") is self._replacement:
            del self._optimizer.step
            if self._before is not None:
                self._optimizer.step = self._before  # type: ignore[method-assign]

    # The script's step

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        if self._gradients.sealed:
            self._end_step()
        elif self._staleness == 0:
            self._original()  # without a backward pass there is no step of the mesh
        return loss

    def _after_scaler(self) -> None:
        """A GradScaler that has seen an overflow has not called `optimizer.step()`; the step is over all the same."""
        if self._gradients.sealed:
            self._check()
            self._end_step(skip=True)

    def _end_step(self, *, skip: bool = False) -> None:
        """Returns when the next step may start, with the model as it is to compute with.

        Args:
            skip: the optimizer does not step on the round in `p.grad` (s=0).
        """
        gradients, done = self._gradients, self._gradients.done
        self._changes_gradients |= self._step_parts.untouched.changed() is not None
        if done is not None:
            if not skip:
                # Equal options may have changed since the bind, alike on all peers, as in a script without a job.
                equal = done.hyperparameters == gradients.hyperparameters
                self._applying.step_under(None if equal else self._applying.options(done))
            self._applying.conclude(done)
        self._tell_stepped()
        self.wait_start()
        self._base.clipping.step_ended()

    def _tell_stepped(self) -> None:
        now_s = time.monotonic()
        self._channel.tell(
            LearnerStepped(
                step=self._gradients.step,
                samples=self._gradients.samples,
                step_s=now_s - self._began_s,
                exposed_s=self._channel.waited_s - self._waited_before_s,
            )
        )
        self._began_s, self._waited_before_s = now_s, self._channel.waited_s
        self._gradients.next_step()

    def _check(self) -> None:
        self._channel.look()
        if not self._step_parts.scaling.active and _called_by_scaler():
            raise UsageError(
                "the GradScaler is not known to the mesh: "
                "mt.prepare(model, optimizer, loader, scaler=scaler), or without a loader, scaler=scaler"
            )
        if self._bases:
            raise UsageError("optimizer.step() inside `with mt.base():`, which is for evaluating and saving: leave it")
        for name, tensor in self._frozen:
            if tensor.grad is not None:
                raise UsageError(
                    f"{name} has a gradient, but was frozen when mt.prepare was called, so it is not averaged: "
                    "call requires_grad_(True) on it before mt.prepare"
                )
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._known:
                    raise UsageError(
                        f"a parameter of shape {tuple(parameter.shape)} was added to the optimizer after mt.prepare, "
                        "so it is not averaged: add it before"
                    )
        self._gradients.check_synchronised()
        if self._staleness:
            self._step_parts.untouched.check()

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """O4. With s=0 clips `p.grad`, with s>0 the rounds to come.

        Returns:
            The norm before clipping: with s>0 of the newest round that was applied, 0 before the first one.

        Raises:
            UsageError: with s>0, for some of the trained parameters only.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        trained = self._base.means.parameters()
        covers, done = clipping.covers(given, trained), self._gradients.done
        if self._staleness:
            if not covers:
                raise UsageError(
                    "mt.clip_grad_norm_ of some parameters only: with a bound above 0 rounds are clipped by the norm "
                    "of all of them: give it model.parameters()"
                )
            self._base.clipping.note(max_norm)
            return torch.tensor(math.sqrt(self._applying.squared_norm))
        if not covers or done is None or done.void or self._step_parts.untouched.changed() is not None:
            return torch.nn.utils.clip_grad_norm_(given, max_norm)
        self._base.clipping.note(max_norm)
        clipping.scale(given, self._base.clipping.coefficient(done.squared_norm, max_norm))
        self._step_parts.untouched.remember()
        return torch.tensor(math.sqrt(done.squared_norm))

    # Waiting

    def wait_start(self) -> None:
        """Applies the rounds that the daemon gives until the step may start, then shows what it computes with."""
        step = self._gradients.step
        self._wait(lambda: self._started == step, f"step {step} for its start")
        if self._staleness:
            self._base.overlay.step_over(self._applying.squared_norm)
            self._base.buffers.restore()
        self._show_view()

    def idle(self, reason: str, until: Callable[[], bool], what: str) -> None:
        """Waits for other peers without being waited for, and applies rounds meanwhile (R5).

        Args:
            what: is waited for, for the error.
        """
        begins_again = self._leave()
        self._channel.tell(LearnerIdle(reason=reason, finished=False))
        if self._gradients.done is None:
            self._wait(until, what)
        else:  # a round of s=0 that the script has not stepped on yet comes first
            self._channel.wait(until, what)
        self._channel.tell(LearnerBack())
        if begins_again:
            self.wait_start()
        else:
            self._show_view()

    def barrier(self, number: int) -> None:
        """Waits until every peer is in this barrier; with s>0 all replicas are equal then.

        Raises:
            UsageError: between backward() and optimizer.step().
            RequestError: some peer will never come.
        """
        if self._gradients.sealed:
            raise UsageError("mt.barrier() between backward() and optimizer.step(): call it after the step")
        self._leave()
        try:
            self._enter(number)
        finally:  # told that some peer will never come, it goes on as well
            if self._passed is not None:
                self._resume()

    def flush(self) -> None:
        """At the end: every round that anybody has contributed to is in the base, and the model holds it."""
        if self._gradients.sealed:
            self._tell_stepped()
        self._leave()
        self._enter(0)
        self.show_base_for_good()

    def show_base_for_good(self) -> None:
        """No step will follow: the model holds what all peers have in common."""
        self._base.overlay.show_base()
        self._base.overlay.clear()
        self._base.buffers.show_base()

    @contextmanager
    def base(self) -> Iterator[None]:
        """O7: inside, the model holds the base."""
        applied, held = self._applying.applied, {}
        if not self._bases:
            self._base.overlay.show_base()
            held = self._base.buffers.show_base()
        self._bases += 1
        try:
            yield
        finally:
            self._bases -= 1
            if not self._bases and not self._closed:
                self._base.buffers.restore()
                if self._applying.applied == applied:
                    self._base.buffers.show(held)
                self._show_view()

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        """Between two steps: rounds are applied and the base is saved as the daemon says, until `until()` is true."""
        with self._saving.possible():
            self._channel.wait(until, what, self._apply)

    def _apply(self, done: RoundDone) -> None:
        if self._staleness == 0 and self._changes_gradients and not done.void:
            raise UsageError(
                f"round {done.round} was averaged while this peer had no samples left, and this script changes "
                "gradients after backward(), which this peer cannot do alike: clip with mt.clip_grad_norm_, or submit "
                "with --shares equal"
            )
        self._applying.apply(done)
        self._saving.do_due()

    def _leave(self) -> bool:
        """The daemon forgets a step that has begun and sent nothing. Returns whether it will be begun again."""
        begins_again = not self._gradients.sealed
        if begins_again:
            self._started = 0
        return begins_again

    def _enter(self, number: int) -> None:
        self._passed = None
        self._channel.tell(LearnerBarrier(number=number))
        what = f"barrier {number}" if number else "the end of the job"
        self._wait(lambda: self._passed is not None, what)
        assert self._passed is not None
        if self._passed.number != number:
            raise MeshtrainError(f"the daemon answered barrier {number} with {self._passed.number}: versions differ")
        if self._passed.error is not None:
            raise RequestError(self._passed.error)

    def _resume(self) -> None:
        if self._step_parts.absent_in_barriers:
            self.wait_start()
        else:
            self._started = self._gradients.step

    def _show_view(self) -> None:
        if not self._bases:
            self._base.overlay.show_view()

    def _on_start(self, start: Start) -> None:
        self._started, self.decided = start.step, start.decided

    def _on_passed(self, passed: BarrierPassed) -> None:
        self._passed = passed


def _called_by_scaler() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is SCALER_CODE:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back  # type: ignore[assignment]
    return False
