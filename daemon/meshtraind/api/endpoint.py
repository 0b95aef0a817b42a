"""The local endpoint: where this machine's command line and learners talk to the daemon.

A Unix socket, or loopback TCP where there is none (Windows). The first message is `Attach`, from a command with the
daemon's token, from a learner with its own; whoever has another first message, a wrong token or nothing to say is sent
away. What a learner may say after that is listed (`LEARNER_ASKS`, `LEARNER_TELLS`), and concerns its own job only.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable

from meshtraind.api.rundir import RunDir
from meshtraind.machine.event_loop import serve_locally
from meshtraind.runtime.tasks import TaskSet
from meshtraind.transport.connection import Connection, Handler, RequestFailed
from meshtraind.trust.learner_tokens import LearnerTokens
from meshwire import limits
from meshwire.frames.header import WIRE_VERSION, Header
from meshwire.message_base import Wire
from meshwire.messages.group import GroupBegin, GroupEnd, SignOfLife, StoreAsk
from meshwire.messages.learner import LEARNER_ASKS, LEARNER_TELLS
from meshwire.messages.local import Attach

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 10.0


class EndpointError(Exception):
    """The endpoint cannot listen; says why."""


class Endpoint:
    """Listens for clients and learners.

    Attributes:
        address: `unix:PATH` or `tcp:HOST:PORT`, once started.
        learners: what they show; whoever starts one asks for a token there.
    """

    def __init__(self, rundir: RunDir) -> None:
        self.handler: Handler  # from `start` on
        self.address = ""
        self.learners = LearnerTokens()
        self._rundir = rundir
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._tasks = TaskSet("endpoint")
        self._other_version = 0  # that a command or a script here spoke last

    async def start(self, handler: Handler) -> None:
        """Begins to listen.

        Args:
            handler: gets what arrives once a connection has attached; its first request is the `Attach` itself.

        Raises:
            EndpointError: it cannot listen.
        """
        self.handler = handler
        loop = asyncio.get_running_loop()
        try:
            self._server, self.address = await serve_locally(loop, self._accept, self._rundir.socket_path)
        except OSError as error:
            raise EndpointError(f"the local endpoint cannot listen: {error}") from error

    def _accept(self) -> Connection:
        guard = _Guard(self, self._rundir.token)
        connection = Connection(guard, name="a local client")
        connection.on_other_version = self._speaks
        self._connections.add(connection)
        if len(self._connections) > limits.LOCAL_CONNECTIONS_MAX:
            connection.close(f"more than {limits.LOCAL_CONNECTIONS_MAX} local connections")
        self._tasks.spawn(self._watch(connection), "attach")
        return connection

    def _speaks(self, version: int) -> str:
        """Warns once when meshtrain was installed anew while this daemon runs (W6); a command may ask again and
        again."""
        told = (
            f"a command or a script here speaks wire version {version}, this daemon {WIRE_VERSION}: meshtrain was "
            "installed anew while it runs; meshtrain down, then meshtrain up"
        )
        if version != self._other_version:
            self._other_version = version
            log.warning("%s", told)
        return told

    async def _watch(self, connection: Connection) -> None:
        """Sends away who does not attach in time; forgets who has gone."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ATTACH_TIMEOUT_S):
                    await connection.closed()
            if connection.attached is None:
                connection.close(f"did not attach within {ATTACH_TIMEOUT_S:.0f} s")
            await connection.closed()
        finally:
            self._connections.discard(connection)

    async def close(self) -> None:
        """Stops listening and ends every connection, letting what was said last arrive."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close("meshtraind is stopping")
        await asyncio.gather(*(connection.closed() for connection in tuple(self._connections)))
        await self._tasks.close()


class _Guard:
    """Hears a connection that has not attached yet."""

    def __init__(self, endpoint: Endpoint, token: str) -> None:
        self._endpoint = endpoint
        self._token = token

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        return "the first message must be Attach"

    def chunk_received(self, conn: Connection, header: Header) -> None:
        raise AssertionError("no chunk is accepted here")

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        conn.refuse("the first message must be Attach")

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Callable[[Wire], None]) -> Wire:
        if not isinstance(body, Attach):
            conn.refuse("the first message must be Attach")
            raise RequestFailed("the first message must be Attach")
        if body.role != "client":
            right = body.job is not None and self._endpoint.learners.job_of(body.token) == body.job
        else:
            right = hmac.compare_digest(body.token.encode(), self._token.encode())
        if not right:
            conn.refuse("wrong token: meshtraind was restarted, or runs on another data folder")
            raise RequestFailed("wrong token")
        conn.attached = body
        conn.on_other_version = None
        conn.name = "a client" if body.role == "client" else f"the {body.role} of job {body.job}"
        handler = self._endpoint.handler
        conn.handler = _LearnerGuard(handler, *_SAYS[body.role]) if body.role in _SAYS else handler
        return await handler.request(conn, header, body, emit)

    def lost(self, conn: Connection, reason: str) -> None:
        """Nothing to do: a connection that never attached is known to nobody."""


_SAYS: dict[str, tuple[tuple[type[Wire], ...], tuple[type[Wire], ...]]] = {
    "learner": (LEARNER_ASKS, LEARNER_TELLS),
    "group": ((StoreAsk,), (GroupBegin, GroupEnd, SignOfLife)),
}


class _LearnerGuard:
    """Hears a learner's connection, or that of its process group: lets through what it may say there.

    Args:
        asks, tells: its requests and notices.
    """

    def __init__(self, handler: Handler, asks: tuple[type[Wire], ...], tells: tuple[type[Wire], ...]) -> None:
        self._handler = handler
        self._asks = asks
        self._tells = tells

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        return self._handler.chunk_announced(conn, header)

    def chunk_received(self, conn: Connection, header: Header) -> None:
        self._handler.chunk_received(conn, header)

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        if isinstance(body, self._tells):
            self._handler.notice(conn, header, body)
        else:
            conn.refuse(f"a learner does not send {type(body).__name__}")

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Callable[[Wire], None]) -> Wire:
        if not isinstance(body, self._asks):
            raise RequestFailed(f"a learner may not ask for {type(body).__name__}")
        return await self._handler.request(conn, header, body, emit)

    def lost(self, conn: Connection, reason: str) -> None:
        self._handler.lost(conn, reason)
