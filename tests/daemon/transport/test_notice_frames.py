"""What goes to all members is encoded once, however many there are, and each hears it as it was meant."""

import asyncio
from typing import Any

import pytest

from meshtraind.transport import notice_frames as notice_frames_module
from meshtraind.transport.connection import Connection
from meshtraind.transport.notice_frames import REMEMBERED_BYTES_MAX, NoticeFrames
from meshwire.frames.header import HEADER_BYTES, Header, decode_header
from meshwire.messages.envelope import Envelope, decode, encode
from meshwire.messages.link import Heartbeat
from meshwire.messages.rounds import Bind, Null
from tests.daemon.connectionpair import Recorder

MEMBERS = 64


class Written(asyncio.Transport):
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is held back."""

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data


def links(count: int) -> tuple[list[Connection], list[Written]]:
    connections = [Connection(Recorder(), name=f"rank {rank}") for rank in range(count)]
    transports = [Written() for _ in connections]
    for connection, transport in zip(connections, transports, strict=True):
        connection.connection_made(transport)
    return connections, transports


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages that are encoded from now on."""
    encoded: list[str] = []

    def encoding(envelope: Envelope) -> bytes:
        encoded.append(type(envelope.body).__name__)
        return encode(envelope)

    monkeypatch.setattr(notice_frames_module, "encode", encoding)
    return encoded


def read(frames: bytes) -> tuple[Header, Any]:
    header = decode_header(frames[:HEADER_BYTES])
    assert isinstance(header, Header)
    envelope = decode(frames[HEADER_BYTES : HEADER_BYTES + header.payload_bytes])
    assert isinstance(envelope, Envelope)
    return header, envelope.body


@pytest.mark.asyncio
async def test_a_round_costs_one_encoding_of_each_message_whatever_the_number_of_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W2: bind, seal and null go to all others, as the same bytes."""
    encoded = counted(monkeypatch)
    connections, transports = links(MEMBERS - 1)
    bind = Bind(round=3, step=3, base=2, weight=8.0)
    for connection in connections:
        connection.notify(bind, job=7, generation=11, complete=2)
    assert encoded == ["Bind"]
    assert len({transport.sent for transport in transports}) == 1
    header, body = read(transports[-1].sent)
    assert (header.job, header.generation, header.complete) == (7, 11, 2)
    assert body == bind


@pytest.mark.asyncio
async def test_a_frame_says_how_far_its_sender_is_when_it_leaves() -> None:
    """G5, G2: the same message again, in another generation or after another round, is another frame."""
    connections, transports = links(1)
    null = Null(round=5)
    for numbers in ((7, 11, 2), (7, 11, 3), (7, 12, 3), (8, 12, 3), (7, 11, 2)):
        job, generation, complete = numbers
        connections[0].notify(null, job=job, generation=generation, complete=complete)
        header, body = read(transports[0].sent)
        assert (header.job, header.generation, header.complete) == numbers
        assert body == null
        transports[0].sent = b""


def test_messages_in_turn_are_each_their_own() -> None:
    frames = NoticeFrames()
    first, second = Null(round=1), Null(round=2)
    for message in (first, second, first, Heartbeat(), second):
        assert read(frames.of(message, job=1, generation=2, complete=0))[1] == message


def test_a_long_message_is_not_kept_in_memory() -> None:
    """A deal or a model of megabytes goes to one member."""
    frames = NoticeFrames()
    bind = Bind(round=1, step=1, base=0, weight=1.0, hyperparameters=bytes(REMEMBERED_BYTES_MAX))
    frames.of(bind, job=0, generation=0, complete=0)
    assert frames._newest is None
