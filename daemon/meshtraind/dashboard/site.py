"""The dashboard's routes: the page and its files, the event stream, logs, and what a person may do.

All of it is asked of whoever answers the command line; `ROUTES` is the whole list, and `guard.py` refuses all else.
"""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router

from meshtraind.dashboard.answers import Answers
from meshtraind.dashboard.caller import is_another_user
from meshtraind.dashboard.feed import Feed
from meshtraind.dashboard.guard import OPEN_IT, SESSION, Access, AsgiApp, SiteGuard, cookie_name
from meshtraind.dashboard.log_view import read_log
from meshtraind.dashboard.page_values import shown
from meshtraind.dashboard.sessions import Sessions
from meshtraind.dashboard.shown_code import ShownCode
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.message_base import Wire, what_is_wrong
from meshwire.messages.local import Cancel, ChangeSettings, Leave, MeasureLinks, PairAccept, PairJoin, Unpair

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {
    "/": "index.html",
    **{
        f"/static/{name}": name
        for name in ("dashboard.css", "dashboard.js", "icon.svg", "uPlot.iife.min.js", "uPlot.min.css")
    },
}
# What a person may do, and the message of the command line that asks for it.
ACTIONS: dict[str, type[Wire]] = {
    "/api/cancel": Cancel,
    "/api/leave": Leave,
    "/api/codec": ChangeSettings,
    "/api/unpair": Unpair,
    "/api/pair/join": PairJoin,
    "/api/pair/accept": PairAccept,
    "/api/measure": MeasureLinks,
}
ROUTES: dict[str, Access] = {
    **{path: Access("GET", public=True) for path in FILES},
    "/api/session": Access("POST", public=True),
    "/api/events": Access("GET"),
    "/api/log": Access("GET"),
    "/api/pair/show": Access("POST"),
    "/api/pair/hide": Access("POST"),
    **{path: Access("POST") for path in ACTIONS},
}


class Site:
    """The app of one server.

    Args:
        port: where that listens, on 127.0.0.1.
    """

    def __init__(self, answers: Answers, sessions: Sessions, port: int) -> None:
        self._answers = answers
        self._sessions = sessions
        self._port = port
        self._code = ShownCode(answers)
        self._feed = Feed(answers, self._code, sessions)
        self._files = {path: (STATIC / name).read_bytes() for path, name in FILES.items()}
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            **dict.fromkeys(FILES, self._file),
            "/api/session": self._begin_session,
            "/api/events": self._events,
            "/api/log": self._log,
            "/api/pair/show": self._show_code,
            "/api/pair/hide": self._hide_code,
            **{path: functools.partial(self._act, kind) for path, kind in ACTIONS.items()},
        }
        routes = [Route(path, handlers[path], methods=[access.method]) for path, access in ROUTES.items()]
        self.app: AsgiApp = SiteGuard(Router(routes, redirect_slashes=False), ROUTES, port, sessions)

    async def close(self) -> None:
        """Ends the event streams, and takes back a code that is shown."""
        await self._feed.close()
        await self._code.close()

    async def _file(self, request: Request) -> Response:
        path = request.url.path
        return Response(self._files[path], media_type=KINDS[Path(FILES[path]).suffix])

    async def _begin_session(self, request: Request) -> Response:
        body = await _body(request)
        token = body.get("token") if isinstance(body, dict) else None
        client = request.client
        if client is None or is_another_user((client.host, client.port), ("127.0.0.1", self._port)):
            return _error(403, "refused: the dashboard is another user's")
        session = self._sessions.redeem(token) if isinstance(token, str) else None
        if session is None:
            return _error(401, f"the address was used before, or is older than a minute: {OPEN_IT}")
        reply = _json({"key": session.key})
        reply.set_cookie(
            cookie_name(self._port),
            session.cookie,
            max_age=int(limits.DASHBOARD_SESSION_S),
            path="/api",
            httponly=True,
            samesite="strict",
        )
        return reply

    async def _events(self, request: Request) -> Response:
        if self._feed.full:
            return _error(503, f"{limits.DASHBOARD_STREAMS_MAX} pages watch already: close one")
        return StreamingResponse(self._feed.read(request.scope[SESSION]), media_type="text/event-stream")

    async def _log(self, request: Request) -> Response:
        query = request.query_params
        offset = query.get("offset")
        numbers = [query.get("rank", "")] + ([offset] if offset is not None else [])
        if not all(number.isascii() and number.isdigit() and len(number) < 16 for number in numbers):
            return _error(400, "a log is asked for by job, rank and offset, which are numbers")
        try:
            offset_bytes = None if offset is None else int(offset)
            return _json(await read_log(self._answers, query.get("job", ""), int(query["rank"]), offset_bytes))
        except ValidationError as error:
            return _error(400, what_is_wrong(error))
        except (RequestFailed, ConnectionEnded, TimeoutError) as error:
            return _error(409, str(error))

    async def _show_code(self, request: Request) -> Response:
        self._code.begin()
        return _json({})

    async def _hide_code(self, request: Request) -> Response:
        self._code.end()
        return _json({})

    async def _act(self, kind: type[Wire], request: Request) -> Response:
        try:
            message = kind.load(await _body(request))
        except ValidationError as error:
            return _error(400, what_is_wrong(error))
        try:
            reply = await self._answers.answer(message, lambda _event: None)
        except (RequestFailed, ConnectionEnded, TimeoutError) as error:
            return _error(409, str(error))
        finally:
            self._feed.soon()
        return _json(shown(reply))


async def _body(request: Request) -> Any:
    """What was sent, as JSON; None if it is none, or does not come."""
    try:
        async with asyncio.timeout(limits.DASHBOARD_REQUEST_S):
            return json.loads(await request.body())
    except (ValueError, RecursionError, TimeoutError):
        return None


def _json(value: Any) -> Response:
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")


def _error(status: int, why: str) -> Response:
    return Response(json.dumps({"error": shown(why)}), status_code=status, media_type="application/json")
