"""What a learner says to its daemon, from its call to the end of its socket."""

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from meshtraind.recovery.join_requests import JoinRequests
from meshtraind.recovery.state_requests import StateRequests
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session.barriers import Barriers
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.cleanup import DATA
from meshtraind.storage.fetch import output_folder
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import Emit
from meshtraind.transport.requests import ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.job import Stage
from meshwire.messages.learner import (
    BarrierPassed,
    EpochOver,
    LearnerApplied,
    LearnerBack,
    LearnerBarrier,
    LearnerBucket,
    LearnerEncoder,
    LearnerGoal,
    LearnerHash,
    LearnerIdle,
    LearnerLog,
    LearnerModel,
    LearnerReady,
    LearnerSaved,
    LearnerSealed,
    LearnerState,
    LearnerStepped,
    LearnerTurn,
    LearnerWelcome,
    Stop,
    Waiting,
)

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds

log = logging.getLogger(__name__)

PREPARED_TWICE = "meshtrain.prepare was called twice; call it once in a script"


class LearnerOwner(Protocol):
    """Whoever runs the job that the learner computes for."""

    @property
    def who(self) -> str:
        """This rank and device, for texts."""

    def fail(self, reason: str) -> None:
        """Ends the job: its learner does not do what learners do."""

    def tell_hash(self, body: LearnerHash) -> None:
        """The base has this hash after this round (O9)."""

    def tell_report(self) -> None:
        """Tells the other members where this rank stands now."""


class LearnerLink(Protocol):
    """The way to the learner's process, as far as notices go. `Connection` is one."""

    @property
    def writable(self) -> bool:
        """It reads what it is sent."""

    def notify(self, body: Wire) -> None:
        """Sends it a notice."""

    def close(self, reason: str) -> None:
        """Ends the connection."""


class StepFigures(Protocol):
    """Whoever counts what the learner says of its steps. `MetricsKeeper` does.

    Attributes:
        values: the script's own, from mt.log.
        stage: where the learner is before its first step has ended.
        rounds_planned: until which round the script goes on; 0: it has not said.
    """

    values: tuple[tuple[str, float], ...]
    stage: Stage | None
    rounds_planned: int

    def stepped(self, message: LearnerStepped) -> None:
        """A step has ended."""


class LearnerHandler:
    """What is said to and by the learners of one job here, one process after the other.

    Attributes:
        requests: serves the process of now, until it is ready.
        attached: whether the learner has called.
        rounds: None before the model is known here, and while this member has no history.
        states: asks the learner for its state.
    """

    def __init__(
        self,
        job: Job,
        barriers: Barriers,
        metrics: StepFigures,
        owner: LearnerOwner,
        tasks: TaskSet,
    ) -> None:
        self._job = job
        self._barriers = barriers
        self._metrics = metrics
        self._owner = owner
        self._tasks = tasks
        self._connection: LearnerLink | None = None
        self._answering = 0
        self._ready = False
        self._in_barrier: asyncio.Task[None] | None = None
        self.states = StateRequests(self)
        self.requests: JoinRequests | None = None
        self.attached = False
        self.rounds: Rounds | None = None

    def begin_anew(self, rounds: "Rounds | None", requests: JoinRequests) -> None:
        """Serves another process, which will call and get its state."""
        self.let_go("another learner takes its place")
        self.requests = requests
        self.rounds = rounds

    def let_go(self, reason: str) -> None:
        """Hears the process of now no more, however much of what it said is still to be read."""
        self.states.learner_lost()
        self._barriers.learner_lost()
        if self._in_barrier is not None:
            self._in_barrier.cancel()
            self._in_barrier = None
        if self._connection is not None:
            self._connection.close(reason)
        self._connection = None
        self._ready = False
        self.attached = False

    def attach(self, connection: LearnerLink) -> LearnerWelcome:
        """Lets the learner in, which has called. Raises RequestFailed when there is one already."""
        job = self._job
        if self.attached:
            raise RequestFailed("this job's learner is attached already: call meshtrain.prepare in one process only")
        self._connection = connection
        self.attached = True
        self._metrics.stage = "script"
        return LearnerWelcome(
            spec=job.spec,
            rank=job.rank,
            members=job.members,
            data_dir=str(job.folder / DATA) if job.spec.data is not None else None,
            output_dir=str(output_folder(job.folder, job.rank)),
        )

    def is_over(self, connection: LearnerLink) -> bool:
        """Whether this connection is the one that attached; others that name the job were refused."""
        return connection is self._connection

    def lost(self, connection: LearnerLink) -> bool:
        """Hears that a socket has closed. Returns whether it was the learner's."""
        if connection is not self._connection:
            return False
        self._connection = None
        self.states.learner_lost()
        return True

    # What it asks for

    async def request(self, body: Wire, emit: Emit) -> Wire:
        """Answers the learner, who meanwhile gets signs of life: some answers take as long as the network does."""
        self._answering += 1
        try:
            return await self._answer(body, emit)
        except (BlobError, ConnectionEnded, TimeoutError, OSError) as error:
            raise RequestFailed(f"{self._owner.who}: {error}") from error
        finally:
            self._answering -= 1

    async def _answer(self, body: Wire, emit: Emit) -> Wire:
        requests = self.requests
        assert requests is not None, "no process was started"
        if self._ready:
            raise RequestFailed(PREPARED_TWICE)
        match body:
            case LearnerModel():
                self._metrics.stage = "preparing"
                await requests.model(body, emit)
                return Done()
            case LearnerState():
                self._metrics.stage = "loading"
                task = await requests.state(body, emit)
                self._tell_over()
                return task
            case LearnerReady():
                self._metrics.stage = "first step"
                self._ready = True
                requests.ready()
                return Done()
        raise RequestFailed(f"a learner does not ask for {type(body).__name__}")

    # What it tells

    def notice(self, body: Wire) -> None:
        """Takes the learner's news."""
        rounds = self.rounds
        if isinstance(body, LearnerLog):
            self._metrics.values = body.values
            return
        if isinstance(body, LearnerGoal):
            self._metrics.rounds_planned = body.rounds
            return
        if isinstance(body, LearnerSaved):
            self.states.saved(body)
            return
        if isinstance(body, LearnerHash) and rounds is not None:
            self._owner.tell_hash(body)
            return
        if rounds is not None and rounds.finished:
            return  # its process may have been seen to end before its last words were read
        if isinstance(body, LearnerBarrier):
            prepared = rounds if self._ready else None  # a script that joins has rounds before it is prepared
            waits = self._barriers.is_waited_in(body.number)
            reached = prepared.learner.enter_barrier(body.number, waits=waits) if prepared is not None else 0
            waiting = self._barrier(prepared, body.number, reached)
            self._in_barrier = self._tasks.spawn(waiting, f"barrier {body.number}")
            return
        if rounds is None:
            self._owner.fail(f"{self._owner.who}: the learner sent {type(body).__name__} before it was ready")
            return
        match body:
            case LearnerBucket():
                rounds.learner.bucket(body)
            case LearnerSealed():
                rounds.learner.sealed(body)
            case LearnerApplied(round=round_):
                rounds.learner.applied(round_)
            case LearnerStepped():
                self._metrics.stepped(body)
                rounds.learner.stepped(body)
            case LearnerTurn():
                if wrong := rounds.learner.turn(body):
                    self._owner.fail(f"{self._owner.who}: {wrong}")
            case LearnerIdle(reason=reason, finished=finished):
                if finished:
                    rounds.learner.gone(reason)
                    self._owner.tell_report()
                else:
                    rounds.learner.idle(reason)
            case LearnerEncoder():
                rounds.learner.encoder(body)
            case LearnerBack():
                rounds.learner.back()
            case _:
                self._owner.fail(f"{self._owner.who}: a learner does not send {type(body).__name__}")

    async def _barrier(self, rounds: "Rounds | None", number: int, reached: int) -> None:
        try:
            newest = await self._barriers.barrier(number, reached, self.notify)
        except RequestFailed as error:
            text = str(error)[: limits.ERROR_CHARS_MAX]
            if rounds is None:
                self.notify(BarrierPassed(number=number, error=text))
            else:
                rounds.learner.barrier_broken(text)
            return
        if rounds is None:
            self.notify(BarrierPassed(number=number, error=None))
        else:
            for rank in range(len(self._job.members)):
                rounds.peer_in_barrier(rank, inside=self._barriers.in_barrier(rank))
            rounds.learner.all_in_barrier(newest)

    # What it is told

    @property
    def was_ready(self) -> bool:
        """The process of now has, or had, a state."""
        return self._ready

    @property
    def has_base(self) -> bool:
        """A learner holds the base, or the next one will find it in memory."""
        return self.ready or (self.requests is not None and self.requests.kept)

    @property
    def ready(self) -> bool:
        """A learner is there that holds a state: that of the start, or one that it has loaded."""
        return self._ready and self._connection is not None

    def notify(self, body: Wire) -> None:
        """Sends the learner a notice, if it is there."""
        if self._connection is not None:
            self._connection.notify(body)

    def _tell_over(self) -> None:
        """To a learner that is not ready: which epochs its script runs through before, while nobody waits for it
        (X4)."""
        if self.rounds is not None and (over := self.rounds.epochs_over):
            self.notify(EpochOver(epoch=over - 1, unused=0))

    def stop(self, reason: str) -> None:
        """The job ends."""
        self.notify(Stop(reason=reason[: limits.ERROR_CHARS_MAX]))

    def sign_of_life(self) -> None:
        """Tells the learner what it waits for. Samples, within a step, are all that this daemon does not know of.

        One that has left much unread computes, for hours perhaps: no more is piled up for it.
        """
        if self._connection is None or not self._connection.writable:
            return
        if self._metrics.stage == "loading" and not self._answering:
            self._tell_over()  # others have gone on
        waiting = self.rounds.learner.waiting() if self.rounds is not None else None
        if waiting is None:
            waiting = "what it has asked for is being worked on" if self._answering else "rounds of other members"
        self.notify(Waiting(reason=waiting))

    def close(self) -> None:
        """Closes the connection, and lets go of the rounds' memory."""
        if self.rounds is not None:
            self.rounds.close()
        self.states.learner_lost()
        if self._connection is not None:
            self._connection.close("the job has ended")
