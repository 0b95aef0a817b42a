"""From a backward pass to averaged gradients: hooks fill the buckets, the end of the pass waits for the round (O1).

Gradients are copied into shared memory as they become ready, and a bucket leaves as soon as it and all before it are
full: the exchange runs while earlier layers are still computed (WFBP).
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType

import torch
from torch.autograd import Variable
from torch.utils.checkpoint import CheckpointFunction

from meshtrain.errors import NonFiniteGradient, NotSupported, UsageError
from meshtrain.train.buffers import Buffers
from meshtrain.train.channel import Channel
from meshtrain.train.drawn import DrawnSamples
from meshtrain.train.slots import Slots, view
from meshtrain.train.tensors import ModelTensors
from meshwire.messages.local import LearnerBucket, LearnerSealed, RoundDone
from meshwire.messages.rounds import Poison, SampleBlock
from meshwire.plan import Bucket, Plan

REENTRANT_CODE: CodeType = CheckpointFunction.backward.__code__


class Gradients:
    """Averages the gradients of one model, one round per synchronised backward pass.

    Args:
        named: adds the peers' names to a reason that names ranks.

    Attributes:
        step: number of the step that is being computed, from 1.
        done: its round, once the backward pass has ended; None before.
        samples: the samples that this step has contributed.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        plan: Plan,
        slots: Slots,
        buffers: Buffers,
        channel: Channel,
        drawn: DrawnSamples,
        named: Callable[[str], str],
    ) -> None:
        specs = tensors.manifest.tensors
        self._tensors = tensors
        self._plan = plan
        self._slots = slots
        self._buffers = buffers
        self._channel = channel
        self._drawn = drawn
        self._named = named
        self._spans = [index for index, span in enumerate(plan.spans) if specs[span.tensor].kind == "parameter"]
        self._buffer_spans = [index for index, span in enumerate(plan.spans) if specs[span.tensor].kind == "buffer"]
        self._bucket_of = {index: bucket.index for bucket in plan.buckets for index in bucket.spans}
        self._lock = threading.RLock()  # a model on several devices has several backward threads
        self._paused = 0
        self._accumulated = False
        self._task: int | None = None  # autograd's id of the running synchronised pass
        self._raw = slots.raw(1)
        self._weight = 1.0
        self.step = 1
        self.done: RoundDone | None = None
        self.samples: tuple[SampleBlock, ...] = ()
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
        if self._accumulated and self.done is None:
            raise UsageError(
                "optimizer.step() after backward passes under mt.no_sync() only: "
                "run the last backward() of a step outside of it"
            )

    def next_step(self) -> None:
        """The optimizer has stepped on the round."""
        self.step += 1
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
        if self.done is not None:
            raise UsageError(
                "a second backward() before optimizer.step(): to accumulate gradients, run all but the last "
                "backward() of a step under `with mt.no_sync():` (O6)"
            )
        self._task = task
        self._weight, self.samples = self._drawn.take()
        self._raw = self._slots.raw(self.step)
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
        place = view(self._raw, span, gradient.shape)
        if gradient.dtype is torch.float32 and gradient.device.type == "cpu":
            torch.mul(gradient, self._weight, out=place)
        else:
            place.copy_(gradient).mul_(self._weight)
        self._filled.add(index)
        self._used.add(span.tensor)
        self._open[self._bucket_of[index]] -= 1

    def _send_full(self) -> None:
        """Strictly in the plan's order: a bucket that is full early waits for those before it."""
        while self._next < len(self._open) and not self._open[self._next]:
            bucket = self._plan.buckets[self._next]
            self._channel.tell(
                LearnerBucket(
                    step=self.step,
                    bucket=bucket.index,
                    weight=self._weight,
                    samples=self.samples,
                    poison=self._poison(bucket),
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
                kind = "gradient" if index in self._filled else "buffer"
                return Poison(bucket=bucket.index, parameter=span.name, reason=f"its {kind} holds NaN or infinity")
        raise AssertionError("padding between two tensors stays zero")

    # Its end

    @torch.no_grad()
    def _finish(self) -> None:
        with self._lock:
            for index in self._spans:
                if index not in self._filled:
                    self._fill_unreached(index)
            self._buffers.write(self._raw, self._weight)
            for index in self._buffer_spans:
                self._open[self._bucket_of[index]] -= 1
            self._send_full()
            self._channel.tell(
                LearnerSealed(step=self.step, used=self._used_bitmap(), integers=self._buffers.integers())
            )
            done = self._channel.wait_round(self.step)
            self._task = None
            self.done = done
            self._take(done)

    def _fill_unreached(self, index: int) -> None:
        """A parameter that this pass did not reach counts with what it has accumulated, else with zero."""
        parameter, span = self._parameter(index), self._plan.spans[index]
        if parameter.grad is not None:
            self._write(index, parameter)
            return
        self._raw[span.start : span.start + span.count].zero_()
        self._open[self._bucket_of[index]] -= 1

    def _take(self, done: RoundDone) -> None:
        if done.void:
            self._buffers.restore()
            for index in self._spans:
                self._parameter(index).grad = None
            if done.stop:
                raise NonFiniteGradient(done.round, self._named(done.reason))
            return
        for index in self._spans:
            parameter, span = self._parameter(index), self._plan.spans[index]
            if not done.used[span.tensor // 8] >> span.tensor % 8 & 1:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view(self._slots.result, span, parameter.shape))
        self._buffers.take(self._slots.result, done.integers)

    def _used_bitmap(self) -> bytes:
        bits = bytearray(-(-len(self._tensors.manifest.tensors) // 8))
        for tensor in self._used:
            bits[tensor // 8] |= 1 << tensor % 8
        return bytes(bits)

    # State

    def _reset_step(self) -> None:
        self.done = None
        self._accumulated = False
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
