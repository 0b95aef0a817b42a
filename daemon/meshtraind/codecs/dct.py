"""dct: of each chunk of 4096 values, taken as 64 rows of 64, the largest coefficients of its cosine transform (DeMo).

DeMo cuts every tensor into chunks of its own rows and columns; here a segment is cut as it lies in the vector, which
needs no shapes. What is not a whole chunk at its end is cut into smaller squares.

What stays behind stays finite: of values at the end of fp32 a sum of few cosines may have the other sign, and then what
lies beyond the largest number becomes that.

What is decoded has lost a few roundings besides the coefficients that were not sent: with all of them as fp32 it is
within 1e-6 of the segment's norm. What stays behind is the values minus what is decoded, in fp32, so that conservation
(P1) holds up to half a last bit of the larger of the two, each time.
"""

import numpy as np

from meshtraind.codecs.base import FIRST, Bits, Codec, Terms, Values
from meshtraind.codecs.cosines import LARGEST_FP32, Cosines
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.selection import largest_of_each
from meshtraind.codecs.sparse import SparseCodec
from meshwire import limits
from meshwire.codecs.registry import CodecSpec
from meshwire.codecs.sparsifiers import CHUNK_SIDE, square_chunks

# A chunk's norm, and so what is decoded of it, is at most CHUNK_SIDE peaks.
LARGEST_SAFE = LARGEST_FP32 / (CHUNK_SIDE + 2)


class Dct(Codec):
    """Leaves at most 1 - coefficients/4096 of each chunk's squared norm, besides what the written values lose."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._chooser = _LargestOfChunks(spec)
        self._cosines = Cosines()
        self._spectrum: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)
        self._peak_sent = 0.0  # of the values that were encoded last

    def encode_rest_into(self, values: Values, out: memoryview, terms: Terms = FIRST) -> int:
        """As `Codec.encode_rest_into`; a rest beyond the largest number becomes that."""
        length = self.encode_into(values, out, terms)
        decoded = self._rest[: len(values)]
        self._back(*self._chooser.sent, decoded, self._bits)
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(values, decoded, out=values)
        if self._peak_sent > LARGEST_SAFE:
            np.clip(values, -LARGEST_FP32, LARGEST_FP32, out=values)
        return length

    def decode_sent_into(self, payload: memoryview, out: Values) -> None:
        """As `Codec.decode_sent_into`, but nothing was decoded."""
        self.decode_into(payload, out)

    def length_of(self, payload: memoryview, count: int) -> int:
        """As `SparseCodec.length_of`."""
        return self._chooser.length_of(payload, count)

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        spectrum = self._spectrum[: len(values)]
        self._peak_sent = self._peak(values.view(np.uint32), bits)
        self._cosines.forward(values, self._peak_sent, spectrum)
        return self._chooser.encode_into(spectrum, out, terms)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        self._back(*self._chooser.read(payload, len(out)), out, bits)

    def _back(self, places: Indices | None, coefficients: Values, out: Values, bits: Bits) -> None:
        """The values of coefficients at these places, None if at all."""
        if places is None:
            places = np.arange(len(out))
        peak = self._peak(coefficients.view(np.uint32), bits[: len(coefficients)])
        self._cosines.inverse(places, coefficients, peak, out)


class _LargestOfChunks(SparseCodec):
    """Of coefficients."""

    def _chosen(self, magnitudes: Bits, number: int, most: int) -> Indices:
        found = [np.empty(0, np.intp)]
        for start, side, squares in square_chunks(len(magnitudes)):
            rows = magnitudes[start : start + squares * side * side].reshape(squares, side * side)
            wanted = min(int(self.spec.number("coefficients")), side * side)
            found.append(largest_of_each(rows, wanted, self._mask) + start)
        return np.concatenate(found)
