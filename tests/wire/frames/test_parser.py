"""The frame parser: bytes in any pieces give the same frames, and payloads lie where they were told to."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire import limits
from meshwire.frames.header import HEADER_BYTES, Flags, Header, Kind, control_frames
from meshwire.frames.parser import (
    Broken,
    ChunkAnnounced,
    ChunkPacked,
    ChunkReceived,
    ControlReceived,
    Event,
    FrameParser,
)

Frame = tuple[Header, bytes]
WANTED = 1  # chunks of the other buckets are drained


def chunk(payload: bytes, bucket: int = WANTED) -> Frame:
    return Header(Kind.CHUNK, len(payload), bucket=bucket, round=1, segment_count=1), payload


def packed(payload: bytes, bucket: int = WANTED) -> Frame:
    """That will be 7 bytes longer; what is in it is not the parser's business."""
    header = Header(Kind.CHUNK, len(payload) + 7, bucket=bucket, round=1, segment_count=1, packed_bytes=len(payload))
    return header, payload


def control(payload: bytes) -> Frame:
    return Header(Kind.CONTROL, len(payload)), payload


frames = st.one_of(
    st.builds(chunk, st.binary(max_size=300), st.sampled_from([WANTED, 2])),
    st.builds(packed, st.binary(min_size=1, max_size=300), st.sampled_from([WANTED, 2])),
    st.builds(control, st.binary(min_size=1, max_size=300)),
)
streams = st.lists(frames, max_size=6)
cuts = st.lists(st.integers(1, 200), max_size=60)


def feed(parser: FrameParser, data: bytes, pieces: Iterable[int] = ()) -> list[Event | bytes]:
    """Everything the parser says, with a landed payload after its ChunkReceived."""
    said: list[Event | bytes] = []
    sizes = iter(pieces)
    place = bytearray()
    while data:
        buffer = parser.buffer()
        assert len(buffer) > 0, "the next bytes always have a place"
        count = min(len(buffer), len(data), next(sizes, len(data)))
        buffer[:count] = data[:count]
        data = data[count:]
        event = parser.received(count)
        while event is not None:
            said.append(event)
            match event:
                case ChunkAnnounced(header) if header.bucket == WANTED:
                    place = bytearray(header.payload_bytes)
                    event = parser.land(memoryview(place))
                case ChunkAnnounced():
                    event = parser.drain()
                case ChunkReceived(_, drained):
                    if not drained:
                        said.append(bytes(place))
                    event = None
                case Broken():
                    return said
                case _:
                    event = None
    return said


def expected(stream: list[Frame]) -> list[Event | bytes]:
    said: list[Event | bytes] = []
    for header, payload in stream:
        if header.kind is Kind.CONTROL:
            said.append(ControlReceived(header, payload))
            continue
        if header.packed_bytes and header.bucket == WANTED:
            place = memoryview(bytearray(header.payload_bytes))
            said += [ChunkAnnounced(header), ChunkPacked(header, memoryview(payload), place)]
            continue
        said += [ChunkAnnounced(header), ChunkReceived(header, header.bucket != WANTED)]
        if header.bucket == WANTED:
            said.append(payload)
    return said


def joined(stream: list[Frame]) -> bytes:
    return b"".join(header.encode() + payload for header, payload in stream)


def test_what_is_left_of_a_payload() -> None:
    """Of one that is wanted, packed, or drained in several pieces; of none before its place is known."""
    large = 2 * limits.CHUNK_BYTES + 5
    for (header, payload), wanted in (
        (chunk(bytes(9)), True),
        (packed(bytes(9)), True),
        (chunk(bytes(large), 2), False),
    ):
        parser, size = FrameParser(), len(payload)
        assert parser.payload_left_bytes == 0
        parser.buffer()[:] = header.encode()
        parser.received(HEADER_BYTES)
        assert parser.payload_left_bytes == 0
        assert (parser.land(memoryview(bytearray(header.payload_bytes))) if wanted else parser.drain()) is None
        for left in range(size, 0, -max(1, size // 9)):
            assert parser.payload_left_bytes == left
            for _ in range(min(left, max(1, size // 9))):
                parser.received(1)
        assert parser.payload_left_bytes == 0


@given(streams, cuts)
def test_any_split_of_a_stream_gives_its_frames(stream: list[Frame], pieces: list[int]) -> None:
    """W1, W4, W5: what a peer said does not depend on how TCP cut it."""
    assert feed(FrameParser(), joined(stream), pieces) == expected(stream)


@given(streams, st.binary(max_size=400), cuts)
def test_no_bytes_make_the_parser_raise(stream: list[Frame], noise: bytes, pieces: list[int]) -> None:
    """After any good beginning, and however cut, noise ends in Broken or in waiting for more."""
    said = feed(FrameParser(), joined(stream) + noise, pieces)
    assert said[: len(expected(stream))] == expected(stream)
    assert said == feed(FrameParser(), joined(stream) + noise)


@pytest.mark.parametrize("bucket", [WANTED, 2], ids=["landed", "drained"])
@pytest.mark.parametrize("size", [0, 1, limits.CHUNK_BYTES, limits.CHUNK_BYTES + 1, limits.FRAME_PAYLOAD_BYTES_MAX])
def test_chunks_of_every_size(bucket: int, size: int) -> None:
    """G8: scratch is smaller than the largest chunk, and the frame after a drained one is found all the same."""
    stream = [chunk(b"x" * size, bucket), control(b"after")]
    assert feed(FrameParser(), joined(stream)) == expected(stream)


def test_a_payload_lands_in_the_given_memory_and_nowhere_else() -> None:
    """M4: the socket writes into the destination itself."""
    parser = FrameParser()
    memory = bytearray(b"." * 30)
    header, payload = chunk(b"0123456789")
    _receive(parser, header.encode())
    parser.land(memoryview(memory)[10:20])
    buffer = parser.buffer()
    assert buffer.obj is memory
    assert len(buffer) == 10
    _receive(parser, payload[:4])
    assert len(parser.buffer()) == 6
    assert _receive(parser, payload[4:]) == ChunkReceived(header, drained=False)
    assert memory == b"." * 10 + payload + b"." * 10


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(HEADER_BYTES), "not a meshtrain frame"),
        (Header(Kind.CONTROL, 0).encode(), "empty control message"),
        (Header(Kind.CHUNK, limits.FRAME_PAYLOAD_BYTES_MAX + 1).encode(), "exceeds the limit"),
    ],
    ids=["not ours", "empty", "oversize"],
)
def test_a_broken_stream_stays_broken(data: bytes, reason: str) -> None:
    """Nothing after the first wrong byte can be trusted."""
    parser = FrameParser()
    (said,) = feed(parser, data)
    assert isinstance(said, Broken)
    assert reason in said.reason
    assert len(parser.buffer()) > 0
    assert _receive(parser, control(b"fine")[0].encode()[:10]) == said


@settings(max_examples=20)
@given(st.integers(limits.FRAME_PAYLOAD_BYTES_MAX + 1, 2**32 - 1), st.sampled_from(Kind))
def test_an_announced_length_costs_no_memory_before_it_is_checked(size: int, kind: Kind) -> None:
    (said,) = feed(FrameParser(), Header(kind, size).encode())
    assert isinstance(said, Broken)


def test_an_announced_chunk_needs_a_decision() -> None:
    parser = FrameParser()
    _receive(parser, chunk(b"1234")[0].encode())
    refusals: list[Callable[[], object]] = [parser.buffer, lambda: parser.land(memoryview(bytearray(3)))]
    for refused in refusals:
        with pytest.raises(AssertionError):
            refused()


def trusting() -> FrameParser:
    parser = FrameParser()
    parser.long_messages = True
    return parser


@given(st.binary(min_size=1, max_size=400), cuts)
def test_a_message_of_several_frames_is_one(payload: bytes, pieces: list[int]) -> None:
    """W1: all but the last say that more follows."""
    frames = control_frames(payload, job=7, frame_bytes=60)
    said = feed(trusting(), frames + joined([control(b"after")]), pieces)
    last = Header(Kind.CONTROL, (len(payload) - 1) % 60 + 1, job=7)
    assert said == [ControlReceived(last, payload), ControlReceived(*control(b"after"))]


def test_a_message_of_several_frames_is_as_long_as_the_limit_and_no_longer() -> None:
    """W1: and whoever is not known yet may not make this side keep more than one frame."""
    whole = control_frames(bytes(limits.MESSAGE_BYTES_MAX))
    assert [type(said) for said in feed(trusting(), whole)] == [ControlReceived]
    longer = b"".join([whole[: -limits.FRAME_PAYLOAD_BYTES_MAX - HEADER_BYTES]] + 2 * [PART])
    assert feed(trusting(), longer) == [Broken(f"message of more than {limits.MESSAGE_BYTES_MAX} bytes")]
    assert feed(FrameParser(), PART) == [Broken(f"message of more than {limits.FRAME_PAYLOAD_BYTES_MAX} bytes")]


PART = Header(Kind.CONTROL, limits.FRAME_PAYLOAD_BYTES_MAX, flags=Flags.MORE).encode() + bytes(
    limits.FRAME_PAYLOAD_BYTES_MAX
)


def test_nothing_comes_between_the_frames_of_a_message() -> None:
    frames = control_frames(bytes(100), frame_bytes=60)
    said = feed(trusting(), frames[: HEADER_BYTES + 60] + joined([chunk(b"x")]))
    assert said == [Broken("a chunk between the frames of a message")]


def _receive(parser: FrameParser, data: bytes) -> Event | None:
    parser.buffer()[: len(data)] = data
    return parser.received(len(data))
