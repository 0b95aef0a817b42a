"""The 80 bytes in front of every frame (W1)."""

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from meshwire import limits

MAGIC = b"MESH"
WIRE_VERSION = 28
RESERVED = bytes(4)
GROUP_ENDS = 1  # `step` of the last relayed frame of a process group that a rank leaves
GROUP_BREAKS = 2  # the same, of one whose process was lost
_VERSION_AT = len(MAGIC)

# magic, version, kind, flags | job | generation | round, program step, bucket | first segment, segment count |
# contributors | weight | complete, payload length | squared norm | packed length, reserved
LAYOUT = struct.Struct("<4sBBHQQIHHIIQdIIdI4s")
HEADER_BYTES = LAYOUT.size
assert HEADER_BYTES == 80


class Kind(IntEnum):
    """What a frame carries."""

    CONTROL = 1  # one msgpack message
    CHUNK = 2  # consecutive encoded segments of one bucket at one step of the topology program
    RELAYED = 3  # bytes of one learner for another, of which daemons know nothing else (P1)
    GOSSIP = 4  # a piece of what a learner's own weights are apart from the base by, for a neighbour (R9)


class Flags(IntFlag):
    """Marks on a frame."""

    NONE = 0
    POISON = 1  # V1, on a chunk: a contributor's part was not finite; there is no payload
    MORE = 2  # on a control frame: the message goes on in the next one


_FLAG_OF = {Kind.CONTROL: Flags.MORE, Kind.CHUNK: Flags.POISON}
_NAME_OF = {Kind.CONTROL: "control frame", Kind.CHUNK: "chunk", Kind.RELAYED: "relayed frame", Kind.GOSSIP: "gossip"}


@dataclass(frozen=True, slots=True)
class Header:
    """One frame's header. Control frames use `job`, `generation`, `complete`, `payload_bytes` and `flags` only; relayed
    ones `job`, `generation` (between daemons, of a job that restarts its scripts: in which their world began), `round`
    (their process group), `step` (GROUP_ENDS, GROUP_BREAKS: no other follows, and the payload says why),
    `contributors` and `payload_bytes`; gossip `job`, `generation`, `round` (in which the period ends), `step` (the
    turn), `first_segment` and `segment_count` (which piece, of how many) and `payload_bytes`.

    Attributes:
        job: `meshwire.jobs.lifecycle.job_number` of the job, 0 when the frame belongs to none.
        generation: first 64 bits of the hash of the generation's id (G2), 0 outside a generation.
        round: from 1.
        step: index into the topology program.
        bucket: index into the plan.
        first_segment, segment_count: which segments of that bucket.
        contributors: bitmap by rank of those whose gradients are summed in the payload; of a relayed frame, of the one
            that it comes from, or, on its way from a learner, that it goes to.
        weight: their summed weight in samples (W3).
        complete: the newest round of this job that the sender holds completely (G5).
        squared_norm: sum of the squares of the final values in the payload (O4); 0 where nothing is final.
        packed_bytes: of a chunk's payload that travels compressed, as an LZ4 block (W5); 0: it travels as it is.
    """

    kind: Kind
    payload_bytes: int
    flags: Flags = Flags.NONE
    job: int = 0
    generation: int = 0
    round: int = 0
    step: int = 0
    bucket: int = 0
    first_segment: int = 0
    segment_count: int = 0
    contributors: int = 0
    weight: float = 0.0
    complete: int = 0
    squared_norm: float = 0.0
    packed_bytes: int = 0

    @property
    def carried_bytes(self) -> int:
        """How many bytes follow the header."""
        return self.packed_bytes or self.payload_bytes

    def encode(self) -> bytes:
        """The header's 80 bytes. Raises struct.error when a field is out of range: our bug, not a peer's."""
        return LAYOUT.pack(
            MAGIC,
            WIRE_VERSION,
            self.kind,
            self.flags,
            self.job,
            self.generation,
            self.round,
            self.step,
            self.bucket,
            self.first_segment,
            self.segment_count,
            self.contributors,
            self.weight,
            self.complete,
            self.payload_bytes,
            self.squared_norm,
            self.packed_bytes,
            RESERVED,
        )


def other_version(data: bytes | bytearray | memoryview) -> int | None:
    """The wire version of a frame that is not of this one, whatever else it holds. None: of this one, or no frame.

    Frames of every version, past and future, begin with the magic and a byte that says which (W6).
    """
    return data[_VERSION_AT] if data[:_VERSION_AT] == MAGIC and data[_VERSION_AT] != WIRE_VERSION else None


def versions_differ(name: str, theirs: int, own_name: str) -> str:
    """What a person is told of a device that speaks another wire version, and what helps."""
    behind = name if theirs < WIRE_VERSION else own_name
    return f"{name} speaks wire version {theirs}, {own_name} {WIRE_VERSION}: update meshtrain on {behind}"


def decode_header(data: bytes | bytearray | memoryview) -> Header | str:
    """Reads 80 bytes; never raises on their content. A string says why they are not a header."""
    (
        magic,
        version,
        kind,
        flags,
        job,
        generation,
        round_,
        step,
        bucket,
        first_segment,
        segment_count,
        contributors,
        weight,
        complete,
        payload_bytes,
        squared_norm,
        packed_bytes,
        reserved,
    ) = LAYOUT.unpack_from(data)
    if magic != MAGIC:
        return f"not a meshtrain frame (it begins with {bytes(magic)!r})"
    if version != WIRE_VERSION:
        return f"frame of wire version {version}; this side speaks version {WIRE_VERSION}"
    if kind not in _NAME_OF:
        return f"unknown frame kind {kind}"
    if flags not in (Flags.NONE, Flags.POISON, Flags.MORE):
        return f"unknown frame flags {flags:#06x}"
    if flags not in (Flags.NONE, _FLAG_OF.get(kind)):
        return f"flags {flags:#06x} on a {_NAME_OF[kind]}"
    if reserved != RESERVED:
        return "reserved header bytes are not zero"
    if payload_bytes > limits.FRAME_PAYLOAD_BYTES_MAX:
        return f"payload of {payload_bytes} bytes exceeds the limit of {limits.FRAME_PAYLOAD_BYTES_MAX}"
    if packed_bytes and (kind == Kind.CONTROL or packed_bytes >= payload_bytes):
        return f"payload of {payload_bytes} bytes packed into {packed_bytes}; only data are, into fewer bytes"
    if not 0.0 <= weight < float("inf"):
        return f"weight {weight} is not a finite number of samples"
    if not 0.0 <= squared_norm <= limits.SQUARED_NORM_MAX:
        return f"squared norm {squared_norm} is not a finite sum of squares of fp32 values"
    return Header(
        kind=Kind(kind),
        flags=Flags(flags),
        job=job,
        generation=generation,
        round=round_,
        step=step,
        bucket=bucket,
        first_segment=first_segment,
        segment_count=segment_count,
        contributors=contributors,
        weight=weight,
        complete=complete,
        payload_bytes=payload_bytes,
        squared_norm=squared_norm,
        packed_bytes=packed_bytes,
    )


def control_frames(
    payload: bytes,
    *,
    job: int = 0,
    generation: int = 0,
    complete: int = 0,
    frame_bytes: int = limits.FRAME_PAYLOAD_BYTES_MAX,
) -> bytes:
    """A control message as the frames that it travels in: one, unless it is longer than `frame_bytes`."""
    frames = []
    for start in range(0, len(payload), frame_bytes):
        piece = payload[start : start + frame_bytes]
        flags = Flags.MORE if start + frame_bytes < len(payload) else Flags.NONE
        header = Header(Kind.CONTROL, len(piece), flags, job=job, generation=generation, complete=complete)
        frames += [header.encode(), piece]
    return b"".join(frames)
