"""What reaches the dashboard: one test for each rule, and for each incident of others that is known."""

import json
from typing import Any

import pytest

from meshtraind.dashboard.guard import HEADERS, Access, Receive, Scope, Send, SiteGuard, cookie_name
from meshtraind.dashboard.sessions import BrowserSession, Sessions
from meshtraind.dashboard.site import ACTIONS, FILES, ROUTES
from meshwire import limits

PORT = 41234
HOST = f"127.0.0.1:{PORT}"
ORIGIN = f"http://{HOST}"
CHANGES = [path for path, access in ROUTES.items() if access.method == "POST"]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "")


class Asked:
    """A guard in front of a site that lets everything in, and one browser that has a session."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.sessions = Sessions()
        session = self.sessions.redeem(self.sessions.issue())
        assert session is not None
        self.session: BrowserSession = session
        self.guard = SiteGuard(self._site, ROUTES, PORT, self.sessions)

    async def _site(self, scope: Scope, _receive: Receive, send: Send) -> None:
        self.reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"public")]})
        await send({"type": "http.response.body", "body": b""})

    def headers(self, **changes: str | None) -> dict[str, str]:
        """What the page itself sends; None leaves one out."""
        own: dict[str, str | None] = {
            "host": HOST,
            "origin": ORIGIN,
            "sec-fetch-site": "same-origin",
            "content-type": "application/json",
            "content-length": "2",
            "cookie": f"{cookie_name(PORT)}={self.session.cookie}",
            "x-meshtrain-key": self.session.key,
        }
        own |= {name.replace("_", "-"): value for name, value in changes.items()}
        return {name: value for name, value in own.items() if value is not None}

    async def status(self, method: str, path: str, headers: dict[str, str], *more: tuple[str, str]) -> int:
        return (await self.answer(method, path, headers, *more))[0]

    async def answer(
        self, method: str, path: str, headers: dict[str, str], *more: tuple[str, str]
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        said: list[Any] = []

        async def send(message: Any) -> None:
            said.append(message)

        async def receive() -> Any:
            raise AssertionError("a guard reads no body")

        pairs = [(name.encode(), value.encode()) for name, value in (*headers.items(), *more)]
        await self.guard({"type": "http", "method": method, "path": path, "headers": pairs}, receive, send)
        return said[0]["status"], said[0]["headers"], said[1]["body"]

    def question(self, **changes: str | None) -> dict[str, str]:
        """Headers of a GET."""
        return self.headers(**{"origin": None, "content_type": None, "content_length": None, **changes})


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.mark.asyncio
async def test_the_page_itself_is_let_through_everywhere(asked: Asked) -> None:
    """Otherwise the tests below would prove nothing."""
    for path, access in ROUTES.items():
        headers = asked.question() if access.method == "GET" else asked.headers()
        assert await asked.status(access.method, path, headers) == 200
    assert asked.reached == list(ROUTES)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        f"evil.example:{PORT}",
        f"127.0.0.1.evil.example:{PORT}",
        f"{HOST}.evil.example",
        f"evil.example@{HOST}",
        "127.0.0.1",
        "127.0.0.1:80",
        f"127.0.0.2:{PORT}",
        f"0.0.0.0:{PORT}",
        f"localhost.:{PORT}",
        "",
    ],
)
@pytest.mark.asyncio
async def test_a_name_that_was_bound_anew_reaches_nothing(asked: Asked, host: str) -> None:
    """Ray CVE-2025-62593: a page lets its own name point to this machine (DNS rebinding), and is of one origin with
    what listens here: its Origin fits, Sec-Fetch-Site says same-origin. Its Host does not fit."""
    headers = asked.headers(host=host, origin=f"http://{host}")
    for path, access in ROUTES.items():
        assert await asked.status(access.method, path, headers) == 403, path
    assert not asked.reached


@pytest.mark.asyncio
async def test_without_a_host_or_with_two_nothing_is_reached(asked: Asked) -> None:
    assert await asked.status("GET", "/", asked.question(host=None)) == 403
    assert await asked.status("GET", "/", asked.question(), ("Host", "evil.example")) == 400
    assert not asked.reached


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
@pytest.mark.asyncio
async def test_every_name_of_this_machine_is_one_of_the_dashboard(asked: Asked, host: str) -> None:
    assert await asked.status("GET", "/", asked.question(host=f"{host}:{PORT}")) == 200


@pytest.mark.parametrize("path", list(ROUTES))
@pytest.mark.asyncio
async def test_no_method_is_forgotten(asked: Asked, path: str) -> None:
    """Ray CVE-2026-27482: DELETE was not among the methods that were refused to browsers. Here one method of a path is
    known, with and without a session."""
    for method in METHODS:
        if method != ROUTES[path].method:
            assert await asked.status(method, path, asked.headers()) == 405
            assert await asked.status(method, path, {"host": HOST}) == 405
    assert not asked.reached


@pytest.mark.parametrize("path", [path for path, access in ROUTES.items() if not access.public])
@pytest.mark.asyncio
async def test_nobody_reads_or_ends_anything_without_a_session(asked: Asked, path: str) -> None:
    """exo#1833: anybody could read the ids of what ran, and end it by them. The event stream is no exception."""
    access = ROUTES[path]
    make = asked.question if access.method == "GET" else asked.headers
    other = asked.sessions.redeem(asked.sessions.issue())
    assert other is not None
    wrong: list[dict[str, str | None]] = [
        {"cookie": None, "x_meshtrain_key": None},
        {"cookie": None},
        {"x_meshtrain_key": None},
        {"cookie": f"{cookie_name(PORT)}=x"},
        {"cookie": f"{cookie_name(PORT + 1)}={asked.session.cookie}"},
        {"x_meshtrain_key": "x"},
        {"x_meshtrain_key": other.key},
        {"cookie": f"{cookie_name(PORT)}=", "x_meshtrain_key": ""},
    ]
    for changes in wrong:
        assert await asked.status(access.method, path, make(**changes)) == 401, changes
    assert not asked.reached


def test_what_is_public_is_the_page_itself_and_the_way_in() -> None:
    """A new route is not public unless somebody decides so, here too; and all that changes anything is a POST."""
    assert {path for path, access in ROUTES.items() if access.public} == {*FILES, "/api/session"}
    assert {ROUTES[path] for path in ACTIONS} == {Access("POST")}
    assert {access.method for access in ROUTES.values()} == {"GET", "POST"}


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain;application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "",
        None,
    ],
)
@pytest.mark.asyncio
async def test_a_form_of_another_page_changes_nothing(asked: Asked, kind: str | None) -> None:
    """Forms, and fetch without asking first (a preflight), send these types of content; JSON only after a preflight,
    which is refused as every OPTIONS is."""
    for path in CHANGES:
        assert await asked.status("POST", path, asked.headers(content_type=kind)) == 415, path
    assert not asked.reached


@pytest.mark.asyncio
async def test_json_may_name_its_letters(asked: Asked) -> None:
    assert (
        await asked.status("POST", "/api/cancel", asked.headers(content_type="application/json; charset=utf-8")) == 200
    )


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        f"http://localhost:{PORT}",
        f"https://{HOST}",
        f"http://127.0.0.1:{PORT + 1}",
        "",
        None,
    ],
)
@pytest.mark.asyncio
async def test_another_origin_changes_nothing(asked: Asked, origin: str | None) -> None:
    """Another port of this machine is one, and so is its other name. Browsers name it with every POST."""
    for path in CHANGES:
        assert await asked.status("POST", path, asked.headers(origin=origin)) == 403, path
    if origin is not None:
        assert await asked.status("GET", "/api/events", asked.question(origin=origin)) == 403
    assert not asked.reached


@pytest.mark.parametrize("site", ["cross-site", "same-site", "nonsense", ""])
@pytest.mark.parametrize("path", list(ROUTES))
@pytest.mark.asyncio
async def test_what_another_page_asks_for_is_refused(asked: Asked, site: str, path: str) -> None:
    """By Sec-Fetch-Site, which no page can set. Same-site is another port of this machine."""
    access = ROUTES[path]
    make = asked.question if access.method == "GET" else asked.headers
    assert await asked.status(access.method, path, make(sec_fetch_site=site)) == 403
    assert not asked.reached


@pytest.mark.asyncio
async def test_an_address_that_was_typed_opens_the_page_and_posts_nothing(asked: Asked) -> None:
    assert await asked.status("GET", "/", asked.question(sec_fetch_site="none")) == 200
    assert await asked.status("POST", "/api/cancel", asked.headers(sec_fetch_site="none")) == 403


@pytest.mark.asyncio
async def test_bodies_are_small_and_their_length_is_said(asked: Asked) -> None:
    async def status(**changes: str | None) -> int:
        return await asked.status("POST", "/api/cancel", asked.headers(**changes))

    most = limits.DASHBOARD_BODY_BYTES_MAX
    assert await status(content_length=str(most)) == 200
    asked.reached.clear()
    for length in (str(most + 1), "1" * 5000, "0" * 12 + str(most + 1), "-1", "1e3", "0x1", "²", " 2"):
        assert await status(content_length=length.encode().decode("latin-1")) == 413
    assert await status(content_length=None) == 411
    assert await status(transfer_encoding="chunked") == 411
    assert await asked.status("GET", "/", asked.question(content_length="1")) == 400
    assert not asked.reached


@pytest.mark.parametrize(
    "path", ["/api", "/api/", "/api/cancel/", "//api/cancel", "/static/../../guard.py", "/static/", "/x", "", "*"]
)
@pytest.mark.asyncio
async def test_what_is_not_on_the_list_does_not_exist(asked: Asked, path: str) -> None:
    for method in ("GET", "POST"):
        assert await asked.status(method, path, asked.headers()) == 404
    assert not asked.reached


@pytest.mark.asyncio
async def test_every_answer_forbids_frames_strangers_scripts_and_copies(asked: Asked) -> None:
    """What is refused, too; and the site cannot say otherwise."""
    for status, host in ((200, HOST), (403, "evil.example")):
        answer = await asked.answer("GET", "/", asked.question(host=host))
        assert answer[0] == status
        assert set(HEADERS) <= set(answer[1])
        assert (b"cache-control", b"public") not in answer[1]
    policy = dict(HEADERS)[b"content-security-policy"].decode()
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.asyncio
async def test_a_refusal_says_what_to_do_and_repeats_nothing(asked: Asked) -> None:
    _, _, body = await asked.answer("GET", "/api/events", asked.question(cookie=None))
    assert "meshtrain dashboard" in json.loads(body)["error"]
    _, _, body = await asked.answer("GET", "/<script>", asked.question(host="<script>"))
    assert b"<script>" not in body


@pytest.mark.asyncio
async def test_cookies_of_others_do_not_hide_ours(asked: Asked) -> None:
    """All ports of this machine share their cookies, and another may have set one of our name."""
    ours = f"{cookie_name(PORT)}={asked.session.cookie}"
    for cookie in (f'odd={{"a": 1}}; {ours}', f"{cookie_name(PORT)}=x; {ours}", f"=; ;;{ours}; a=b"):
        assert await asked.status("GET", "/api/events", asked.question(cookie=cookie)) == 200


@pytest.mark.asyncio
async def test_no_web_socket_is_opened(asked: Asked) -> None:
    async def never(*_: Any) -> Any:
        raise AssertionError

    await asked.guard({"type": "websocket", "path": "/api/events", "headers": []}, never, never)
    assert not asked.reached
