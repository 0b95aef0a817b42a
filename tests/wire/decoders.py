"""All of meshwire that reads bytes of others, as a table for `fuzzing`."""

import math
from typing import NoReturn

from hypothesis import strategies as st

from meshwire import limits
from meshwire.addresses import Address
from meshwire.frames.header import HEADER_BYTES, Flags, Header, Kind, decode_header
from meshwire.frames.parser import Broken, ChunkAnnounced, FrameParser
from meshwire.jobs.files import FileEntry, FileManifest, check_manifest
from meshwire.messages.envelope import Envelope, decode, encode
from tests.wire.fuzzing import Decoder, Refused
from tests.wire.wirevalues import control_messages

numbers = st.integers(0, 2**64 - 1)
marks = st.sampled_from(
    [(Kind.CHUNK, Flags.NONE), (Kind.CHUNK, Flags.POISON), (Kind.CONTROL, Flags.NONE), (Kind.CONTROL, Flags.MORE)]
)
headers = st.builds(
    lambda mark, **fields: Header(mark[0], flags=mark[1], **fields),
    mark=marks,
    payload_bytes=st.integers(0, limits.FRAME_PAYLOAD_BYTES_MAX),
    job=numbers,
    generation=numbers,
    round=st.integers(0, 2**32 - 1),
    segment_count=st.integers(0, 2**32 - 1),
    contributors=numbers,
    weight=st.floats(0, 1e300),
)


def decode_frame_header(data: bytes) -> None:
    """What is accepted encodes to the very bytes that it came from."""
    decoded = decode_header(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    if isinstance(decoded, Header):
        assert decoded.encode() == data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
        assert decoded.payload_bytes <= limits.FRAME_PAYLOAD_BYTES_MAX
        assert math.isfinite(decoded.weight)
    else:
        refuse(decoded)


def decode_message(data: bytes) -> None:
    """What is accepted can be sent on, and what is refused can be shown."""
    decoded = decode(data)
    if isinstance(decoded, Envelope):
        assert isinstance(decode(encode(decoded)), Envelope)
    else:
        refuse(decoded)


def refuse(reason: str) -> NoReturn:
    """Raises Refused with a reason that is fit for logs, for the other side and for a terminal."""
    assert reason.isprintable()
    assert len(reason) <= limits.REFUSAL_CHARS_MAX
    raise Refused(reason)


def decode_stream(data: bytes) -> None:
    """Every other chunk is drained. No buffer is larger than the largest frame."""
    parser = FrameParser()
    drains = False
    while data:
        buffer = parser.buffer()
        assert 0 < len(buffer) <= limits.FRAME_PAYLOAD_BYTES_MAX
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        event = parser.received(count)
        while event is not None:
            if isinstance(event, Broken):
                refuse(event.reason)
            if isinstance(event, ChunkAnnounced):
                drains = not drains
                place = memoryview(bytearray(event.header.payload_bytes))
                event = parser.drain() if drains else parser.land(place)
            else:
                event = None


def decode_manifest(data: bytes) -> None:
    """What is accepted reads back equal; checking it raises nothing."""
    manifest = FileManifest.unpack(data)
    check_manifest(manifest)
    assert FileManifest.unpack(manifest.pack()) == manifest


def decode_address(data: bytes) -> None:
    """What is accepted reads back equal, and can be given to a resolver."""
    address = Address.parse(data.decode("utf-8", "replace"))
    assert Address.parse(str(address)) == address
    address.host.encode("idna")
    assert str(address).isprintable()


def framed(payload: bytes) -> bytes:
    return Header(Kind.CONTROL, len(payload)).encode() + payload


def chunk(payload: bytes) -> bytes:
    return Header(Kind.CHUNK, len(payload), round=1, segment_count=1).encode() + payload


streams = st.lists(control_messages().map(framed) | st.binary(max_size=99).map(chunk), min_size=1, max_size=3)
file_entries = st.builds(
    FileEntry,
    path=st.text(st.characters(codec="utf-8"), max_size=8),
    size_bytes=st.integers(0, limits.DATA_BYTES_MAX),
    sha256=st.binary(min_size=32, max_size=32),
    executable=st.booleans(),
)
manifests = st.lists(file_entries, max_size=4).map(lambda entries: FileManifest(entries=tuple(entries)).pack())
ADDRESSES = (b"192.168.1.20:29610", b"[fe80::1%eth0]:1", b"[2001:db8::1%3]", b"laptop.local", b"[::ffff:1.2.3.4]:65535")

WIRE_DECODERS = (
    Decoder("header", decode_frame_header, headers.map(Header.encode)),
    Decoder("control message", decode_message, control_messages(), examples=150),
    Decoder("frames", decode_stream, streams.map(b"".join)),
    Decoder("manifest of files", decode_manifest, manifests, (ValueError,)),
    Decoder("address", decode_address, st.sampled_from(ADDRESSES), (ValueError,)),
)
