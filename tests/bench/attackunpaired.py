"""Attacks of a host on the same network that is not paired: noise, floods, spoofed mDNS, guesses at a pairing code."""

import asyncio
import contextlib
import random
import re
import secrets
import socket
import ssl
import subprocess
import time
from collections.abc import Awaitable, Iterator, Sequence

from zeroconf._dns import DNSPointer
from zeroconf._protocol.outgoing import DNSOutgoing
from zeroconf.asyncio import AsyncServiceInfo

from meshtrain.client import Client, RequestError
from meshtraind.peers.mdns import INSTANCE_CHARS, MDNS_PORT, SERVICE_TYPE
from meshtraind.trust.identity import Identity, load_or_create
from meshtraind.trust.pairing_channel import receive, send
from meshtraind.trust.pairing_guest import Guest, Target, pair_with
from meshtraind.trust.pairing_host import PairedDevice, PairingError
from meshtraind.trust.pairing_proof import PairingAnswer, PairingExchange, PairingRole, offer
from meshtraind.trust.tls import PAIRING_ALPN
from meshwire import limits
from meshwire.addresses import DEFAULT_PORT
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope
from meshwire.messages.envelope import Role as MessageRole
from meshwire.messages.link import Heartbeat
from meshwire.messages.local import PairCode, Paired, PairHost, PairJoin
from tests.bench.attackscene import NAMES, LeftOutError, NotHeldError, Scene, Victim, attack, in_thread
from tests.bench.liar import frame

TTL_S = 2**31 - 1  # 68 years
SPOOFED_HOSTS = range(101, 117)  # ADDRESSES_PER_PEER_MAX of the attacker's own, behind which nobody answers
CUT_S = 20.0  # the patience, one dial of the true address that fails, and some of false ones
RECONNECT_SLACK_S = 10.0  # what lies may add to a reconnect: two dials that nobody answers
LINK_IN_FLOOD_S = 5.0  # for a paired device: half of what a handshake may take
GUESSES = 12
ANSWERS_TRIED = 70
ANSWERS_SPREAD_S = 0.1  # between the quickest answer and the median one: they are to take the same time
AFTER_CONFLICT_S = 30.0  # three times as long as a daemon waits before it announces itself again
PAIR_TIMEOUT_S = 60.0
ANSWERS_TIMEOUT_S = 60.0

# Names by which a listener could be asked for another protocol.
PROTOCOLS = (PAIRING_ALPN, "meshtrain", "meshtrain-pair-1", "h2", "http/1.1", "postgresql", "acme-tls/1")


def stranger(scene: Scene) -> Identity:
    """A device that nobody has paired with."""
    folder = scene.attacker / "stranger"
    return load_or_create(folder, "stranger")


def tls(identity: Identity | None = None, protocol: str | None = None) -> ssl.SSLContext:
    """A client that believes everything, with or without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if identity is not None:
        identity.load_into(context)
    if protocol is not None:
        context.set_alpn_protocols([protocol])
    return context


def client_hello() -> bytes:
    """The first bytes of a TLS handshake."""
    out = ssl.MemoryBIO()
    session = tls().wrap_bio(ssl.MemoryBIO(), out)
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return out.read()


async def said_to(victim: Victim, context: ssl.SSLContext, said: bytes, timeout_s: float = 3.0) -> bytes:
    """What a daemon tells a TLS client that says `said`, until it closes or for so long."""
    heard = b""
    writer = None
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # TimeoutError and ssl.SSLError are OSErrors
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                victim.address.host, victim.address.port, ssl=context, server_hostname="meshtrain"
            )
            writer.write(said)
            while piece := await reader.read(4096):
                heard += piece
    if writer is not None:
        writer.transport.abort()
    return heard


async def raw(victim: Victim, source: str | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A TCP connection."""
    local = (source, 0) if source is not None else None
    return await asyncio.open_connection(victim.address.host, victim.address.port, local_addr=local)


async def poured(victim: Victim, until_s: float, first: list[bytes]) -> int:
    """Connections, each with one of `first`, one after the other; returns how many."""
    count = 0
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            _, writer = await raw(victim)
            writer.write(first[count % len(first)])
            count += 1
            await asyncio.sleep(0)
            writer.transport.abort()
    return count


@attack("unpaired")
async def junk_bytes(scene: Scene) -> str:
    """connections as fast as they go, each with random bytes, a TLS record of 4 GiB, HTTP or a frame without TLS"""
    rng = random.Random(scene.seed)
    first = [rng.randbytes(rng.randint(1, 3000)) for _ in range(50)]
    first += [b"\x16\x03\x01\xff\xff" + bytes(100), b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", bytes(5000)]
    first.append(frame(Envelope(MessageRole.REQUEST, 1, Heartbeat())))
    until_s = time.monotonic() + scene.seconds(15)
    counts = await asyncio.gather(*(poured(victim, until_s, first) for victim in scene.victims))
    return f"{sum(counts)} connections"


@attack("unpaired")
async def half_a_handshake(scene: Scene) -> str:
    """three times as many connections as may be in a handshake, each with half of TLS's first record, then silence"""
    hello = client_hello()
    opened = [await raw(scene.anna) for _ in range(3 * limits.HANDSHAKES_MAX)]
    began_s = time.monotonic()
    for _, writer in opened:
        writer.write(hello[: len(hello) // 2])
    most_s = limits.HANDSHAKE_TIMEOUT_S + 2.0
    return await closed_within([reader for reader, _ in opened], [w for _, w in opened], began_s, most_s)


@attack("unpaired")
async def slow_hello(scene: Scene) -> str:
    """TLS's first record one byte every half second, which is a sign of life, on ten connections"""
    hello = client_hello()
    opened = [await raw(scene.anna) for _ in range(10)]
    began_s = time.monotonic()

    async def drip() -> None:
        for byte in hello:
            for _, writer in opened:
                writer.write(bytes([byte]))
            await asyncio.sleep(0.5)

    dripping = asyncio.get_running_loop().create_task(drip(), name="drip")
    try:
        most_s = limits.HANDSHAKE_TIMEOUT_S + 2.0
        return await closed_within([reader for reader, _ in opened], [w for _, w in opened], began_s, most_s)
    finally:
        dripping.cancel()


async def closed_within(
    readers: Sequence[asyncio.StreamReader], writers: Sequence[asyncio.StreamWriter], began_s: float, most_s: float
) -> str:
    """Raises NotHeldError when one of these connections is open after `most_s`."""

    async def end(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()

    try:
        async with asyncio.timeout(began_s + most_s - time.monotonic()):
            await asyncio.gather(*map(end, readers))
    except TimeoutError:
        raise NotHeldError(f"a connection is still open after {most_s:.0f} s") from None
    finally:
        for writer in writers:
            writer.transport.abort()
    return f"all {len(readers)} closed after {time.monotonic() - began_s:.1f} s"


@attack("unpaired")
async def a_key_that_is_not_pinned(scene: Scene) -> str:
    """TLS without a certificate, with one that nobody pinned, and as TLS 1.2; then a request and a hello"""
    identity = stranger(scene)
    old = tls(identity)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    said = frame(Envelope(MessageRole.REQUEST, 1, Heartbeat()))
    for how, context in (("no certificate", tls()), ("an unpinned key", tls(identity)), ("TLS 1.2", old)):
        for victim in scene.victims:
            if heard := await said_to(victim, context, said):
                raise NotHeldError(f"{victim.name} told {how} {len(heard)} bytes: {heard[:60]!r}")
    if seen := {name for victim in scene.victims for name in victim.linked()} & {"stranger"}:
        raise NotHeldError(f"{seen} is linked")
    return "not a byte but the handshake's own"


@attack("unpaired")
async def other_protocols(scene: Scene) -> str:
    """TLS with other application protocols (ALPN), pairing's too while no code is open, then a frame of a pairing"""
    identity = stranger(scene)
    guess = PairingExchange(PairingRole.GUEST, "123-456")
    packed = offer(guess, identity.certificate_der, identity.certificate_der).pack()
    said = len(packed).to_bytes(2, "big") + packed
    for protocol in PROTOCOLS:
        for own in (None, identity):
            if heard := await said_to(scene.anna, tls(own, protocol), said, 1.0):
                raise NotHeldError(f"asked for {protocol}, anna told {len(heard)} bytes: {heard[:60]!r}")
    return f"{len(PROTOCOLS)} protocols, no answer"


@attack("unpaired")
async def connection_flood(scene: Scene) -> str:
    """connections as fast as they go, half of them with a TLS hello, while a paired device makes its link"""
    liar = scene.liar(scene.anna)
    until_s = time.monotonic() + scene.seconds(20)
    hello = client_hello()
    loop = asyncio.get_running_loop()
    floods = [loop.create_task(poured(scene.anna, until_s, [b"", hello]), name="flood") for _ in range(8)]
    took_s = []
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(3 * LINK_IN_FLOOD_S), liar.at(scene.anna.address):
                took_s.append(time.monotonic() - began_s)
        except (OSError, TimeoutError):
            took_s.append(3 * LINK_IN_FLOOD_S)
        await asyncio.sleep(0.5)
    counts = await asyncio.gather(*floods)
    if max(took_s) > LINK_IN_FLOOD_S:
        raise NotHeldError(f"a paired device took {max(took_s):.1f} s to link, at most {LINK_IN_FLOOD_S:.0f}")
    return f"{sum(counts)} connections; a paired device linked within {max(took_s):.2f} s, {len(took_s)} times"


# mDNS


def announcement(
    device_id: str, addresses: Sequence[str], port: int, text: dict[str, str], *, ttl_s: int = 4500
) -> bytes:
    """A multicast packet that announces a device."""
    info = AsyncServiceInfo(
        SERVICE_TYPE,
        f"{device_id[:INSTANCE_CHARS]}.{SERVICE_TYPE}",
        parsed_addresses=list(addresses),
        port=port,
        properties={"id": device_id, "v": "4", "name": "spoofed"} | text,
        server=f"host-{device_id[:8]}.local.",
        host_ttl=ttl_s,
        other_ttl=ttl_s,
    )
    out = DNSOutgoing(0x8400)
    out.add_answer_at_time(DNSPointer(SERVICE_TYPE, 12, 1, ttl_s, info.name), 0)
    out.add_answer_at_time(info.dns_service(), 0)
    out.add_answer_at_time(info.dns_text(), 0)
    for record in info.dns_addresses():
        out.add_answer_at_time(record, 0)
    packet: bytes = out.packets()[0]
    return packet


@contextlib.contextmanager
def multicast(scene: Scene) -> Iterator[socket.socket]:
    """A socket that sends to all on the attacker's network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(scene.host))
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        sender.bind(("", MDNS_PORT))
        sender.connect(("224.0.0.251", MDNS_PORT))
        yield sender


async def told(sender: socket.socket, packets: Sequence[bytes], pause_s: float = 0.0) -> None:
    """Sends packets, not faster than a network takes them."""
    for packet in packets:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sender.send(packet)
        await asyncio.sleep(pause_s)


@attack("unpaired")
async def mdns_of_many_devices(scene: Scene) -> str:
    """thousands of invented devices with long TTLs, names of control characters, and TXT records beyond any size"""
    rng = random.Random(scene.seed)
    count = int(scene.seconds(3000))
    packets = []
    for number in range(count):
        text = {"name": "\x1b[2J\u202eevil\n"} if number % 3 else {"more": "x" * 200, "still": "y" * 230}
        device = rng.randbytes(32).hex()
        packets.append(announcement(device, [f"10.77.0.{rng.randint(100, 250)}"], DEFAULT_PORT, text, ttl_s=TTL_S))
    with multicast(scene) as sender:
        await told(sender, packets, 0.002)
    await asyncio.sleep(2.0)
    most = 0
    for victim in scene.victims:
        peers = victim.peers().peers
        seen = [peer for peer in peers if peer.state == "seen"]
        most = max(most, len(seen))
        if len(seen) > limits.DEVICES_SEEN_MAX:
            raise NotHeldError(f"{victim.name} keeps {len(seen)} devices, at most {limits.DEVICES_SEEN_MAX}")
        if drawing := [peer.name for peer in peers if not peer.name.isprintable()]:
            raise NotHeldError(f"{victim.name} shows the name {drawing[0]!r}")
        if missing := set(NAMES) - {victim.name} - victim.linked():
            raise NotHeldError(f"{victim.name} has lost {missing}")
    if scene.lab is not None and most == 0:
        raise LeftOutError("none of the packets has arrived")
    return f"{count} devices announced, {most} shown at most, all paired ones linked"


@attack("unpaired", needs_lab=True)
async def false_addresses_of_paired_devices(scene: Scene) -> str:
    """three mDNS packets give each daemon 16 false addresses, for 68 years, where everybody is let in and nobody
    answers; then a cable is out for 20 s"""
    before_s = await reconnect_s(scene, LINK_IN_FLOOD_S * 12)
    false = [scene.host.rpartition(".")[0] + f".{number}" for number in SPOOFED_HOSTS]
    devices = [victim.status().device for victim in scene.victims]
    packets = [announcement(device, false, DEFAULT_PORT, {}, ttl_s=TTL_S) for device in devices]
    with silent_hosts(false) as silent, multicast(scene) as sender:
        await told(sender, packets, 0.2)
        await asyncio.sleep(1.0)
        most_s = before_s + RECONNECT_SLACK_S
        after_s = await reconnect_s(scene, most_s + 40.0)
        misled = 0
        silent.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                misled += 1
    found = f"back after {after_s:.1f} s, without the lies after {before_s:.1f} s; {misled} dials to false addresses"
    if after_s > most_s:
        raise NotHeldError(found)
    return found


async def reconnect_s(scene: Scene, timeout_s: float) -> float:
    """How long all links take to be there again after anna's cable was out; `timeout_s` when they are not by then."""
    assert scene.lab is not None
    scene.lab.plug(0, into=False)
    began_s = time.monotonic()
    try:
        while time.monotonic() - began_s < CUT_S or scene.anna.linked() & set(NAMES):
            if time.monotonic() - began_s > 3 * CUT_S:
                raise LeftOutError("anna's links outlived her cable")
            await asyncio.sleep(0.1)
    finally:
        scene.lab.plug(0, into=True)
    began_s = time.monotonic()
    with contextlib.suppress(TimeoutError):
        await asyncio.to_thread(scene.wait_linked, timeout_s)
    return time.monotonic() - began_s


@contextlib.contextmanager
def silent_hosts(hosts: Sequence[str]) -> Iterator[socket.socket]:
    """These addresses are the attacker's: connections are let in, and nothing is ever said on them."""
    for host in hosts:
        subprocess.run(["ip", "addr", "add", f"{host}/24", "dev", "eth0"], check=True, capture_output=True)
    try:
        with socket.create_server(("0.0.0.0", DEFAULT_PORT), backlog=1000) as silent:
            yield silent
    finally:
        for host in hosts:
            subprocess.run(["ip", "addr", "del", f"{host}/24", "dev", "eth0"], check=True, capture_output=True)


@attack("unpaired", needs_lab=True)
async def an_id_conflict(scene: Scene) -> str:
    """somebody announces anna's own id before anna does, for 68 years; is a person told to delete her identity,
    and is anna announced when the lies have ended?"""
    device = scene.anna.status().device
    packet = announcement(device, [scene.host], DEFAULT_PORT, {"seq": "99"}, ttl_s=TTL_S)
    with multicast(scene) as sender:
        loop = asyncio.get_running_loop()
        lying = loop.create_task(told(sender, [packet] * 400, 0.05), name="lies")
        await in_thread(lambda: scene.restart(scene.anna))
        await lying
    warnings = scene.anna.status().warnings
    for text in warnings:
        advice = text.replace("Only if you copied this data folder to the other machine: remove the folder", "")
        if re.search(r"(remove|delete).{0,40}identity", advice, re.I) or "Keep this device's identity" not in text:
            raise NotHeldError(f"`status` of anna says: {text}")
    await in_thread(scene.wait_linked)
    began_s = time.monotonic()
    while scene.anna.status().warnings:
        if time.monotonic() - began_s > AFTER_CONFLICT_S:
            raise NotHeldError(f"{AFTER_CONFLICT_S:.0f} s after the last lie anna is still not announced")
        await asyncio.sleep(0.2)
    took_s = time.monotonic() - began_s
    return f"anna is linked, and announced {took_s:.0f} s after the last lie; she warned of it {len(warnings)} times"


# Pairing


class ShownCode:
    """`meshtrain pair` on a daemon, until it is left."""

    def __init__(self, victim: Victim) -> None:
        self.client = Client.connect(victim.data_dir)
        self.host = victim.address.host
        self._shown: asyncio.Future[PairCode] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._waiting = self._loop.create_task(asyncio.to_thread(self._wait), name="pairing")

    def _wait(self) -> str:
        """How it ended."""

        def on_event(event: Wire) -> None:
            if isinstance(event, PairCode):
                self._loop.call_soon_threadsafe(self._shown.set_result, event)

        try:
            reply = self.client.request(
                PairHost(), timeout_s=limits.PAIRING_LIFETIME_S, name="pairing", on_event=on_event
            )
        except (RequestError, TimeoutError, OSError, ValueError) as error:
            return str(error)
        except Exception as error:  # the connection is closed under it, when this is left
            return type(error).__name__
        return f"paired with {reply.name}" if isinstance(reply, Paired) else str(reply)

    async def shown(self) -> PairCode:
        """The code, with where this daemon says that it is."""
        async with asyncio.timeout(PAIR_TIMEOUT_S):
            return await asyncio.shield(self._shown)

    async def ended(self, timeout_s: float) -> str | None:
        """What the person saw in the end; None when the code is shown still."""
        done, _ = await asyncio.wait({self._waiting}, timeout=timeout_s)
        return self._waiting.result() if done else None

    async def leave(self) -> None:
        """Ctrl-C."""
        with contextlib.suppress(OSError):
            self.client._stream.shutdown(socket.SHUT_RDWR)
        await asyncio.wait({self._waiting}, timeout=5.0)
        self.client.close()


def wrong_codes(right: str) -> Iterator[str]:
    """Codes that are not this one."""
    while True:
        code = f"{secrets.randbelow(10**6):06}"
        if code != right.replace("-", ""):
            yield code


def guest_with(shown: ShownCode, code: PairCode, identity: Identity, typed: str) -> Awaitable[PairedDevice]:
    """Types a code at a daemon that shows one."""
    return pair_with(Guest(identity, typed, 1), Target(shown.host, code.port))


@attack("unpaired")
async def the_door_for_guests(scene: Scene) -> str:
    """while a code is shown: links' messages without a certificate, with and without pairing's protocol (ALPN), with a
    key that nobody pinned, and as TLS 1.2"""
    identity = stranger(scene)
    shown = ShownCode(scene.anna)
    liar = scene.liar(scene.anna)
    said = frame(Envelope(MessageRole.NOTICE, 0, liar.hello)) + frame(Envelope(MessageRole.REQUEST, 1, Heartbeat()))
    try:
        await shown.shown()
        for how, own, protocol in (
            ("no certificate", None, None),
            ("no certificate", None, PAIRING_ALPN),
            ("no certificate", None, "h2"),
            ("an unpinned key", identity, None),
            ("an unpinned key", identity, PAIRING_ALPN),
        ):
            for newest in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
                context = tls(own, protocol)
                context.maximum_version = newest
                if heard := await said_to(scene.anna, context, said):
                    raise NotHeldError(f"{how}, ALPN {protocol}: anna told {len(heard)} bytes: {heard[:60]!r}")
        if await shown.ended(0.0) is not None:
            raise NotHeldError("the code has died of it, without a guess")
        if seen := scene.anna.linked() - set(NAMES):
            raise NotHeldError(f"{seen} is linked")
        async with liar.at(scene.anna.address) as link:  # paired ones come in meanwhile as ever
            await link.ask(Heartbeat())
    finally:
        await shown.leave()
    return "not a byte but the handshake's own; a paired device linked meanwhile"


@attack("unpaired")
async def guests_that_stay(scene: Scene) -> str:
    """while a code is shown: twice as many guests as may be at the door come in by pairing's protocol (ALPN) and say
    nothing, again and again; a person types the right code on bert"""
    shown = ShownCode(scene.anna)
    loop = asyncio.get_running_loop()
    try:
        code = await shown.shown()

        async def stay() -> None:
            while True:
                await said_to(scene.anna, tls(None, PAIRING_ALPN), b"\x10", 60.0)

        staying = [loop.create_task(stay(), name="guest") for _ in range(2 * limits.HANDSHAKES_MAX)]
        await asyncio.sleep(2.0)
        began_s = time.monotonic()
        at = str(scene.anna.address)
        try:
            await in_thread(lambda: scene.bert.request(PairJoin(code=code.code, at=at), PAIR_TIMEOUT_S, "pairing"))
        except (RequestError, TimeoutError) as error:
            raise NotHeldError(f"bert could not pair: {' '.join(str(error).split())[:300]}") from error
        finally:
            for task in staying:
                task.cancel()
            await asyncio.wait(staying)
        return f"paired after {time.monotonic() - began_s:.1f} s"
    finally:
        await shown.leave()


@attack("unpaired")
async def guesses_at_a_code(scene: Scene) -> str:
    """a dozen wrong codes at once while one is shown: three may be judged, then the code is dead and says so"""
    identity = stranger(scene)
    shown = ShownCode(scene.anna)
    try:
        code = await shown.shown()
        guesses = wrong_codes(code.code)
        results = await asyncio.gather(
            *(guest_with(shown, code, identity, next(guesses)) for _ in range(GUESSES)),
            return_exceptions=True,
        )
        if unexpected := [found for found in results if not isinstance(found, PairingError)]:
            raise NotHeldError(f"a wrong code led to {unexpected[0]!r}")
        said = await shown.ended(limits.PAIRING_EXCHANGE_TIMEOUT_S + 5.0)
        if said is None:
            raise NotHeldError(f"after {GUESSES} wrong codes the code is still shown")
        if "3 times" not in said:
            raise NotHeldError(f"the person is told: {said}")
        try:
            await guest_with(shown, code, identity, code.code)
        except PairingError:
            return f"the code died: {said[:70]}"
        raise NotHeldError("the right code was taken after three wrong ones")
    finally:
        await shown.leave()


@attack("unpaired")
async def answers_without_a_guess(scene: Scene) -> str:
    """70 guests that take the host's answer and leave before they prove a code, to measure it: 50 may be answered, at
    even times, and the person is told"""
    identity = stranger(scene)
    shown = ShownCode(scene.anna)
    took_s: list[float] = []
    try:
        code = await shown.shown()
        context = tls(None, PAIRING_ALPN)
        at_once = asyncio.Semaphore(8)

        async def ask() -> None:
            async with at_once:
                reader, writer = await asyncio.open_connection(
                    shown.host, code.port, ssl=context, server_hostname="meshtrain"
                )
                try:
                    host_der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                    exchange = await asyncio.to_thread(PairingExchange, PairingRole.GUEST, "000-000")
                    asked_s = time.monotonic()
                    await send(writer, offer(exchange, identity.certificate_der, host_der))
                    await receive(reader, PairingAnswer)
                    took_s.append(time.monotonic() - asked_s)
                finally:
                    writer.transport.abort()

        asking = [asyncio.get_running_loop().create_task(ask(), name="ask") for _ in range(ANSWERS_TRIED)]
        await asyncio.wait(asking, timeout=ANSWERS_TIMEOUT_S)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        told_person = await shown.ended(5.0)
    finally:
        await shown.leave()
    if not took_s:
        raise LeftOutError("the host answered nobody: does this attack still speak its protocol?")
    found = f"{len(took_s)} answers, after {min(took_s):.3f} to {max(took_s):.3f} s; the person is told: {told_person}"
    if len(took_s) > limits.PAIRING_ANSWERS_MAX:
        raise NotHeldError(f"at most {limits.PAIRING_ANSWERS_MAX} answers of one code: {found}")
    if min(took_s) < limits.PAIRING_ANSWER_DELAY_S or sorted(took_s)[len(took_s) // 2] - min(took_s) > ANSWERS_SPREAD_S:
        raise NotHeldError(f"not at even times: {found}")
    if told_person is None:
        raise NotHeldError(f"the code is still shown: {found}")
    return found


@attack("unpaired", needs_lab=True)
async def false_pairing_hosts(scene: Scene) -> str:
    """eight invented devices announce that they show a code, and let everybody in and say nothing; a person types the
    code of the real one"""
    rng = random.Random(scene.seed + 1)
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(multicast(scene))
        fakes = [rng.randbytes(32).hex() for _ in range(8)]
        ports = {}
        for fake in fakes:
            silent = stack.enter_context(socket.create_server((scene.host, 0), backlog=1000))
            ports[fake] = silent.getsockname()[1]
        packets = [announcement(fake, [scene.host], ports[fake], {"pair": "1"}, ttl_s=TTL_S) for fake in fakes]
        await told(sender, packets, 0.05)
        await asyncio.sleep(1.0)
        shown = ShownCode(scene.anna)
        try:
            code = await shown.shown()
            await told(sender, packets, 0.05)
            began_s = time.monotonic()
            try:
                await in_thread(
                    lambda: scene.bert.request(PairJoin(code=code.code, at=None), PAIR_TIMEOUT_S, "pairing")
                )
            except (RequestError, TimeoutError) as error:
                text = " ".join(str(error).split())
                raise NotHeldError(f"bert could not pair by the code that anna shows: {text[:900]}") from error
            took_s = time.monotonic() - began_s
            if took_s > 2 * limits.PAIRING_EXCHANGE_TIMEOUT_S:
                raise NotHeldError(f"pairing took {took_s:.0f} s")
            return f"paired after {took_s:.1f} s"
        finally:
            await shown.leave()
            for fake in fakes:
                gone = announcement(fake, [scene.host], ports[fake], {}, ttl_s=0)
                await told(sender, [gone])
