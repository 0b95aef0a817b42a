"""The local endpoint: only who shows the token first is heard."""

import asyncio
import os
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import meshtraind.api.endpoint
from meshtraind.api.endpoint import Endpoint, EndpointError
from meshtraind.api.rundir import RunDir
from meshtraind.transport.connection import Connection, ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.frames.header import Header, Kind
from meshwire.memory_layout.shared_slots import PORTABLE_VARIABLE
from meshwire.message_base import Wire
from meshwire.messages import learner
from meshwire.messages.envelope import Done
from meshwire.messages.learner import LearnerApplied, LearnerReady, Stop
from meshwire.messages.local import Attach, GetJobs, Shutdown
from tests.daemon.waiting import until

DEADLINE_S = 10.0
JOB = "1kx3m9q2v7bd"


class App:
    """Records what attached connections say."""

    def __init__(self) -> None:
        self.requests: list[tuple[Attach | None, Wire]] = []
        self.notices: list[Wire] = []
        self.lost_names: list[str] = []

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        return "no chunks here"

    def chunk_received(self, conn: Connection, header: Header) -> None:
        raise AssertionError

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        self.notices.append(body)

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Callable[[Wire], None]) -> Wire:
        self.requests.append((conn.attached, body))
        return Done()

    def lost(self, conn: Connection, reason: str) -> None:
        self.lost_names.append(conn.name)


class Client(App):
    """The other end."""

    reason: str | None = None

    def lost(self, conn: Connection, reason: str) -> None:
        self.reason = reason


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[Endpoint, App, str]]:
    """An endpoint, its app, and the token."""
    with RunDir(tmp_path / "data") as run:
        endpoint, app = Endpoint(run), App()
        await endpoint.start(app)
        try:
            yield endpoint, app, run.token
        finally:
            async with asyncio.timeout(DEADLINE_S):
                await endpoint.close()


@asynccontextmanager
async def connected(endpoint: Endpoint) -> AsyncIterator[tuple[Connection, Client]]:
    client = Client()
    connection = Connection(client, name="meshtraind")
    loop = asyncio.get_running_loop()
    kind, _, where = endpoint.address.partition(":")
    if kind == "unix":
        await loop.create_unix_connection(lambda: connection, where)
    else:
        host, _, port = where.rpartition(":")
        await loop.create_connection(lambda: connection, host, int(port))
    try:
        yield connection, client
    finally:
        connection.close("the test has ended")
        async with asyncio.timeout(DEADLINE_S):
            await connection.closed()


async def ask(connection: Connection, body: Wire) -> Wire:
    return await connection.request(body, timeout_s=DEADLINE_S, name=type(body).__name__)


@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
@pytest.mark.asyncio
async def test_who_shows_the_token_is_heard_and_remembered(
    tmp_path: Path, unix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not unix:
        monkeypatch.setenv(PORTABLE_VARIABLE, "1")
    async with serving(tmp_path) as (endpoint, app, token):
        assert endpoint.address.startswith("unix:" if unix else "tcp:127.0.0.1:")
        attach = Attach(token=token, role="client", pid=5)
        async with connected(endpoint) as (connection, _):
            assert await ask(connection, attach) == Done()
            connection.notify(Stop(reason="x"))
            assert await ask(connection, GetJobs(prefix="a")) == Done()
            assert app.requests == [(attach, attach), (attach, GetJobs(prefix="a"))]
            assert app.notices == [Stop(reason="x")]
        await until(lambda: app.lost_names == ["a client"])


@pytest.mark.asyncio
async def test_a_learner_is_heard_where_it_speaks_as_learners_do(tmp_path: Path) -> None:
    async with serving(tmp_path) as (endpoint, app, _):
        attach = Attach(token=endpoint.learners.issue(JOB), role="learner", job=JOB, pid=5)
        async with connected(endpoint) as (connection, client):
            assert await ask(connection, attach) == Done()
            assert await ask(connection, LearnerReady()) == Done()
            connection.notify(LearnerApplied(round=3))
            with pytest.raises(RequestFailed, match="a learner may not ask for GetJobs"):
                await ask(connection, GetJobs(prefix="a"))
            assert app.requests == [(attach, attach), (attach, LearnerReady())]
            assert app.notices == [LearnerApplied(round=3)]
            connection.notify(Shutdown())
            await until(lambda: client.reason is not None)
            assert "a learner does not send Shutdown" in str(client.reason)
        await until(lambda: app.lost_names == [f"the learner of job {JOB}"])
        endpoint.learners.revoke(attach.token)
        async with connected(endpoint) as (connection, _):
            with pytest.raises((ConnectionEnded, RequestFailed)):
                await ask(connection, attach)
        assert len(app.requests) == 2


def test_what_learners_may_say_is_all_that_there_is_for_them() -> None:
    """A message that is new and forgotten in the lists would end the job of everybody who sends it."""
    theirs = {cls for name, cls in vars(learner).items() if name.startswith("Learner") and isinstance(cls, type)}
    assert theirs - {learner.LearnerWelcome} == {*learner.LEARNER_ASKS, *learner.LEARNER_TELLS}
    assert not set(learner.LEARNER_ASKS) & set(learner.LEARNER_TELLS)


@pytest.mark.skipif(os.name != "posix", reason="modes")
@pytest.mark.asyncio
async def test_the_socket_is_its_users_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as (endpoint, _, _):
        assert stat.S_IMODE(os.stat(endpoint.address.removeprefix("unix:")).st_mode) == 0o600


@pytest.mark.parametrize("token", ["", "0" * 64, "ü"])
@pytest.mark.asyncio
async def test_a_wrong_token_is_sent_away(tmp_path: Path, token: str) -> None:
    async with serving(tmp_path) as (endpoint, app, _), connected(endpoint) as (connection, client):
        with pytest.raises((ConnectionEnded, RequestFailed)):
            await ask(connection, Attach(token=token, role="client"))
        await until(lambda: client.reason is not None)
        assert client.reason is not None
        assert "wrong token" in client.reason
        assert not app.requests
        assert not app.lost_names


@pytest.mark.asyncio
async def test_nothing_is_heard_before_attach(tmp_path: Path) -> None:
    async with serving(tmp_path) as (endpoint, app, _):
        async with connected(endpoint) as (connection, client):
            with pytest.raises((ConnectionEnded, RequestFailed), match="first message must be Attach"):
                await ask(connection, GetJobs(prefix="a"))
        async with connected(endpoint) as (connection, client):
            connection.notify(Stop(reason="x"))
            await until(lambda: client.reason is not None)
            assert "first message must be Attach" in str(client.reason)
        async with connected(endpoint) as (connection, client):
            connection.send_chunk(Header(Kind.CHUNK, 0, round=1), None)
            await until(lambda: client.reason is not None)
            assert "first message must be Attach" in str(client.reason)
        assert not app.requests
        assert not app.notices


@pytest.mark.asyncio
async def test_who_says_nothing_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshtraind.api.endpoint, "ATTACH_TIMEOUT_S", 0.1)
    async with (
        serving(tmp_path) as (endpoint, _, token),
        connected(endpoint) as (silent, client),
        connected(endpoint) as (attached, _),
    ):
        await ask(attached, Attach(token=token, role="client"))
        await until(lambda: client.reason is not None)
        assert silent.closing
        assert await ask(attached, GetJobs()) == Done(), "who has attached may be silent"


@pytest.mark.asyncio
async def test_local_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOCAL_CONNECTIONS_MAX", 1)
    async with serving(tmp_path) as (endpoint, _, token):
        async with connected(endpoint) as (first, _):
            await ask(first, Attach(token=token, role="client"))
            async with connected(endpoint) as (_, client):
                await until(lambda: client.reason is not None)
            assert await ask(first, GetJobs()) == Done()
        await until(lambda: not endpoint._connections)
        async with connected(endpoint) as (again, _):
            assert await ask(again, Attach(token=token, role="client")) == Done()


@pytest.mark.asyncio
async def test_stopping_ends_every_connection(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as (endpoint, app, token),
        connected(endpoint) as (connection, client),
        connected(endpoint) as (_, silent),
    ):
        await ask(connection, Attach(token=token, role="client"))
        began_s = time.monotonic()
        await endpoint.close()
        await until(lambda: client.reason is not None and silent.reason is not None)
        assert time.monotonic() - began_s < 5
        assert app.lost_names == ["a client"]


@pytest.mark.asyncio
async def test_an_endpoint_that_cannot_listen_says_so(tmp_path: Path) -> None:
    with RunDir(tmp_path / "data") as run:
        run.socket_path = tmp_path / "missing" / "socket"
        with pytest.raises(EndpointError, match=r"the local endpoint cannot listen: .*No such file"):
            await Endpoint(run).start(App())
