"""Sums, means and squared norms of one run of segments: what is computed when a chunk has arrived or is to leave."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshtraind.contributions.contribution import HopContribution, OwnContribution, WithErrorFeedback
from meshtraind.contributions.error_feedback import Feedback
from meshtraind.contributions.received import BrokenPartError, MemberPart, mean_into, member_parts, payloads_of
from meshtraind.contributions.results import Final
from meshtraind.contributions.segments import Segment, each_payload
from meshtraind.contributions.terms import RunTerms
from meshtraind.executor.result_slot import ResultSlot
from meshwire.collectives.exchange import Work
from meshwire.encoded_layout.budget import Budget

SQUARES_TOLERANCE = 1e-3  # of sums of squares in fp32: the bound for 64 Ki values in 32 lanes is 1.2e-4
SQUARES_LEAST = 1e-30  # below it nothing is clipped
SQUARES_FP32_MIN, SQUARES_FP32_MAX = 1e-20, 1e30  # where squares neither vanish nor overflow


class Arithmetic(ABC):
    """Scratch memory for one run at a time; use it from one thread.

    Args:
        segments: by bucket.
        segment_values: of the longest segment.
    """

    def __init__(self, segments: Sequence[Sequence[Segment]], segment_values: int) -> None:
        self._segments = segments
        self._sum: Values = np.empty(segment_values, np.float32)
        self._wide = np.empty(segment_values, np.float64)

    @abstractmethod
    def compute(
        self,
        number: int,
        bucket: int,
        work: Work,
        area: memoryview,
        own: OwnContribution | None,
        slot: ResultSlot | None,
    ) -> Work:
        """Does what `work` says of a run, all but the sending.

        Args:
            number: of the round.
            area: the round's.
            own: of this member; looked at if `work.add_own`.
            slot: where final values are decoded to; None: they are not, now.

        Returns the work with its length and squared norm, if it is finished here, or poisoned, if a sum turned out not
        to be finite (V1). Raises CodecError when the payload that has arrived was broken.
        """

    def served(self, final: Final, own: OwnContribution | None) -> None:
        """A run of a round has come from a member that holds it; `own` may be in it. Raises CodecError."""
        for payload in final.payloads:
            for segment, each in each_payload(self._run(final.bucket, final), payload):
                segment.codec.decode_into(each, self._sum[: segment.count])

    def final(self, bucket: int, work: Work, area: memoryview, own: OwnContribution | None) -> Final:
        """Where the bytes lie of a run that is final."""
        void = work.poison or not work.contributors
        payloads = () if void else self._payloads(bucket, work, area, own)
        run = work.first_segment, work.segment_count
        return Final(bucket, *run, payloads, work.contributors, work.weight, work.weights)

    def _payloads(
        self, bucket: int, work: Work, area: memoryview, own: OwnContribution | None
    ) -> tuple[memoryview, ...]:
        offset = self._segments[bucket][work.first_segment].offset
        return (area[offset : offset + work.length_bytes],)

    def decode(self, final: Final, slot: ResultSlot) -> None:
        """Puts the values of a run that is final, and not void, into the slot. Raises CodecError when its bytes, of a
        round that was served, are broken."""
        (payload,) = final.payloads
        for segment, each in each_payload(self._run(final.bucket, final), payload):
            segment.codec.decode_into(each, slot.place(segment))

    def _check(self, parts: Sequence[MemberPart], segments: Sequence[Segment]) -> None:
        """A sum is not finite: raises BrokenPartError if a part was not."""
        for part in parts:
            for index, segment in enumerate(segments):
                part.check(index, self._sum[: segment.count])

    def _take_final(self, bucket: int, work: Work, payload: memoryview, slot: ResultSlot | None) -> None:
        """A run that another has finished is checked before it is passed on or kept: finite, and of the squared norm
        that is said of it (O4). It is decoded to its place, if there is a slot. Raises CodecError."""
        squared_norm = 0.0
        for segment, each in each_payload(self._run(bucket, work), payload):
            values = slot.place(segment) if slot is not None else self._sum[: segment.count]
            if slot is None and segment.codec.identity and finite(np.frombuffer(each, np.float32)):
                values = np.frombuffer(each, np.float32)  # they need not be copied to be looked at
            else:
                segment.codec.decode_into(each, values)
            if segment.measured:
                squared_norm += self._about_squared_norm(values, work.squared_norm)
        check_norm(work.squared_norm, squared_norm)

    def _about_squared_norm(self, values: Values, of_run: float) -> float:
        """In fp32, which a BLAS does in one pass; in float64 where that may be zero or infinite."""
        if SQUARES_FP32_MIN < of_run < SQUARES_FP32_MAX:
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                return float(np.dot(values, values))
        return self._squared_norm(values)

    def _run(self, bucket: int, run: Work | Final) -> Sequence[Segment]:
        return self._segments[bucket][run.first_segment : run.first_segment + run.segment_count]

    def _squared_norm(self, values: Values) -> float:
        """In float64: fp32 would lose digits over so many, and overflow."""
        wide = self._wide[: len(values)]
        np.copyto(wide, values)
        return float(np.dot(wide, wide))


def finite(values: Values) -> bool:
    """In one pass. False, too, where their squares are beyond fp32."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return math.isfinite(np.dot(values, values))


def check_norm(told: float, found: float) -> None:
    """O4: raises CodecError where the squared norm of a final run is not what its values give. Sums of squares in fp32
    are as near as this; what lies between is as harmless as a value that is a little wrong."""
    if not math.isclose(told, found, rel_tol=SQUARES_TOLERANCE, abs_tol=SQUARES_LEAST):
        raise CodecError(f"values with the squared norm {found:.6g}, of which {told:.6g} was said (O4)")


class HopArithmetic(Arithmetic):
    """Adds the own part to the sums that come to it, and encodes that anew, in its place: on a ring one sum, in a tree
    each child's.

    Args:
        seed: of the job and this member, for codecs that draw.
        built_on: later rounds are computed from the final bytes of these, which are read when they come.
    """

    def __init__(
        self, segments: Sequence[Sequence[Segment]], segment_values: int, seed: int, *, built_on: bool = False
    ) -> None:
        super().__init__(segments, segment_values)
        self._seed = seed
        self._built_on = built_on

    def compute(
        self,
        number: int,
        bucket: int,
        work: Work,
        area: memoryview,
        own: OwnContribution | None,
        slot: ResultSlot | None,
    ) -> Work:
        if work.poison or not (work.add_own or work.incoming or work.parts):
            return work
        if work.deliver and not work.finish:
            offset = self._segments[bucket][work.first_segment].offset
            self._take_final(bucket, work, area[offset : offset + work.length_bytes], slot)
            return work
        opened = slot if work.deliver else None
        run_terms = RunTerms(self._seed ^ work.contributors, number, None)  # a sum may come by again, with more in it
        squared_norm = 0.0
        for segment in self._run(bucket, work):
            codec = segment.codec
            encoded = area[segment.offset : segment.offset + segment.length]
            total = scratch = self._sum[: segment.count]
            if work.add_own or work.finish or work.parts:
                if work.add_own:
                    assert isinstance(own, HopContribution)
                    if work.incoming:
                        codec.sum_into(encoded, own.values(segment), total)
                    else:
                        total = own.values(segment)
                elif work.incoming:
                    codec.decode_into(encoded, total)
                if work.parts:
                    total = self._add_others(bucket, work, area, segment, total, scratch)
                if work.finish:
                    with np.errstate(over="ignore", invalid="ignore"):  # found when it is encoded
                        total = np.divide(total, np.float32(work.weight), out=self._sum[: segment.count])
                try:
                    codec.encode_into(total, encoded, run_terms.of(segment))
                except CodecError:
                    if work.parts:
                        self._blame(bucket, work, area, segment)
                    elif work.incoming:
                        codec.decode_into(encoded, self._sum[: segment.count])  # raises if the payload was broken
                    return replace(work, poison=True)  # finite parts can have a sum that is not
            elif not work.deliver:
                codec.decode_into(encoded, self._sum[: segment.count])  # it only forwards: raises if it was broken
            measured = work.finish and segment.measured
            if opened is not None or measured or (self._built_on and work.deliver):
                values = opened.place(segment) if opened is not None else self._sum[: segment.count]
                codec.decode_into(encoded, values)
                if measured:
                    squared_norm += self._squared_norm(values)
        return replace(work, squared_norm=squared_norm) if work.finish else work

    def _add_others(
        self, bucket: int, work: Work, area: memoryview, segment: Segment, total: Values, out: Values
    ) -> Values:
        """Adds the sums that lie beside the vector, in their order, and returns `out`.

        Args:
            total: all before them, if there is any; `out` itself, or values that are somebody else's.
        """
        alone = not (work.add_own or work.incoming)
        for payload in self._others(bucket, work, area, segment):
            if alone:
                segment.codec.decode_into(payload, out)
                alone = False
            else:
                segment.codec.sum_into(payload, total, out)
            total = out
        return total

    def _others(self, bucket: int, work: Work, area: memoryview, segment: Segment) -> list[memoryview]:
        """A segment's bytes in each of the sums that lie beside the vector."""
        at = segment.offset - self._segments[bucket][work.first_segment].offset
        places = [place for place in work.parts if place is not None]  # no own part here: that is `work.add_own`
        return [area[offset + at : offset + at + segment.length] for offset, _ in places]

    def _blame(self, bucket: int, work: Work, area: memoryview, segment: Segment) -> None:
        """A sum is not finite: raises BrokenPartError if one that came was not."""
        payloads = self._others(bucket, work, area, segment)
        if work.incoming:
            payloads.insert(0, area[segment.offset : segment.offset + segment.length])
        for rank, payload in zip(work.senders, payloads, strict=True):
            try:
                segment.codec.decode_into(payload, self._sum[: segment.count])
            except CodecError as error:
                raise BrokenPartError(rank, error) from None


class ShardedArithmetic(Arithmetic):
    """Sums all members' parts of a run that this one owns, and encodes their mean once.

    Args:
        seed: of the job and this owner, for codecs that draw.
        feedback: None for a codec without.
        budget: None for a codec without.
    """

    def __init__(
        self,
        segments: Sequence[Sequence[Segment]],
        segment_values: int,
        seed: int,
        feedback: Feedback | None,
        budget: Budget | None,
    ) -> None:
        super().__init__(segments, segment_values)
        self._seed = seed
        self._feedback = feedback
        self._budget = budget

    def compute(
        self,
        number: int,
        bucket: int,
        work: Work,
        area: memoryview,
        own: OwnContribution | None,
        slot: ResultSlot | None,
    ) -> Work:
        if work.poison or not work.contributors:
            return work
        segments = self._run(bucket, work)
        if work.finish:
            parts = member_parts(work.contributors, segments, payloads_of(bucket, work, area, own))
            mean_weight = work.weight / work.contributors.bit_count()
            own_weight = own.weight if isinstance(own, WithErrorFeedback) else mean_weight
            return self._finish(number, bucket, work, area, segments, parts, own_weight, slot)
        if work.deliver:
            (payload,) = self._payloads(bucket, work, area, own)
            self._take_final(bucket, work, payload, slot)
        return work

    def _finish(
        self,
        number: int,
        bucket: int,
        work: Work,
        area: memoryview,
        segments: Sequence[Segment],
        parts: Sequence[MemberPart],
        own_weight: float,
        slot: ResultSlot | None,
    ) -> Work:
        start, last = segments[0].start, segments[-1]
        owed = None
        if self._feedback is not None and segments[0].codec.error_feedback:
            of_bucket = self._segments[bucket]
            of = of_bucket[0].start, of_bucket[-1].start + of_bucket[-1].count - of_bucket[0].start
            count = last.start + last.count - start
            owed = self._feedback.finish(number, of, start, count, work.weight, own_weight)
        squared_norm = 0.0
        run_terms = RunTerms(self._seed, number, self._budget)
        at = first = segments[0].offset
        for index, segment in enumerate(segments):
            total = self._sum[: segment.count]
            mean_into(parts, index, work.weight, total)
            place = area[at : at + segment.length]
            terms = run_terms.of(segment)
            try:
                if owed is None:
                    length = segment.codec.encode_into(total, place, terms)
                else:
                    rest = owed[segment.start - start : segment.start - start + segment.count]
                    with np.errstate(over="ignore", invalid="ignore"):
                        np.add(rest, total, out=rest)
                    length = segment.codec.encode_rest_into(rest, place, terms)
            except CodecError:  # finite parts can have a sum that is not
                if self._feedback is not None and owed is not None:
                    self._feedback.owner.cancel(number, start)
                self._check(parts, segments)
                return replace(work, poison=True)
            if slot is not None or segment.measured:
                values = slot.place(segment) if slot is not None else total
                if owed is None:
                    segment.codec.decode_into(area[at : at + length], values)
                else:
                    segment.codec.decode_sent_into(area[at : at + length], values)
                squared_norm += self._squared_norm(values) if segment.measured else 0.0
            if terms.bytes_max is not None:
                run_terms.spend(length)
            at += length
        return replace(work, length_bytes=at - first, squared_norm=squared_norm)
