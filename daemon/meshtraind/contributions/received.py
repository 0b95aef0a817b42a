"""The members' parts of a run of segments, where they meet whole: at a shard's owner, and at everybody in a gather."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import CodecError, Values
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.sparse import SparseCodec
from meshtraind.contributions.contribution import OwnContribution
from meshtraind.contributions.segments import Segment, each_payload
from meshwire.collectives.exchange import Work


class BrokenPartError(CodecError):
    """A member's part is broken.

    Attributes:
        rank: the member's.
    """

    def __init__(self, rank: int, error: CodecError) -> None:
        super().__init__(f"the part of rank {rank}: {error}")
        self.rank = rank


class MemberPart:
    """One member's part of a run, read segment by segment. Every method raises BrokenPartError when it is broken."""

    def __init__(self, rank: int, segments: Sequence[Segment], run: memoryview) -> None:
        self._rank = rank
        try:
            self._payloads = list(each_payload(segments, run))
        except CodecError as error:
            raise self._broken(error) from None

    def decode_into(self, index: int, out: Values) -> None:
        """Writes the values of the segment at `index` of the run."""
        segment, payload = self._payloads[index]
        try:
            segment.codec.decode_into(payload, out)
        except CodecError as error:
            raise self._broken(error) from None

    def add_to(self, index: int, total: Values) -> None:
        """Adds the values of the segment at `index` to `total`."""
        segment, payload = self._payloads[index]
        try:
            segment.codec.sum_into(payload, total, total)
        except CodecError as error:
            raise self._broken(error) from None

    def sent(self, index: int) -> tuple[Indices | None, Values]:
        """Where in the segment at `index` this member has sent values, ascending, None if everywhere; and the values.
        Of a codec whose segments say so."""
        segment, payload = self._payloads[index]
        assert isinstance(segment.codec, SparseCodec)
        try:
            return segment.codec.read(payload, segment.count)
        except CodecError as error:
            raise self._broken(error) from None

    def check(self, index: int, scratch: Values) -> None:
        """Looks for what no encoder makes, which `add_to` may have added in silence."""
        self.decode_into(index, scratch)

    def _broken(self, error: CodecError) -> BrokenPartError:
        return BrokenPartError(self._rank, error)


def member_parts(bitmap: int, segments: Sequence[Segment], payloads: Sequence[memoryview]) -> list[MemberPart]:
    """The parts of the contributors in `bitmap`, whose bytes are `payloads`, in the order of ranks. Raises
    BrokenPartError."""
    ranks = [rank for rank in range(bitmap.bit_length()) if bitmap >> rank & 1]
    return [MemberPart(rank, segments, payload) for rank, payload in zip(ranks, payloads, strict=True)]


def payloads_of(bucket: int, work: Work, area: memoryview, own: OwnContribution | None) -> tuple[memoryview, ...]:
    """The bytes of all contributors' parts of a run, in the order of ranks."""
    return tuple(
        _own_payload(own, bucket, work) if place is None else area[place[0] : place[0] + place[1]]
        for place in work.parts
    )


def _own_payload(own: OwnContribution | None, bucket: int, work: Work) -> memoryview:
    assert own is not None
    payload = own.encoded(bucket, work.first_segment, work.segment_count)
    assert payload is not None
    return payload


def mean_into(parts: Sequence[MemberPart], index: int, weight: float, out: Values) -> None:
    """The mean of a segment: the parts are added in their order, and divided once by the weight (W3). A sum may
    overflow in silence, for whoever goes on with it looks. Raises BrokenPartError."""
    parts[0].decode_into(index, out)
    for part in parts[1:]:
        part.add_to(index, out)
    with np.errstate(over="ignore", invalid="ignore"):
        np.divide(out, np.float32(weight), out=out)


def senders_mean_into(parts: Sequence[MemberPart], index: int, weights: Sequence[float], out: Values) -> None:
    """The mean of a segment, each value's over those alone that sent it, and 0 where nobody did (SparseLoCo): who sent
    nothing there does not pull it to zero. A part whose values have a larger norm than the median of those that sent
    anything (the lower one of two) is scaled down to that. Parts are added in their order (W3), and in the same bits by
    all members.

    A sum may overflow in silence, for whoever goes on with it looks. Raises BrokenPartError.

    Args:
        weights: of the parts, which are w*g.
    """
    every = [part.sent(index) for part in parts]
    norms = [
        math.sqrt(squared_norm_by_halves(values.astype(np.float64))) / weight
        for (_, values), weight in zip(every, weights, strict=True)
    ]
    told = sorted(norm for norm in norms if norm) or [0.0]  # who has nothing here says nothing of how much is usual
    median = told[(len(told) - 1) // 2]
    of_senders = np.zeros(len(out), np.float64)
    out.fill(0)
    with np.errstate(over="ignore", invalid="ignore"):
        for (indices, values), norm, weight in zip(every, norms, weights, strict=True):
            places = slice(None) if indices is None else indices
            out[places] += values * np.float32(median / norm) if norm > median else values
            of_senders[places] += weight
        sent = of_senders > 0
        np.divide(out, of_senders.astype(np.float32), out=out, where=sent)


def squared_norm_by_halves(wide: NDArray[np.float64]) -> float:
    """Of values that are overwritten. In one order on all machines, while a BLAS's depends on the processor."""
    np.multiply(wide, wide, out=wide)
    while len(wide) > 1:
        left = len(wide) // 2
        wide[:left] += wide[-left:]
        wide = wide[: len(wide) - left]
    return float(wide.sum())
