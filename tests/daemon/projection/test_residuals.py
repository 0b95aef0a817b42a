"""What an autoencoder leaves out of a part: its values but for its share of what all decode, whenever that is done."""

import itertools

import numpy as np
import pytest

from meshtraind.codecs.base import Values
from meshtraind.contributions.error_feedback import Residual
from meshtraind.projection.lgc.latents import Convolved
from meshtraind.projection.lgc.leader import Places, default_places
from meshtraind.projection.lgc.residuals import Underway, WholeRests
from meshwire.codecs.registry import parse_codec
from meshwire.encoded_layout.lgc import PIECE_BLOCKS, Chosen, chosen_of
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import plan_buckets

SIDE = 700
CODEC = parse_codec("lgc:0.01,conv+fp32")
DRAW = np.random.default_rng(4)


def chosen() -> Chosen:
    """Of a model whose blocks are not a multiple of a piece, and the last one of them is short."""
    tensors = tuple(TensorSpec(name=name, kind="parameter", shape=(SIDE, SIDE), dtype="float32") for name in "ab")
    plan = plan_buckets(ModelManifest(tensors=tensors, optimizer="SGD"), codec=CODEC)
    return chosen_of(plan, CODEC, learnt=True)


def places_of(of: Chosen, bucket: int) -> Places:
    places = default_places(of, 1, bucket)
    places += np.arange(len(places), dtype=np.int32)[:, None] * np.int32(of.block_values)
    return places


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("later", [3.0, 12.0])
def test_the_rest_is_what_was_not_decoded(at_once: bool, later: float) -> None:
    """P1: in pieces on the loop, or at once for a bucket whose next part is about to be encoded. In the units of the
    round that is then the newest."""
    of = chosen()
    assert of.model.coded_buckets >= 1
    residual, rests, map_ = Residual(of.model.total_values), WholeRests(), Convolved(of.rows, None)
    expected: Values = np.zeros_like(residual.values)
    pieces = 0
    for bucket in range(of.model.coded_buckets):
        places, start = places_of(of, bucket), of.model.buckets[bucket].start
        values = DRAW.standard_normal(places.shape, np.float32)
        latents = DRAW.standard_normal(len(places) * of.latents, np.float32)
        means = np.empty_like(values)
        scratch: Values = np.empty(means.size, np.float32)
        for first in range(0, len(places), PIECE_BLOCKS):
            run = slice(first, min(first + PIECE_BLOCKS, len(places)))
            map_.decode_into(latents[run.start * of.latents : run.stop * of.latents], means[run], scratch)
            pieces += 1
        expected[start:][places] = np.float32(later / 3.0) * (values - np.float32(3.0) * means)
        residual.begin(8, start, of.model.buckets[bucket].count, later)
        rests.keep(7, bucket, Underway(values, start, 3.0, residual))
        rests.leave(bucket, rests.take(7)[bucket], of, places, map_, latents)
    residual.settle(8, void=False)
    assert not residual.values.any(), "nothing is done before its turn"
    if at_once:
        for bucket in reversed(range(of.model.coded_buckets)):
            rests.late.catch_up(bucket)
            here = of.model.buckets[bucket]
            done = slice(here.start, here.start + here.count)
            np.testing.assert_array_equal(residual.values[done], expected[done])
            assert not residual.values[: here.start].any(), "it is another bucket's"
        assert not rests.late.do_one()
    else:
        assert sum(1 for _ in itertools.takewhile(lambda _: rests.late.do_one(), itertools.count())) == pieces
    np.testing.assert_array_equal(residual.values, expected)
    assert rests.take(7) == {}


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**11])
def test_an_autoencoder_that_is_none_is_that_of_the_start(bad: float) -> None:
    """All have heard the same weights, whatever they are, so all fall back alike. What latents no encoder makes stand
    for is finite."""
    of = chosen()
    weights = DRAW.standard_normal(of.learnt_count, np.float32)
    weights[3] = bad
    latents = np.array([1.0, -2.0, 3e38] * of.rows, np.float32)
    decoded = []
    for heard in (weights, weights[:-1], None):
        out: Values = np.empty((3, of.block_chosen), np.float32)
        Convolved(of.rows, heard).decode_into(latents.copy(), out, np.empty(out.size, np.float32))
        assert np.isfinite(out).all()
        decoded.append(out.tobytes())
    assert len(set(decoded)) == 1
