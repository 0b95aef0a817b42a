"""randomk: values at places that follow from a seed, one in each of as many equal strata, at a random distance.

The seed travels instead of the indices. Senders that share it send the same places, and so does the sum of theirs. All
places are equally likely; the values are not scaled up, for error feedback sends later what is left out now.
"""

import struct
from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import FIRST, Bits, Codec, CodecError, Terms, Values
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.kept_values import FORMS
from meshtraind.codecs.mixing import mixed
from meshwire.codecs.registry import CodecSpec
from meshwire.codecs.sparsifiers import SEED_BYTES, most_kept

SEED = struct.Struct("<Q")
assert SEED.size == SEED_BYTES


class DrawnCodec(Codec):
    """Values at places that are drawn; all others are decoded as 0."""

    draws = True
    shared_draws = True

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._draws = Draws()

    def decode_sent_into(self, payload: memoryview, out: Values) -> None:
        """As `Codec.decode_sent_into`, but nothing was decoded."""
        self.decode_into(payload, out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        places, sent = self._read(payload, len(out))
        out.fill(0)
        out[places] = sent

    def _sum(self, payload: memoryview, values: Values, out: Values) -> None:
        if out is not values:
            np.copyto(out, values)
        places, sent = self._read(payload, len(values))
        np.add.at(out, places, sent)  # each comes once

    @abstractmethod
    def _read(self, payload: memoryview, count: int) -> tuple[Indices, Values]:
        """The places, each once, and the values there. The length is checked. Raises CodecError."""


class RandomK(DrawnCodec):
    """Leaves 1 - ratio of the segment's squared norm in expectation, besides what the written values lose."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._written = FORMS[spec.choice("values")]()
        self._sent = np.empty(0, np.intp), np.empty(0, np.float32)  # places and values, by the last encoding

    def encode_rest_into(self, values: Values, out: memoryview, terms: Terms = FIRST) -> int:
        """As `Codec.encode_rest_into`, at the places alone that were sent."""
        length = self.encode_into(values, out, terms)
        places, sent = self._sent
        np.subtract.at(values, places, sent)  # each comes once
        return length

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        self._peak(values.view(np.uint32), bits)
        SEED.pack_into(out, 0, terms.seed)
        places = self._draws.places(terms.seed, most_kept(self.spec, len(values)), len(values))
        self._sent = places, self._written.quantised_into(values.take(places), out[SEED.size :])
        return len(out)

    def _read(self, payload: memoryview, count: int) -> tuple[Indices, Values]:
        (seed,) = SEED.unpack_from(payload)
        kept = most_kept(self.spec, count)
        try:
            sent = self._written.read(payload[SEED.size :], kept)
        except CodecError as error:
            raise CodecError(f"{self.spec}: {error}") from None
        return self._draws.places(seed, kept, count), sent


class Strata:
    """`kept` runs of neighbours among `count` values, as equal in length as can be: in each, one place is drawn."""

    def __init__(self, kept: int, count: int) -> None:
        self.key = kept, count
        self._numbers = np.arange(kept + 1, dtype=np.uint64)
        bounds = self._numbers * np.uint64(count) // np.uint64(max(kept, 1))
        self._firsts = bounds[:-1]
        self._widths = bounds[1:] - bounds[:-1]

    def drawn(self, seed: int) -> Indices:
        """Different places, each as likely as any. On every machine the same."""
        _, count = self.key
        if not count:
            return np.empty(0, np.intp)
        draws = mixed(seed, self._numbers)
        np.right_shift(draws, np.uint64(32), out=draws)
        # Strata differ in width by one. Turning all by the same random distance makes all places equally likely.
        turn = (draws[-1] * np.uint64(count)) >> np.uint64(32)
        places: NDArray[np.uint64] = draws[:-1]
        np.multiply(places, self._widths, out=places)
        np.right_shift(places, np.uint64(32), out=places)
        np.add(places, self._firsts, out=places)
        np.add(places, turn, out=places)
        np.minimum(places, places - np.uint64(count), out=places)  # below 0 is beyond all others
        return places.view(np.int64).astype(np.intp, copy=False)


class Draws:
    """The places that one codec draws. The last ones are kept: all members of a round draw the same, and their parts
    of a segment are read one behind the other."""

    def __init__(self) -> None:
        self._strata = Strata(0, 0)
        self._seed: int | None = None
        self._places: Indices = np.empty(0, np.intp)

    def places(self, seed: int, kept: int, count: int) -> Indices:
        """`kept` places in [0, count), only to be read."""
        if self._strata.key != (kept, count):
            self._strata, self._seed = Strata(kept, count), None
        if self._seed != seed:
            self._places, self._seed = self._strata.drawn(seed), seed
        return self._places


def drawn_places(seed: int, kept: int, count: int) -> Indices:
    """`kept` different places in [0, count), in the order of their strata. On every machine the same."""
    return Strata(kept, count).drawn(seed)
