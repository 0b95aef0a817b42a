"""Links between devices in one loop, over real TLS: who gets in, which link stays, when one is lost."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import meshtraind.peers.links
from meshtraind.machine.facts import running_system
from meshtraind.peers.links import Link, Links, ListenError
from meshtraind.runtime import log_limit as loglimit
from meshtraind.runtime.log_limit import LimitedHandler
from meshtraind.transport import connection as connection_module
from meshtraind.transport.connection import Connection, ConnectionEnded, RequestFailed
from meshtraind.trust.identity import load_or_create
from meshtraind.trust.pins import Pin, PinTable
from meshtraind.trust.tls import Trust
from meshwire import limits
from meshwire.addresses import Address
from meshwire.discovery import addressbook
from meshwire.discovery.addressbook import AddressBook, Source
from meshwire.frames.header import HEADER_BYTES, WIRE_VERSION, Header, Kind
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done, Envelope, Role, encode
from meshwire.messages.learner import Stop
from meshwire.messages.link import Addresses, Heartbeat, Hello, Software
from meshwire.messages.local import GetJobs
from tests.daemon.waiting import until

DEADLINE_S = 10.0


@pytest.fixture(autouse=True)
def whoever_is_refused_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """These read until the daemon does."""
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", 0.2)


class Device:
    """Identity, pins, address book and links; records what the app would get."""

    def __init__(self, folder: Path, name: str, *, patience_s: float = 5.0) -> None:
        folder = folder / name
        folder.mkdir()
        self.identity = load_or_create(folder, name)
        self.id = self.identity.device_id
        self.pins = PinTable(folder / "pins.db")
        self.trust = Trust(self.identity, self.pins)
        self.book = AddressBook(self.id)
        self.hello = Hello(
            incarnation=len(name),
            name=name,
            listen_port=0,
            software=Software(meshtrain="0", python="3", torch=None, system="test"),
            cores=1,
            memory_bytes=1,
        )
        self.patience_s = patience_s
        self.notices: list[Wire] = []
        self.losses: list[tuple[str | None, str]] = []
        self.on_link: Callable[[Link], None] = lambda _link: None
        self.on_away: Callable[[], None] = lambda: None
        self.on_gone: Callable[[str, int], None] = lambda _device, _incarnation: None

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Device"]:
        self.links = Links(
            self.id, self.trust, self.book, hello=self.hello, host="127.0.0.1", port=0, patience_s=self.patience_s
        )
        await self.links.start(self)
        try:
            yield self
        finally:
            await self.links.close()
            self.pins.close()

    @property
    def address(self) -> Address:
        return Address(host="127.0.0.1", port=self.links.port)

    def trusts(self, *others: "Device") -> None:
        for other in others:
            self.pins.add(Pin(other.id, other.identity.name, other.identity.certificate_pem, 0.0, self.id))
        self.book.set_pinned((pin.device_id for pin in self.pins.all()), time.monotonic())

    def dial(self, address: Address) -> None:
        self.book.configure(address, time.monotonic())
        self.links.dial_now()

    def link(self, other: "Device") -> Link:
        return self.links.linked[other.id]

    def link_made(self, link: Link) -> None:
        self.on_link(link)

    def was_away(self) -> None:
        self.on_away()

    def peer_gone(self, device: str, incarnation: int) -> None:
        self.on_gone(device, incarnation)

    def violated(self, device: str, reason: str) -> None:
        pass

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        return None

    def chunk_received(self, conn: Connection, header: Header) -> None:
        raise AssertionError

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        self.notices.append(body)

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Callable[[Wire], None]) -> Wire:
        if body == GetJobs(prefix="wait"):
            await asyncio.Event().wait()
        return body

    def lost(self, conn: Connection, reason: str) -> None:
        self.losses.append((conn.device, reason))


@asynccontextmanager
async def devices(
    folder: Path, *names: str, pinned: bool = True, patience_s: float = 5.0
) -> AsyncIterator[list[Device]]:
    """Devices that run, all paired with each other unless told."""
    made = [Device(folder, name, patience_s=patience_s) for name in names]
    if pinned:
        for device in made:
            device.trusts(*(other for other in made if other is not device))
    async with AsyncExitStack() as stack:
        for device in made:
            await stack.enter_async_context(device.running())
        yield made


def linked(one: Device, other: Device) -> bool:
    return other.id in one.links.linked and one.id in other.links.linked


class Relay:
    """A TCP hop on the way to `target`, with a delay each way, that can fall silent without closing anything."""

    def __init__(self, target: Address, there_s: float = 0.0, back_s: float = 0.0) -> None:
        self._target = target
        self._there_s = there_s
        self._back_s = back_s
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepted: list[asyncio.StreamWriter] = []

    def fall_silent(self) -> None:
        self._flows.clear()

    async def __aenter__(self) -> Address:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return Address(host="127.0.0.1", port=self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._accepted:  # also of a task that has not begun
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._accepted.append(writer)
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer), name="relay")
        task.add_done_callback(lambda _: writer.transport.abort())  # also when it is cancelled before its first step
        self._tasks.add(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._target.host, self._target.port)
        try:
            await asyncio.gather(
                self._copy(reader, there_writer, self._there_s), self._copy(there_reader, writer, self._back_s)
            )
        finally:
            there_writer.transport.abort()
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(delay_s)
            await self._flows.wait()
            writer.write(data)
        writer.close()


@pytest.mark.asyncio
async def test_paired_devices_link_talk_and_part(tmp_path: Path) -> None:
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        anna.dial(bert.address)
        await until(lambda: linked(anna, bert), "the link")
        link = anna.link(bert)
        assert (link.device, link.hello.name, link.address) == (bert.id, "bert", bert.address)
        assert bert.link(anna).address == anna.address, "where anna listens, not where she called from"
        assert link.connection.device == bert.id
        link.connection.notify(Stop(reason="x"))
        reply = await bert.link(anna).connection.request(GetJobs(prefix="y"), timeout_s=5, name="jobs")
        assert reply == GetJobs(prefix="y")
        await until(lambda: bert.notices == [Stop(reason="x")], "the notice")
        anna.links.drop(bert.id, "bert was unpaired")
        await until(lambda: bert.losses and anna.losses, "the end")
        assert anna.losses == [(bert.id, "bert was unpaired")]
        assert "refused: bert was unpaired" in bert.losses[0][1]
        with pytest.raises(ConnectionEnded):
            await link.connection.request(GetJobs(prefix="y"), timeout_s=5, name="jobs")


@pytest.mark.asyncio
async def test_one_sided_trust_is_none(tmp_path: Path) -> None:
    """Nothing unpaired gets past the handshake, in either direction."""
    async with devices(tmp_path, "anna", "bert", "cleo", pinned=False) as (anna, bert, cleo):
        anna.trusts(bert, cleo)
        cleo.trusts(anna)
        anna.dial(bert.address)  # bert does not know anna
        bert.dial(anna.address)
        anna.dial(cleo.address)
        await until(lambda: linked(anna, cleo), "the link of the paired ones")
        assert anna.links.linked.keys() == {cleo.id}
        assert not bert.links.linked


@pytest.mark.asyncio
async def test_how_the_newest_dial_ended_is_known_until_there_is_a_link(tmp_path: Path) -> None:
    """For `meshtrain doctor`; of paired devices alone, and no longer than they are."""
    async with devices(tmp_path, "anna", "bert", "cleo") as (anna, bert, cleo):
        nobody = Address(host="127.0.0.1", port=1)
        for device in (bert.id, cleo.id):
            anna.book.learn(device, nobody, Source.MDNS, time.monotonic())
        anna.links.dial_now()
        await until(lambda: len(anna.links.dial_failures) == 2, "two dials that nobody takes")
        assert "127.0.0.1" in anna.links.dial_failures[bert.id]
        anna.dial(bert.address)
        await until(lambda: linked(anna, bert), "the link")
        assert anna.links.dial_failures.keys() == {cleo.id}
        anna.links.drop(cleo.id, "unpaired")
        assert not anna.links.dial_failures


@pytest.mark.asyncio
async def test_identity_is_the_key_and_not_the_address(tmp_path: Path) -> None:
    """An address that turns out to be another device's links that device, and is no longer believed to be bert's."""
    async with devices(tmp_path, "anna", "bert", "cleo") as (anna, bert, cleo):
        anna.book.learn(bert.id, cleo.address, Source.GOSSIP, time.monotonic())
        anna.links.dial_now()
        await until(lambda: linked(anna, cleo), "the link")
        assert cleo.address not in anna.book.addresses_of(bert.id)
        assert bert.id not in anna.links.linked


@pytest.mark.asyncio
async def test_false_addresses_do_not_delay_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes connections and says nothing for longer than the test waits; the right one comes after them all."""
    monkeypatch.setattr(meshtraind.peers.links, "DIAL_TIMEOUT_S", 10 * DEADLINE_S)
    async with devices(tmp_path, "anna", "bert") as (anna, bert), AsyncExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        false = [Address(host="127.0.0.1", port=holder.getsockname()[1]) for holder in silent]
        now_s = time.monotonic()
        anna.book.learn(bert.id, bert.address, Source.GOSSIP, now_s)
        anna.book.sighted(bert.id, false, now_s)
        assert anna.book.addresses_of(bert.id)[-1] == bert.address
        anna.links.dial_now()
        await until(lambda: linked(anna, bert), "the link")
        await until(lambda: not anna.links._dials, "the end of the other dials")
        for holder in silent:  # they were dialled, and are left in order
            holder.setblocking(False)
            accepted, _ = holder.accept()
            with accepted:
                accepted.settimeout(DEADLINE_S)
                with contextlib.suppress(ConnectionError):
                    while accepted.recv(65536):
                        pass
        anna.links.drop(bert.id, "once more")
        await until(lambda: anna.losses, "the end of the link")
        assert anna.book.addresses_of(bert.id)[0] == bert.address, "it worked, and is dialled first"
        await until(lambda: linked(anna, bert), "the second link")


@pytest.mark.asyncio
async def test_both_ends_keep_the_same_of_two_dials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cable and WiFi, say: what anna says arrives first on one way, what bert says on the other."""
    monkeypatch.setattr(addressbook, "ATTEMPT_DELAY_S", 0.0)
    async with (
        devices(tmp_path, "anna", "bert") as (anna, bert),
        Relay(bert.address, back_s=0.3) as one,
        Relay(bert.address, there_s=0.2) as other,
    ):
        anna.book.sighted(bert.id, [one, other], time.monotonic())
        anna.links.dial_now()
        await until(lambda: linked(anna, bert), "the link")
        await until(lambda: not anna.links._dials and not bert.links._welcoming, "the end of the other dial")
        reply = await anna.link(bert).connection.request(GetJobs(prefix="y"), timeout_s=5, name="jobs")
        assert reply == GetJobs(prefix="y")
        assert linked(anna, bert)
        assert not anna.losses
        assert not bert.losses


@pytest.mark.asyncio
async def test_a_device_that_was_unpaired_meanwhile_is_sent_away(tmp_path: Path) -> None:
    """Un-pairing revokes at once, whatever a handshake began with."""
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        anna.dial(bert.address)
        await until(lambda: linked(anna, bert), "the link")
        bert.pins.remove(anna.id)
        bert.links.drop(anna.id, "unpaired")
        await until(lambda: not bert.links.linked and not anna.links.linked, "the end")
        anna.dial(bert.address)
        await until(lambda: anna.book.next_dial(time.monotonic()) is not None, "the failed dial")
        assert not bert.links.linked


@pytest.mark.asyncio
async def test_unpairing_between_the_handshake_and_the_hello_revokes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        verified = asyncio.Event()
        made: list[Link] = []
        anna.on_link = made.append
        verify = anna.links.verify_peer

        def noted(connection: Connection) -> None:
            verify(connection)
            verified.set()

        monkeypatch.setattr(anna.links, "verify_peer", noted)
        async with stranger(anna, bert) as (reader, writer):
            await asyncio.wait_for(verified.wait(), DEADLINE_S)
            anna.pins.remove(bert.id)
            writer.write(frame(Envelope(Role.NOTICE, 0, bert.hello)))
            assert await is_closed(reader)
        assert not made


@pytest.mark.asyncio
async def test_if_both_dialled_the_lower_ids_dial_stays(tmp_path: Path) -> None:
    """W4: one connection per pair, and both sides choose the same."""
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        anna.dial(bert.address)
        bert.dial(anna.address)
        lower = min(anna.id, bert.id)
        await until(lambda: linked(anna, bert), "the link")
        await until(
            lambda: linked(anna, bert) and anna.link(bert).dialled_by == bert.link(anna).dialled_by, "agreement"
        )
        # Either only one dial was needed, or the lower id's has stayed; and what is left carries both ways.
        both = anna.losses or bert.losses
        assert not both or anna.link(bert).dialled_by == lower
        for one, other in ((anna, bert), (bert, anna)):
            reply = await one.link(other).connection.request(GetJobs(prefix="y"), timeout_s=5, name="jobs")
            assert reply == GetJobs(prefix="y")


@pytest.mark.asyncio
async def test_a_device_does_not_link_itself(tmp_path: Path) -> None:
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        anna.dial(anna.address)
        anna.dial(bert.address)
        await until(lambda: linked(anna, bert), "the link")
        assert anna.links.linked.keys() == {bert.id}


@pytest.mark.asyncio
async def test_a_peer_that_falls_silent_is_lost_after_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop lid closes: no socket is closed, nothing is said any more; both sides notice, and link again later."""
    monkeypatch.setattr(meshtraind.peers.links, "HEARTBEAT_INTERVAL_S", 0.02)
    async with devices(tmp_path, "anna", "bert", patience_s=0.4) as (anna, bert):
        relay = Relay(bert.address)
        async with relay as address:
            anna.dial(address)
            await until(lambda: linked(anna, bert) and anna.link(bert).rtt_s is not None, "a measured round trip")
            assert 0 < (anna.link(bert).rtt_s or 0) < 0.4
            relay.fall_silent()
            began_s = time.monotonic()
            await until(lambda: anna.losses and bert.losses, "both to notice")
            assert time.monotonic() - began_s >= 0.3
            assert anna.losses[0][1].startswith("silent for 0.")
            await until(lambda: linked(anna, bert), "bert to dial anna where she listens, without the relay")


@pytest.mark.asyncio
@pytest.mark.parametrize("slept_s", [0.0, 100.0], ids=["awake", "asleep"])
async def test_silence_while_this_device_stood_still_is_its_own(
    slept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens the lid would lose all its links at once, though what came meanwhile is only to be read."""
    now_s = 1000.0
    closed: list[str] = []
    waits: list[float] = []

    async def sleep(wait_s: float) -> None:
        nonlocal now_s
        waits.append(wait_s)
        now_s += wait_s + (slept_s if len(waits) == 1 else 0.0)
        if slept_s and len(waits) == 2:  # it has been read
            connection.last_received_s, connection.closing = now_s, True

    def close(reason: str, **_now: bool) -> None:
        closed.append(reason)
        connection.closing = True

    monkeypatch.setattr(meshtraind.peers.links, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(meshtraind.peers.links, "asyncio", SimpleNamespace(sleep=sleep))
    said: list[Wire] = []
    connection = SimpleNamespace(closing=False, last_received_s=now_s, notify=said.append, close=close)
    tasks = SimpleNamespace(spawn=lambda _measure, _name: SimpleNamespace(done=lambda: False))
    links = SimpleNamespace(_patience_s=0.5, _tasks=tasks, _measure=lambda _link: None, _needed=frozenset())
    link = SimpleNamespace(
        device="b", connection=connection, rtt_s=0.001, round_trips_s=(), hello=SimpleNamespace(name="bert")
    )
    await Links._keep_alive(cast(Any, links), cast(Any, link))
    assert closed == ([] if slept_s else ["silent for 0.5 s"])
    assert slept_s or sum(waits) == 0.5, "it is noticed at that very instant"
    assert slept_s or said == [Heartbeat()] * 2, "and three intervals before it this side spoke, though nobody answers"


@pytest.mark.parametrize(("needed", "asked"), [(True, 24), (False, 6)], ids=["by a job", "by none"])
@pytest.mark.asyncio
async def test_a_link_that_no_job_needs_costs_little(needed: bool, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side still speaks four times a patience; three round trips are measured at once, then every eighth beat
    asks for an answer, and with a job each."""
    now_s, measured, said = 1000.0, list[str](), list[Wire]()

    async def sleep(wait_s: float) -> None:
        nonlocal now_s
        now_s = connection.last_received_s = now_s + wait_s
        connection.closing = len(said) + len(measured) >= 24

    def spawn(_measure: None, name: str) -> Any:
        measured.append(name)
        link.round_trips_s = (*link.round_trips_s[-2:], 0.001)
        return SimpleNamespace(done=lambda: True)

    monkeypatch.setattr(meshtraind.peers.links, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(meshtraind.peers.links, "asyncio", SimpleNamespace(sleep=sleep))
    connection = SimpleNamespace(closing=False, last_received_s=now_s, notify=said.append)
    links = SimpleNamespace(
        _patience_s=5.0, _tasks=SimpleNamespace(spawn=spawn), _measure=lambda _link: None,
        _needed=frozenset({"b"} if needed else ()),
    )  # fmt: skip
    link = SimpleNamespace(
        device="b", connection=connection, rtt_s=0.001, round_trips_s=(), hello=SimpleNamespace(name="bert")
    )
    await Links._keep_alive(cast(Any, links), cast(Any, link))
    assert (len(measured), len(said)) == (asked, 24 - asked)
    assert now_s - 1000.0 == pytest.approx(25 * 5.0 / 4)


@pytest.mark.asyncio
async def test_a_round_trip_above_the_patience_is_measured_and_is_no_silence(tmp_path: Path) -> None:
    """G7: all waits follow from it. Heartbeats go on while an answer is on its way: each side hears the other."""
    async with devices(tmp_path, "anna", "bert", patience_s=0.3) as (anna, bert), AsyncExitStack() as stack:
        address = await stack.enter_async_context(Relay(bert.address, there_s=0.2, back_s=0.2))
        anna.dial(address)
        await until(lambda: linked(anna, bert), "the link")
        link = anna.link(bert)
        await until(lambda: len(link.round_trips_s) == 3, "three answers")
        assert (link.rtt_s or 0) >= 0.4
        assert not anna.losses
        assert not bert.losses


@pytest.mark.asyncio
async def test_no_link_is_made_while_the_others_are_being_closed(tmp_path: Path) -> None:
    """Nobody would close it. bert does not hear of the end, which is waited for; cleo calls meanwhile."""
    async with devices(tmp_path, "anna", "bert", "cleo") as (anna, bert, cleo):
        relay = Relay(anna.address)
        async with relay as at, asyncio.TaskGroup() as closing:
            bert.dial(at)
            await until(lambda: linked(anna, bert), "the link")
            relay.fall_silent()
            closed = closing.create_task(anna.links.close())
            cleo.dial(anna.address)
            await until(lambda: closed.done() or linked(anna, cleo), "the end of the links")
        assert not anna.links.linked


@pytest.mark.asyncio
async def test_a_busy_peer_is_still_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that refuses one more request lives; when it falls silent later, that is still noticed."""
    monkeypatch.setattr(meshtraind.peers.links, "HEARTBEAT_INTERVAL_S", 0.02)
    async with devices(tmp_path, "anna", "bert", patience_s=0.4) as (anna, bert):
        relay = Relay(bert.address)
        async with relay as address:
            anna.dial(address)
            await until(lambda: linked(anna, bert), "the link")
            connection = anna.link(bert).connection
            waiting = asyncio.get_running_loop().create_task(
                connection.request(GetJobs(prefix="wait"), timeout_s=60, name="jobs"), name="waiting"
            )
            await until(lambda: bert.link(anna).connection._answering, "the request")
            monkeypatch.setattr(limits, "REQUESTS_PER_CONNECTION_MAX", 1)
            with pytest.raises(RequestFailed, match="being answered already"):
                await connection.request(Heartbeat(), timeout_s=5, name="heartbeat")
            received_s = connection.last_received_s
            await until(lambda: connection.last_received_s > received_s + 0.1, "heartbeats that were refused too")
            relay.fall_silent()
            with pytest.raises(ConnectionEnded):
                await waiting
            assert anna.losses[0][1].startswith("silent for")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """By this daemon; asyncio says how slow the machine is."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("meshtraind")]


def in_version(version: int, envelope: Envelope) -> bytes:
    """As a daemon of another wire version sends it; what follows the version means something else there."""
    said = bytearray(frame(envelope))
    said[4] = version
    said[6:] = said[6:][::-1]
    return bytes(said)


@pytest.mark.asyncio
@pytest.mark.parametrize("step", [-1, 1])
async def test_another_wire_version_is_refused_and_told_once_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    """W6: whoever calls. A device of another version may call for months; others are not disturbed."""
    theirs = WIRE_VERSION + step
    async with devices(tmp_path, "anna", "cleo") as (anna, cleo):
        bert = Device(tmp_path, "bert")
        anna.trusts(bert)
        bert.trusts(anna)
        anna.dial(cleo.address)
        await until(lambda: linked(anna, cleo), "the link")
        behind = "bert" if step < 0 else "anna"
        said = f"bert speaks wire version {theirs}, anna {WIRE_VERSION}: update meshtrain on {behind}"
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                async with stranger(anna, bert) as (reader, writer):
                    writer.write(in_version(theirs, Envelope(Role.NOTICE, 0, bert.hello)))
                    answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
                assert said.encode() in answer
        assert told(caplog) == [said]
        assert anna.links.unlinkable == {bert.id: said}
        assert linked(anna, cleo)
        async with bert.running():  # which was updated
            anna.dial(bert.address)
            await until(lambda: linked(anna, bert), "the link")
            assert not anna.links.unlinkable


@pytest.mark.asyncio
async def test_a_listener_of_another_wire_version_is_noted_by_who_dials_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W6: who was dialled says hello first. It is dialled on, less and less often, and told of once."""
    monkeypatch.setattr(addressbook, "BACKOFF_MIN_S", 0.01)
    bert = Device(tmp_path, "bert")
    refusals: list[bytes] = []

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(in_version(WIRE_VERSION - 1, Envelope(Role.NOTICE, 0, bert.hello)))
        with contextlib.suppress(OSError):
            refusals.append(await reader.read())
        writer.transport.abort()

    async with devices(tmp_path, "anna") as (anna,):
        anna.trusts(bert)
        bert.trusts(anna)
        server = await asyncio.start_server(old, "127.0.0.1", 0, ssl=bert.trust.server_context)
        with caplog.at_level(logging.INFO):
            anna.dial(Address(host="127.0.0.1", port=server.sockets[0].getsockname()[1]))
            await until(lambda: len(refusals) >= 3, "dials")
        said = f"bert speaks wire version {WIRE_VERSION - 1}, anna {WIRE_VERSION}: update meshtrain on bert"
        assert told(caplog) == [said]
        assert said.encode() in refusals[0]
        assert anna.links.unlinkable == {bert.id: said}
        anna.links.drop(bert.id, "this device was unpaired")
        assert not anna.links.unlinkable
        server.close()
    bert.pins.close()


@pytest.mark.asyncio
async def test_the_version_of_a_stranger_is_nobodys_business(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """W6 is for devices that are paired at that moment: of others nothing is noted."""
    async with devices(tmp_path, "anna") as (anna,):
        bert = Device(tmp_path, "bert")
        anna.trusts(bert)
        bert.trusts(anna)
        async with stranger(anna, bert) as (reader, writer):
            await reader.readexactly(HEADER_BYTES)  # of anna's hello: bert was paired
            anna.pins.remove(bert.id)
            writer.write(in_version(WIRE_VERSION + 1, Envelope(Role.NOTICE, 0, bert.hello)))
            assert b"is not paired with this one" in await asyncio.wait_for(reader.read(), DEADLINE_S)
        assert not anna.links.unlinkable
        assert "wire version" not in caplog.text
        bert.pins.close()


@pytest.mark.asyncio
async def test_a_link_whose_version_changes_breaks_the_protocol(tmp_path: Path) -> None:
    """W6 is about hellos: a link was made in one version, which it keeps."""
    async with devices(tmp_path, "anna") as (anna,):
        bert = Device(tmp_path, "bert")
        anna.trusts(bert)
        bert.trusts(anna)
        async with stranger(anna, bert) as (reader, writer):
            hello = Envelope(Role.NOTICE, 0, bert.hello)
            writer.write(frame(hello))
            await until(lambda: bert.id in anna.links.linked, "the link")
            writer.write(in_version(WIRE_VERSION + 1, hello))
            assert b"protocol violation" in await asyncio.wait_for(reader.read(), DEADLINE_S)
        assert not anna.links.unlinkable
        bert.pins.close()


def frame(envelope: Envelope) -> bytes:
    payload = encode(envelope)
    return Header(Kind.CONTROL, len(payload)).encode() + payload


@asynccontextmanager
async def stranger(
    server: Device, client: Device | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to `server`'s port that follows no rules; with TLS when it has `client`'s key."""
    context = client.trust.client_context if client is not None else None
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.links.port, ssl=context, server_hostname="x" if context is not None else None
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """True once the other side has ended the connection; raises TimeoutError when it does not."""
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), DEADLINE_S)
    return True


@pytest.mark.parametrize(
    "first",
    [
        frame(Envelope(Role.NOTICE, 0, Stop(reason="x"))),
        frame(Envelope(Role.REQUEST, 1, Heartbeat())),
        frame(Envelope(Role.REPLY, 1, Done())),
        Header(Kind.CHUNK, 5, round=1).encode() + b"12345",
        Header(Kind.CONTROL, limits.FRAME_PAYLOAD_BYTES_MAX + 1).encode(),
        os.urandom(200),
    ],
    ids=["notice", "request", "reply", "chunk", "oversize", "random"],
)
@pytest.mark.asyncio
async def test_the_first_message_must_be_a_hello(tmp_path: Path, first: bytes) -> None:
    """Also from a paired device."""
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        async with stranger(anna, bert) as (reader, writer):
            writer.write(first)
            assert await is_closed(reader)
        assert not anna.links.linked
        assert not anna.notices


@pytest.mark.asyncio
async def test_peers_are_told_of_a_new_address_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleo has moved, and bert's network hides it: its link to anna is an old one, and no link is made by which he
    would learn of it. Whoever changes addresses without end is told of once in a while."""
    monkeypatch.setattr(meshtraind.peers.links, "GOSSIP_INTERVAL_S", 0.2)
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        cleo = Device(tmp_path, "cleo")
        for one in (anna, bert):
            one.trusts(*(other for other in (anna, bert) if other is not one), cleo)
        anna.dial(bert.address)
        await until(lambda: linked(anna, bert), "a link")
        told: list[Wire] = []
        learn = bert.links.learn

        def hear(gossip: Addresses) -> None:
            told.append(gossip)
            learn(gossip)

        monkeypatch.setattr(bert.links, "learn", hear)
        began_s = time.monotonic()
        for port in range(1, 51):
            anna.book.sighted(cleo.id, [Address(host="192.0.2.7", port=port)], time.monotonic())
            anna.links.dial_now()
            await asyncio.sleep(0)
        await until(lambda: Address(host="192.0.2.7", port=50) in bert.book.addresses_of(cleo.id), "its last address")
        assert len(told) <= 2 + (time.monotonic() - began_s) / 0.2
        count = len(told)
        anna.links.dial_now()
        await until(lambda: not anna.links._book_changed.is_set(), "a look at what has changed")
        anna.book.sighted(cleo.id, [Address(host="192.0.2.8", port=50)], time.monotonic())
        anna.links.dial_now()
        await until(lambda: Address(host="192.0.2.8", port=50) in bert.book.addresses_of(cleo.id), "another one")
        assert len(told) == count + 1, "what has not changed is not told again"
        cleo.pins.close()


@pytest.mark.asyncio
async def test_a_mesh_that_comes_up_says_where_its_devices_are_a_few_times_on_each_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not on all links for each that is made: that is m^2 messages of each of m devices, all of which list all."""
    monkeypatch.setattr(meshtraind.peers.links, "GOSSIP_INTERVAL_S", 60.0)  # whoever has come links itself with all
    said: list[Wire] = []
    notify = Connection.notify

    def telling(connection: Connection, body: Wire, **numbers: int) -> None:
        if isinstance(body, Addresses):
            said.append(body)
        notify(connection, body, **numbers)

    monkeypatch.setattr(Connection, "notify", telling)
    names = [f"device {number}" for number in range(8)]
    async with devices(tmp_path, *names) as mesh:
        for one in mesh[1:]:
            one.dial(mesh[0].address)
        await until(lambda: all(len(one.links.linked) == len(mesh) - 1 for one in mesh), "links between all")
        assert len(said) <= 3 * len(mesh) * (len(mesh) - 1)


@pytest.mark.parametrize("paired", [True, False], ids=["after TLS", "before TLS"])
@pytest.mark.asyncio
async def test_half_open_and_dripping_connections_end_at_the_handshakes_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paired: bool
) -> None:
    monkeypatch.setattr(limits, "HANDSHAKE_TIMEOUT_S", 0.4)
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        said = frame(Envelope(Role.NOTICE, 0, bert.hello)) if paired else b"\x16\x03\x01\x02\x00\x01\x00"
        key = bert if paired else None
        async with stranger(anna, key) as (silent, _), stranger(anna, key) as (dripped, drip):
            began_s = time.monotonic()
            closed = asyncio.get_running_loop().create_task(is_closed(dripped), name="closed")
            for byte in said:
                drip.write(bytes([byte]))
                await asyncio.wait({closed}, timeout=0.1)
                if closed.done():
                    break
            assert await closed
            assert await is_closed(silent)
            assert time.monotonic() - began_s < 5
        assert not anna.links.linked


@pytest.mark.asyncio
async def test_strangers_cannot_keep_a_peer_out(tmp_path: Path) -> None:
    """At most HANDSHAKES_MAX say nothing; the oldest of them goes for the next one."""
    async with devices(tmp_path, "anna", "bert") as (anna, bert), AsyncExitStack() as stack:
        readers = []
        for _ in range(limits.HANDSHAKES_MAX + 3):
            reader, _ = await stack.enter_async_context(stranger(anna, None))
            readers.append(reader)
        bert.dial(anna.address)
        await until(lambda: linked(anna, bert), "the link")
        for reader in readers[:4]:
            assert await is_closed(reader)
        assert not any(reader.at_eof() for reader in readers[4:])


@pytest.mark.asyncio
async def test_a_flood_of_junk_is_logged_with_its_address_and_not_line_by_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = LimitedHandler(caplog.handler)
    logger = logging.getLogger("meshtraind")
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        async with devices(tmp_path, "anna") as (anna,):
            for _ in range(3 * loglimit.LINES_MAX):
                async with stranger(anna, None) as (_, writer):
                    writer.write(b"GET / HTTP/1.1\r\n\r\n")
                    await writer.drain()
            await until(lambda: not anna.links._welcoming, "the end of the flood")
            handler.tell(all_kinds=True)
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    ours = (record for record in caplog.records if record.name.startswith("meshtraind"))  # asyncio has a log, too
    lines = [record.getMessage() for record in ours]
    assert all("a connection from 127.0.0.1 was not let in: " in line for line in lines)
    assert 1 < len(lines) <= loglimit.LINES_PER_SOURCE_MAX + 1
    assert lines[-1].startswith(f"... and {3 * loglimit.LINES_MAX - len(lines) + 1} more from 1 address")


@pytest.mark.asyncio
async def test_a_second_hello_is_a_violation(tmp_path: Path) -> None:
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        anna.dial(bert.address)
        await until(lambda: linked(anna, bert), "the link")
        anna.link(bert).connection.notify(anna.hello)
        await until(lambda: bert.losses, "the end")
        assert bert.losses[0] == (anna.id, "a second hello")


@pytest.mark.parametrize("how", ["refused", "replaced", "one too many"])
@pytest.mark.asyncio
async def test_who_is_sent_away_and_stays_holds_one_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A paired device comes again and again, and neither reads nor closes: it cannot take every descriptor so."""
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", 60.0)
    came: list[Connection] = []
    writers: list[asyncio.StreamWriter] = []
    make_link = Links.make_link

    def note(self: Links, connection: Connection, hello: Hello, dialled: Address | None) -> str:
        came.append(connection)
        return make_link(self, connection, hello, dialled)

    monkeypatch.setattr(Links, "make_link", note)
    async with devices(tmp_path, "anna", "bert") as (anna, bert), AsyncExitStack() as stack:
        for number in range(6):
            _, writer = await stack.enter_async_context(stranger(anna, bert))
            cast(asyncio.ReadTransport, writer.transport).pause_reading()
            incarnation = number if how == "replaced" else 1
            said = frame(Envelope(Role.NOTICE, 0, bert.hello.model_copy(update={"incarnation": incarnation})))
            writer.write(2 * said if how == "refused" else said)  # a second hello breaks the protocol
            writers.append(writer)
            await until(lambda: len(came) == len(writers), "its hello")
        await until(lambda: sum(not one._ended.is_set() for one in came) <= 2, "those before to end")
        assert not came[-1]._ended.is_set(), "the last one has its time for why"
    assert not anna.links._leaving, "what has ended is forgotten"


@pytest.mark.parametrize("moments", range(6))
@pytest.mark.asyncio
async def test_who_calls_while_the_links_close_is_closed(tmp_path: Path, moments: int) -> None:
    """Whichever step of being let in that is: a socket that nobody knows of any more would be a warning here."""
    async with Device(tmp_path, "anna").running() as anna:
        await asyncio.sleep(0)
        with socket.create_connection(("127.0.0.1", anna.links.port)) as caller:
            for _ in range(moments):
                await asyncio.sleep(0)
            await anna.links.close()
            gc.collect()
            caller.settimeout(DEADLINE_S)
            with contextlib.suppress(ConnectionResetError):
                assert caller.recv(1) == b""


@pytest.mark.asyncio
async def test_a_port_that_is_taken_is_named_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        device = Device(tmp_path, "anna")
        links = Links(device.id, device.trust, device.book, hello=device.hello, host="127.0.0.1", port=port)
        with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{port}: .* in use.*meshtrain status.*--listen"):
            await links.start(device)
        await links.close()
        device.pins.close()


@pytest.mark.asyncio
async def test_a_paired_key_is_needed_for_tls(tmp_path: Path) -> None:
    """A client with another key, or none, gets no byte of ours."""
    async with devices(tmp_path, "anna", "bert") as (anna, _):
        cleo = Device(tmp_path, "cleo")
        cleo.trusts(anna)
        keyless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        keyless.check_hostname = False
        keyless.verify_mode = ssl.CERT_NONE
        for context in (cleo.trust.client_context, keyless):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", anna.links.port, ssl=context, server_hostname="x"
            )
            with contextlib.suppress(ssl.SSLError, ConnectionError):  # an alert, or the end, by chance of order
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
            writer.transport.abort()
        cleo.pins.close()
        assert not anna.links.linked


@pytest.mark.parametrize(
    ("same_host", "own", "theirs", "shared"),
    [(True, "a", "b", True), (False, "a", "a", True), (False, "a", "b", False), (False, "", "", False)],
)
def test_whose_cores_are_the_own_ones(
    same_host: bool, own: str, theirs: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M3: a container has an address of its own, and this machine's cores."""
    monkeypatch.setattr("meshtraind.peers.links.running_system", lambda: own)
    connection: Any = SimpleNamespace(same_host=same_host)
    place = Address(host="10.0.0.2", port=1)
    for hub in (False, True):
        hello: Any = SimpleNamespace(machine=theirs, hub=hub)
        link = Link("b" * 64, hello, connection, place, "a" * 64, place)
        assert link.same_machine == shared
        assert link.computes_here == (shared and not hub), "H1: a hub has no learner"


def test_a_running_system_has_one_name() -> None:
    """Whoever runs on it says the same, and it is not what the system calls it."""
    name = running_system()
    there = subprocess.run(
        [sys.executable, "-c", "from meshtraind.machine.facts import running_system as name; print(name())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert there.stdout.strip() == name
    assert (len(name) == 32) == Path("/proc/sys/kernel/random/boot_id").exists()
