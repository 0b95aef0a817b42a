"""What all codecs have in common: checks, scratch memory, adding, and what an encoding leaves out."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from meshwire import limits
from meshwire.codecs.registry import CodecSpec

Values = NDArray[np.float32]
Bits = NDArray[np.uint32]

MAGNITUDE_FP32 = 0x7FFFFFFF  # all bits but the sign
INFINITY_FP32 = 0x7F800000  # as bits; what is not smaller is infinite or NaN


class CodecError(ValueError):
    """Values or bytes that the codec does not take. From a peer it is a protocol error of that link."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What an encoding follows besides the values. All of it is the encoder's alone: decoding needs none of it.

    Attributes:
        round: its number, from 1, for rates that change over time.
        seed: for codecs that draw; a non-negative 64-bit number.
        bytes_max: what the segment may take, of a codec with a budget; never less than one value needs.
        values_max: how many values it may send, of a codec that sends as many as there is room for, which it shares
            with the other members.
    """

    round: int = 1
    seed: int = 0
    bytes_max: int | None = None
    values_max: int | None = None


FIRST = Terms()


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of a segment's values, one behind the other.

    Attributes:
        starts: where they begin, the first one at 0.
        lengths: of each.
        even: the length of all but the last, which is no longer; None if they differ.
    """

    starts: NDArray[np.intp]
    lengths: NDArray[np.intp]
    even: int | None

    @classmethod
    def of(cls, starts: NDArray[np.intp], count: int) -> Self:
        """Of `count` values."""
        lengths = np.diff(starts, append=count)
        even = (lengths[:-1] == lengths[:1]).all() and (lengths[-1:] <= lengths[:1]).all()
        return cls(starts, lengths, (int(lengths[0]) if len(lengths) else 1) if even else None)

    def __len__(self) -> int:
        return len(self.starts)

    def each(self, values: Values) -> list[Values]:
        """The values of each."""
        return [values[at : at + length] for at, length in zip(self.starts, self.lengths, strict=True)]


class Codec(ABC):
    """Encodes one segment at a time (C1). Values are contiguous fp32; bytes are little-endian.

    It has no memory of what it encoded before: the same values and terms give the same bytes. An instance owns scratch
    memory: use it from one thread.

    Attributes:
        error_feedback: what it leaves out is to be encoded later.
    """

    identity: ClassVar[bool] = False  # encoded segments are the values' own memory
    draws: bool = False  # it looks at the terms' seed
    shared_draws: ClassVar[bool] = False  # all members of a round are to draw alike, from one seed

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec
        self.error_feedback = spec.error_feedback
        self._fixed = spec.fixed
        self._borders: tuple[int, ...] = ()
        self._bytes_max: dict[int, int] = {}  # by count
        self._runs_by_count: dict[int, Runs] = {}
        self._bits: Bits = np.empty(limits.SEGMENT_VALUES_MAX, np.uint32)
        self._decoded: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)
        self._rest: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)

    def within(self, borders: tuple[int, ...]) -> Self:
        """The same codec for segments in which other tensors begin at `borders`. It shares this one's scratch memory:
        use both from one thread. This one itself, if borders are nothing to it."""
        if not borders or self.spec.family.blocks is None:
            return self
        bordered = copy.copy(self)
        bordered._borders = borders
        bordered._bytes_max = {}
        bordered._runs_by_count = {}
        return bordered

    def bytes_max(self, count: int) -> int:
        """What a segment of so many values takes at most. Raises CodecError when no segment has so many."""
        most = self._bytes_max.get(count)
        if most is None:
            if count > limits.SEGMENT_VALUES_MAX:
                raise CodecError(f"{self.spec}: a segment of {count} values; at most {limits.SEGMENT_VALUES_MAX}")
            most = self._bytes_max[count] = self.spec.segment_bytes_max(count, self._borders)
        return most

    def encode_into(self, values: Values, out: memoryview, terms: Terms = FIRST) -> int:
        """Writes a segment to the beginning of `out`, which has at least `bytes_max(len(values))` bytes, and
        returns its length.

        Raises CodecError when a value is not finite (V1: such a bucket is sent as poison).
        """
        if len(out) != self._bytes_max.get(len(values)):
            out = self._room(len(values), out)
        return self._encode(values, self._bits[: len(values)], out, terms)

    def encode_rest_into(self, values: Values, out: memoryview, terms: Terms = FIRST) -> int:
        """As `encode_into`, and leaves in `values` what was not encoded: the values minus those that are decoded.

        When it raises CodecError, `values` are as they were.
        """
        length = self.encode_into(values, out, terms)
        decoded = self._rest[: len(values)]
        self._decode(out[:length], decoded, self._bits[: len(values)])
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(values, decoded, out=values)
        return length

    def decode_sent_into(self, payload: memoryview, out: Values) -> None:
        """As `decode_into` of the bytes that the last `encode_rest_into` has written, which had to decode them."""
        np.copyto(out, self._rest[: len(out)])

    def clear_sent(self, values: Values) -> None:
        """Sets to 0 what lies at the places that the last encoding has sent: all of them, unless a codec says which."""
        values.fill(0)

    def decode_into(self, payload: memoryview, out: Values) -> None:
        """Overwrites `out` with the payload's values; all are finite.

        Raises CodecError when the payload has another length, or holds what no encoder makes; `out` is then undefined.
        """
        self._check(payload, len(out))
        self._decode(payload, out, self._bits[: len(out)])

    def sum_into(self, payload: memoryview, values: Values, out: Values) -> None:
        """Writes `values` plus the payload's values to `out`, the very same array or one that shares no memory with it,
        in fp32; sums may overflow to infinity.

        Raises CodecError when the payload has another length. What no encoder makes is found here, or makes a sum that
        `encode_into` refuses.
        """
        self._check(payload, len(out))
        with np.errstate(over="ignore", invalid="ignore"):
            self._sum(payload, values, out)

    def length_of(self, payload: memoryview, count: int) -> int:
        """Bytes of the segment of `count` values that `payload` begins with. Raises CodecError if they are not there.

        A codec whose segments vary in length reads it from the segment's header.
        """
        most = self.bytes_max(count)
        if len(payload) < most:
            raise CodecError(f"{self.spec}: {len(payload)} bytes for {count} values, which take {most}")
        return most

    def _sum(self, payload: memoryview, values: Values, out: Values) -> None:
        decoded = self._rest[: len(out)] if out is values else out
        self._decode(payload, decoded, self._bits[: len(out)])
        np.add(values, decoded, out=out)

    @abstractmethod
    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        """`out` has exactly `bytes_max(len(values))` bytes. `bits` is scratch as long as `values`, which are
        only read. Returns the length."""

    @abstractmethod
    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        """The length is that which `length_of` gives. `bits` is scratch as long as `out`. Raises CodecError."""

    def _room(self, count: int, out: memoryview) -> memoryview:
        """As much of `out` as a segment may take."""
        most = self.bytes_max(count)
        if len(out) < most:
            raise CodecError(f"{self.spec}: {len(out)} bytes for {count} values, which may take {most}")
        return out[:most]

    def _check(self, payload: memoryview, count: int) -> None:
        if self._fixed and len(payload) == self._bytes_max.get(count):
            return
        length = self.length_of(payload, count)
        if len(payload) != length:
            raise CodecError(f"{self.spec}: {len(payload)} bytes for {count} values, which take {length}")

    def _blocks(self, count: int) -> "Runs":
        """The blocks of a segment, of a codec that has such (`meshwire.codecs.spec.Blocks`)."""
        runs = self._runs_by_count.get(count)
        if runs is None:
            blocks = self.spec.family.blocks
            assert blocks is not None
            starts = np.array(blocks.starts(count, self._borders), np.intp)
            runs = self._runs_by_count[count] = Runs.of(starts, count)
        return runs

    def _peak(self, values: Bits, bits: Bits) -> float:
        """max |x| of fp32 values given as bits, 0 if there are none. Raises CodecError when one is not finite.

        Magnitudes are ordered as their bits are: one pass finds maximum, infinity and NaN, and nothing warns.
        """
        np.bitwise_and(values, MAGNITUDE_FP32, out=bits)
        peak = np.uint32(bits.max(initial=0))
        if peak >= INFINITY_FP32:
            raise CodecError(f"{self.spec}: a value is infinite or not a number")
        return float(peak.view(np.float32))
