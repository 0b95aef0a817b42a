"""A contribution is what the same formulas give for whole vectors, bit for bit."""

import numpy as np
import pytest

from meshtraind.codecs.base import Terms
from meshtraind.contributions.contribution import WithErrorFeedback, compensation_of
from meshtraind.contributions.error_feedback import feedback_of
from meshtraind.contributions.seeds import segment_seed
from meshtraind.contributions.segments import RoundForms
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.exchange import Part
from meshwire.model.manifest import ModelManifest, Momentum, TensorSpec
from meshwire.model.plan import plan_buckets
from tests.daemon.codectrips import Values, heavy

MANIFEST = ModelManifest(
    tensors=tuple(
        TensorSpec(name=f"tensor{index}", shape=shape, dtype="float32", kind="parameter")
        for index, shape in enumerate(((700, 300), (40, 50)))
    ),
    optimizer="SGD",
)
FACTOR = 0.5
WEIGHTS = (2.0, 2.0, 64.0, 1.0, 1.0)
SEED = 7
BROKEN = 3  # of the rounds: a value of its last segment is not finite


class Worker:
    """One member's parts, and beside them the same for whole vectors.

    Attributes:
        whole, velocity: what is left out, and the momentum, of the formulas.
    """

    def __init__(self, codec: str, momentum: Momentum | None) -> None:
        spec = parse_codec(codec)
        self.plan = plan_buckets(MANIFEST, codec=spec)
        self.form = RoundForms(self.plan, spec).of(1)
        self.feedback = feedback_of(spec, self.plan.total_values, momentum)
        self._compensation = compensation_of(SEED, spec, self.plan, None, self.feedback, momentum)
        self._momentum = momentum
        self.whole: Values = np.zeros(self.plan.total_values, np.float32)
        self.velocity: Values = np.zeros(self.plan.total_values, np.float32)

    def part(self, number: int, weight: float) -> WithErrorFeedback:
        area = memoryview(bytearray(self.form.layout.total_bytes))
        return WithErrorFeedback(self.form.segments, area, number, self._compensation, weight, 4)

    def expected(self, number: int, bucket: int, gradient: Values, factor: np.float32, mu: np.float32) -> bytes:
        """One vector operation after the other."""
        segments = self.form.segments[bucket]
        run = slice(segments[0].start, segments[-1].start + segments[-1].count)
        if self._momentum is None:
            self.whole[run] = self.whole[run] * factor + gradient[run]
        else:
            self.velocity[run] = self.velocity[run] * mu + gradient[run]
            self.whole[run] = self.whole[run] * factor + self.velocity[run]
        payloads = []
        for segment in segments:
            of_segment = slice(segment.start, segment.start + segment.count)
            out = memoryview(bytearray(segment.length))
            terms = Terms(number, segment_seed(SEED, number, segment.start) if segment.codec.draws else 0)
            payloads.append(bytes(out[: segment.codec.encode_rest_into(self.whole[of_segment], out, terms)]))
            segment.codec.clear_sent(self.velocity[of_segment])
        return b"".join(payloads)


@pytest.mark.parametrize("codec", ["topk:0.02", "topk:0.02,decay=0.5", "int8", "onebit", "cocktail", "dgc:0.05,ramp=0"])
def test_a_part_is_what_whole_vectors_give(codec: str) -> None:
    """Bytes, residual and momentum to the bit, over rounds of changing weight; and a round with a value that is not
    finite in its last segment leaves all as it was, though others of the bucket were encoded."""
    spec = parse_codec(codec)
    worker = Worker(codec, Momentum(factor=FACTOR, nesterov=False) if spec.momentum else None)
    assert worker.feedback is not None
    assert max(map(len, worker.form.segments)) > 2
    coded = worker.plan.coded_buckets
    before = 1.0
    for number, weight in enumerate(WEIGHTS, 1):
        gradient = heavy(worker.plan.total_values, number)
        part = worker.part(number, weight)
        if number == BROKEN:
            for segments in worker.form.segments:
                gradient[segments[-1].start + segments[-1].count - 1] = np.inf
            residuals = [each for each in (worker.feedback.worker, worker.feedback.velocity) if each is not None]
            state = [(each.values.tobytes(), dict(each.weights)) for each in residuals]
            assert {part.keep(bucket, gradient) for bucket in range(coded)} == {Part.POISON}
            assert [(each.values.tobytes(), dict(each.weights)) for each in residuals] == state
            worker.feedback.settle(number, void=True, contributed=True)
            continue
        decay = np.float32(spec.decay if number == 1 else spec.decay * (weight / before))
        mu = np.float32(FACTOR if number == 1 else FACTOR * (weight / before))
        for bucket in range(coded):
            assert part.keep(bucket, gradient) is Part.DATA
            payload = part.encoded(bucket, 0, len(worker.form.segments[bucket]))
            assert bytes(payload) == worker.expected(number, bucket, gradient, decay, mu)
        worker.feedback.settle(number, void=False, contributed=True)
        assert worker.feedback.worker.values.tobytes() == worker.whole.tobytes()
        if worker.feedback.velocity is not None:
            assert worker.feedback.velocity.values.tobytes() == worker.velocity.tobytes()
        before = weight
