"""DGC at the worker against its definition (ALGORITHMS section 3, "DGC", and section 0.2)."""

import itertools
import math
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Codec
from meshtraind.contributions.contribution import Compensation, WithErrorFeedback
from meshtraind.contributions.error_feedback import feedback_of
from meshtraind.contributions.momentum import correction_of
from meshtraind.contributions.segments import RoundForms, Segment
from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.codecs.sparsifiers import kept_in_round, kept_values
from meshwire.collectives.exchange import Part
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.model.manifest import ModelManifest, Momentum, TensorSpec
from meshwire.model.plan import plan_buckets
from tests.daemon.codectrips import Values, encoded, heavy

SHAPES = ((60, 50), (40,), (30, 30), (7,), (200, 20))
MANIFEST = ModelManifest(
    tensors=tuple(
        TensorSpec(name=f"tensor{index}", shape=shape, dtype="float32", kind="parameter")
        for index, shape in enumerate(SHAPES)
    ),
    optimizer="SGD",
)
PLAIN = Momentum(factor=0.5, nesterov=False)
NESTEROV = Momentum(factor=0.5, nesterov=True)
WEIGHTS = (2.0, 64.0, 1.0)  # of rounds, in turn: what is left out follows them
NONE = Momentum.model_construct(factor=0.0, nesterov=False)  # SGD without momentum is refused: there is none to take


class Worker:
    """One member's parts, round by round.

    Attributes:
        plan: of MANIFEST with the codec.
        sent: what the last round's part decodes to.
    """

    def __init__(self, codec: str, momentum: Momentum | None, members: int = 1) -> None:
        spec = parse_codec(codec)
        self.plan = plan_buckets(MANIFEST, codec=spec)
        form = RoundForms(self.plan, spec).of(1)
        self._segments = form.segments
        feedback = feedback_of(spec, self.plan.total_values, momentum)
        assert feedback is not None
        self.feedback = feedback
        correction = correction_of(spec, momentum, feedback, self.plan)
        self._compensation = Compensation(7, feedback.worker, None, correction)
        self._size_bytes, self._members, self._number = form.layout.total_bytes, members, 0
        self.sent: Values = np.zeros(self.plan.total_values, np.float32)

    def round(self, gradient: Values, weight: float = 1.0) -> list[Part]:
        """The next one, not settled."""
        self._number += 1
        area = memoryview(bytearray(self._size_bytes))
        part = WithErrorFeedback(self._segments, area, self._number, self._compensation, weight, self._members)
        kept = [part.keep(bucket.index, gradient) for bucket in self.plan.buckets]
        self.sent = np.zeros_like(self.sent)
        for bucket, done in zip(self.plan.buckets, kept, strict=True):
            if done is Part.DATA:
                for index, segment in enumerate(self._segments[bucket.index]):
                    self._decode(segment, part.encoded(bucket.index, index, 1))
        return kept

    def _decode(self, segment: Segment, payload: memoryview) -> None:
        segment.codec.decode_into(payload, self.sent[segment.start : segment.start + segment.count])

    def settle(self, *, void: bool = False) -> None:
        """The newest round."""
        self.feedback.settle(self._number, void=void, contributed=True)

    @property
    def residual(self) -> Values:
        return self.feedback.worker.values

    @property
    def velocity(self) -> Values:
        assert self.feedback.velocity is not None
        return self.feedback.velocity.values

    @property
    def coded(self) -> slice:
        """What the codec is for."""
        return slice(self.plan.buckets[self.plan.coded_buckets].start)


def gradients(worker: Worker, seed: int = 0) -> list[Values]:
    """Small whole numbers; padding too, which nothing here depends on."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-31, 32, worker.plan.total_values).astype(np.float32) for _ in range(8)]


def test_matrices_are_coded_and_vectors_travel_whole_behind_them() -> None:
    """1-D tensors are dense, with the optimizer's own momentum."""
    plan = plan_buckets(MANIFEST, codec=parse_codec("dgc"))
    names = [[plan.spans[index].name for index in bucket.spans] for bucket in plan.buckets]
    coded, whole = (list(itertools.chain(*part)) for part in (names[: plan.coded_buckets], names[plan.coded_buckets :]))
    assert coded == ["tensor4", "tensor2", "tensor0"]
    assert whole == ["tensor3", "tensor1"]
    codecs = EncodedLayout(plan, parse_codec("dgc:0.01+fp32")).codecs
    assert [str(each) for each in dict.fromkeys(codecs)] == ["dgc:0.01+fp32", "threshold:rms=0+fp32"]
    dense = parse_codec("dgc:1")
    assert not plan_buckets(MANIFEST, codec=dense).coded_buckets
    assert not dense.momentum


def test_without_momentum_it_is_top_k_with_error_feedback_bit_for_bit() -> None:
    """mu = 0."""
    worker = Worker("dgc:0.05,ramp=0", NONE)
    segment_values, coded = worker.plan.segment_values, worker.coded
    residual = np.zeros(worker.plan.total_values, np.float32)
    for seed in range(6):
        gradient = heavy(worker.plan.total_values, seed)
        residual += gradient
        worker.round(gradient)
        worker.settle()
        top_k = codec_named("topk:0.05")
        for bucket in worker.plan.buckets[: worker.plan.coded_buckets]:
            for start, count in map(bucket.segment_bounds, range(bucket.segment_count)):
                out = memoryview(bytearray(top_k.spec.segment_bytes_max(segment_values)))
                top_k.encode_rest_into(residual[start : start + count], out)
        assert worker.residual[coded].tobytes() == residual[coded].tobytes()


@pytest.mark.parametrize("momentum", [PLAIN, NESTEROV])
def test_masking_off_what_is_sent_and_owed_are_the_velocities_of_sgd(momentum: Momentum) -> None:
    """P1 of momentum, exact for dyadic numbers: sum of sent + v = sum of the steps that SGD takes, in units of g."""
    worker = Worker("dgc:0.05,ramp=3+fp32", momentum)
    buffer, steps, sent = (np.zeros(worker.plan.total_values) for _ in range(3))
    weights, weight = itertools.cycle(WEIGHTS), 0.0
    with patch.object(Codec, "clear_sent"), patch("meshtraind.codecs.sparse.SparseCodec.clear_sent"):
        for gradient in gradients(worker):
            buffer = momentum.factor * buffer + gradient  # torch.optim.SGD
            steps += gradient + momentum.factor * buffer if momentum.nesterov else buffer
            weight = next(weights)
            worker.round(np.float32(weight) * gradient, weight)
            worker.settle()
            sent += worker.sent / np.float64(weight)
    assert (sent + worker.residual / np.float64(weight) == steps)[worker.coded].all()
    assert worker.residual[worker.coded].any()


@pytest.mark.parametrize("nesterov", [False, True])
def test_where_something_is_sent_the_velocity_ends(nesterov: bool) -> None:
    """Factor masking, step by step as in `dgc/memory.py` of the paper's authors, whatever the rounds weigh."""
    worker = Worker("dgc:0.05,ramp=0+fp32", Momentum(factor=0.9, nesterov=nesterov))
    mu = np.float32(0.9)
    u, v = (np.zeros(worker.plan.total_values, np.float32) for _ in range(2))
    coded = worker.coded
    for gradient, weight in zip(gradients(worker), itertools.cycle(WEIGHTS), strict=False):
        if nesterov:
            u = (u + gradient) * mu
            v = v + u + gradient
        else:
            u = u * mu + gradient
            v = v + u
        worker.round(np.float32(weight) * gradient, weight)
        worker.settle()
        places = np.flatnonzero(worker.sent[coded])
        assert np.allclose(worker.sent[places] / weight, v[places], rtol=1e-5)
        u[places] = v[places] = 0
        assert np.allclose(worker.velocity[coded] / weight, u[coded], rtol=1e-5, atol=1e-5)
        assert np.allclose(worker.residual[coded] / weight, v[coded], rtol=1e-5, atol=1e-4)
        assert not worker.velocity[places].any()
        assert worker.velocity[coded].any()


def test_vectors_have_no_velocity_and_leave_nothing_out() -> None:
    worker = Worker("dgc:0.05+fp32", PLAIN)
    gradient = gradients(worker)[0]
    worker.round(gradient)
    whole = slice(worker.coded.stop, None)
    assert not worker.velocity[whole].any()
    assert not worker.residual[whole].any()
    assert (worker.sent[whole] == gradient[whole]).all()


@settings(max_examples=20)
@given(st.sampled_from(["void", "nan", "inf", "rests"]), st.booleans(), st.integers(0, 2**16))
def test_a_round_that_does_not_count_leaves_velocity_and_residual_as_they_were(
    kind: str, nesterov: bool, seed: int
) -> None:
    """V1, X3: to the bit, with s=0; and what is not finite never enters."""
    worker = Worker("dgc:0.05,clip=3", NESTEROV if nesterov else PLAIN)
    first, second, *_ = gradients(worker, seed)
    worker.round(first)
    worker.settle()
    before = worker.velocity.tobytes(), worker.residual.tobytes()
    if kind in ("nan", "inf"):
        second[worker.coded.stop // 2] = np.float32(kind)
        assert Part.POISON in worker.round(second)
    else:
        worker.round(second)
    if kind == "rests":
        worker.feedback.settle(2, void=False, contributed=False)
    else:
        worker.settle(void=True)
    assert (worker.velocity.tobytes(), worker.residual.tobytes()) == before


@settings(max_examples=10)
@given(st.sampled_from([PLAIN, NESTEROV]), st.integers(0, 2**16))
def test_a_void_round_is_taken_out_of_a_velocity_that_later_ones_have_multiplied(momentum: Momentum, seed: int) -> None:
    """V1 with s>0, masking off: the velocity is that of the rounds that count."""
    counted, voided = Worker("dgc:0.05", momentum), Worker("dgc:0.05", momentum)
    first, lost, third, *_ = (2 * each + 1 for each in gradients(counted, seed))  # odd: no velocity is 0 by chance
    with patch("meshtraind.codecs.sparse.SparseCodec.clear_sent"):
        for worker in (counted, voided):
            worker.round(first)
            worker.settle()
        voided.round(np.float32(2) * lost, 2.0)
        voided.round(np.float32(64) * third, 64.0)
        voided.feedback.settle(2, void=True, contributed=True)
        counted.round(np.float32(64) * third, 64.0)
    assert (voided.velocity == counted.velocity)[counted.coded].all()


@settings(max_examples=10)
@given(st.sampled_from([PLAIN, NESTEROV]), st.integers(0, 2**16))
def test_a_void_round_leaves_no_velocity_where_a_later_one_has_sent(momentum: Momentum, seed: int) -> None:
    """V1 with s>0: what that one cleared holds nothing of the void round, so nothing of it is to be taken out."""
    worker = Worker("dgc:0.05,ramp=0", momentum)
    first, lost, third, *_ = gradients(worker, seed)
    worker.round(first)
    worker.settle()
    worker.round(lost)
    worker.round(third)
    places = np.flatnonzero(worker.sent[worker.coded])
    worker.feedback.settle(2, void=True, contributed=True)
    assert len(places)
    assert not worker.velocity[places].any()


def norms(worker: Worker, values: Values) -> Sequence[float]:
    spans = worker.plan.spans[: worker.plan.buckets[worker.plan.coded_buckets].spans.start]
    return [float(np.linalg.norm(values[span.start : span.start + span.count])) for span in spans]


@pytest.mark.parametrize("members", [1, 4])
def test_each_tensor_is_clipped_to_its_members_share_of_the_norm(members: int) -> None:
    """Local clipping: the threshold times m^-1/2, of the mean gradient, before it is accumulated."""
    worker = Worker("dgc:1e-5,ramp=0,clip=10+fp32", PLAIN, members)
    gradient = gradients(worker)[0]
    worker.round(gradient * np.float32(8), weight=8.0)
    arrived = worker.residual + worker.sent
    assert norms(worker, arrived) == pytest.approx([8 * 10 / math.sqrt(members)] * 3, rel=1e-5)
    small = Worker("dgc:1e-5,ramp=0,clip=10+fp32", PLAIN, members)
    small.round(gradient * np.float32(1e-4))
    assert ((small.residual + small.sent)[small.coded] == (gradient * np.float32(1e-4))[small.coded]).all()


def test_the_warm_up_has_five_stages_by_equal_factors() -> None:
    """25 %, 6.3 %, 1.6 %, 0.4 %, 0.1 %, as in the paper."""
    spec, count = parse_codec("dgc:0.001,ramp=50"), 10**6
    kept = [kept_in_round(spec, number, count) for number in range(1, 80)]
    assert kept == sorted(kept, reverse=True)
    stages = [(value, len(list(rounds))) for value, rounds in itertools.groupby(kept)]
    assert [length for _, length in stages] == [10, 10, 10, 10, 39]
    assert [value / count for value, _ in stages] == pytest.approx([0.2512, 0.0631, 0.01585, 0.00398, 0.001], rel=1e-3)
    assert kept_in_round(parse_codec("dgc:0.001,ramp=0"), 1, count) == kept_values(0.001, count)


def test_at_a_thousandth_the_wire_carries_a_250th() -> None:
    """Packed."""
    full = limits.SEGMENT_VALUES_MAX
    assert len(encoded("dgc:0.001,ramp=0", heavy(full))) * 250 < 4 * full
