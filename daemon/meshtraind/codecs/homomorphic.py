"""homomorphic: the largest magnitudes in cells, which add without being decoded (Li et al. 2024, arXiv 2402.07529).

Lossless but for STEP: what is sent are whole multiples of it, and their sum is exact, in whatever order it is made.
Whoever adds and whoever reads need the same cells for the same place: the seed is that of the round and the segment,
whoever encodes.
"""

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import FIRST, Bits, Codec, CodecError, Terms, Values
from meshtraind.codecs.indices import Indices, write_bitmap
from meshtraind.codecs.selection import largest
from meshtraind.codecs.sketch import Numbers, cells_of, peel, peel_order, poured, read_cells, write_cells
from meshwire import limits
from meshwire.codecs.registry import CodecSpec
from meshwire.codecs.sketch import LIMIT, SEED_BYTES, STEP, cells_for, segment_room
from meshwire.codecs.sparsifiers import bitmap_bytes

SEED = struct.Struct("<Q")
assert SEED.size == SEED_BYTES

PEAK = np.nextafter(np.float32(LIMIT), np.float32(0))


class Recovered(NamedTuple):
    """What a segment's bytes say.

    Attributes:
        places: that were sent by one member or more.
        whole: their values were found. All who have these bytes find so, or not.
    """

    places: int
    whole: bool


class Homomorphic(Codec):
    """What `decode_into` makes of a segment whose values are not found is zeros."""

    draws = True
    shared_draws = True

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._mask: NDArray[np.bool_] = np.empty(limits.SEGMENT_VALUES_MAX, np.bool_)
        self._sent: tuple[Indices, Values] = np.empty(0, np.intp), np.empty(0, np.float32)  # by the last encoding

    def room(self, count: int) -> int:
        """How many of a segment's `count` values all members can send together."""
        return segment_room(self.spec, count)

    def add_encoded(self, payload: memoryview, total: memoryview, count: int) -> None:
        """Makes of the segment of `count` values in `total` that of the sum with the one in `payload`.

        Equal bit for bit in whatever order segments are added. Raises CodecError when their lengths or seeds differ.
        """
        self._check(payload, count)
        self._check(total, count)
        if payload[: SEED.size] != total[: SEED.size]:
            raise CodecError(f"{self.spec}: segments with different seeds cannot be added")
        cells_at = _cells_at(count)
        marked = np.frombuffer(total[SEED.size : cells_at], np.uint8)
        np.bitwise_or(marked, np.frombuffer(payload[SEED.size : cells_at], np.uint8), out=marked)
        write_cells(read_cells(payload[cells_at:]) + read_cells(total[cells_at:]), total[cells_at:])

    def check_places(self, payload: memoryview, count: int) -> None:
        """Raises CodecError where no values of `count` can be in it. What its cells hold, only their sum tells."""
        self._check(payload, count)
        self._marked(payload, count)

    def recover_into(self, payload: memoryview, out: Values) -> Recovered:
        """As `decode_into`, and says whether the values were found; if not, `out` is zeros."""
        self._check(payload, len(out))
        return self._recover(payload, out)

    def encode_rest_into(self, values: Values, out: memoryview, terms: Terms = FIRST) -> int:
        """As `Codec.encode_rest_into`, at the places alone that were sent."""
        length = self.encode_into(values, out, terms)
        places, sent = self._sent
        np.subtract.at(values, places, sent)  # each comes once
        return length

    def decode_sent_into(self, payload: memoryview, out: Values) -> None:
        """As `Codec.decode_sent_into`, but nothing was decoded."""
        self.decode_into(payload, out)

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        self._peak(values.view(np.uint32), bits)
        room = self.room(len(values))
        most = room if terms.values_max is None else min(terms.values_max, room)
        cells = cells_for(room)
        while True:
            places, numbers = self._chosen(values, bits, most)
            where = cells_of(terms.seed, places, cells)
            if peel_order(where, cells) is not None:
                break
            most //= 2  # a single one is always found
        self._sent = places, _values_of(numbers)
        SEED.pack_into(out, 0, terms.seed)
        cells_at = _cells_at(len(values))
        write_bitmap(places, len(values), out[SEED.size : cells_at])
        write_cells(poured(where, numbers, cells), out[cells_at:])
        return len(out)

    def _chosen(self, values: Values, magnitudes: Bits, most: int) -> tuple[Indices, Numbers]:
        """At most so many places, and how many times STEP is sent there."""
        places = largest(magnitudes, most, self._mask) if most else np.empty(0, np.intp)
        steps = values.take(places)
        np.clip(steps, -PEAK, PEAK, out=steps)
        np.multiply(steps, np.float32(1 / STEP), out=steps)
        numbers: Numbers = np.rint(steps, out=steps).astype(np.int64)
        sent = numbers != 0
        return places.compress(sent), numbers.compress(sent)

    def _marked(self, payload: memoryview, count: int) -> Indices:
        """The places, ascending. Raises CodecError where one is beyond the segment."""
        bitmap = np.frombuffer(payload[SEED.size : _cells_at(count)], np.uint8)
        places = np.flatnonzero(np.unpackbits(bitmap, bitorder="little").view(np.bool_))
        if len(places) and places[-1] >= count:
            raise CodecError(f"{self.spec}: a place beyond the segment's {count} values")
        return places

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        self._recover(payload, out)

    def _recover(self, payload: memoryview, out: Values) -> Recovered:
        (seed,) = SEED.unpack_from(payload)
        cells_at = _cells_at(len(out))
        places = self._marked(payload, len(out))
        cells = read_cells(payload[cells_at:])
        out.fill(0)
        if len(places) > len(cells):
            return Recovered(len(places), whole=False)
        numbers = peel(cells_of(seed, places, len(cells)), cells)
        if numbers is None:
            return Recovered(len(places), whole=False)
        if cells.any():
            raise CodecError(f"{self.spec}: cells hold more than the values at the {len(places)} places that were sent")
        out[places] = _values_of(numbers)
        return Recovered(len(places), whole=True)


def _cells_at(count: int) -> int:
    return SEED.size + bitmap_bytes(count)


def _values_of(numbers: Numbers) -> Values:
    """Rounded once, if at all."""
    return (numbers * STEP).astype(np.float32)
