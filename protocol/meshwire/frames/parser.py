"""Turns a byte stream into frames and says where the next bytes go; it never holds a chunk's payload itself.

The owner of a socket loops over three calls: receive into `buffer()`, report `received(n)`, and handle the event.
After a `ChunkAnnounced` it must call `land` or `drain` before it asks for the next buffer.
"""

from dataclasses import dataclass

from meshwire import limits
from meshwire.frames.header import HEADER_BYTES, Flags, Header, Kind, decode_header, other_version


@dataclass(frozen=True, slots=True)
class ChunkAnnounced:
    """The header of a chunk, or of a relayed frame, is here; its payload needs a place."""

    header: Header


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """A chunk's payload lies where `land` said; `drained` payloads are gone."""

    header: Header
    drained: bool


@dataclass(frozen=True, slots=True)
class ChunkPacked:
    """A chunk's compressed payload is here, to be unpacked into the place that `land` was given (W5)."""

    header: Header
    packed: memoryview
    place: memoryview


@dataclass(frozen=True, slots=True)
class ControlReceived:
    """A whole control message."""

    header: Header  # of its last frame
    payload: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """The stream is not ours or breaks a limit; nothing after it can be trusted.

    `version`: which other wire version its frame is of, where it is a frame of one (W6).
    """

    reason: str
    version: int | None = None


Event = ChunkAnnounced | ChunkReceived | ChunkPacked | ControlReceived | Broken


class FrameParser:
    """One direction of one link.

    Attributes:
        long_messages: whether a control message may have more than one frame: the other end is known.
        broken: why nothing more can be read; None while it can.
    """

    def __init__(self) -> None:
        self.long_messages = False
        self._message = bytearray()  # the frames of one that is not whole yet
        self._header_bytes = bytearray(HEADER_BYTES)
        self._scratch: bytearray | None = None
        self._target = memoryview(self._header_bytes)
        self._filled = 0
        self._header: Header | None = None  # of the frame whose payload is being received
        self._place: memoryview | None = None  # of a payload that arrives packed
        self._drain_left_bytes = 0
        self._awaiting_place = False
        self._drained = False
        self.broken: str | None = None
        self.chunk_bytes = 0  # of payloads of chunks, in all

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        assert not self._awaiting_place, "land() or drain() the announced chunk first"
        return self._target[self._filled :]

    @property
    def payload_left_bytes(self) -> int:
        """Of the frame whose header is here: what of its payload is not."""
        if self._header is None or self._awaiting_place:
            return 0
        return (self._drain_left_bytes or len(self._target)) - self._filled

    def received(self, count: int) -> Event | None:
        """Reports that `count` bytes were written into `buffer()`."""
        if self.broken is not None:
            return Broken(self.broken)
        if self._header is not None and self._header.kind is not Kind.CONTROL:
            self.chunk_bytes += count
        self._filled += count
        if self._filled < len(self._target):
            return None
        if self._header is None:
            return self._header_complete()
        if self._drain_left_bytes:
            self._drain_left_bytes -= self._filled
            if self._drain_left_bytes:
                self._aim(self._scratch_view(self._drain_left_bytes))
                return None
        return self._payload_complete()

    def land(self, place: memoryview) -> Event | None:
        """Gives the announced chunk its place, exactly `payload_bytes` long. An empty chunk completes at once.

        The place of a packed one is written by whoever unpacks it; what arrives is shorter, and lies here until then.
        """
        assert self._awaiting_place
        assert self._header is not None
        assert len(place) == self._header.payload_bytes
        self._awaiting_place = False
        self._drained = False
        if self._header.packed_bytes:
            self._place = place
            place = memoryview(bytearray(self._header.packed_bytes))
        self._aim(place)
        return self._payload_complete() if not len(place) else None

    def drain(self) -> Event | None:
        """Receives the announced chunk into scratch and forgets it (G8)."""
        assert self._awaiting_place
        assert self._header is not None
        self._awaiting_place = False
        self._drained = True
        self._drain_left_bytes = self._header.carried_bytes
        if not self._drain_left_bytes:
            return self._payload_complete()
        self._aim(self._scratch_view(self._drain_left_bytes))
        return None

    def _header_complete(self) -> Event | None:
        header = decode_header(self._header_bytes)
        if isinstance(header, str):
            self._break(header)
            return Broken(header, other_version(self._header_bytes))
        if header.kind is not Kind.CONTROL and self._message:
            return self._break("a chunk between the frames of a message")
        self._header = header
        if header.kind is not Kind.CONTROL:
            self.chunk_bytes += HEADER_BYTES
            self._awaiting_place = True
            return ChunkAnnounced(header)
        if not header.payload_bytes:
            return self._break("empty control message")
        most = limits.MESSAGE_BYTES_MAX if self.long_messages else limits.CONTROL_BYTES_MAX
        least = len(self._message) + header.payload_bytes + (header.flags == Flags.MORE)
        if least > most:
            return self._break(f"message of more than {most} bytes")
        self._aim(memoryview(bytearray(header.payload_bytes)))
        return None

    def _break(self, reason: str) -> Broken:
        self.broken = reason
        self._aim(memoryview(self._header_bytes))  # what still arrives needs a place, though nobody reads it
        return Broken(reason)

    def _payload_complete(self) -> Event | None:
        header, payload = self._header, self._target
        assert header is not None
        self._header = None
        self._aim(memoryview(self._header_bytes))
        if self._place is not None:
            place, self._place = self._place, None
            return ChunkPacked(header, payload, place)
        if header.kind is not Kind.CONTROL:
            return ChunkReceived(header, self._drained)
        if not self._message and header.flags != Flags.MORE:
            return ControlReceived(header, bytes(payload))
        self._message += payload
        if header.flags == Flags.MORE:
            return None
        message, self._message = bytes(self._message), bytearray()
        return ControlReceived(header, message)

    def _aim(self, target: memoryview) -> None:
        self._target = target
        self._filled = 0

    def _scratch_view(self, wanted_bytes: int) -> memoryview:
        if self._scratch is None:
            self._scratch = bytearray(limits.CHUNK_BYTES)
        return memoryview(self._scratch)[: min(wanted_bytes, len(self._scratch))]
