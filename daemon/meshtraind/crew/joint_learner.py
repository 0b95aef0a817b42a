"""The connections of a device's learners, and the one to its daemon, to which they are one learner (R6).

The daemon's protocol with a learner is spoken on both sides. Requests before the first step are made once all learners
have made them; the first one gets its state from the daemon, and the others get theirs from it. From then on what they
say is joined (`together.py`) and what the daemon says goes to all of them. Logged values, checkpoints and LGC's
autoencoder are the first learner's alone.
"""

import asyncio
import hmac
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshtraind.crew.slots import CrewMemory
from meshtraind.crew.together import ALIKE, NotAlikeError, Together
from meshtraind.learner.shared_memory import SharedMemoryError
from meshtraind.machine.event_loop import connect_locally
from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.transport.connection import Connection, ConnectionEnded, Emit, RequestFailed
from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.learner import (
    LEARNER_TELLS,
    EncoderTask,
    EpochOver,
    Grant,
    LearnerBucket,
    LearnerEncoder,
    LearnerLog,
    LearnerModel,
    LearnerReady,
    LearnerSaved,
    LearnerState,
    LearnerWelcome,
    RoundDone,
    Save,
    StateTask,
    Waiting,
)
from meshwire.messages.local import Attach
from meshwire.model.manifest import first_difference
from meshwire.model.plan import plan_buckets

ATTACH_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 7200.0  # longer than the daemon's own patience with slow members, whose error says more
STATE_TIMEOUT_S = 1800.0  # for the first learner to write its state to the disk
FIRST = 0
ATTACH_FIRST = "the first message must be Attach"


@dataclass(frozen=True)
class DaemonEntrance:
    """Where the daemon is, and what lets this device's learners in."""

    endpoint: str  # unix:PATH or tcp:HOST:PORT
    token: str = field(repr=False)
    job: str


class _WithoutData:
    """A handler of connections on which nothing but messages travels."""

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        return "no frame of data is taken here"

    def chunk_received(self, conn: Connection, header: Header) -> None:
        raise AssertionError("no chunk is accepted here")


class JointLearner(_WithoutData):
    """Hears the learners of one device, and speaks for them.

    Args:
        tokens: what each of them shows, by its place.
        folder: for states on their way from the first learner to the others.
        on_failure: is told why the learners cannot go on together.
    """

    def __init__(
        self,
        entrance: DaemonEntrance,
        memory: CrewMemory,
        tokens: Sequence[str],
        folder: Path,
        on_failure: Callable[[str], None],
    ) -> None:
        self._entrance = entrance
        self._memory = memory
        self._tokens = tokens
        self._folder = folder
        self._on_failure = on_failure
        self._together = Together(len(tokens))
        self._tasks = TaskSet("learners", told_elsewhere)
        self._learners: dict[int, Connection] = {}
        self._gone: set[int] = set()
        self._ended_unprepared: set[int] = set()  # their scripts have ended well
        self._daemon = Connection(_FromDaemon(self), name="the daemon")
        self._welcomed: asyncio.Task[LearnerWelcome] | None = None
        self._models: dict[int, LearnerModel] = {}
        self._all_prepared = asyncio.Event()
        self._agreed: asyncio.Task[Wire] | None = None
        self._first_holds = asyncio.Event()  # the state to begin from
        self._ready: set[int] = set()
        self._all_ready = asyncio.Event()
        self._begun: asyncio.Task[Wire] | None = None
        self._held: list[Wire] = []  # news of samples
        self._saving: dict[int, asyncio.Future[LearnerSaved]] = {}

    def accept(self) -> Connection:
        """For somebody who calls."""
        return Connection(self, name="a learner")

    def ended(self, learner: int) -> None:
        """The script of a learner has ended well."""
        if learner not in self._models:
            self._ended_unprepared.add(learner)
            self._check_all_come()

    def _check_all_come(self) -> None:
        """Nobody waits for a learner that does not come any more."""
        if self._ended_unprepared and (self._models or self._together.behind()):
            ended = f"learner {min(self._ended_unprepared) + 1} of this device has ended without meshtrain.prepare"
            self._on_failure(f"{ended}, and others of its learners wait for it: {ALIKE}")

    async def close(self) -> None:
        """Ends all connections."""
        for connection in (*self._learners.values(), self._daemon):
            connection.close("the learners of this device have ended")
        await self._tasks.close()

    # What learners ask for

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Emit) -> Wire:
        if isinstance(body, Attach):
            return await self._attach(conn, body)
        learner = self._place_of(conn)
        if learner is None:
            conn.refuse(ATTACH_FIRST)
            raise RequestFailed(ATTACH_FIRST)
        match body:
            case LearnerModel():
                return await self._model(learner, body)
            case LearnerState():
                return await self._state(learner, body)
            case LearnerReady():
                return await self._is_ready(learner)
        raise RequestFailed(f"a learner does not ask for {type(body).__name__}")

    async def _attach(self, conn: Connection, body: Attach) -> LearnerWelcome:
        shown = body.token.encode()
        places = [place for place, token in enumerate(self._tokens) if hmac.compare_digest(shown, token.encode())]
        if not places or body.job != self._entrance.job:
            conn.refuse("wrong token: this is no learner of this device")
            raise RequestFailed("wrong token")
        if body.role != "learner":
            raise RequestFailed(
                "torch.distributed has one rank a device here: submit without --learners, or exchange by mt.prepare"
            )
        learner = places[0]
        if learner in self._learners:
            raise RequestFailed("this learner is attached already: call meshtrain.prepare in one process only")
        conn.attached = body
        conn.name = f"learner {learner + 1}"
        self._learners[learner] = conn
        if self._welcomed is None:
            self._welcomed = self._tasks.spawn(self._call(body), "attach")
        welcome = await asyncio.shield(self._welcomed)
        return welcome.model_copy(update={"learner": learner})

    async def _call(self, body: Attach) -> LearnerWelcome:
        """Attaches to the daemon, as the one learner that it waits for."""
        entrance, daemon, loop = self._entrance, self._daemon, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                await connect_locally(loop, lambda: daemon, entrance.endpoint)
        except OSError as error:  # a time-out, too
            raise RequestFailed(f"the daemon that started this script does not answer: {error}") from error
        attach = body.model_copy(update={"token": entrance.token, "pid": os.getpid()})
        daemon.attached = attach
        welcome = await self._ask(attach, "the learners' call")
        assert isinstance(welcome, LearnerWelcome)
        return welcome

    async def _ask(self, body: Wire, name: str) -> Wire:
        try:
            return await self._daemon.request(body, timeout_s=ANSWER_TIMEOUT_S, name=name, on_event=self.tells)
        except (ConnectionEnded, TimeoutError) as error:
            raise RequestFailed(str(error)) from error

    async def _model(self, learner: int, body: LearnerModel) -> Wire:
        self._models[learner] = body
        self._check_all_come()
        if len(self._models) == len(self._tokens) and self._agreed is None:
            self._agreed = self._tasks.spawn(self._agree(), "model")
            self._all_prepared.set()
        await self._all_prepared.wait()
        assert self._agreed is not None
        return await asyncio.shield(self._agreed)

    async def _agree(self) -> Wire:
        """All have prepared the same: it is the device's."""
        assert self._welcomed is not None
        spec, first = self._welcomed.result().spec, self._models[FIRST]
        for learner, model in sorted(self._models.items()):
            if (difference := first_difference(first.manifest, model.manifest)) is not None:
                raise RequestFailed(
                    f"learner {learner + 1} of this device has prepared something else than learner 1 (here: learner "
                    f"1, there: learner {learner + 1}): {difference}"
                )
        try:
            self._memory.map(plan_buckets(first.manifest, spec.bucket_bytes, parse_codec(spec.codec)))
        except (SharedMemoryError, OSError, ValueError) as error:
            raise RequestFailed(f"the learners of this device cannot share memory: {error}") from error
        learners_bytes = sum(model.learner_bytes for model in self._models.values())
        shared_bytes = first.memory_bytes * (len(self._models) - 1)  # beside what the daemon knows of
        whole = first.model_copy(update={"learner_bytes": learners_bytes + shared_bytes})
        return await self._ask(whole, "agreement on the model")

    async def _state(self, learner: int, body: LearnerState) -> Wire:
        """The first learner's is the device's, compared with the other devices'; any other learner begins from it."""
        if learner == FIRST:
            return await self._ask(body, "comparison of the start states")
        await self._first_holds.wait()
        folder = self._folder / str(learner)
        folder.mkdir()
        saved = self._saving[-learner] = asyncio.get_running_loop().create_future()
        self._learners[FIRST].notify(Save(number=-learner, after_round=0, folder=str(folder), digests=body.units))
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                done = await saved
        except TimeoutError:
            raise RequestFailed(f"the first learner did not write its state within {STATE_TIMEOUT_S:.0f} s") from None
        if done.error is not None:
            raise RequestFailed(f"the first learner cannot write its state: {done.error}")
        units = tuple(unit for unit in range(done.units) if unit not in done.left_out)
        return StateTask(units=units, folder=str(folder), round=done.round)

    async def _is_ready(self, learner: int) -> Wire:
        """The daemon is told when all are. The first one has its answer at once, for it must go on to give its state
        to the others; its first step begins with theirs."""
        self._ready.add(learner)
        if learner == FIRST:
            self._first_holds.set()
            return Done()
        if len(self._ready) == len(self._tokens) and self._begun is None:
            self._begun = self._tasks.spawn(self._ask(LearnerReady(), "the first step"), "ready")
            self._all_ready.set()
        await self._all_ready.wait()
        assert self._begun is not None
        return await asyncio.shield(self._begun)

    # What learners tell

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        learner = self._place_of(conn)
        if learner is None or not isinstance(body, LEARNER_TELLS):
            conn.refuse(ATTACH_FIRST if learner is None else f"a learner does not send {type(body).__name__}")
            return
        if isinstance(body, LearnerSaved) and body.number in self._saving:
            saved = self._saving.pop(body.number)
            if not saved.done():  # whoever waited may be gone
                saved.set_result(body)
            return
        if isinstance(body, LearnerLog | LearnerEncoder | LearnerSaved):
            if learner == FIRST:
                self._daemon.notify(body)
            return
        try:
            heard = self._together.hears(learner, body)
        except NotAlikeError as error:
            self._on_failure(str(error))
            return
        self._check_all_come()
        if self._together.waits:
            self._tell_held()
        if isinstance(heard.device, LearnerBucket):
            self._memory.add_up(heard.device.bucket)
        if heard.device is not None:
            self._daemon.notify(heard.device)
        if heard.answer is not None:
            conn.notify(heard.answer)

    def lost(self, conn: Connection, reason: str) -> None:
        """Without one of its learners that train the device has none; with the last one its part is over. How one ends
        that has not prepared, its process tells."""
        learner = self._place_of(conn)
        if learner is None:
            return
        self._gone.add(learner)
        trained = learner in self._models and learner not in self._together.finished
        if trained or len(self._gone) == len(self._tokens):
            self._daemon.close(f"a learner of this device has gone: {reason}")

    def _place_of(self, conn: Connection) -> int | None:
        """None: it has not attached."""
        return next((place for place, learner in self._learners.items() if learner is conn), None)

    # What the daemon tells

    def tells(self, body: Wire) -> None:
        """All learners hear what one would; what only one of them is to do, the first one does."""
        match body:
            case Save() | EncoderTask():
                self._learners[FIRST].notify(body)
                return
            case Waiting():
                self._sign_of_life(body)
                return
            case Grant() | EpochOver():
                self._held.append(body)
                if self._together.waits:
                    self._tell_held()
                return
            case RoundDone(void=False):
                self._memory.hand_out()
        self._together.told(body)
        self._tell_all(body)

    def _tell_held(self) -> None:
        held, self._held = self._held, []
        for body in held:
            self._tell_all(body)

    def _tell_all(self, body: Wire) -> None:
        for learner in self._learners.values():
            learner.notify(body)

    def _sign_of_life(self, body: Waiting) -> None:
        if behind := self._together.behind():
            names = ", ".join(f"learner {place + 1}" for place in behind)
            body = Waiting(reason=f"{names} of this device"[: limits.ERROR_CHARS_MAX])
        for learner in self._learners.values():
            if learner.writable:
                learner.notify(body)

    def daemon_lost(self, reason: str) -> None:
        """Its connection has ended: so do the learners'."""
        for learner in self._learners.values():
            learner.close(f"the daemon's connection has ended: {reason}")


class _FromDaemon(_WithoutData):
    """Hears the daemon."""

    def __init__(self, joint: JointLearner) -> None:
        self._joint = joint

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        self._joint.tells(body)

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Emit) -> Wire:
        raise RequestFailed(f"a learner is not asked for {type(body).__name__}")

    def lost(self, conn: Connection, reason: str) -> None:
        self._joint.daemon_lost(reason)
