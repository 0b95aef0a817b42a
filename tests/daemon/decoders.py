"""All of the daemon that reads bytes of others, as a table for `fuzzing`. Frames and messages are in the wire's."""

import asyncio
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from cryptography.utils import CryptographyDeprecationWarning
from hypothesis import strategies as st
from zeroconf._cache import DNSCache
from zeroconf._dns import DNSPointer
from zeroconf._protocol.incoming import DNSIncoming
from zeroconf._protocol.outgoing import DNSOutgoing
from zeroconf.asyncio import AsyncServiceInfo

from meshtraind.api.endpoint import Endpoint, _Guard
from meshtraind.codecs import codec_named
from meshtraind.codecs.base import CodecError
from meshtraind.peers.mdns import SERVICE_TYPE, parse_sighting
from meshtraind.transport.connection import Connection, RequestFailed
from meshtraind.trust.identity import CertificateError, Identity, check_certificate, load_or_create
from meshtraind.trust.learner_tokens import LearnerTokens
from meshtraind.trust.pairing_channel import PairingFrameError, loaded, profile_of, receive_plain
from meshtraind.trust.pairing_proof import (
    ElementError,
    PairingAnswer,
    PairingExchange,
    PairingOffer,
    PairingRefusal,
    PairingRole,
    Profile,
    Proof,
)
from meshwire import limits
from meshwire.codecs.registry import SEGMENT_FAMILIES
from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, encode
from meshwire.messages.envelope import Role as MessageRole
from meshwire.messages.local import Attach
from tests.wire.decoders import framed
from tests.wire.fuzzing import Decoder, Refused
from tests.wire.wirevalues import control_messages, messages

TOKEN = "0" * 64
PAIRING_FRAMES = (PairingOffer, PairingAnswer, Proof, PairingRefusal)


@cache
def identity() -> Identity:
    """A device as this version makes it."""
    with TemporaryDirectory() as folder:
        return load_or_create(Path(folder), "device")


def decode_segment(name: str, data: bytes) -> None:
    """As many values as the first byte says, from the rest; what is accepted is finite."""
    if not data:
        raise CodecError("no count")
    codec = codec_named(name)
    payload = memoryview(data)[1:]
    out = np.zeros(data[0], np.float32)
    codec.decode_into(payload[: codec.length_of(payload, len(out))], out)
    assert np.isfinite(out).all()


def encoded_segment(name: str, values: list[float]) -> bytes:
    codec = codec_named(name)
    out = bytearray(codec.spec.segment_bytes_max(len(values)))
    length = codec.encode_into(np.array(values, np.float32), memoryview(out))
    return bytes([len(values)]) + bytes(out[:length])


def decode_pairing_frame(data: bytes) -> None:
    """As every frame of a pairing, from a stream; a proof's profile besides."""

    async def read() -> object:
        reader = asyncio.StreamReader(limit=limits.PAIRING_FRAME_BYTES_MAX)
        reader.feed_data(data)
        reader.feed_eof()
        return await receive_plain(reader)

    plain = asyncio.run(read())
    refusal = ""
    for kind in PAIRING_FRAMES:
        try:
            body = loaded(kind, plain)
            if isinstance(body, Proof):
                profile_of(body)
            return
        except PairingFrameError as error:
            refusal = str(error)
    assert len(refusal) <= limits.REFUSAL_CHARS_MAX
    raise PairingFrameError(refusal)


def pairing_frame(body: Wire) -> bytes:
    packed = body.pack()
    return len(packed).to_bytes(2, "big") + packed


proofs = st.builds(
    Proof, profile=messages(Profile).map(lambda profile: profile.pack()), tag=st.binary(min_size=32, max_size=32)
)
pairing_frames = st.one_of(proofs, *(messages(kind) for kind in PAIRING_FRAMES if kind is not Proof))


def decode_element(data: bytes) -> None:
    """What is accepted makes keys."""
    PairingExchange(PairingRole.HOST, "123-456").keys(data, b"host", b"guest")


def decode_certificate(data: bytes) -> None:
    """What is accepted can be trusted: it is PEM by then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)  # of serial numbers, before the signature
        assert check_certificate(data).startswith("-----BEGIN CERTIFICATE-----")


INSTANCE = "0123456789abcdef"


def announced(properties: dict[str, str], addresses: list[str], port: int) -> bytes:
    """A multicast packet as zeroconf sends it."""
    info = AsyncServiceInfo(
        SERVICE_TYPE,
        f"{INSTANCE}.{SERVICE_TYPE}",
        parsed_addresses=addresses,
        port=port,
        properties=properties,
        server="host.local.",
    )
    out = DNSOutgoing(0x8400)
    out.add_answer_at_time(DNSPointer(SERVICE_TYPE, 12, 1, 4500, info.name), 0)
    out.add_answer_at_time(info.dns_service(), 0)
    out.add_answer_at_time(info.dns_text(), 0)
    for record in info.dns_addresses():
        out.add_answer_at_time(record, 0)
    packet: bytes = out.packets()[0]
    return packet


def decode_mdns_packet(data: bytes) -> None:
    """What is accepted is safe to show and to dial."""
    packet = DNSIncoming(data)
    cache = DNSCache()
    cache.async_add_records(packet.answers())
    info = AsyncServiceInfo(SERVICE_TYPE, f"{INSTANCE}.{SERVICE_TYPE}")
    if not info.load_from_cache(cast(Any, SimpleNamespace(cache=cache))):
        raise Refused
    sighting = parse_sighting(INSTANCE, info)
    if sighting is None:
        raise Refused
    assert sighting.name.isprintable()
    assert 0 < sighting.port < 65536
    assert 0 < len(sighting.addresses) <= limits.ADDRESSES_PER_PEER_MAX


packets = st.builds(
    announced,
    st.fixed_dictionaries(
        {"id": st.just(INSTANCE + 48 * "0"), "v": st.integers(0, 65535).map(str), "name": st.text(max_size=20)},
        optional={"pair": st.integers(1, 65535).map(str)},
    ),
    st.lists(st.sampled_from(["192.168.1.20", "127.0.0.1", "fd00::2"]), min_size=1, max_size=3),
    st.integers(1, 65535),
)


class _Wires(asyncio.Transport):
    """Takes what a connection sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def close(self) -> None:
        """Whoever owns the connection ends it."""

    abort = close


class _Attached:
    """Handler of whoever has shown the token: takes all."""

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        return memoryview(bytearray(header.payload_bytes))

    def chunk_received(self, conn: Connection, header: Header) -> None:
        pass

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        pass

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Callable[[Wire], None]) -> Wire:
        raise RequestFailed("not now")

    def lost(self, conn: Connection, reason: str) -> None:
        pass


def decode_local_stream(data: bytes) -> None:
    """A client of the local endpoint: nothing that it sends is an error of ours."""

    async def receive() -> bytes:
        wires = _Wires()
        connection = Connection(
            _Guard(cast(Endpoint, SimpleNamespace(handler=_Attached(), learners=LearnerTokens())), TOKEN),
            name="a client",
        )
        connection.connection_made(wires)
        rest = data
        while rest and not connection.closing:
            buffer = connection.get_buffer(-1)
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
            connection.buffer_updated(count)
        await asyncio.sleep(0)
        closing = connection.closing
        connection.connection_lost(None)
        await connection.closed()
        assert b"meshtraind failed" not in wires.sent
        if closing:
            raise Refused
        return wires.sent

    asyncio.run(receive())


def attached(requests: list[bytes]) -> bytes:
    """A client that shows its token, and then asks."""
    token = encode(Envelope(MessageRole.REQUEST, 1, Attach(token=TOKEN, role="client")))
    return b"".join(map(framed, [token, *requests]))


DAEMON_DECODERS = (
    *(
        Decoder(
            f"codec {name}",
            partial(decode_segment, name),
            st.lists(st.floats(-1e6, 1e6, width=32), max_size=20).map(partial(encoded_segment, name)),
            (CodecError,),
        )
        for name in sorted(SEGMENT_FAMILIES)
    ),
    Decoder(
        "pairing frame",
        decode_pairing_frame,
        pairing_frames.map(pairing_frame),
        (PairingFrameError, asyncio.IncompleteReadError),
    ),
    Decoder(
        "pairing element",
        decode_element,
        st.builds(lambda: PairingExchange(PairingRole.GUEST, "123-456").element),
        (ElementError,),
        examples=2,
    ),
    Decoder("certificate", decode_certificate, st.builds(lambda: identity().certificate_der), (CertificateError,), 60),
    Decoder("mDNS packet", decode_mdns_packet, packets),
    Decoder(
        "local endpoint", decode_local_stream, st.lists(control_messages(MessageRole.REQUEST), max_size=2).map(attached)
    ),
)
