"""The dashboard's server: uvicorn, in the daemon's loop, on this machine alone."""

import asyncio
import socket
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshtraind.dashboard.guard import AsgiApp
from meshwire import limits

CLOSE_S = 2  # for answers that are under way
BACKLOG = 32


class BoundedProtocol(H11Protocol):
    """A connection that ends when its other end does not send a request in time, or does not read what it asked for."""

    _head: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_came()
        elif self._head is None:
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(limits.DASHBOARD_REQUEST_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)  # which resumes writing

    def _await_head(self) -> None:
        self._head = self.loop.call_later(limits.DASHBOARD_REQUEST_S, self.transport.abort)

    def _head_came(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


class WebServer:
    """Serves one app. It takes no signals, and has no loop of its own: uvicorn's would wake ten times a second.

    Args:
        listener: bound, and not yet listening.
    """

    def __init__(self, app: AsgiApp, listener: socket.socket) -> None:
        settings: dict[str, Any] = {
            "http": BoundedProtocol,
            "ws": "none",
            "lifespan": "off",
            "loop": "none",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "limit_concurrency": limits.DASHBOARD_CONNECTIONS_MAX,
            "timeout_graceful_shutdown": CLOSE_S,
            "h11_max_incomplete_event_size": limits.DASHBOARD_HEAD_BYTES_MAX,
            "backlog": BACKLOG,
        }
        self._config = Config(app, **settings)
        self._server = Server(self._config)
        self._listener = listener

    async def start(self) -> None:
        """Begins to listen."""
        self._config.load()
        self._server.lifespan = self._config.lifespan_class(self._config)
        await self._server.startup(sockets=[self._listener])

    async def close(self) -> None:
        """Stops, and ends every connection."""
        state = self._server.server_state
        await self._server.shutdown(sockets=[self._listener])
        for connection in tuple(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=CLOSE_S)
