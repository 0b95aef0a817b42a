"""Codecs whose blocks end where a tensor does (onebit, twobit, terngrad): as if each tensor's part were alone."""

import struct

import numpy as np
import pytest

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Codec, CodecError, Terms
from meshtraind.contributions.segments import RoundForms
from meshwire.codecs.registry import parse_codec
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import plan_buckets
from tests.daemon.codectrips import Values, encoded, heavy, round_trip

BY_TENSOR = ("onebit", "twobit", "terngrad")
BORDERS = (64, 80, 8192, 20000)  # multiples of 16
COUNT = 30000
HEADERS = {"onebit": 8, "twobit": 8, "terngrad": 4}


def bordered(name: str, borders: tuple[int, ...] = BORDERS) -> Codec:
    return codec_named(name).within(borders)


def trip(codec: Codec, values: Values, seed: int = 0) -> tuple[bytes, Values]:
    out = memoryview(bytearray(codec.spec.segment_bytes_max(len(values), codec._borders)))
    payload = out[: codec.encode_into(values, out, Terms(seed=seed))]
    found = np.full(len(values), np.nan, np.float32)
    codec.decode_into(payload, found)
    return bytes(payload), found


def of_all_sizes() -> Values:
    """Tensors beside each other whose values differ by a thousand."""
    scales = np.repeat([1.0, 1e-3, 0.1, 1e3, 0.5], np.diff([0, *BORDERS, COUNT]))
    values: Values = (heavy(COUNT) * scales).astype(np.float32)
    return values


@pytest.mark.parametrize("name", ["onebit", "twobit"])
def test_each_tensor_is_as_if_it_were_alone(name: str) -> None:
    values = of_all_sizes()
    payload, found = trip(bordered(name), values)
    parts = np.split(values, BORDERS)
    assert (found == np.concatenate([round_trip(name, part) for part in parts])).all()
    assert len(payload) == HEADERS[name] * sum(-(-len(part) // 4096) for part in parts) + len(
        encoded(name, values)
    ) - HEADERS[name] * -(-COUNT // 4096)


def test_a_tensor_is_drawn_from_its_own_scaler() -> None:
    """TernGrad: s, 0 and -s by what 2.5 root mean squares of each tensor are, and right on average for each."""
    values = of_all_sizes()
    payload, found = trip(bordered("terngrad"), values)
    scalers = struct.unpack_from("<5f", payload)
    for scaler, part, of_part in zip(scalers, np.split(values, BORDERS), np.split(found, BORDERS), strict=True):
        rms = float(np.sqrt(np.square(part.astype(np.float64)).mean()))
        assert scaler == pytest.approx(min(2.5 * rms, float(np.abs(part).max())), rel=1e-6)
        assert set(np.unique(np.abs(of_part))) <= {np.float32(0), np.float32(scaler)}
    mean = np.mean([trip(bordered("terngrad"), values, seed)[1].astype(np.float64) for seed in range(200)], axis=0)
    clipped = np.clip(values, *(np.repeat(scalers, np.diff([0, *BORDERS, COUNT])) * side for side in (-1, 1)))
    for off, part in zip(np.split(mean - clipped, BORDERS), np.split(clipped, BORDERS), strict=True):
        assert np.linalg.norm(off) < 0.3 * np.linalg.norm(part)


@pytest.mark.parametrize("name", BY_TENSOR)
def test_small_tensors_do_not_lose_to_large_neighbours(name: str) -> None:
    """What is left out of the small one between two large ones, by its own norm: over the border it was all of it or
    many times its norm."""
    values = of_all_sizes()
    small = slice(64, 80)
    own, across = (
        float(np.linalg.norm(values[small] - found[small]) / np.linalg.norm(values[small]))
        for found in (trip(bordered(name), values)[1], round_trip(name, values))
    )
    assert own < (3 if name == "terngrad" else 1)
    assert across >= (1 if name == "terngrad" else 5)


@pytest.mark.parametrize("name", BY_TENSOR)
def test_one_codec_serves_all_segments(name: str) -> None:
    """Borders are a segment's, scratch memory is the codec's; without borders it is the codec itself."""
    codec = codec_named(name)
    assert codec.within(()) is codec
    assert codec_named("int8").within(BORDERS).spec == parse_codec("int8")
    first, second = codec.within((16,)), codec.within((16, 4096))
    values = heavy(5000)
    before = trip(first, values)[0]
    trip(second, values)
    trip(codec, values)
    assert trip(first, values)[0] == before
    assert first._decoded is second._decoded is codec._decoded


@pytest.mark.parametrize("name", BY_TENSOR)
def test_another_tensors_bytes_are_no_segment(name: str) -> None:
    """Lengths follow from the plan; what is hostile in any block is refused."""
    codec = bordered(name)
    payload, found = trip(codec, of_all_sizes())
    with pytest.raises(CodecError, match="bytes for 30000 values, which take"):
        codec.decode_into(memoryview(encoded(name, of_all_sizes())), found)
    for block in range(5):
        hostile = bytearray(payload)
        width = 2 if name == "twobit" else 4
        at = block * (8 if name == "twobit" else 4)
        hostile[at : at + width] = b"\xff" * width
        with pytest.raises(CodecError):
            codec.decode_into(memoryview(hostile), found)


@pytest.mark.parametrize("name", BY_TENSOR)
def test_places_follow_from_the_plan(name: str) -> None:
    """C1: borders are those of the tensors of a bucket, each segment has exactly its place, one behind the other."""
    shapes = [(7,), (100, 30), (5,), (40, 40), (64,), (300, 500), (3,)]
    tensors = tuple(
        TensorSpec(name=f"t{index}", shape=shape, dtype="float32", kind="parameter")
        for index, shape in enumerate(shapes)
    )
    plan = plan_buckets(ModelManifest(tensors=tensors, optimizer="SGD"), codec=parse_codec(name))
    layout, (form,) = EncodedLayout(plan, parse_codec(name)), RoundForms(plan, parse_codec(name))
    begins = {span.start for span in plan.spans}
    at = 0
    for bucket in plan.buckets:
        for index, segment in enumerate(form.segments[bucket.index]):
            borders = plan.borders(bucket.index, index)
            inside = {begin for begin in begins if segment.start < begin < segment.start + segment.count}
            assert {segment.start + border for border in borders} == inside
            assert layout.span(bucket.index, index, 1) == (at, segment.length) == (segment.offset, segment.length)
            assert segment.length == parse_codec(name).segment_bytes_max(segment.count, borders)
            at += segment.length
        assert layout.span(bucket.index, 0, bucket.segment_count)[1] == sum(
            segment.length for segment in form.segments[bucket.index]
        )
    assert at == layout.total_bytes
    assert any(plan.borders(bucket.index, index) for bucket in plan.buckets for index in range(bucket.segment_count))
