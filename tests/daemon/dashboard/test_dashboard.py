"""The dashboard over real connections: from the command's address to what a person does, and its bounds."""

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshtraind.dashboard.dashboard import Dashboard, dashboard_port
from meshtraind.dashboard.site import ACTIONS, FILES, STATIC
from meshtraind.transport.connection import RequestFailed
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.local import Cancel, ChangeSettings, Leave, MeasureLinks, PairAccept, PairJoin, Unpair
from tests.daemon.fakedaemon import JOB
from tests.daemon.httpclient import EventStream, HttpClient, Refused, exchange, read_answer, request
from tests.daemon.scripteddaemon import ScriptedDaemon, device, peer, served

ROOT = Path(__file__).parents[3]


async def entered(dashboard: Dashboard, daemon: ScriptedDaemon) -> HttpClient:
    """A page with a session."""
    client = HttpClient((await dashboard.open(daemon)).url)
    assert (await client.enter()).status == 200
    return client


@pytest.mark.asyncio
async def test_the_way_in_and_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address, page, token, session, events, and a job that is cancelled."""
    monkeypatch.setattr("meshtraind.dashboard.feed.LOOK_S", 0.01)
    daemon = ScriptedDaemon()
    daemon.train(5)
    async with served() as dashboard:
        client = HttpClient((await dashboard.open(daemon)).url)
        page = await client.get("/")
        assert (page.status, page.header("content-type")) == (200, "text/html; charset=utf-8")
        for path in re.findall(rb'(?:src|href)="(/[^"]*)"', page.body):
            assert (await client.get(path.decode())).status == 200
        assert (await client.get("/api/events")).status == 401
        reply = await client.enter()
        assert reply.status == 200
        cookie = reply.header("set-cookie") or ""
        flags = {flag.strip().lower() for flag in cookie.split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/api"} <= flags
        assert not any(flag.startswith("domain") for flag in flags)
        events = await EventStream.open(client)
        jobs = await events.until("jobs")
        assert [(job["job"], job["round"], job["ended"]) for job in jobs] == [(JOB, 5, False)]
        assert (await client.post("/api/cancel", {"job": JOB, "now": False})).status == 200
        assert daemon.asked == [Cancel(job=JOB, now=False)]
        while not (await events.until("jobs"))[0]["ended"]:
            pass
        await events.close()


@pytest.mark.asyncio
async def test_a_token_is_good_once_and_its_thief_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtraind.dashboard.feed.LOOK_S", 0.01)
    daemon = ScriptedDaemon()
    async with served() as dashboard:
        client = await entered(dashboard, daemon)
        events = await EventStream.open(client)
        await events.until("status")
        second = await HttpClient(client.url).enter()
        assert second.status == 401
        assert "meshtrain dashboard" in second.json["error"]
        assert (await client.get("/api/log?job=x&rank=0")).status == 401
        await events.ended()  # at the next look
        await events.close()


@pytest.mark.asyncio
async def test_a_session_needs_a_token_and_nothing_else_passes_for_one() -> None:
    async with served() as dashboard:
        client = HttpClient((await dashboard.open(ScriptedDaemon())).url)
        body: Any
        for body in (
            {},
            {"token": ""},
            {"token": None},
            {"token": ["x"]},
            [],
            b"",
            b"nonsense",
            b"[" * 4000,
            b"\xff\xfe",
        ):
            assert (await client.post("/api/session", body)).status == 401
        assert (await client.enter()).status == 200


@pytest.mark.asyncio
async def test_text_without_asking_first_changes_nothing() -> None:
    """What fetch of another page sends without a preflight; over a real connection, with a session's cookie."""
    daemon = ScriptedDaemon()
    daemon.train(1)
    async with served() as dashboard:
        client = await entered(dashboard, daemon)
        body = {"job": JOB, "now": True}
        assert (await client.post("/api/cancel", body, **{"content-type": "text/plain"})).status == 415
        assert (await client.post("/api/cancel", body, origin="http://evil.example")).status == 403
        assert (await client.post("/api/cancel", body, host=f"evil.example:{client.port}")).status == 403
        assert (await client.post("/api/cancel", body, **{"x-meshtrain-key": ""})).status == 401
        assert daemon.asked == []


WISHES: list[tuple[str, Any, Wire]] = [
    ("/api/leave", {"job": JOB}, Leave(job=JOB)),
    ("/api/codec", {"job": JOB, "codec": "int4"}, ChangeSettings(job=JOB, codec="int4")),
    ("/api/unpair", {"peer": device(1), "introduced": True}, Unpair(peer=device(1), introduced=True)),
    ("/api/pair/join", {"code": "111-222", "at": None}, PairJoin(code="111-222", at=None)),
    ("/api/pair/accept", {"peer": device(2)}, PairAccept(peer=device(2))),
    ("/api/measure", {}, MeasureLinks()),
    ("/api/cancel", {"job": JOB, "now": True}, Cancel(job=JOB, now=True)),
]


@pytest.mark.asyncio
async def test_every_wish_is_the_commands_own_message() -> None:
    assert {path for path, _, _ in WISHES} == ACTIONS.keys()
    async with served() as dashboard:
        daemon = ScriptedDaemon()
        client = await entered(dashboard, daemon)
        for path, body, message in WISHES:
            daemon.train(1)
            assert (await client.post(path, body)).status == 200
            assert daemon.asked[-1] == message
            wrong: Any
            for wrong in ({**body, "more": 1}, [], None, b"x"):
                refused = await client.post(path, wrong)
                assert refused.status == 400
                assert refused.json["error"]
        assert len(daemon.asked) == len(WISHES)


@pytest.mark.asyncio
async def test_what_the_daemon_refuses_is_told_as_it_is() -> None:
    async with served() as dashboard:
        daemon = ScriptedDaemon()
        client = await entered(dashboard, daemon)
        refused = await client.post("/api/pair/join", {"code": "999-999", "at": None})
        assert (refused.status, refused.json) == (409, {"error": "no device shows this code"})


@pytest.mark.asyncio
async def test_a_code_is_shown_taken_back_and_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtraind.dashboard.feed.LOOK_S", 0.01)
    async with served() as dashboard:
        daemon = ScriptedDaemon()
        client = await entered(dashboard, daemon)
        events = await EventStream.open(client)
        assert await events.until("pairing") is None
        for _ in range(2):  # asked for twice, shown once
            assert (await client.post("/api/pair/show", {})).status == 200
        while "code" not in (shown := await events.until("pairing")):
            pass  # the daemon was asked, and has not answered yet
        assert shown["code"] == "483-917"
        assert (await client.post("/api/pair/hide", {})).status == 200
        assert await events.until("pairing") is None
        await client.post("/api/pair/show", {})
        daemon.guest.set()
        while (await events.until("pairing")).get("paired") != "dora":
            pass
        await events.close()


@pytest.mark.asyncio
async def test_a_log_is_read_from_its_end_and_on() -> None:
    """In whole lines, without what a terminal obeys; a letter of several bytes is not cut."""
    async with served() as dashboard:
        daemon = ScriptedDaemon()
        daemon.logs[1] = b"old\n" * 20_000 + b"\x1b[31mred\x1b[0m\n10%\r20%\r\nbad \x1b]0;x\x07 \xe2\x80\xae\nhalf \xc3"
        client = await entered(dashboard, daemon)
        piece = (await client.get(f"/api/log?job={JOB}&rank=1")).json
        assert piece["lines"][-4:] == ["old", "red", "20%", "bad \\x1b]0;x\\x07 \\u202e"]
        assert 5000 < len(piece["lines"]) < 9000
        assert set(piece["lines"][:-3]) == {"old"}
        daemon.logs[1] += b"\xa9 more\nx"
        piece = (await client.get(f"/api/log?job={JOB}&rank=1&offset={piece['offset_bytes']}")).json
        assert piece["lines"] == ["half é more"]
        for query in (
            "",
            "job=x",
            "job=x&rank=-1",
            "job=x&rank=0&offset=x",
            "job=x&rank=" + "9" * 99,
            "rank=0",
            "job=../x&rank=0",
        ):
            assert (await client.get(f"/api/log?{query}")).status == 400, query
        assert (await client.get(f"/api/log?job={JOB}&rank=9")).status == 409


@pytest.mark.asyncio
async def test_a_line_without_an_end_is_shown_and_read_on() -> None:
    async with served() as dashboard:
        daemon = ScriptedDaemon()
        daemon.logs[0] = b"x" * 300_000
        client = await entered(dashboard, daemon)
        offset, pieces = 0, 0
        while offset < 200_000:
            offset = (await client.get(f"/api/log?job={JOB}&rank=0&offset={offset}")).json["offset_bytes"]
            pieces += 1
        assert pieces == 4


@pytest.mark.asyncio
async def test_nothing_listens_and_nothing_is_loaded_until_it_is_opened() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with served(port) as dashboard:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert HttpClient((await dashboard.open(ScriptedDaemon())).url).port == port
        assert HttpClient((await dashboard.open(ScriptedDaemon())).url).port == port  # no second server


def test_a_daemon_loads_no_web_server() -> None:
    """Until somebody wants the dashboard: it is idle for months, and small."""
    web = {"starlette", "uvicorn", "h11", "anyio"}
    code = f"import meshtraind.app, meshtraind.cli, sys; print(*sorted({web} & set(sys.modules)))"
    paths = [str(ROOT / folder) for folder in ("daemon", "protocol")]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.asyncio
async def test_a_taken_port_and_off_are_refused_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with served(port) as dashboard:
            with pytest.raises(RequestFailed, match=f"127.0.0.1:{port}.*in use.*up --dashboard"):
                await dashboard.open(ScriptedDaemon())
    async with served(None) as dashboard:
        with pytest.raises(RequestFailed, match="--dashboard off"):
            await dashboard.open(ScriptedDaemon())


def test_a_port_is_read_as_typed() -> None:
    assert [dashboard_port(typed) for typed in ("0", "29611", "65535", "off")] == [0, 29611, 65535, None]
    for typed in ("", "x", "-1", "65536", "0000000065536", "1.5", "²", "on"):
        with pytest.raises(ValueError, match="--dashboard"):
            dashboard_port(typed)


@pytest.mark.asyncio
async def test_the_daemon_keeps_its_signals_and_its_end() -> None:
    """With a page that watches, one that is silent, and half a request under way; that no task is left is looked at
    after every test."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with served() as dashboard:
        daemon = ScriptedDaemon()
        client = await entered(dashboard, daemon)
        await client.post("/api/pair/show", {})
        events = await EventStream.open(client)
        await events.until("status")
        idle = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(2)]
        idle[1][1].write(b"GET / HT")
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    await events.ended()
    await events.close()
    for reader, writer in idle:
        assert await reader.read() == b""
        writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", client.port)


@pytest.mark.asyncio
async def test_pages_that_watch_are_few() -> None:
    async with served() as dashboard:
        client = await entered(dashboard, ScriptedDaemon())
        streams = [await EventStream.open(client) for _ in range(limits.DASHBOARD_STREAMS_MAX)]
        for stream in streams:
            await stream.until("status")
        refused = await client.get("/api/events")
        assert refused.status == 503
        assert "close one" in refused.json["error"]
        await streams.pop().close()
        for _ in range(200):
            if (again := await opened(client)) is not None:
                streams.append(again)
                break
            await asyncio.sleep(0.01)
        assert len(streams) == limits.DASHBOARD_STREAMS_MAX
        for stream in streams:
            await stream.close()


async def opened(client: HttpClient) -> EventStream | None:
    try:
        return await EventStream.open(client)
    except Refused:
        return None


@pytest.mark.asyncio
async def test_connections_are_few() -> None:
    async with served() as dashboard:
        client = HttpClient((await dashboard.open(ScriptedDaemon())).url)
        many = [
            await asyncio.open_connection("127.0.0.1", client.port) for _ in range(limits.DASHBOARD_CONNECTIONS_MAX)
        ]
        answer = await exchange_loosely(client)
        assert b" 503 " in answer
        for _, writer in many:
            writer.close()


async def exchange_loosely(client: HttpClient) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(request("GET", "/", client.own_headers))
    try:
        return await asyncio.wait_for(reader.readuntil(b"\r\n"), 15.0)
    finally:
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n", b"\r\n"])
@pytest.mark.asyncio
async def test_who_sends_no_request_in_time_is_sent_away(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DASHBOARD_REQUEST_S", 0.1)
    async with served() as dashboard:
        client = HttpClient((await dashboard.open(ScriptedDaemon())).url)
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(sent)
        async with asyncio.timeout(15.0):
            with contextlib.suppress(ConnectionResetError):
                assert (await reader.read())[:12] in (b"", b"HTTP/1.1 400")
        writer.close()


@pytest.mark.asyncio
async def test_half_a_request_after_a_whole_one_is_sent_away_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as dashboard:
        client = HttpClient((await dashboard.open(ScriptedDaemon())).url)
        monkeypatch.setattr(limits, "DASHBOARD_REQUEST_S", 0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(request("GET", "/", client.own_headers))
        assert (await read_answer(reader)).status == 200
        writer.write(b"GET /")
        async with asyncio.timeout(15.0):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


@pytest.mark.asyncio
async def test_a_body_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as dashboard:
        daemon = ScriptedDaemon()
        client = await entered(dashboard, daemon)
        monkeypatch.setattr(limits, "DASHBOARD_REQUEST_S", 0.1)
        assert (await client.post("/api/cancel", b"{", **{"content-length": "20"})).status == 400
        assert daemon.asked == []


@pytest.mark.slow
@pytest.mark.asyncio
async def test_who_does_not_read_is_dropped_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was put to sleep, or a program that means no good: what waits for it does not grow."""
    monkeypatch.setattr("meshtraind.dashboard.feed.LOOK_S", 0.01)
    async with served() as dashboard:
        daemon = ScriptedDaemon(("anna",))
        daemon.peers = [peer(at, f"peer{at}" + "x" * 50) for at in range(1, 250)]
        client = await entered(dashboard, daemon)
        monkeypatch.setattr(limits, "DASHBOARD_REQUEST_S", 0.3)
        monkeypatch.setattr(limits, "DASHBOARD_STREAMS_MAX", 2)
        stream = socket.create_connection(("127.0.0.1", client.port))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.sendall(request("GET", "/api/events", client.own_headers))
        reading = await EventStream.open(client)

        turn, third = 0, None
        async with asyncio.timeout(20.0):
            while third is None:
                turn += 1
                daemon.peers = [one.model_copy(update={"cores": 1 + turn % 64}) for one in daemon.peers]
                await reading.until("peers")
                third = await opened(client)  # there is room: the other is gone
        await third.close()
        stream.close()
        await reading.close()


@pytest.mark.asyncio
async def test_who_does_not_watch_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtraind.dashboard.feed.LOOK_S", 0.01)
    looks = 0

    class Counting(ScriptedDaemon):
        async def answer(self, body: Wire, emit: Any) -> Wire:
            nonlocal looks
            looks += 1
            return await super().answer(body, emit)

    async with served() as dashboard:
        client = await entered(dashboard, Counting())
        assert looks == 0
        events = await EventStream.open(client)
        await events.until("status")
        assert looks > 0
        await events.close()
        before = -1
        async with asyncio.timeout(10.0):
            while before != looks:  # until it looks no more
                before = looks
                await asyncio.sleep(0.1)


@pytest.mark.asyncio
async def test_what_the_daemon_cannot_tell_is_a_problem_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtraind.dashboard.feed.LOOK_S", 0.01)
    async with served() as dashboard:
        daemon = ScriptedDaemon()
        daemon.failure = "the history cannot be read: disk I/O error"
        client = await entered(dashboard, daemon)
        events = await EventStream.open(client)
        assert await events.until("problem") == daemon.failure
        daemon.failure = None
        assert await events.until("problem") is None
        assert events.parts["status"]["name"] == "anna" if "status" in events.parts else await events.until("status")
        await events.close()


@pytest.mark.asyncio
async def test_absolute_addresses_and_junk_reach_nothing() -> None:
    async with served() as dashboard:
        client = await entered(dashboard, ScriptedDaemon())
        assert (await exchange(client.port, request("GET", "http://evil.example/", client.own_headers))).status == 404
        assert (await exchange(client.port, request("GET", "/%2e%2e/guard.py", client.own_headers))).status == 404
        assert (await exchange(client.port, request("OPTIONS", "*", client.own_headers))).status in (400, 404)
        for junk in (b"\x16\x03\x01\x02\x00", b"MESH" + bytes(76), b"GET / HTTP/9.9\r\n\r\n", b"A" * 40_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(junk + b"\r\n\r\n")
            first = await asyncio.wait_for(reader.read(12), 15.0)
            assert first in (b"HTTP/1.1 400", b"HTTP/1.1 403", b"")
            writer.close()


def test_the_page_is_small_and_asks_nobody_else() -> None:
    """Below 100 KB, nothing from elsewhere, and no text becomes markup."""
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 100_000
    assert {path.name for path in STATIC.iterdir()} == {*FILES.values(), "uPlot.LICENSE.txt"}
    for name in ("index.html", "dashboard.js", "dashboard.css"):
        text = (STATIC / name).read_text("utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", text)
        assert not re.search(r"\bstyle=|<style|\son[a-z]+=\"", text)


@pytest.mark.asyncio
async def test_two_commands_at_once_get_one_server() -> None:
    async with served() as dashboard:
        daemon = ScriptedDaemon()
        opened_both = await asyncio.gather(dashboard.open(daemon), dashboard.open(daemon))
        assert len({HttpClient(one.url).port for one in opened_both}) == 1
        assert len({HttpClient(one.url).token for one in opened_both}) == 2
