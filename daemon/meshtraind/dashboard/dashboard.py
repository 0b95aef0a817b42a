"""The dashboard of a daemon: nothing of it is loaded, and nothing listens, until a person asks for it."""

import asyncio
import importlib
import logging
import socket
import sys
from contextlib import AsyncExitStack

from meshtraind.dashboard.answers import Answers
from meshtraind.dashboard.sessions import Sessions
from meshtraind.runtime.threads import Check, in_thread
from meshtraind.transport.connection import RequestFailed
from meshwire import limits
from meshwire.messages.local import DashboardOpened

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
OFF = "off"
PORT_MAX = 65_535


def dashboard_port(typed: str) -> int | None:
    """What `--dashboard` says: a port, 0 for any free one, None for `off`. Raises ValueError."""
    if typed == OFF:
        return None
    if not (typed.isascii() and typed.isdigit() and len(typed) < 6 and int(typed) <= PORT_MAX):
        raise ValueError(f"--dashboard {typed}: a port (0: any free one), or {OFF}")
    return int(typed)


def _load(_check: Check) -> None:
    """Some hundred files, in a thread: links and rounds go on meanwhile."""
    for name in ("server", "site"):
        importlib.import_module(f"meshtraind.dashboard.{name}")


class Dashboard:
    """Listens from the first time on that it is opened, until the daemon ends.

    Args:
        port: 0: any free one; None: it is never served.
    """

    def __init__(self, port: int | None) -> None:
        self._wanted = port
        self._sessions = Sessions()
        self._port: int | None = None  # where it listens
        self._starting = asyncio.Lock()
        self._parts = AsyncExitStack()

    async def open(self, answers: Answers) -> DashboardOpened:
        """Lets one more browser in. Raises RequestFailed."""
        async with self._starting:
            if self._port is None:
                self._port = await self._start(answers)
        url = f"http://{HOST}:{self._port}/#token={self._sessions.issue()}"
        return DashboardOpened(url=url, expires_s=limits.DASHBOARD_TOKEN_S)

    async def close(self) -> None:
        """Stops serving."""
        async with self._starting:
            await self._parts.aclose()

    async def _start(self, answers: Answers) -> int:
        if self._wanted is None:
            raise RequestFailed(
                "this daemon was started with --dashboard off: meshtrain down, then meshtrain up without it"
            )
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if sys.platform != "win32":  # there it would let others in
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((HOST, self._wanted))
            listener.listen()
            await in_thread(_load)
        except OSError as error:
            listener.close()
            raise RequestFailed(
                f"the dashboard cannot listen on {HOST}:{self._wanted}: {error.strerror or error}; "
                "meshtrain down, then meshtrain up --dashboard with another port, or 0 for any free one"
            ) from error
        except BaseException:
            listener.close()
            raise
        from meshtraind.dashboard.server import WebServer
        from meshtraind.dashboard.site import Site

        port: int = listener.getsockname()[1]
        site = Site(answers, self._sessions, port)
        server = WebServer(site.app, listener)
        self._parts.push_async_callback(server.close)
        await server.start()
        self._parts.push_async_callback(site.close)  # before the server: its event streams never end by themselves
        log.info("the dashboard listens on %s:%d", HOST, port)
        return port
