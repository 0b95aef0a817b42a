"""Live daemons and those who keep to no rule: floods, slow clients, and paired peers that say whatever they like.

What ends a single wrong connection is in `test_links.py`, `test_endpoint.py` and `test_pairing.py`; this is about the
others: links and jobs that go on meanwhile, and what it costs.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import meshtraind.peers.links
from meshtraind.app import App
from meshtraind.peers.handshake import Doorway, LinkMaker
from meshtraind.transport import connection as connection_module
from meshtraind.trust.pins import Pin
from meshwire import limits
from meshwire.addresses import Address
from meshwire.frames.header import HEADER_BYTES, Header, Kind, decode_header
from meshwire.jobs.lifecycle import JobState, job_number
from meshwire.messages.envelope import Envelope, Failure, Role, decode, encode
from meshwire.messages.learner import LEARNER_ASKS
from meshwire.messages.link import Refuse
from meshwire.messages.local import Attach
from meshwire.messages.rounds import Null, Seal
from tests.daemon.api.test_app import config, pair, running
from tests.daemon.api.test_app import linked as linked_names
from tests.daemon.peers.test_links import DEADLINE_S, Device, devices, frame, linked, stranger
from tests.daemon.realjobs import PREAMBLE, TIMEOUT_S, submission
from tests.daemon.waiting import until
from tests.wire.wirevalues import every_message

# They end the daemon, start a process, or wait for a person or for a host that does not exist.
NOT_ASKED = {"shutdown", "submit", "pair.host", "pair.join", "attach"}


@pytest.fixture(autouse=True)
def whoever_is_refused_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """These read until the daemon does. That a pairing's answers leave at even times is proved with the pairing."""
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(limits, "PAIRING_ANSWER_DELAY_S", 0.01)


@pytest.mark.asyncio
async def test_a_flood_of_connections_leaves_the_loop_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else the daemon has to do goes on between any two that are accepted."""
    loop = asyncio.get_running_loop()
    turns = 0
    accepted_at: list[int] = []

    def turn() -> None:
        nonlocal turns
        turns += 1
        handle[0] = loop.call_soon(turn)

    def counted(links: LinkMaker) -> Doorway:
        accepted_at.append(turns)
        return Doorway(links)

    monkeypatch.setattr(meshtraind.peers.links, "Doorway", counted)
    async with devices(tmp_path, "anna") as (anna,):
        handle = [loop.call_soon(turn)]
        with contextlib.ExitStack() as flood:
            for _ in range(meshtraind.peers.links.BACKLOG):  # all are there before the first is accepted
                flood.enter_context(socket.create_connection(("127.0.0.1", anna.links.port)))
            await until(lambda: len(accepted_at) == meshtraind.peers.links.BACKLOG, "all to be accepted")
        handle[0].cancel()
    assert len(set(accepted_at)) == len(accepted_at)


@pytest.mark.skipif(sys.platform != "linux", reason="a second loopback address")
@pytest.mark.asyncio
async def test_a_flood_from_one_address_takes_only_its_own_places(tmp_path: Path) -> None:
    """A slow laptop in the middle of its handshake is not sent away for a stranger's hundredth connection."""
    async with devices(tmp_path, "anna", "bert") as (anna, bert), stranger(anna, bert) as (slow, writer):
        with contextlib.ExitStack() as flood:
            here = ("127.0.0.1", anna.links.port)
            first, *_ = [
                flood.enter_context(socket.create_connection(here, source_address=("127.0.0.2", 0)))
                for _ in range(limits.HANDSHAKES_MAX + 8)
            ]
            first.setblocking(False)
            async with asyncio.timeout(DEADLINE_S):
                assert await asyncio.get_running_loop().sock_recv(first, 1) == b"", "the flood's oldest goes"
            assert not slow.at_eof()
            writer.write(frame(Envelope(Role.NOTICE, 0, bert.hello)))  # it was through TLS, without a hello
            await until(lambda: bert.id in anna.links.linked, "the slow one's link")


@pytest.mark.asyncio
async def test_hosts_that_never_answer_a_dial_delay_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gossip may name anybody: one says nothing, one drips; both are given up, and bert is linked meanwhile."""
    monkeypatch.setattr(meshtraind.peers.links, "DIAL_TIMEOUT_S", 0.3)
    lost = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended(reader, writer)

    async def dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in b"\x16\x03\x03\x40\x00" + bytes(100):
            if reader.at_eof():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        await ended(reader, writer)

    async def ended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lost
        with contextlib.suppress(ConnectionError):
            await reader.read()
        lost += 1
        writer.transport.abort()

    async with devices(tmp_path, "anna", "bert") as (anna, bert), AsyncExitStack() as stack:
        for serve in (silent, dripping):
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            stack.callback(server.close)
            anna.dial(Address(host="127.0.0.1", port=server.sockets[0].getsockname()[1]))
        anna.dial(bert.address)
        await until(lambda: linked(anna, bert), "bert's link")
        await until(lambda: lost >= 2, "both to be given up")


class Cleo(Device):
    """A device that a daemon has paired with, and that follows no rule."""

    def pair_with(self, app: App) -> None:
        identity = app.mesh._identity
        self.pins.add(Pin(identity.device_id, identity.name, identity.certificate_pem, 0.0, self.id))
        app.mesh._pins.add(Pin(self.id, "cleo", self.identity.certificate_pem, 0.0, identity.device_id))

    @asynccontextmanager
    async def at(self, app: App) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A link of which the daemon thinks well so far."""
        self.hello = self.hello.model_copy(update={"incarnation": self.hello.incarnation + 1})
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", app.mesh._links.port, ssl=self.trust.client_context, server_hostname="x"
        )
        try:
            writer.write(frame(Envelope(Role.NOTICE, 0, self.hello)))
            await until(lambda: self.known_to(app), "the link")
            yield reader, writer
        finally:
            writer.transport.abort()

    def known_to(self, app: App) -> bool:
        link = app.mesh.node.links.get(self.id)
        return link is not None and link.hello.incarnation == self.hello.incarnation


@asynccontextmanager
async def mesh_with_cleo(folder: Path) -> AsyncIterator[tuple[App, App, Cleo]]:
    """Anna and bert are linked; anna knows cleo too."""
    cleo = Cleo(folder, "cleo")
    try:
        async with running(config(folder, "anna"), config(folder, "bert")) as (anna, bert):
            await pair(anna, bert)
            await until(lambda: linked_names(anna) == {"bert"} and linked_names(bert) == {"anna"}, "the link")
            cleo.pair_with(anna)
            yield anna, bert, cleo
    finally:
        cleo.pins.close()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def answers(reader: asyncio.StreamReader, count: int) -> None:
    """Waits for as many control frames."""
    async with asyncio.timeout(DEADLINE_S):
        while count:
            header = decode_header(await reader.readexactly(HEADER_BYTES))
            assert isinstance(header, Header)
            envelope = decode(await reader.readexactly(header.payload_bytes))
            assert isinstance(envelope, Envelope), envelope
            count -= envelope.role in (Role.REPLY, Role.FAILURE)


@pytest.mark.asyncio
async def test_any_message_from_a_paired_peer_is_answered_or_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As requests and as notices, of no job that is here: never an error of ours, and the link stays."""
    said = {name: body for name, body in every_message().items() if name not in ("hello", "refuse")}
    async with mesh_with_cleo(tmp_path) as (anna, _, cleo):
        async with cleo.at(anna) as (reader, writer):
            for number, body in enumerate(said.values(), 1):
                writer.write(frame(Envelope(Role.NOTICE, 0, body)))
                writer.write(frame(Envelope(Role.REQUEST, number, body)))
            await answers(reader, len(said))
            assert linked_names(anna) == {"bert", "cleo"}
        assert not errors(caplog)


@pytest.mark.asyncio
async def test_any_request_of_a_local_client_is_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = [body for name, body in every_message().items() if name not in NOT_ASKED]
    async with running(config(tmp_path, "anna")) as (anna,):
        node = anna.mesh.node
        token = (node.data_dir / "run/token").read_text()
        reader, writer = await asyncio.open_unix_connection(node.entrance.address.removeprefix("unix:"))
        for number, body in enumerate([Attach(token=token, role="client"), *asked], 1):
            writer.write(frame(Envelope(Role.REQUEST, number, body)))
        await answers(reader, 1 + len(asked))
        writer.transport.abort()
        assert not errors(caplog)


@pytest.mark.asyncio
async def test_a_learners_token_opens_nothing_that_a_learner_does_not_need(tmp_path: Path) -> None:
    """It submits, pairs, cancels and stops nothing, of no job: a script's mistake stays in its job."""
    asked = {name: body for name, body in every_message().items() if not isinstance(body, (*LEARNER_ASKS, Refuse))}
    assert {"shutdown", "submit", "pair.host", "cancel", "leave", "unpair", "watch", "get.jobs"} <= asked.keys()
    async with running(config(tmp_path, "anna")) as (anna,):
        node = anna.mesh.node
        own = Attach(token=node.entrance.learners.issue("0" * 12), role="learner", job="0" * 12)
        reader, writer = await asyncio.open_unix_connection(node.entrance.address.removeprefix("unix:"))
        writer.write(frame(Envelope(Role.REQUEST, 1, own)))
        assert await failure(reader) == "no job 000000000000 runs here"
        for body in asked.values():
            writer.write(frame(Envelope(Role.REQUEST, 2, body)))
            assert await failure(reader) == f"a learner may not ask for {type(body).__name__}"
        writer.transport.abort()
        for attach in (
            Attach(token=own.token, role="client"),
            Attach(token=own.token, role="learner", job="1" * 12),
            Attach(token=own.token, role="learner"),
            Attach(token=(node.data_dir / "run/token").read_text(), role="learner", job="0" * 12),
        ):
            reader, writer = await asyncio.open_unix_connection(node.entrance.address.removeprefix("unix:"))
            writer.write(frame(Envelope(Role.REQUEST, 1, attach)))
            assert "wrong token" in await failure(reader)
            writer.transport.abort()
        assert not anna._stopping.is_set()


async def failure(reader: asyncio.StreamReader) -> str:
    """With what the next request was refused, or the connection."""
    async with asyncio.timeout(DEADLINE_S):
        header = decode_header(await reader.readexactly(HEADER_BYTES))
        assert isinstance(header, Header)
        envelope = decode(await reader.readexactly(header.payload_bytes))
    assert isinstance(envelope, Envelope), envelope
    assert isinstance(envelope.body, Failure | Refuse), envelope
    return envelope.body.error if isinstance(envelope.body, Failure) else envelope.body.reason


@pytest.mark.asyncio
async def test_what_no_job_wants_costs_no_memory(tmp_path: Path) -> None:
    """Chunks and messages of jobs that are not here, 48 MiB of them, over one link."""
    async with mesh_with_cleo(tmp_path) as (anna, _, cleo):
        chunk = Header(Kind.CHUNK, limits.FRAME_PAYLOAD_BYTES_MAX, job=7, generation=7, round=1, segment_count=1)
        seal = encode(Envelope(Role.NOTICE, 0, Seal(round=1, used=bytes(limits.CONTROL_BYTES_MAX // 2))))
        sent = (
            chunk.encode() + bytes(limits.FRAME_PAYLOAD_BYTES_MAX),
            Header(Kind.CONTROL, len(seal), job=7, generation=7).encode() + seal,
        )
        async with cleo.at(anna) as (_, writer):
            tracemalloc.start()
            try:
                for _ in range(32):
                    for data in sent:
                        writer.write(data)
                        await writer.drain()
                await until(lambda: writer.transport.get_write_buffer_size() == 0, "all to be sent")
                peak_bytes = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert cleo.known_to(anna)
        assert peak_bytes < 16 * limits.MIB


@pytest.mark.asyncio
async def test_a_peers_name_draws_on_no_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        bert.hello = bert.hello.model_copy(update={"name": "\x1b[2J\nbert"})
        async with stranger(anna, bert) as (_, writer):
            writer.write(frame(Envelope(Role.NOTICE, 0, bert.hello)))
            await until(lambda: bert.id in anna.links.linked, "the link")
            assert anna.link(bert).connection.name.startswith(r"\x1b[2J\nbert (")
    assert "\x1b" not in caplog.text


GATED = (
    PREAMBLE
    + """
model, optimizer, loader = mt.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
mt.finish()
"""
)


@pytest.mark.asyncio
async def test_a_running_job_does_not_notice_strangers_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """G2, G8: a paired peer that is no member cannot speak in a job, and chunks of another generation are dropped."""
    gate = tmp_path / "gate"
    async with mesh_with_cleo(tmp_path) as (anna, bert, cleo):
        submit = submission(tmp_path, GATED, args=(str(gate),), on=("anna", "bert"))
        job_id = (await anna.jobs.submissions.submit(submit, lambda _: None)).job
        job, number = anna.jobs.registry.jobs[job_id], job_number(job_id)
        async with asyncio.timeout(TIMEOUT_S):
            while not job.ended and (job.reports.get(1) is None or job.reports[1].metrics.round == 0):
                await job.news(1.0)
        chunk = Header(Kind.CHUNK, 8, job=number, generation=7, round=1, segment_count=1)
        null = encode(Envelope(Role.NOTICE, 0, Null(round=1)))
        for said in (
            chunk.encode() + bytes(8),
            Header(Kind.CONTROL, len(null), job=number, generation=7).encode() + null,
        ):
            async with cleo.at(anna) as (reader, writer):
                writer.write(said)
                assert b"is not a member of job" in await reader.read()
        bert.mesh.node.links[anna.mesh.node.device].connection.send_chunk(chunk, bytes(8))
        assert job.state is JobState.RUNNING
        gate.touch()
        async with asyncio.timeout(TIMEOUT_S):
            while not job.ended:
                await job.news(1.0)
        assert (job.state, job.error) == (JobState.SUCCEEDED, None)
        assert job.hashes.equal
        assert not errors(caplog)
