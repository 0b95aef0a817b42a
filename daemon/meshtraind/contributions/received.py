"""The members' parts of a run of segments, where they meet whole: at a shard's owner, and at everybody in a gather."""

from collections.abc import Sequence

import numpy as np

from meshtraind.codecs.base import CodecError, Values
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
