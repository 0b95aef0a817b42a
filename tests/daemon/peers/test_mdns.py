"""Daemons find each other by real multicast DNS on the loopback interface."""

import asyncio
import hashlib
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import zeroconf._core
from zeroconf._dns import DNSPointer
from zeroconf._protocol.outgoing import DNSOutgoing
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from meshtraind.peers import mdns as discovery
from meshtraind.peers.interfaces import Interface, usable_interfaces
from meshtraind.peers.mdns import SERVICE_TYPE, Discovery, Sighting, parse_sighting
from meshwire import limits

DEADLINE_S = 10.0
AIM_S = 2.0


# Real daemons may announce themselves on this machine during the test: only ids made here count.
SALT = secrets.token_bytes(16)
MADE_HERE: set[str] = set()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the three probes, announcements and goodbyes of the library: nothing here proves how long they are, and
    all who speak are in one process. Who has a name answers a probe after 120 ms at most, before the third."""
    for pause, ms in (("_CHECK_TIME", 150), ("_REGISTER_TIME", 75), ("_UNREGISTER_TIME", 25)):
        monkeypatch.setattr(zeroconf._core, pause, ms)


def device(name: str) -> str:
    device_id = hashlib.sha256(SALT + name.encode()).hexdigest()
    MADE_HERE.add(device_id)
    return device_id


class Daemon:
    """A Discovery and what it has reported so far."""

    def __init__(self, name: str, port: int = 4000, **options: object) -> None:
        self.device_id = device(name)
        self.seen: dict[str, Sighting] = {}
        self.told: list[Sighting] = []  # also what the next one has corrected at once
        self.gone: list[str] = []
        self.paired: set[str] = set()
        settings: dict[str, object] = {
            "device_id": self.device_id,
            "name": name,
            "wire_version": 1,
            "listen_host": "127.0.0.1",
            "listen_port": port,
            "interfaces": ["lo"],
            "listener": self,
        }
        self.discovery = Discovery(**(settings | options))  # type: ignore[arg-type]
        self._changed = asyncio.Event()

    def sighted(self, sighting: Sighting) -> None:
        if sighting.device_id in MADE_HERE:
            self.seen[sighting.device_id] = sighting
            self.told.append(sighting)
            self._changed.set()

    def is_paired(self, device_id: str) -> bool:
        return device_id in self.paired

    def out_of_sight(self, device_id: str) -> None:
        if device_id in MADE_HERE:
            self.seen.pop(device_id, None)
            self.gone.append(device_id)
            self._changed.set()

    async def until(self, condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pytest.fail(f"{what}: not within {deadline_s} s")


@asynccontextmanager
async def running(*daemons: Daemon) -> AsyncIterator[None]:
    try:
        for daemon in daemons:
            await daemon.discovery.start()
        yield
    finally:
        for daemon in daemons:
            await daemon.discovery.stop()


@asynccontextmanager
async def stranger() -> AsyncIterator[AsyncZeroconf]:
    """Somebody else on the network, who may announce what he likes."""
    mdns = AsyncZeroconf(interfaces=["127.0.0.1"])
    try:
        await mdns.zeroconf.async_wait_for_start()
        yield mdns
    finally:
        await mdns.async_close()


def announcement(
    instance: str, text: dict[str, str], host: str = "127.0.0.1", port: int = 4000, ttl_s: int = 4500
) -> AsyncServiceInfo:
    return AsyncServiceInfo(
        SERVICE_TYPE,
        f"{instance}.{SERVICE_TYPE}",
        host_ttl=ttl_s,
        other_ttl=ttl_s,
        parsed_addresses=[host],
        port=port,
        properties=text,
        server=f"{instance}-host.local.",
    )


@pytest.mark.asyncio
async def test_daemons_see_each_other_and_nobody_sees_itself() -> None:
    """Aim: the second daemon is listed by the first within two seconds of its start."""
    daemons = [Daemon(name, 4000 + i) for i, name in enumerate(["ada", "bo", "cy"])]
    async with running(*daemons):
        for daemon in daemons:
            await daemon.until(lambda daemon=daemon: len(daemon.seen) == 2, "two others seen")  # type: ignore[misc]
            assert daemon.device_id not in daemon.seen
        assert daemons[0].seen[device("bo")] == Sighting(device("bo"), ("127.0.0.1",), 4001, "bo", 1, False)
        late = Daemon("late")
        async with running(late):
            await daemons[0].until(lambda: device("late") in daemons[0].seen, "the late one seen", 2 * AIM_S)
            await late.until(lambda: len(late.seen) == 3, "the earlier ones seen", 2 * AIM_S)


@pytest.mark.asyncio
async def test_a_goodbye_removes_and_leaves_no_task_or_thread() -> None:
    a, b = Daemon("ada"), Daemon("bo")
    threads = threading.active_count()
    async with running(a):
        async with running(b):
            await a.until(lambda: b.device_id in a.seen, "bo seen")
            assert threading.active_count() == threads
        await a.until(lambda: a.gone == [b.device_id], "bo gone", AIM_S)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert threading.active_count() == threads


@pytest.mark.asyncio
async def test_stop_works_at_any_time() -> None:
    """Before start, twice, and while the announcement is still being probed."""
    daemon = Daemon("ada")
    await daemon.discovery.stop()
    await daemon.discovery.start()
    await daemon.discovery.stop()
    await daemon.discovery.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_pairing_is_announced_while_it_lasts_and_again_the_next_time() -> None:
    a, b = Daemon("ada"), Daemon("bo")
    async with running(a, b):
        for pairing in (True, False, True, False):
            b.discovery.announce_pairing(pairing)
            await a.until(
                lambda now=pairing: b.device_id in a.seen and a.seen[b.device_id].pairing == now,  # type: ignore[misc]
                f"pairing {pairing} seen",
            )


@pytest.mark.asyncio
async def test_a_copied_identity_is_reported() -> None:
    original, copy = Daemon("ada", 4000), Daemon("ada", 4001)
    witness = Daemon("bo")
    async with running(original, witness):
        await witness.until(lambda: original.device_id in witness.seen, "the original seen")
        async with running(copy):
            await _until_warned(copy, "another machine announces the id")
            advice = copy.discovery.warning or ""
            assert "Keep this device's identity" in advice, "nobody can be made to throw it away by an announcement"
            assert "--peer HOST[:PORT]" in advice
            assert "Only if you copied this data folder" in advice
            assert "of the copy, there" in advice


@pytest.mark.asyncio
async def test_a_daemon_is_announced_when_nobody_claims_its_id_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when one packet has claimed it for 68 years; and while it is claimed every try is refused anew."""
    monkeypatch.setattr(discovery, "INTERFACE_POLL_S", 0.3)
    a, witness = Daemon("ada"), Daemon("bo")
    text = {"id": a.device_id, "v": "1", "name": "x"}
    async with running(witness), stranger() as liar:
        claim = announcement(a.device_id[:16], text, host="127.0.0.9", ttl_s=FOR_EVER_S)

        async def claim_again() -> None:
            while True:
                liar.zeroconf.async_send(liar.zeroconf.generate_service_broadcast(claim, None))
                await asyncio.sleep(0.02)

        claiming = asyncio.get_running_loop().create_task(claim_again(), name="claims")
        async with running(a):
            await _until_warned(a, "another machine announces the id")
            claiming.cancel()
            await asyncio.wait({claiming})
            async with asyncio.timeout(DEADLINE_S):
                while a.discovery.warning is not None:
                    await asyncio.sleep(0.02)
            a.discovery.announce_pairing(True)
            await witness.until(lambda: witness.seen[a.device_id].pairing, "ada, who shows a code")


@pytest.mark.asyncio
async def test_a_port_held_by_one_program_alone_is_a_warning_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("", 0))  # stands for 5353, which cannot be had where avahi shares it
        monkeypatch.setattr(discovery, "MDNS_PORT", other.getsockname()[1])
        daemon = Daemon("ada")
        async with running(daemon):
            assert daemon.discovery.warning is not None
            assert f"UDP port {discovery.MDNS_PORT} cannot be shared" in daemon.discovery.warning
            assert "--peer HOST[:PORT]" in daemon.discovery.warning


@pytest.mark.asyncio
async def test_an_interface_that_is_not_there_is_a_warning_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon("ada", interfaces=["nope0"])
    with caplog.at_level(logging.WARNING):
        async with running(daemon):
            assert daemon.discovery.warning is not None
            assert "no interface 'nope0'" in daemon.discovery.warning
            assert "--peer HOST[:PORT]" in daemon.discovery.warning
    assert "no interface 'nope0'" in caplog.text


@pytest.mark.asyncio
async def test_a_change_of_addresses_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laptops change networks: what was seen on the old one is withdrawn, the new one is announced."""
    monkeypatch.setattr(discovery, "INTERFACE_POLL_S", 0.1)
    present = list(usable_interfaces(["lo"]))
    a = Daemon("ada")
    async with running(a):
        with monkeypatch.context() as patch:
            patch.setattr(discovery, "usable_interfaces", lambda _names: tuple(present))
            b = Daemon("bo", listen_host="0.0.0.0")
            async with running(b):
                await a.until(lambda: b.device_id in a.seen, "bo seen")
                await b.until(lambda: a.device_id in b.seen, "ada seen")
                present[0] = Interface("lo", ("127.0.0.1", "127.0.0.2"))
                await b.until(lambda: b.gone == [a.device_id], "the old network forgotten")
                await a.until(
                    lambda: b.device_id in a.seen and "127.0.0.2" in a.seen[b.device_id].addresses,
                    "bo's new address seen",
                )
                await b.until(lambda: a.device_id in b.seen, "ada seen again")
                present.clear()
                await a.until(lambda: b.device_id not in a.seen, "bo gone")
                await _until_warned(b, "no usable network interface")


@pytest.mark.asyncio
async def test_a_flood_of_bogus_names_stays_bounded_and_hides_nobody() -> None:
    """Pointers to nothing, complete but invented devices, names that are not ours: all forgotten in time."""
    a, b, own = Daemon("ada"), Daemon("bo"), device("own")
    a.paired.add(own)
    async with running(a), stranger() as flood:
        info = announcement(own[:16], {"id": own, "v": "1", "name": "own"})
        flood.zeroconf.async_send(flood.zeroconf.generate_service_broadcast(info, None))
        await a.until(lambda: own in a.seen, "the paired one seen")
        for i in range(10):
            pointers = DNSOutgoing(0x8400)
            for j in range(60):
                name = f"{device(f'{i} {j}')[:16]}.{SERVICE_TYPE}"
                pointers.add_answer_at_time(DNSPointer(SERVICE_TYPE, 12, 1, 4500, name), 0)
                junk = f"junk {i} {j}.{SERVICE_TYPE}"
                pointers.add_answer_at_time(DNSPointer(SERVICE_TYPE, 12, 1, 4500, junk), 0)
            flood.zeroconf.async_send(pointers)
            await asyncio.sleep(0)
        invented = [device(f"invented {i}") for i in range(limits.DEVICES_SEEN_MAX + 44)]
        async with asyncio.timeout(DEADLINE_S):
            while unseen := [device_id for device_id in invented if device_id not in a.seen.keys() | set(a.gone)]:
                for device_id in unseen:  # again and again: a socket's buffer drops what is too much at once
                    info = announcement(device_id[:16], {"id": device_id, "v": "1", "name": "x"})
                    flood.zeroconf.async_send(flood.zeroconf.generate_service_broadcast(info, None))
                    await asyncio.sleep(0)
        async with running(b):
            await a.until(lambda: b.device_id in a.seen, "bo seen through the flood")
        assert own in a.seen, "no stranger displaces a paired device"
        assert len(a.seen) <= limits.DEVICES_SEEN_MAX, "whoever follows is told who was forgotten"
        assert len(a.discovery._sightings) <= limits.DEVICES_SEEN_MAX
        assert len(a.discovery._resolving) <= limits.MDNS_RESOLVES_MAX
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_inventions_at_one_address_crowd_out_their_own() -> None:
    """Among hundreds of invented devices the one at another address stays known, although it is the oldest."""
    a = Daemon("ada")
    real = device("real")
    invented = [device(f"crowd {i}") for i in range(limits.DEVICES_SEEN_MAX + 20)]
    for device_id, host in ((real, "127.0.0.2"), *((device_id, "127.0.0.1") for device_id in invented)):
        text = {"id": device_id, "v": "1", "name": "x"}
        a.discovery._resolved(device_id[:16], announcement(device_id[:16], text, host=host))
    assert real[:16] in a.discovery._sightings
    assert len(a.discovery._sightings) == limits.DEVICES_SEEN_MAX


FOR_EVER_S = 2**31 - 1


@pytest.mark.asyncio
async def test_who_does_not_answer_is_forgotten_whatever_the_announcement_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "INTERFACE_POLL_S", 0.05)
    monkeypatch.setattr(discovery, "SIGHTING_LIFETIME_S", 0.3)
    monkeypatch.setattr(discovery, "RESOLVE_TIMEOUT_S", 0.2)
    a, ghost = Daemon("ada"), device("ghost")
    async with running(a), stranger() as liar:
        info = announcement(ghost[:16], {"id": ghost, "v": "1", "name": "ghost"}, ttl_s=FOR_EVER_S)
        for _ in range(2):  # also when the same is announced again
            liar.zeroconf.async_send(liar.zeroconf.generate_service_broadcast(info, None))
            await a.until(lambda: ghost in a.seen, "the ghost seen")
            await a.until(lambda: ghost not in a.seen, "the ghost forgotten")
        assert ghost[:16] not in a.discovery._confirmed


def cached(daemon: Daemon, instance: str) -> list[object]:
    """What a daemon's cache holds of a device, and that there is one."""
    mdns = daemon.discovery._mdns
    assert mdns is not None
    cache, name = mdns.zeroconf.cache, f"{instance}.{SERVICE_TYPE}"
    pointers = [r for r in cache.entries_with_name(SERVICE_TYPE) if getattr(r, "alias", "") == name]
    return [*pointers, *cache.entries_with_name(name), *cache.entries_with_name(f"{instance}-host.local.")]


@pytest.mark.asyncio
async def test_of_invented_devices_the_cache_keeps_no_more_than_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room for 10,000 records, and lets go first of those that end first: true ones."""
    monkeypatch.setattr(limits, "DEVICES_SEEN_MAX", 4)
    a = Daemon("ada")
    invented = [device(f"crowd {i}") for i in range(8)]
    async with running(a), stranger() as liar:
        for invention in invented:
            info = announcement(invention[:16], {"id": invention, "v": "1", "name": "x"}, ttl_s=FOR_EVER_S)
            liar.zeroconf.async_send(liar.zeroconf.generate_service_broadcast(info, None))
            await a.until(lambda invention=invention: invention in a.seen, "an invention seen")  # type: ignore[misc]
        gone = [invention[:16] for invention in invented if invention[:16] not in a.discovery._sightings]
        assert len(gone) >= 4
        assert [cached(a, instance) for instance in gone] == [[]] * len(gone)
        assert cached(a, invented[-1][:16])


@pytest.mark.asyncio
async def test_what_leads_nowhere_is_forgotten_whatever_the_announcement_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "INTERFACE_POLL_S", 0.05)
    monkeypatch.setattr(discovery, "SIGHTING_LIFETIME_S", 0.3)
    a, nobody = Daemon("ada"), device("nobody")[:16]
    async with running(a), stranger() as liar:
        out = DNSOutgoing(0x8400)
        out.add_answer_at_time(DNSPointer(SERVICE_TYPE, 12, 1, FOR_EVER_S, f"{nobody}.{SERVICE_TYPE}"), 0)
        liar.zeroconf.async_send(out)
        async with asyncio.timeout(DEADLINE_S):
            while not cached(a, nobody):
                await asyncio.sleep(0.01)
            while cached(a, nobody):
                await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_who_answers_is_not_forgotten_and_corrects_what_others_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "INTERFACE_POLL_S", 0.05)
    monkeypatch.setattr(discovery, "SIGHTING_LIFETIME_S", 0.3)
    a, b = Daemon("ada", 4000), Daemon("bo", 4001)
    async with running(a, b), stranger() as liar:
        await a.until(lambda: b.device_id in a.seen, "bo seen")
        text = {"id": b.device_id, "v": "1", "name": "bo"}
        info = announcement(b.device_id[:16], text, host="127.0.0.9", ttl_s=FOR_EVER_S)
        liar.zeroconf.async_send(liar.zeroconf.generate_service_broadcast(info, None))
        await a.until(lambda: any("127.0.0.9" in one.addresses for one in a.told), "what is not true")
        await a.until(lambda: a.seen[b.device_id].addresses == ("127.0.0.1",), "the truth")
        confirmed = a.discovery._confirmed[b.device_id[:16]]
        async with asyncio.timeout(DEADLINE_S):
            while a.discovery._confirmed[b.device_id[:16]] is confirmed:
                await asyncio.sleep(0.02)
        assert a.gone == []


GOOD = {"id": device("x"), "v": "1", "name": "x"}


def test_a_well_formed_announcement_is_read() -> None:
    sighting = parse_sighting(device("x")[:16], announcement(device("x")[:16], GOOD | {"pair": "1"}))
    assert sighting == Sighting(device("x"), ("127.0.0.1",), 4000, "x", 1, True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ({"v": "1"}, "no id"),
        (GOOD | {"id": "x" * 64}, "id not hexadecimal"),
        (GOOD | {"id": device("x").upper()}, "id not canonical"),
        (GOOD | {"id": device("x")[:63]}, "id too short"),
        (GOOD | {"id": device("y")}, "id of another instance"),
        ({"id": device("x")}, "no version"),
        (GOOD | {"v": "one"}, "version not a number"),
        (GOOD | {"v": "65536"}, "version too large"),
        (GOOD | {"a": "x" * 200, "b": "x" * 200}, "text too long"),
    ],
)
def test_malformed_announcements_are_ignored(text: dict[str, str], why: str) -> None:
    assert parse_sighting(device("x")[:16], announcement(device("x")[:16], text)) is None, why


def test_one_announcement_has_room_for_few_addresses() -> None:
    """Or a false one would crowd out what is known of the device otherwise."""
    info = announcement(device("x")[:16], GOOD)
    info.addresses = [socket.inet_aton(f"10.9.0.{i}") for i in range(1, 40)]
    sighting = parse_sighting(device("x")[:16], info)
    assert sighting is not None
    assert len(sighting.addresses) == limits.ADDRESSES_PER_SIGHTING_MAX < limits.ADDRESSES_PER_PEER_MAX


@pytest.mark.parametrize("host", ["0.0.0.0", "224.0.0.251", "fe80::1", "::"])
def test_an_announcement_without_a_usable_address_is_ignored(host: str) -> None:
    assert parse_sighting(device("x")[:16], announcement(device("x")[:16], GOOD, host=host)) is None


def test_a_strangers_name_cannot_draw_on_the_terminal() -> None:
    text = GOOD | {"name": "\x1b[31mred\x07\u202e" + "n" * 100, "pair": "0"}
    sighting = parse_sighting(device("x")[:16], announcement(device("x")[:16], text))
    assert sighting is not None
    assert replace(sighting, name="") == Sighting(device("x"), ("127.0.0.1",), 4000, "", 1, False)
    assert sighting.name == ("[31mred" + "n" * 100)[: limits.NAME_CHARS_MAX]


async def _until_warned(daemon: Daemon, text: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while text not in (daemon.discovery.warning or ""):
            await asyncio.sleep(0.02)
