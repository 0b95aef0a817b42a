"""From a backward pass to the daemon: hooks fill the buckets. With s=0 the end of the pass waits for the round (O1).

Gradients are copied into shared memory as they become ready, and a bucket leaves as soon as it and all before it are
full: the exchange runs while earlier layers are still computed (WFBP).
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType

import torch
from torch.autograd import Variable
from torch.utils.checkpoint import CheckpointFunction

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.applying import Applying
from meshtrain.train.buffers import Buffers
from meshtrain.train.channel import Channel
from meshtrain.train.clipping import Untouched
from meshtrain.train.drawn import DrawnSamples, Taken
from meshtrain.train.means import Means
from meshtrain.train.overlay import Overlay
from meshtrain.train.scaling import Scaling
from meshtrain.train.slots import view
from meshwire.messages.learner import LearnerBucket, LearnerSealed, RoundDone, StepLost
from meshwire.messages.rounds import Poison
from meshwire.plan import Bucket

REENTRANT_CODE: CodeType = CheckpointFunction.backward.__code__


@dataclass(frozen=True)
class StepParts:
    """What goes with the gradients of a step.

    Attributes:
        applying: takes rounds into the base.
        staleness: the bound s.
        absent_in_barriers: whether rounds go on without a learner that waits for the others: its daemon then tells it
            to start again.
        pack: the options of the optimizer for the bind of a step (O3).
    """

    means: Means
    buffers: Buffers
    overlay: Overlay
    applying: Applying
    drawn: DrawnSamples
    scaling: Scaling
    untouched: Untouched
    staleness: int
    absent_in_barriers: bool
    pack: Callable[[int], bytes]


class Gradients:
    """Sends the gradients of one model, one round per synchronised backward pass.

    Attributes:
        step: number of the step that is being computed, from 1.
        sealed: whether its backward pass has ended.
        done: s=0: its round, which is in `p.grad` and not in the base; None before the pass has ended, and for a lost
            step.
        hyperparameters: what its bind said.
        samples: how many this step covers.
    """

    def __init__(self, parts: StepParts, channel: Channel) -> None:
        plan, specs = parts.means.plan, parts.means.tensors.manifest.tensors
        self._parts = parts
        self._plan = plan
        self._tensors = parts.means.tensors
        self._channel = channel
        self._spans = [index for index, span in enumerate(plan.spans) if specs[span.tensor].kind == "parameter"]
        self._buffer_spans = [index for index, span in enumerate(plan.spans) if specs[span.tensor].kind == "buffer"]
        self._bucket_of = {index: bucket.index for bucket in plan.buckets for index in bucket.spans}
        self._lock = threading.RLock()  # a model on several devices has several backward threads
        self._paused = 0
        self._raw = parts.means.slots.raw(1)
        self._taken = Taken(1.0, (), 0)
        self._scale = 1.0
        self.step = 1
        self.sealed = False
        self.done: RoundDone | None = None
        self.hyperparameters = b""
        self.samples = 0
        self._task: int | None = None  # autograd's id of the running synchronised pass
        self._accumulated = False
        self._poisoned = False
        self._lost = False
        self._filled: set[int] = set()  # spans that hold a gradient
        self._used: set[int] = set()  # their tensors
        self._open: list[int] = []  # spans that are missing, by bucket
        self._next = 0  # the bucket to be sent next
        self._reset_step()
        self._hooks = [
            self._parameter(index).register_post_accumulate_grad_hook(self._hook(index)) for index in self._spans
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """O6: backward passes inside only accumulate."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def check_synchronised(self) -> None:
        """Called before the optimizer steps. Raises UsageError when it would step on gradients of this peer alone."""
        if self._task is not None:
            raise UsageError("optimizer.step() after a backward pass that failed: this step cannot be completed")
        if self._accumulated and not self.sealed:
            raise UsageError(
                "optimizer.step() after backward passes under mt.no_sync() only: "
                "run the last backward() of a step outside of it"
            )

    def lost(self, notice: StepLost) -> None:
        """A step of this learner is in no round (V2, R5)."""
        self._parts.overlay.drop(notice.step)
        if notice.step == self.step and notice.retry:
            self._lost = True
            self.samples = 0

    def next_step(self) -> None:
        """The step has ended."""
        self.step += 1
        self._parts.untouched.forget()
        self._reset_step()

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

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
                elif task != self._task or index in self._filled:
                    self._refuse_second()
                self._write(index, parameter)
                self._send_full()

        return on_gradient

    def _begin(self, task: int) -> None:
        if _inside_reentrant_checkpoint():
            raise NotSupported(_REENTRANT)
        if self.sealed:
            raise UsageError(
                "a second backward() before optimizer.step(): to accumulate gradients, run all but the last "
                "backward() of a step under `with mt.no_sync():` (O6)"
            )
        self._task = task
        self._scale = self._parts.scaling.begin()
        self._taken = self._parts.drawn.take(self.step)
        self.samples = int(self._taken.weight) if self._taken.blocks else 0
        self.hyperparameters = self._parts.pack(self.step)
        self._raw = self._parts.means.slots.raw(self.step)
        Variable._execution_engine.queue_callback(self._finish)

    def _refuse_second(self) -> None:
        if _inside_reentrant_checkpoint():
            raise NotSupported(_REENTRANT)
        raise UsageError(
            "an earlier backward pass of this step failed when part of its gradients had been sent already, or runs "
            "at the same time in another thread: this step cannot be completed"
        )

    def _write(self, index: int, parameter: torch.Tensor) -> None:
        gradient, span = parameter.grad, self._plan.spans[index]
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise NotSupported(
                f"{span.name} has a sparse gradient, which cannot be averaged: use sparse=False in its module (O6)"
            )
        place, factor = view(self._raw, span, gradient.shape), self._taken.weight / self._scale
        if gradient.dtype is torch.float32 and gradient.device.type == "cpu":
            torch.mul(gradient, factor, out=place)
        else:
            place.copy_(gradient).mul_(factor)
        self._filled.add(index)
        self._used.add(span.tensor)
        self._open[self._bucket_of[index]] -= 1

    def _send_full(self) -> None:
        """Strictly in the plan's order: a bucket that is full early waits for those before it."""
        while self._next < len(self._open) and not self._open[self._next]:
            bucket = self._plan.buckets[self._next]
            poison = self._poison(bucket)
            self._poisoned |= poison is not None
            self._channel.tell(
                LearnerBucket(
                    step=self.step,
                    bucket=bucket.index,
                    weight=self._taken.weight,
                    samples=self._taken.blocks,
                    hyperparameters=self.hyperparameters,
                    claim=self._taken.claim,
                    poison=poison,
                )
            )
            self._next += 1

    def _poison(self, bucket: Bucket) -> Poison | None:
        """V1: the first tensor of the bucket that holds NaN or an infinity."""
        if _finite(self._raw[bucket.start : bucket.start + bucket.count]):
            return None
        for index in bucket.spans:
            span = self._plan.spans[index]
            if not _finite(self._raw[span.start : span.start + span.count]):
                is_gradient = index in self._filled
                return Poison(
                    bucket=bucket.index,
                    parameter=span.name,
                    reason=f"its {'gradient' if is_gradient else 'buffer'} holds NaN or infinity",
                    overflow=is_gradient and self._parts.scaling.active,
                )
        raise AssertionError("padding between two tensors stays zero")

    # Its end

    @torch.no_grad()
    def _finish(self) -> None:
        with self._lock:
            for index in self._spans:
                if index not in self._filled:
                    self._fill_unreached(index)
            buffers = self._parts.buffers
            buffers.write(self._raw, self._taken.weight)
            for index in self._buffer_spans:
                self._open[self._bucket_of[index]] -= 1
            self._send_full()
            self._channel.tell(LearnerSealed(step=self.step, used=self._used_bitmap(), integers=buffers.integers()))
            if self._parts.staleness == 0:
                self._take_round()
            elif not self._poisoned:  # what is not finite would spread over the view, and from there for ever
                self._parts.overlay.keep(self.step, self._scale, self.hyperparameters)
            self._task = None
            self.sealed = True
            self._parts.untouched.remember()

    def _fill_unreached(self, index: int) -> None:
        """A parameter that this pass did not reach counts with what it has accumulated, else with zero."""
        parameter, span = self._parameter(index), self._plan.spans[index]
        if parameter.grad is not None:
            self._write(index, parameter)
            return
        self._raw[span.start : span.start + span.count].zero_()
        self._open[self._bucket_of[index]] -= 1

    def _take_round(self) -> None:
        """O1: `p.grad` becomes the average; None after a void round, and in a lost step."""
        rounds = self._channel.rounds
        self._channel.wait(
            lambda: self._lost or (bool(rounds) and rounds[0].step == self.step), f"step {self.step} for its round"
        )
        if self._lost:
            self._forget_gradients()
            return
        self.done = done = rounds.popleft()
        if done.void:
            self._parts.buffers.restore()
            self._forget_gradients()
        self._parts.applying.check(done)
        if done.void:
            return
        for parameter, mean in self._parts.means.of(done):
            if mean is None:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(mean)
            if self._parts.scaling.active:
                parameter.grad.mul_(self._scale)
        self._parts.buffers.take(self._parts.means.slots.result, done.integers)

    def _forget_gradients(self) -> None:
        """A GradScaler must see an overflow on every peer, so that all of them skip the step and shrink alike."""
        for parameter in self._parts.means.parameters():
            parameter.grad = torch.full_like(parameter, float("inf")) if self._parts.scaling.active else None

    def _used_bitmap(self) -> bytes:
        bits = bytearray(-(-len(self._tensors.manifest.tensors) // 8))
        for tensor in self._used:
            bits[tensor // 8] |= 1 << tensor % 8
        return bytes(bits)

    # State

    def _reset_step(self) -> None:
        self.sealed = False
        self.done = None
        self.samples = 0
        self._task = None
        self._accumulated = self._poisoned = self._lost = False
        self._filled = set()
        self._used = set()
        self._open = [len(bucket.spans) for bucket in self._plan.buckets]
        self._next = 0

    def _parameter(self, index: int) -> torch.Tensor:
        return self._tensors.places[self._plan.spans[index].tensor].tensor()


_REENTRANT = (
    "activation checkpointing with use_reentrant=True runs a backward pass inside the backward pass, and its gradients "
    "cannot be told from complete ones: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


def _finite(values: torch.Tensor) -> bool:
    """One pass, no temporary: the largest magnitude is infinite or NaN when any value is."""
    return bool(torch.linalg.vector_norm(values, ord=float("inf")).isfinite())


def _inside_reentrant_checkpoint() -> bool:
    """Whether this hook was called from the backward pass that such a checkpoint starts: it stands on the stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is REENTRANT_CODE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
