"""What this member adds to a round, from the learner's words "bucket ready" until the round is forgotten (M1).

It outlives generations: a round that runs again is given the very bytes that it was given before (G6, C1).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshtraind.codecs.base import FIRST, CodecError, Terms, Values
from meshtraind.contributions.error_feedback import Feedback, Residual
from meshtraind.contributions.momentum import MomentumCorrection, correction_of
from meshtraind.contributions.segments import Segment, Segments
from meshtraind.contributions.terms import RunTerms
from meshwire.codecs.spec import CodecSpec
from meshwire.collectives.exchange import Part
from meshwire.encoded_layout.budget import Budget
from meshwire.model.manifest import Momentum
from meshwire.model.plan import VALUE_BYTES, Plan


class OwnContribution(ABC):
    """This member's part of one round: its gradients times its weight, w*g."""

    area: memoryview | None = None
    """Memory of the daemon's that it takes."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._kept: dict[int, Part] = {}

    def keep(self, bucket: int, raw: Values | None) -> Part:
        """Takes a bucket that has become ready in the raw slot, once; later calls do not look at `raw`.

        Returns DATA, or POISON when a value was found that is not finite (V1).
        """
        part = self._kept.get(bucket)
        if part is None:
            assert raw is not None
            try:
                self._take(bucket, raw)
                part = Part.DATA
            except CodecError:
                part = Part.POISON
            self._kept[bucket] = part
        return part

    @abstractmethod
    def _take(self, bucket: int, raw: Values) -> None:
        """Reads a bucket of the raw slot. Raises CodecError when a value is found that is not finite."""

    def counted(self) -> None:
        """Hears that the round is complete, and that it counts with this part in it."""
        return

    @abstractmethod
    def encoded(self, bucket: int, first_segment: int, segment_count: int) -> memoryview | None:
        """The bytes of a run of segments as they can be sent, if encoding them is done, or changes nothing.

        They stay as they are until every member holds the round.
        """


class HopContribution(OwnContribution):
    """A part that enters a sum at one hop, as values: of codecs whose sums grow from hop to hop."""

    @abstractmethod
    def values(self, segment: Segment) -> Values:
        """What is added to the sum; valid until the next call."""


class InTwoPhases(HopContribution):
    """A part of which a bucket's values follow from the sum of what all have added to its precursor."""

    @abstractmethod
    def second(self, bucket: int) -> Part:
        """Makes a bucket's values, now that the sums of its precursor are here; again when the round runs again, for
        these may be others. Returns DATA, or POISON when a value was found that is not finite (V1)."""


class ZeroCopy(HopContribution):
    """A part that stays in the learner's slot, for s=0: the learner writes the slot again only after the round is
    complete, and so after its successor on the ring has received what was sent from here. Nothing is copied, and what
    only enters a sum is never rounded."""

    _raw: Values

    def _take(self, bucket: int, raw: Values) -> None:
        self._raw = raw

    def values(self, segment: Segment) -> Values:
        return self._raw[segment.start : segment.start + segment.count]

    def encoded(self, bucket: int, first_segment: int, segment_count: int) -> memoryview | None:
        segments = self._segments[bucket][first_segment : first_segment + segment_count]
        if not segments[0].codec.identity:
            return None
        # Encoding changes nothing, and the learner has looked for NaN (V1). Other buckets may be encoded otherwise, so
        # the area is not laid out as the slot is.
        end = segments[-1].start + segments[-1].count
        return self._raw.data.cast("B")[segments[0].start * VALUE_BYTES : end * VALUE_BYTES]


class Retained(HopContribution):
    """A part that is encoded at once, for s>0: the learner writes the slot again while the round is on its way.

    Args:
        area: where it is kept.
        scratch: for the values of one segment; shared by all rounds.
    """

    area: memoryview

    def __init__(self, segments: Segments, area: memoryview, scratch: Values) -> None:
        super().__init__(segments)
        self.area = area
        self._scratch = scratch

    def _take(self, bucket: int, raw: Values) -> None:
        for segment in self._segments[bucket]:
            self._encode(segment, raw)

    def _encode(self, segment: Segment, vector: Values, terms: Terms = FIRST) -> None:
        values = vector[segment.start : segment.start + segment.count]
        segment.codec.encode_into(values, self.area[segment.offset : segment.offset + segment.length], terms)

    def values(self, segment: Segment) -> Values:
        payload = self.area[segment.offset : segment.offset + segment.length]
        if segment.codec.identity:
            return np.frombuffer(payload, np.float32)
        values = self._scratch[: segment.count]
        segment.codec.decode_into(payload, values)
        return values

    def encoded(self, bucket: int, first_segment: int, segment_count: int) -> memoryview | None:
        segments = self._segments[bucket][first_segment : first_segment + segment_count]
        return self.area[segments[0].offset : segments[-1].offset + segments[-1].length]


@dataclass(frozen=True)
class Compensation:
    """What every part of a member is encoded with, where parts meet whole or are added encoded.

    Attributes:
        seed: of the job and this member, for codecs that draw.
        residual: the worker's; None if no codec has error feedback.
        budget: None for a codec without.
        correction: None for a codec that does not take momentum over.
    """

    seed: int
    residual: Residual | None
    budget: Budget | None
    correction: MomentumCorrection | None


def compensation_of(
    seed: int, codec: CodecSpec, plan: Plan, budget: Budget | None, feedback: Feedback | None, momentum: Momentum | None
) -> Compensation:
    """What the parts of a job with this codec are encoded with; `momentum` is what the codec takes over from the
    optimizer."""
    residual = feedback.worker if feedback is not None else None
    return Compensation(seed, residual, budget, correction_of(codec, momentum, feedback, plan))


class WithErrorFeedback(OwnContribution):
    """A part that is encoded at once, whatever s is, where parts meet whole: with what earlier rounds left out, for
    what this one leaves out enters the next. A bucket's segments lie back to back, so any run of them can be sent as it
    lies.

    Args:
        number: of the round.
        members: of the generation in which its encoding begins.

    Attributes:
        weight: of this member in the round.
    """

    area: memoryview

    def __init__(
        self,
        segments: Segments,
        area: memoryview,
        number: int,
        compensation: Compensation,
        weight: float,
        members: int,
    ) -> None:
        super().__init__(segments)
        self.area = area
        self._number = number
        self._residual = compensation.residual
        self._correction = compensation.correction
        self.weight = weight
        self._members = members
        self._terms = RunTerms(compensation.seed, number, compensation.budget)
        self._ends: dict[int, list[int]] = {}  # by bucket: where its segments begin in the area, and the last one ends

    def _take(self, bucket: int, raw: Values) -> None:
        segments = self._segments[bucket]
        start, count = segments[0].start, segments[-1].start + segments[-1].count - segments[0].start
        gradient = raw[start : start + count]
        if self._residual is None or not segments[0].codec.error_feedback:
            self._ends[bucket] = self._encode_run(segments, gradient, None, owed=False)
            return
        self._residual.lay_out((start, count))
        values = self._residual.begin(self._number, start, count, self.weight)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # found when it is encoded
                if self._correction is None:
                    np.add(values, gradient, out=values)
                    velocity = None
                else:
                    velocity = self._correction.accumulate(
                        self._number, bucket, values, gradient, self.weight, self._members
                    )
            self._ends[bucket] = self._encode_run(segments, values, velocity, owed=True)
        except CodecError:
            self._residual.cancel(self._number, start)
            if self._correction is not None:
                self._correction.velocity.cancel(self._number, start)
            raise

    def _encode_run(
        self, segments: Sequence[Segment], values: Values, velocity: Values | None, *, owed: bool
    ) -> list[int]:
        """Encodes a bucket's segments back to back, and returns where they begin, and where the last one ends.

        Args:
            values: of the bucket. What is not sent of them stays there if it is `owed`.
            velocity: of the bucket; what has moved a value that is sent is cleared.
        """
        start, at = segments[0].start, segments[0].offset
        ends = [at]
        for segment in segments:
            run = slice(segment.start - start, segment.start - start + segment.count)
            codec, place, terms = segment.codec, self.area[at : at + segment.length], self._terms.of(segment)
            length = (codec.encode_rest_into if owed else codec.encode_into)(values[run], place, terms)
            if terms.bytes_max is not None:
                self._terms.spend(length)
            if velocity is not None:
                codec.clear_sent(velocity[run])
            at += length
            ends.append(at)
        return ends

    def encoded(self, bucket: int, first_segment: int, segment_count: int) -> memoryview:
        ends = self._ends[bucket]
        return self.area[ends[first_segment] : ends[first_segment + segment_count]]
