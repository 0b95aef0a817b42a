"""Means of one run of segments where every member has everybody's part (C2): each adds them up for itself."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.contributions.contribution import OwnContribution
from meshtraind.contributions.received import (
    MemberPart,
    mean_into,
    member_parts,
    payloads_of,
    senders_mean_into,
    squared_norm_by_halves,
)
from meshtraind.contributions.results import Final
from meshtraind.contributions.segments import Segment
from meshtraind.executor.result_slot import ResultSlot
from meshtraind.executor.ring_and_sharded import Arithmetic, ShardedArithmetic
from meshwire.collectives.exchange import Work


class GatherArithmetic(Arithmetic):
    """Sums all parts in the order of ranks and divides once. Whatever one member finds here all find: means, squared
    norms and sums that are not finite, for each is a function of the parts' bytes alone.

    Nothing is encoded, so what is kept of a run are the parts. Whoever opens the slot later adds them up again: keeping
    the means instead would cost 4 bytes a value and round.
    """

    def compute(
        self,
        number: int,
        bucket: int,
        work: Work,
        area: memoryview,
        own: OwnContribution | None,
        slot: ResultSlot | None,
    ) -> Work:
        if work.poison or not work.deliver or not work.contributors:
            return work
        final = self.final(bucket, work, area, own)
        segments, parts = self._parts(final)
        squared_norm = 0.0
        for index, segment in enumerate(segments):
            values = slot.place(segment) if slot is not None else self._sum[: segment.count]
            _mean_into(segment, parts, index, final, values)
            squared_norm += self._squared_norm(values)
        if not math.isfinite(squared_norm):
            self._check(parts, segments)
            return replace(work, poison=True)  # finite parts can have a sum that is not
        return replace(work, squared_norm=squared_norm) if segments[0].measured else work

    def decode(self, final: Final, slot: ResultSlot) -> None:
        segments, parts = self._parts(final)
        for index, segment in enumerate(segments):
            _mean_into(segment, parts, index, final, slot.place(segment))

    def _parts(self, final: Final) -> tuple[Sequence[Segment], Sequence[MemberPart]]:
        segments = self._run(final.bucket, final)
        return segments, member_parts(final.contributors, segments, final.payloads)

    def _payloads(
        self, bucket: int, work: Work, area: memoryview, own: OwnContribution | None
    ) -> tuple[memoryview, ...]:
        return payloads_of(bucket, work, area, own)

    def _squared_norm(self, values: Values) -> float:
        """By halves, for every member computes it: what a BLAS adds up in which order depends on the processor."""
        wide = self._wide[: len(values)]
        np.copyto(wide, values)
        return squared_norm_by_halves(wide)


class AllToAllArithmetic(ShardedArithmetic):
    """Sums all parts in the order of ranks, divides once, and encodes the mean: what a shard's owner does, of every run
    and by everybody, in the same bits."""

    def _squared_norm(self, values: Values) -> float:
        wide = self._wide[: len(values)]
        np.copyto(wide, values)
        return squared_norm_by_halves(wide)


def _mean_into(segment: Segment, parts: Sequence[MemberPart], index: int, final: Final, out: Values) -> None:
    """The mean of a segment, the one at `index` of the run, as its codec asks for it: over all that contributed, or for
    each value over those that sent it."""
    if segment.codec.spec.of_senders:
        senders_mean_into(parts, index, final.weights, out)
    else:
        mean_into(parts, index, final.weight, out)
