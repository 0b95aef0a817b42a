"""All that trains one prepared model in a job, behind one object: what `mt`'s functions and the loader ask for."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from meshtrain.errors import UsageError
from meshtrain.train.link.channel import Channel
from meshtrain.train.optim.clipping import checked
from meshtrain.train.optim.rehearsal import Rehearsal
from meshtrain.train.step.base import Base
from meshtrain.train.step.boundary import StepBoundary
from meshtrain.train.step.contribution import StepContribution
from meshwire.messages.learner import LearnerReady, StepLost


class ScriptSteps(Protocol):
    """What stands in place of the script's `optimizer.step()`: `GradientStep`, or with a period `LocalStep`."""

    @property
    def number(self) -> int:
        """The number of the step that is being computed; the first one is 1."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate (O6)."""

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """O4 (clipping). Returns the norm before clipping."""

    def end_period(self) -> bool:
        """Local steps that no round has covered become a round now. Returns whether there were any (R9, period)."""

    @property
    def rehearsal(self) -> Rehearsal:
        """Computes steps that count for nothing, over epochs of which there is nothing for this learner (X4)."""

    def take_turns(self) -> None:
        """Of several optimizers: rounds may have gone on, and the script catches up with them."""

    def stop_catching_up(self) -> None:
        """It is to be as if it had."""

    def close(self) -> None:
        """The optimizer steps as it did before."""


class Engine:
    """From the backward pass to the base, of one model and optimizer. `step/README.md` has the way of a gradient.

    Args:
        clip_refusal: why the means of the job's codec cannot be clipped, and what to do instead; None: they can be.
        flushes: whether there may be rounds, at the end, that this learner is not in: those of learners that go on.
        base_apart: whether the model may hold something else than the base between two steps: with s > 0, or a period.
    """

    def __init__(
        self,
        base: Base,
        contribution: StepContribution,
        boundary: StepBoundary,
        steps: ScriptSteps,
        channel: Channel,
        *,
        clip_refusal: str | None,
        flushes: bool,
        base_apart: bool,
    ) -> None:
        self._base = base
        self._contribution = contribution
        self._channel = channel
        self._clip_refusal = clip_refusal
        self._flushes = flushes
        self._base_apart = base_apart
        self._entered = False
        self._behind_loop = 0  # steps that were rehearsed there, while this learner takes no part
        self.boundary = boundary
        self.steps = steps
        channel.route(StepLost, self._on_step_lost)

    def enter(self) -> None:
        """This learner takes part: its daemon hears that it is ready, the rounds since its state are applied, and the
        first step may begin. Does nothing the second time.

        Raises:
            RequestError: a peer has failed.
            ConnectionLost, JobStopped, MeshtrainError.
        """
        if self._entered:
            return
        self.steps.rehearsal.watcher = None
        self._end_rehearsals()
        self._channel.ask(LearnerReady(), "the start of the first step")
        self._entered = True
        self.boundary.wait_start()
        self.steps.take_turns()

    def enter_later(self) -> None:
        """The script has epochs to run through that are over (X4): until the first one that is not, all of it is
        rehearsed, and the other peers go on without this learner, which would hold them up. A script that steps
        outside the loader's loop takes part then."""
        self.steps.rehearsal.watcher = self
        self.steps.rehearsal.begin()
        self.steps.rehearsal.leave()

    def rehearsed_behind_loop(self) -> None:
        """The first step behind a loop may be on its last batch; with another one the script is in no loop any more."""
        self._behind_loop += 1
        if self._behind_loop > 1:
            self.enter()

    # For the script

    def show_base(self) -> AbstractContextManager[None]:
        """`mt.base()`, by O7 (base): inside, the model holds the base."""
        if self.steps.rehearsal.on:
            self.steps.rehearsal.restore()
        return self.boundary.base() if self._base_apart else nullcontext()

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """`mt.clip_grad_norm_`, by O4 (clipping). Infinity only asks for the norm, which every codec allows.

        Raises UsageError where the codec keeps the momentum, or does not tell the norm.
        """
        if self._clip_refusal is not None and math.isfinite(checked(max_norm)):
            raise UsageError(self._clip_refusal)
        if self.steps.rehearsal.on:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return self.steps.clip_grad_norm_(parameters, max_norm)

    def barrier(self, number: int) -> None:
        """Waits for all peers' barriers of this number. Raises as `enter`, and as `StepBoundary.barrier`."""
        self.enter()
        self.steps.stop_catching_up()
        rehearsed, left = self.steps.rehearsal.on, self.steps.rehearsal.left
        self._end_rehearsals()  # rounds may be applied meanwhile
        try:
            self.steps.end_period()
            self.boundary.barrier(number)
        finally:
            if rehearsed:
                self.begin_rehearsal()
            if left:
                self.leave_rehearsal()
            self.steps.take_turns()

    def flush(self) -> None:
        """At the end: takes every round that anybody has contributed to, unless this learner is in all of them.

        Between backward() and step() of s=0 it leaves at once, as where it is in all of them: the round in hand is the
        script's, which will not step on it, and none can follow before.
        """
        self.enter()
        self._end_rehearsals()
        self.steps.end_period()
        if self._flushes and self._contribution.done is None:
            self.boundary.flush()

    def tell_last_hash(self) -> None:
        """Of the final base, which the model then holds."""
        self._end_rehearsals()
        if self._base_apart:
            self.boundary.show_base_for_good()
        # Between backward() and step() of s=0 there is no base: buffers are of the new round, parameters are not.
        if self._entered and self._contribution.done is None:
            self._base.tell_last_hash()

    def close(self) -> None:
        """Model and optimizer are ordinary ones again."""
        self._end_rehearsals()
        self.steps.close()
        self.boundary.close()

    # For the prepared loader

    def wait_samples(self, until: Callable[[], bool]) -> None:
        """Takes what the daemon says until `until()` is true. Rounds wait in their queue. Raises as `enter`."""
        if not self._entered:
            self._channel.look()  # more epochs may be over by now
            if not until():
                self.enter()
        self._channel.wait(until, "samples")

    def wait_idle(self, reason: str, until: Callable[[], bool], what: str) -> None:
        """Waits for what other peers' steps have to bring, and applies rounds meanwhile. Raises as `enter`."""
        self.enter()
        self.steps.stop_catching_up()
        self.boundary.idle(reason, until, what)
        self.steps.take_turns()

    def end_period(self) -> bool:
        """Local steps so far become a round (R9, period). Returns whether there were any."""
        return self.steps.end_period()

    def begin_rehearsal(self) -> None:
        """The loader gives a batch that no step needs: what the script makes of it counts for nothing."""
        self.steps.stop_catching_up()
        if self._entered:
            self.steps.rehearsal.begin()
        else:
            self._behind_loop = 0
            self.steps.rehearsal.enter_loop()

    def leave_rehearsal(self) -> None:
        """The loop is over or was left: one step more is rehearsed. Does nothing where none is."""
        if self.steps.rehearsal.on:
            self.steps.rehearsal.leave()

    def end_rehearsal(self) -> None:
        """The next step counts, where the script is where the rounds are. Does nothing where none is rehearsed, nor
        before this learner takes part."""
        if self._entered:
            self._end_rehearsals()
            self.steps.take_turns()

    def _end_rehearsals(self) -> None:
        """Nothing is rehearsed: the model is the base's to change, or the script's."""
        self.steps.stop_catching_up()
        if self.steps.rehearsal.on:
            self.steps.rehearsal.end()

    # For the daemon

    def _on_step_lost(self, notice: StepLost) -> None:
        """A step of this learner is in no round: V2 (cut off), R5 (absent)."""
        self._base.drop(notice.step)
        self._contribution.step_lost(notice)
