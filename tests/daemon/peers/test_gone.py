"""Who is gone and who is only silent: what a daemon may conclude from a link that ended and a dial that is refused."""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from meshtraind.peers.own_presence import Presence, Reading
from meshtraind.peers.refused_dial import refuses
from meshtraind.trust.identity import load_or_create
from meshtraind.trust.pins import Pin, PinTable
from meshwire.addresses import Address
from tests.daemon.peers.test_links import Device, Relay, devices, linked
from tests.daemon.waiting import until

AT_HOME = Reading(now_s=100.0, asleep_s=7.0, addresses=frozenset({"127.0.0.1", "10.0.0.2"}))
NAMED = "is gone: nobody listens at"


def after(
    reading: Reading, seconds_s: float, *, asleep_s: float = 0.0, addresses: frozenset[str] | None = None
) -> Reading:
    """A later look at the same machine."""
    there = reading.addresses if addresses is None else addresses
    return Reading(reading.now_s + seconds_s, reading.asleep_s + asleep_s, there)


@pytest.mark.parametrize(
    ("second", "third", "unbroken"),
    [
        (after(AT_HOME, 1.0), after(AT_HOME, 2.1), True),
        (after(AT_HOME, 1.0), after(AT_HOME, 2.1, asleep_s=0.01), True),
        (after(AT_HOME, 1.0, asleep_s=60.0), after(AT_HOME, 2.0, asleep_s=60.0), False),
        (after(AT_HOME, 3.0), after(AT_HOME, 4.0), False),
        (after(AT_HOME, 1.0), after(AT_HOME, 4.0), False),
        (after(AT_HOME, 1.0, addresses=frozenset({"127.0.0.1"})), after(AT_HOME, 2.0), False),
        (after(AT_HOME, 1.0), after(AT_HOME, 2.0, addresses=frozenset({"10.9.0.2"})), False),
    ],
    ids=["there", "two clocks", "slept", "stood still", "stands still", "left and came back", "came elsewhere"],
)
def test_this_machine_was_there_all_the_time_or_not(second: Reading, third: Reading, unbroken: bool) -> None:
    """G1: who slept, stood still or came into another network learns nothing of others from a refusal."""
    looks = iter((AT_HOME, second, third, after(third, 1.0, addresses=third.addresses), after(third, 1.5)))
    presence = Presence(1.0, lambda: next(looks))
    presence.look()
    presence.look()
    assert presence.unbroken_since(AT_HOME.now_s + 0.5) is unbroken
    if third.addresses == AT_HOME.addresses:
        presence.look()
        presence.look()
        assert presence.unbroken_since(third.now_s + 0.1), "it is over, and what came later counts"


@pytest.mark.parametrize(
    ("second", "away"),
    [
        (after(AT_HOME, 3.0), False),
        (after(AT_HOME, 1.0, asleep_s=2.0), False),
        (after(AT_HOME, 4.1), True),
        (after(AT_HOME, 1.0, asleep_s=3.1), True),
        (after(AT_HOME, 1.0, addresses=frozenset({"127.0.0.1"})), True),
    ],
)
def test_others_go_on_without_it_only_when_it_was_away_for_long(second: Reading, away: bool) -> None:
    """G4: a busy machine is not taken for one that slept, and does not look for others that are lost."""
    looks = iter((AT_HOME, second))
    presence = Presence(1.0, lambda: next(looks))
    assert presence.look() == away


def test_a_real_look_finds_this_machine() -> None:
    presence = Presence(10.0)
    assert presence.unbroken_since(time.monotonic() - 5.0)


@pytest.mark.asyncio
async def test_only_a_refused_dial_tells_that_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = Address(host="127.0.0.1", port=listener.getsockname()[1])
        assert not await refuses(there, 0.1), "it is taken, and nothing is said"
    began_s = time.monotonic()
    assert await refuses(there, 10.0)
    assert time.monotonic() - began_s < 5.0

    async def no_way(*_: object) -> None:
        raise OSError(113, "No route to host")

    monkeypatch.setattr(asyncio, "open_connection", no_way)
    assert not await refuses(there, 0.1)


@pytest.mark.asyncio
async def test_a_listener_that_outlives_its_connections_is_dialled_again() -> None:
    """A process that is killed loses them one after the other."""
    taken: list[asyncio.StreamWriter] = []

    def drop(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        writer.transport.abort()
        if len(taken) == 2:
            server.close()

    server = await asyncio.start_server(drop, "127.0.0.1", 0)
    assert await refuses(Address(host="127.0.0.1", port=server.sockets[0].getsockname()[1]), 10.0)
    assert len(taken) == 2


async def vanish(device: Device, *, listens: bool = False) -> None:
    """As if it were killed, or only its connections broke."""
    if not listens:
        await device.links._tasks.close()  # it dials nobody any more
        assert device.links._listener is not None
        device.links._listener.close()
    for link in list(device.links.linked.values()):
        transport = link.connection._transport
        assert transport is not None
        transport.abort()


@pytest.mark.asyncio
@pytest.mark.parametrize("dials", ["the one that stays", "the one that goes"])
async def test_who_was_heard_just_now_and_listens_no_more_is_gone(tmp_path: Path, dials: str) -> None:
    """G1: whoever dialled, for it is known where the other listens."""
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        gone: list[tuple[str, int]] = []
        anna.on_gone = lambda device, incarnation: gone.append((device, incarnation))
        one, other = (anna, bert) if dials == "the one that stays" else (bert, anna)
        one.dial(other.address)
        await until(lambda: linked(anna, bert), "the link")
        began_s = time.monotonic()
        await vanish(bert)
        await until(lambda: gone, "the refusal")
        assert gone == [(bert.id, bert.hello.incarnation)]
        assert time.monotonic() - began_s < 3.0
        assert anna.losses, "the loss was told first"


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["it listens", "closed here", "refused there", "slept", "replaced"])
async def test_who_may_be_elsewhere_is_not_gone(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """G1: its connection broke and it listens on; this side has closed the link; this machine was away itself."""
    caplog.set_level(logging.INFO)
    async with devices(tmp_path, "anna", "bert", patience_s=1.0) as (anna, bert):
        gone: list[str] = []
        asked: list[Address] = []
        anna.on_gone = lambda device, _: gone.append(device)

        async def noted(address: Address, within_s: float) -> bool:
            if address != there:
                return False  # it is bert that asks
            asked.append(address)
            if how == "replaced":
                anna.links._linked[bert.id] = link
            try:
                return await refuses(address, within_s)
            finally:
                answered.set()

        there = bert.address
        answered = asyncio.Event()
        monkeypatch.setattr("meshtraind.peers.links.refuses", noted)
        anna.dial(bert.address)
        await until(lambda: linked(anna, bert), "the link")
        link = anna.link(bert)
        if how == "slept":
            anna.links._presence._broken_s = time.monotonic()
        if how == "closed here":
            anna.links.drop(bert.id, "unpaired")
        elif how == "refused there":
            bert.links.drop(anna.id, "unpaired")
        else:
            await vanish(bert, listens=how == "it listens")
        await until(lambda: anna.losses, "the loss")
        if how in ("closed here", "refused there"):
            await vanish(bert)
            await asyncio.sleep(0.1)
            assert not asked
        else:
            await asyncio.wait_for(answered.wait(), 10)
            await asyncio.sleep(0)
            assert asked == [there]
            assert ("bert may be elsewhere" in caplog.text) == (how in ("it listens", "slept"))
        assert not gone
        if how == "replaced":
            del anna.links._linked[bert.id]


@pytest.mark.asyncio
async def test_a_machine_that_slept_knows_it_before_it_hears_of_a_loss(tmp_path: Path) -> None:
    """G4: of two laptops the one that wakes up would else go on by itself at once, and what the other made meanwhile
    would be given up."""
    async with devices(tmp_path, "anna", "bert") as (anna, bert):
        heard: list[str] = []
        anna.on_away = lambda: heard.append("away" if not anna.losses else "too late")
        anna.dial(bert.address)
        await until(lambda: linked(anna, bert), "the link")
        presence = anna.links._presence
        presence._take = lambda: after(presence._last, 0.1, asleep_s=300.0)
        await vanish(bert)
        await until(lambda: anna.losses, "the loss")
        assert heard[0] == "away"


@pytest.mark.asyncio
async def test_silence_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where nobody listens behind it any more: this side has closed the link, and knows no more than that."""
    monkeypatch.setattr("meshtraind.peers.links.HEARTBEAT_INTERVAL_S", 0.02)
    async with devices(tmp_path, "anna", "bert", patience_s=0.3) as (anna, bert), Relay(bert.address) as relay:
        gone: list[str] = []
        anna.on_gone = lambda device, _: gone.append(device)
        anna.dial(relay)
        await until(lambda: linked(anna, bert), "the link")
        anna.link(bert).connection.last_received_s -= 10.0
        await vanish(bert)
        await until(lambda: anna.losses, "the loss")
        await asyncio.sleep(0.1)
        assert not gone


@pytest.mark.asyncio
async def test_a_daemon_that_is_killed_is_gone_within_the_grace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """G1: a process that nobody asked, on its own port. Where this process has stood still meanwhile, for longer than a
    refusal may take, as on a machine that has much to do, nothing follows, and it is tried again."""
    caplog.set_level(logging.INFO)
    folder = tmp_path / "bert"
    folder.mkdir()
    bert = load_or_create(folder, "bert")
    async with devices(tmp_path, "anna") as (anna,):
        anna.pins.add(Pin(bert.device_id, "bert", bert.certificate_pem, 0.0, anna.id))
        anna.book.set_pinned([bert.device_id], time.monotonic())
        pins = PinTable(folder / "pins.db")
        pins.add(Pin(anna.id, "anna", anna.identity.certificate_pem, 0.0, bert.device_id))
        pins.close()
        gone_s: list[float] = []
        anna.on_gone = lambda _device, _incarnation: gone_s.append(time.monotonic())
        for _ in range(5):
            caplog.clear()
            killed_s = await linked_and_killed(anna, bert.device_id, folder)
            await until(lambda: gone_s or "may be elsewhere" in caplog.text, "the refusal")
            if gone_s:
                break
            await until(lambda: bert.device_id not in anna.links.linked, "the end of the link")
        assert gone_s, "this process stood still each time"
        assert gone_s[0] - killed_s < 2.0


async def linked_and_killed(anna: Device, device: str, folder: Path) -> float:
    """Starts a daemon that links with anna, and kills it. Returns when."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "meshtraind", "run", "--no-mdns", "--name", "bert", "--data-dir", str(folder)),
        *("--listen", "127.0.0.1:0", "--peer", str(anna.address)),
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        await until(lambda: device in anna.links.linked, "the link")
        await asyncio.sleep(0)
        return time.monotonic()
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
