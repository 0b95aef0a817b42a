"""Between two steps of a learner: rounds go into the base until the daemon says that the next step may start.

The daemon decides which rounds there are and when a step may start, by R1 (start). Here the learner obeys: it applies
the rounds that it is given, in order, until it is told to start. Waiting for other peers, for samples or in a barrier,
is the same loop with another end.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from meshtrain.errors import MeshtrainError, RequestError, UsageError
from meshtrain.train.lgc.training import train_as_asked
from meshtrain.train.link.channel import Channel
from meshtrain.train.optim.clipping import UntouchedGradients
from meshtrain.train.optim.lent_gradients import LentGradients
from meshtrain.train.partial.progressive import Progressive
from meshtrain.train.step.base import Base
from meshtrain.train.step.contribution import StepContribution
from meshtrain.train.step.saving import StateSaver
from meshwire.messages.learner import (
    BarrierPassed,
    EncoderTask,
    LearnerBack,
    LearnerBarrier,
    LearnerIdle,
    LearnerStepped,
    RoundDone,
    Start,
)


class StepBoundary:
    """Stands between the steps of one learner: `end_step` is called by what stands in place of `optimizer.step()`.

    Args:
        untouched: knows whether the script changes gradients between backward() and step(): only s=0 allows it.
        lent: gradients that lie in the result slot, which must not while rounds go on without this learner.
        saver: writes checkpoints, for which a boundary is the moment.
        growing: the part of the model that grows by rounds; it is told of the round that a step is for, before the step
            begins. With s > 0 that is a guess.
        absent_in_barriers: whether rounds go on without a learner that waits for the others: its daemon then tells it
            to start again.

    Attributes:
        decided: rounds that this learner was in or was passed over in, when its step began.
        local_steps: of the step at hand, where it is a period (R9), or backward passes where these add up (O6).
        bases: contexts of `base` that are open.
    """

    def __init__(
        self,
        base: Base,
        contribution: StepContribution,
        untouched: UntouchedGradients,
        lent: LentGradients,
        saver: StateSaver,
        growing: Progressive | None,
        channel: Channel,
        *,
        absent_in_barriers: bool,
    ) -> None:
        self._base = base
        self._contribution = contribution
        self._untouched = untouched
        self._lent = lent
        self._saver = saver
        self._growing = growing
        self._channel = channel
        self._absent_in_barriers = absent_in_barriers
        self._started = 0
        self._passed: BarrierPassed | None = None
        self._closed = False
        self._encoder_tasks: deque[EncoderTask] = deque()  # that came within a step
        self._waits = False  # between two steps
        self._began_s = time.monotonic()
        self._waited_before_s = channel.waited_s
        self.decided = 0
        self.local_steps = 1
        self.bases = 0
        self._held: Mapping[int, torch.Tensor] = {}  # this learner's own buffers, while the model holds the base's
        channel.route(Start, self._on_start)
        channel.route(BarrierPassed, self._on_passed)
        channel.route(EncoderTask, self._on_encoder_task)

    def close(self) -> None:
        """When contexts of `base` that are still open end, they leave the model as it is."""
        self._closed = True

    def end_step(self, done: RoundDone | None) -> None:
        """The step has ended. Returns when the next one may start, with the model as it is to compute with.

        Args:
            done: with s=0 the step's own round, which may bring the word to start; None: there is none.
        """
        self._tell_stepped()
        if done is not None:
            self.local_steps = done.local_steps
            if done.start:
                self._started, self.decided = done.start, done.round
        self.wait_start()

    def _tell_stepped(self) -> None:
        now_s = time.monotonic()
        self._channel.tell(
            LearnerStepped(
                step=self._contribution.step,
                samples=self._contribution.samples,
                step_s=now_s - self._began_s,
                exposed_s=self._channel.waited_s - self._waited_before_s,
            )
        )
        self._began_s, self._waited_before_s = now_s, self._channel.waited_s
        self._contribution.next_step()
        self._base.options.clipping.known = True  # the next bind can tell how this step was clipped

    def wait_start(self) -> None:
        """Applies the rounds that the daemon gives until the step may start, then shows what it computes with."""
        step = self._contribution.step
        self._wait(lambda: self._started == step, f"step {step} for its start")
        self._contribution.aim_at(self.decided + 1, self.local_steps)
        if self._growing is not None:
            self._growing.enter_round(self.decided + 1)
        self._base.begin_step()
        self._show_view()

    def save_in_period(self) -> None:
        """Between two local steps, of which a period (R9) may have many: writes a checkpoint that is due. The base lies
        beside the local weights, which go on as they were."""
        if self._saver.due:
            with self._saver.possible():
                self._show_view()

    def take_in(self, until: Callable[[], bool]) -> None:
        """Between two local steps, with rounds that overlap (R9): applies rounds until the one is applied that a period
        has begun. Local weights go on, as they follow it."""
        if not until():
            steps = self.local_steps
            self._wait(until, f"step {self._contribution.step} for the round before it")
            self.local_steps = steps  # a period keeps those that it has begun with
            self._show_view()

    def idle(self, reason: str, until: Callable[[], bool], what: str) -> None:
        """Waits for other peers without being waited for, and applies rounds meanwhile, by R5 (absent).

        Args:
            what: is waited for, for the error.
        """
        begins_again = self._leave_step()
        self._contribution.forget_promise()
        self._channel.tell(LearnerIdle(reason=reason, finished=False))
        if self._contribution.done is None:
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
        if self._contribution.sealed:
            raise UsageError("mt.barrier() between backward() and optimizer.step(): call it after the step")
        self._leave_step()
        try:
            self._enter_barrier(number)
        finally:  # told that some peer will never come, it goes on as well
            if self._passed is not None:
                self._leave_barrier()

    def flush(self) -> None:
        """At the end: every round that anybody has contributed to is in the base, and the model holds it."""
        if self._contribution.sealed:
            self._tell_stepped()
        self._leave_step()
        self._enter_barrier(0)
        self.show_base_for_good()

    def show_base_for_good(self) -> None:
        """No step will follow: the model holds what all peers have in common."""
        self._base.view.show_base()
        self._base.view.clear()
        self._base.buffers.show_base()

    @contextmanager
    def base(self) -> Iterator[None]:
        """`mt.base()`, by O7 (base): inside, the model holds the base."""
        applied = self._base.applied
        if not self.bases:
            self._base.view.show_base()
            self._held = self._base.buffers.show_base()
        self.bases += 1
        try:
            yield
        finally:
            self.bases -= 1
            if not self.bases and not self._closed:
                self._base.buffers.restore()
                if self._base.applied == applied:
                    self._base.buffers.show(self._held)
                self._show_view()

    def show_own_buffers(self) -> None:
        """Inside `base`, before a round of local steps: the model holds their buffers, until it is over (O5)."""
        if self.bases:
            self._base.buffers.show(self._held)
            self._held = {}

    def check_step(self) -> None:
        """When the script calls `optimizer.step()`. Raises UsageError where it must not, JobStopped."""
        self._channel.look()
        if self.bases:
            raise UsageError("optimizer.step() inside `with mt.base():`, which is for evaluating and saving: leave it")

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        """Between two steps: rounds are applied and the base is saved as the daemon says, until `until()` is true."""
        self._waits = True
        try:
            self._train_encoders()
            with self._saver.possible():
                self._channel.wait(until, what, self._apply)
        finally:
            self._waits = False

    def _apply(self, done: RoundDone) -> None:
        self.apply(done)
        self.local_steps = done.local_steps
        self._saver.save_due()

    def apply(self, done: RoundDone) -> None:
        """A round goes into the base without the script. Raises UsageError where this script does more to a round than
        the learner knows of."""
        late = None
        if self._untouched.ever_changed:
            late = "changes gradients after backward()", "clip with mt.clip_grad_norm_"
        elif self._base.options.hyperparameters.ever_late:
            late = "sets the learning rate, or another option, after backward()", "set it before that"
        if late is not None and not done.void:
            raise UsageError(
                f"round {done.round} was averaged while this peer had no samples left, and this script {late[0]}, "
                f"which this peer cannot do alike: {late[1]}"
            )
        self._base.apply(done)

    def _leave_step(self) -> bool:
        """This learner is about to be absent: the daemon forgets a step that has begun and sent nothing.

        Returns whether there is such a step, which will be begun again.
        """
        if self._contribution.done is None:  # else the slot is that round's until the script has stepped on it
            self._lent.own_all()
        begins_again = not self._contribution.sealed
        if begins_again:
            self._started = 0
        return begins_again

    def _enter_barrier(self, number: int) -> None:
        self._passed = None
        self._channel.tell(LearnerBarrier(number=number))
        what = f"barrier {number}" if number else "the end of the job"
        self._wait(lambda: self._passed is not None, what)
        assert self._passed is not None
        if self._passed.number != number:
            raise MeshtrainError(f"the daemon answered barrier {number} with {self._passed.number}: versions differ")
        if self._passed.error is not None:
            raise RequestError(self._passed.error)

    def _leave_barrier(self) -> None:
        if self._absent_in_barriers:
            self.wait_start()
        else:
            self._started = self._contribution.step
            self._show_view()  # a state may have been saved meanwhile

    def _show_view(self) -> None:
        if self.bases:
            self._base.buffers.show_base()
        else:
            self._base.view.show_view()

    def _on_start(self, start: Start) -> None:
        self._started, self.decided, self.local_steps = start.step, start.decided, start.local_steps

    def _on_encoder_task(self, task: EncoderTask) -> None:
        """Not within a step: that may be in its backward pass, where autograd is off, and others wait for its end."""
        self._encoder_tasks.append(task)
        if self._waits:
            self._train_encoders()

    def _train_encoders(self) -> None:
        while self._encoder_tasks:
            self._channel.tell(train_as_asked(self._encoder_tasks.popleft()))

    def _on_passed(self, passed: BarrierPassed) -> None:
        self._passed = passed
