"""cocktail: the largest magnitudes among values at random places, in 4 bits (CocktailSGD).

All members draw the same places in a round, as with randomk, so that no indices travel for them; what top-k then sends
has indices among those places alone, which are cheaper. Error feedback at both sides brings every value to its turn.
"""

import numpy as np

from meshtraind.codecs.base import FIRST, Bits, CodecError, Terms, Values
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.randomk import SEED, DrawnCodec
from meshtraind.codecs.topk import TopK
from meshwire.codecs.registry import CodecSpec
from meshwire.codecs.sparsifiers import masked_values, of_masked


class Cocktail(DrawnCodec):
    """Leaves at most 1 - mask * ratio of the segment's squared norm in expectation, besides what the values lose."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._chooser = TopK(of_masked(spec))

    def encode_rest_into(self, values: Values, out: memoryview, terms: Terms = FIRST) -> int:
        """As `Codec.encode_rest_into`, at the places alone that were drawn."""
        self._peak(values.view(np.uint32), self._bits[: len(values)])
        most = self.bytes_max(len(values))
        places = self._places(terms.seed, len(values))
        rest = values.take(places)
        SEED.pack_into(out, 0, terms.seed)
        length = self._chooser.encode_rest_into(rest, out[SEED.size : most], terms)
        values[places] = rest
        return SEED.size + length

    def length_of(self, payload: memoryview, count: int) -> int:
        """From the header behind the seed. Raises CodecError as `SparseCodec.length_of` does."""
        self.bytes_max(count)
        try:
            return SEED.size + self._chooser.length_of(payload[SEED.size :], masked_values(self.spec, count))
        except CodecError as error:
            raise self._named(error) from None

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        self._peak(values.view(np.uint32), bits)
        SEED.pack_into(out, 0, terms.seed)
        masked = values.take(self._places(terms.seed, len(values)))
        return SEED.size + self._chooser.encode_into(masked, out[SEED.size :], terms)

    def _read(self, payload: memoryview, count: int) -> tuple[Indices, Values]:
        (seed,) = SEED.unpack_from(payload)
        places = self._places(seed, count)
        masked = np.empty(len(places), np.float32)
        try:
            self._chooser.decode_into(payload[SEED.size :], masked)
        except CodecError as error:
            raise self._named(error) from None
        return places, masked

    def _places(self, seed: int, count: int) -> Indices:
        return self._draws.places(seed, masked_values(self.spec, count), count)

    def _named(self, error: CodecError) -> CodecError:
        return CodecError(f"{self.spec}: under the mask, {error}")
