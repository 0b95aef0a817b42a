"""Sums of segments that are added encoded, round the ring; the values are found once, in the final bytes, by everybody.

A segment in whose sum they cannot be told has a mean of zero: all find that in the same bytes.
"""

from dataclasses import replace

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshtraind.codecs.homomorphic import Homomorphic
from meshtraind.contributions.contribution import OwnContribution
from meshtraind.contributions.results import Final
from meshtraind.contributions.segments import Segment, each_payload
from meshtraind.contributions.sketch import SketchPart
from meshtraind.executor.result_slot import ResultSlot
from meshtraind.executor.ring_and_sharded import HopArithmetic, check_norm
from meshwire import limits
from meshwire.collectives.exchange import Work


class SketchArithmetic(HopArithmetic):
    """As the ring's, which float buffers are left to. Of what it finds it tells the own part."""

    def compute(
        self,
        number: int,
        bucket: int,
        work: Work,
        area: memoryview,
        own: OwnContribution | None,
        slot: ResultSlot | None,
    ) -> Work:
        segments = self._run(bucket, work)
        if not isinstance(segments[0].codec, Homomorphic):
            return super().compute(number, bucket, work, area, own, slot)
        if work.poison or not work.contributors:
            return work
        squared_norm = 0.0
        for segment in segments:
            encoded = area[segment.offset : segment.offset + segment.length]
            if work.add_own:
                assert isinstance(own, SketchPart)
                _add(segment, own.payload(segment), encoded, incoming=work.incoming)
            if work.deliver:
                values = slot.place(segment) if slot is not None else self._sum[: segment.count]
                _mean_into(segment, encoded, work.weight, own, values)
                squared_norm += self._squared_norm(values) if segment.measured else 0.0
            elif work.incoming:
                _check(segment, encoded)
        if work.deliver and not work.finish:
            check_norm(work.squared_norm, squared_norm)
        return replace(work, squared_norm=squared_norm) if work.finish else work

    def decode(self, final: Final, slot: ResultSlot) -> None:
        (payload,) = final.payloads
        segments = self._run(final.bucket, final)
        if not isinstance(segments[0].codec, Homomorphic):
            super().decode(final, slot)
            return
        for segment, each in each_payload(segments, payload):
            _mean_into(segment, each, final.weight, None, slot.place(segment))

    def served(self, final: Final, own: OwnContribution | None) -> None:
        segments = self._run(final.bucket, final)
        if own is None or final.void or not isinstance(segments[0].codec, Homomorphic):
            return
        (payload,) = final.payloads
        for segment, each in each_payload(segments, payload):
            _mean_into(segment, each, final.weight, own, self._sum[: segment.count])


def _check(segment: Segment, payload: memoryview) -> None:
    assert isinstance(segment.codec, Homomorphic)
    segment.codec.check_places(payload, segment.count)


def _add(segment: Segment, payload: memoryview, total: memoryview, *, incoming: bool) -> None:
    assert isinstance(segment.codec, Homomorphic)
    if incoming:
        segment.codec.add_encoded(payload, total, segment.count)
    else:
        total[:] = payload


def _mean_into(segment: Segment, payload: memoryview, weight: float, own: OwnContribution | None, out: Values) -> None:
    assert isinstance(segment.codec, Homomorphic)
    found = segment.codec.recover_into(payload, out)
    if weight < limits.WEIGHT_MIN:
        raise CodecError(f"a sum of weight {weight}; the least is {limits.WEIGHT_MIN}")
    np.divide(out, np.float32(weight), out=out)
    if isinstance(own, SketchPart):
        own.found(segment, found)
