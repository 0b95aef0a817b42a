"""What the codecs have in common that send some values of a segment with their indices.

A segment is a header, indices (`indices.py`), and values (`kept_values.py`). Values that are written as zero are not
sent, but in int4. When all values of the segment take no more bytes than those chosen with their indices, all are sent.
"""

import struct
from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import FIRST, Bits, Codec, CodecError, Terms, Values
from meshtraind.codecs.indices import (
    Form,
    Indices,
    gaps_between,
    gaps_can_be_smaller,
    read_indices,
    smallest_form,
    write_bitmap,
    write_gaps,
)
from meshtraind.codecs.kept_values import FORMS
from meshwire import limits
from meshwire.codecs.registry import CodecSpec
from meshwire.codecs.sparsifiers import HEADER_BYTES, bitmap_bytes, kept_within

HEADER = struct.Struct("<BHH")  # form of the indices, how many, their bytes; how many and their bytes are 0 for ALL
assert HEADER.size == HEADER_BYTES

Mask = NDArray[np.bool_]


class SparseCodec(Codec):
    """A codec says which values are sent: see `_chosen`.

    Attributes:
        sent: by the last encoding: at which places, None if at all, and the values as they are decoded.
    """

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._written = FORMS[spec.choice("values")]()
        self._mask: Mask = np.empty(limits.SEGMENT_VALUES_MAX, np.bool_)
        self.sent: tuple[Indices | None, Values] = None, np.empty(0, np.float32)

    @abstractmethod
    def _chosen(self, magnitudes: Bits, number: int, most: int) -> Indices:
        """Ascending indices of values that are not zero: at most `most`, and at most `sparsecodecs.most_kept`.

        Args:
            magnitudes: finite |x|, as bits, in whose order they are.
            number: of the round.
        """

    def encode_rest_into(self, values: Values, out: memoryview, terms: Terms = FIRST) -> int:
        """As `Codec.encode_rest_into`, at the places alone that were sent."""
        length = self.encode_into(values, out, terms)
        _apply(np.subtract, values, *self.sent)
        return length

    def decode_sent_into(self, payload: memoryview, out: Values) -> None:
        """As `Codec.decode_sent_into`, but nothing was decoded."""
        self.decode_into(payload, out)

    def clear_sent(self, values: Values) -> None:
        """As `Codec.clear_sent`."""
        indices, _ = self.sent
        values[slice(None) if indices is None else indices] = 0

    def length_of(self, payload: memoryview, count: int) -> int:
        """From the header. Raises CodecError unless so many bytes are there, and can be those of `count` values."""
        self.bytes_max(count)
        if len(payload) < HEADER.size:
            raise CodecError(f"{self.spec}: {len(payload)} bytes are no header")
        form, kept, index_bytes = HEADER.unpack_from(payload)
        if form == Form.ALL:
            if kept or index_bytes:
                raise CodecError(f"{self.spec}: indices where all values are sent")
            kept = count
        elif kept > count or index_bytes > bitmap_bytes(count):
            raise CodecError(f"{self.spec}: {kept} values with {index_bytes} bytes of indices, of {count}")
        length: int = HEADER.size + index_bytes + self._written.size(kept)
        if length > len(payload):
            raise CodecError(f"{self.spec}: {len(payload)} bytes of a segment of {length}")
        return length

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        self._peak(values.view(np.uint32), bits)
        written, count = self._written, len(values)
        most = count
        if terms.bytes_max is not None:
            most = kept_within(self.spec, count, terms.bytes_max)
        indices = self._chosen(bits, terms.round, most)
        sent = None
        if written.drops_zeros:
            sent = written.quantised(values.take(indices))
            if not sent.all():
                found = sent != 0
                indices, sent = indices.compress(found), sent.compress(found)
        gaps = gaps_between(indices) if gaps_can_be_smaller(len(indices), count) else None
        form, index_bytes = smallest_form(gaps, count) if gaps is not None else (Form.BITMAP, bitmap_bytes(count))
        sent_bytes, all_bytes = written.size(len(indices)), written.size(count)
        if all_bytes <= index_bytes + sent_bytes:
            HEADER.pack_into(out, 0, Form.ALL, 0, 0)
            self.sent = None, written.quantised_into(values, out[HEADER.size : HEADER.size + all_bytes])
            return HEADER.size + all_bytes
        HEADER.pack_into(out, 0, form, len(indices), index_bytes)
        values_at = HEADER.size + index_bytes
        place = out[HEADER.size : values_at]
        if gaps is None or form is Form.BITMAP:
            write_bitmap(indices, count, place)
        else:
            write_gaps(form, gaps, place)
        place = out[values_at : values_at + sent_bytes]
        if sent is None:
            sent = written.quantised_into(values.take(indices), place)
        else:
            written.write(sent, place)
        self.sent = indices, sent
        return values_at + sent_bytes

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        indices, sent = self.read(payload, len(out))
        if indices is None:
            out[:] = sent
        else:
            out.fill(0)
            out[indices] = sent

    def _sum(self, payload: memoryview, values: Values, out: Values) -> None:
        if out is not values:
            np.copyto(out, values)
        _apply(np.add, out, *self.read(payload, len(values)))

    def read(self, payload: memoryview, count: int) -> tuple[Indices | None, Values]:
        """The ascending indices, None if all are sent, and the values there. `payload` has the length that `length_of`
        gives. Raises CodecError."""
        form, kept, index_bytes = HEADER.unpack_from(payload)
        values_at = HEADER.size + index_bytes
        try:
            if form == Form.ALL:
                return None, self._written.read(payload[values_at:], count)
            indices = read_indices(form, payload[HEADER.size : values_at], kept, count)
            return indices, self._written.read(payload[values_at:], kept)
        except CodecError as error:
            raise CodecError(f"{self.spec}: {error}") from None


def _apply(operation: np.ufunc, values: Values, indices: Indices | None, operands: Values) -> None:
    """In place, to the values at `indices` with an operand for each; None is all."""
    if indices is None:
        operation(values, operands, out=values)
    else:
        operation.at(values, indices, operands)  # each comes once
