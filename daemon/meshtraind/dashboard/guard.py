"""What reaches the dashboard at all: everything is refused that is not allowed here.

Any web page that its user has open can send requests to this machine, and with a name of its own that it lets point
here (DNS rebinding) it can read the answers. So a request is heard only if it is meant for this server by name and
port, comes from a page of this server or from none, has the method that its path knows, and shows a session
(`sessions.py`). It is one layer around the whole site, and it knows every route: one that it was not told of does not
exist.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from meshtraind.dashboard.sessions import Sessions
from meshwire import limits

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

SESSION = "meshtrain.session"  # where a request's scope has its session
KEY_HEADER = b"x-meshtrain-key"
OPEN_IT = "type `meshtrain dashboard` for a new one"
HEADERS = (
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True)
class Access:
    """How a path may be asked for.

    Attributes:
        method: the only one.
        public: without a session: what is the same for everybody, and where a session begins.
    """

    method: str
    public: bool = False


@dataclass(frozen=True)
class _Refusal:
    status: int
    why: str


class _Twice(Exception):
    """A header that decides stands there several times: two readers could understand it in two ways."""


class SiteGuard:
    """An ASGI app around the site's.

    Args:
        routes: all paths that there are.
        port: where the server listens, on 127.0.0.1.
    """

    def __init__(self, site: AsgiApp, routes: Mapping[str, Access], port: int, sessions: Sessions) -> None:
        self._site = site
        self._routes = routes
        self._sessions = sessions
        self._cookie = cookie_name(port)
        self._hosts = {f"{host}:{port}" for host in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no web socket is ever opened
        try:
            refusal = self._refusal(scope)
        except _Twice as twice:
            refusal = _Refusal(400, f"refused: several headers {twice}")
        if refusal is not None:
            await _answer(refusal, send)
            return
        await self._site(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> _Refusal | None:
        headers = scope["headers"]
        host = _one(headers, b"host")
        if host is None or host.lower() not in self._hosts:
            return _Refusal(403, "refused: this is no name of the dashboard; open the address that it was given")
        access = self._routes.get(scope["path"])
        if access is None:
            return _Refusal(404, "refused: nothing is there")
        if scope["method"] != access.method:
            return _Refusal(405, f"refused: {scope['path']} takes {access.method} only")
        changes = access.method != "GET"
        site = _one(headers, b"sec-fetch-site")
        if site is not None and site != "same-origin" and (changes or site != "none"):
            return _Refusal(403, "refused: another page has asked for this")
        origin = _one(headers, b"origin")
        if (changes or origin is not None) and origin != f"http://{host}":
            return _Refusal(403, "refused: another page has asked for this")
        if (wrong := _wrong_body(headers, changes)) is not None:
            return wrong
        if access.public:
            return None
        key = _one(headers, KEY_HEADER) or ""
        # A page of another port can set a cookie of any name, and cannot know what ours is.
        found = (self._sessions.find(cookie, key) for cookie in self._cookies(headers))
        session = next((each for each in found if each is not None), None)
        if session is None:
            return _Refusal(401, f"this page has no session with the daemon: {OPEN_IT}")
        scope[SESSION] = session
        return None

    def _cookies(self, headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
        pairs = (part.strip().partition("=") for part in (_one(headers, b"cookie") or "").split(";"))
        return [value for name, _, value in pairs if name == self._cookie]


def cookie_name(port: int) -> str:
    """Of one server: all on this machine share their cookies."""
    return f"meshtrain_{port}"


def _wrong_body(headers: Iterable[tuple[bytes, bytes]], changes: bool) -> _Refusal | None:
    length = _one(headers, b"content-length")
    if _one(headers, b"transfer-encoding") is not None or (changes and length is None):
        return _Refusal(411, "refused: the length of a request must be said")
    if length is None:
        return None
    if not (
        length.isascii() and length.isdigit() and len(length) < 9 and int(length) <= limits.DASHBOARD_BODY_BYTES_MAX
    ):
        return _Refusal(413, f"refused: more than {limits.DASHBOARD_BODY_BYTES_MAX} bytes")
    if not changes:
        return _Refusal(400, "refused: a question has no body") if int(length) else None
    # What a form of another page can send without asking is never JSON.
    if (_one(headers, b"content-type") or "").partition(";")[0].strip().lower() != "application/json":
        return _Refusal(415, "refused: only application/json is taken")
    return None


def _one(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """The header's only value. Raises _Twice."""
    found = [value for each, value in headers if each.lower() == name]
    if len(found) > 1:
        raise _Twice(name.decode())
    return found[0].decode("latin-1") if found else None


def _with_headers(send: Send) -> Send:
    async def sending(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in HEADERS}
            kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in own]
            message = {**message, "headers": [*kept, *HEADERS]}
        await send(message)

    return sending


async def _answer(refusal: _Refusal, send: Send) -> None:
    body = json.dumps({"error": refusal.why}).encode()
    # What its body may hold is not read: the connection ends with the answer.
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *HEADERS,
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
