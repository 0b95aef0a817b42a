"""Rates that change over time and budgets, on real segments (ALGORITHMS section 3, VARCO)."""

import asyncio
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtraind.codecs.base import Terms
from meshtraind.executor.executor import Executor
from meshwire.codecs.registry import parse_codec
from meshwire.codecs.sparsifiers import chosen_bytes_max, kept_values
from tests.daemon.codectrips import Values, codec, decoded, heavy
from tests.daemon.executorring import PLAN
from tests.daemon.shardedmesh import ShardedMesh, constant_offers

SPARSE = (
    "topk:0.3+fp16",
    "topk:1+int8",
    "sidco:0.1+fp32",
    "sidco:0.5,pareto",
    "threshold:rms=0",
    "threshold:1e-4+fp32",
)


def payload(text: str, values: Values, terms: Terms) -> bytes:
    out = memoryview(bytearray(parse_codec(text).segment_bytes_max(len(values))))
    return bytes(out[: codec(text).encode_into(values, out, terms)])


def sent(text: str, values: Values, terms: Terms) -> int:
    return int(np.count_nonzero(decoded(text, payload(text, values, terms), len(values))))


@pytest.mark.parametrize("name", ["topk", "sidco"])
@pytest.mark.parametrize("pace", ["", "/linear"])
def test_a_round_sends_the_part_of_its_rate(name: str, pace: str) -> None:
    text = f"{name}:0.2..0.01/8{pace}+fp32"
    ramp, values = parse_codec(text).ramp("ratio"), heavy(20_000)
    counts = [sent(text, values, Terms(number)) for number in range(1, 12)]
    for number, count in enumerate(counts, 1):
        wanted = kept_values(ramp.at(number), len(values))
        assert count == wanted if name == "topk" else wanted / 1.3 <= count <= 1.3 * wanted
    assert counts == sorted(counts, reverse=True) or name == "sidco"  # whose fits are not exact
    assert counts[8] == counts[10]


def test_a_ramp_that_ends_at_all_is_dense_from_there_on() -> None:
    """VARCO: given the same state, the last rounds are those of the dense codec, to the bit, and nothing is owed."""
    rising, dense = "topk:0.01..1/5/linear+fp32", "topk:1+fp32"
    residual = np.zeros(5000, np.float32)
    for number in range(1, 9):
        residual += heavy(5000, number)
        state = residual.copy()
        out = memoryview(bytearray(parse_codec(rising).segment_bytes_max(5000)))
        length = codec(rising).encode_rest_into(residual, out, Terms(number))
        assert residual.any() == (number <= 5)
        if number > 5:
            assert out[:length] == payload(dense, state, Terms(number))
            assert decoded(rising, out[:length], 5000).tobytes() == state.tobytes()


@settings(max_examples=150)
@given(
    st.sampled_from(SPARSE),
    st.integers(1, 5000),
    st.integers(0, 30_000),
    st.sampled_from(["heavy", "constant", "zero", "sparse", "huge"]),
    st.integers(0, 2**16),
)
def test_a_segment_never_takes_more_than_it_may(text: str, count: int, more: int, kind: str, seed: int) -> None:
    """Wherever its values are; and something of it is sent each time, so that error feedback is bounded (P3)."""
    rng = np.random.default_rng(seed)
    values = {
        "heavy": heavy(count, seed),
        "constant": np.full(count, 0.3, np.float32),
        "zero": np.zeros(count, np.float32),
        "sparse": np.where(rng.random(count) < 0.01, heavy(count), np.float32(0)),
        "huge": heavy(count, seed) * np.float32(1e35),
    }[kind]
    bytes_max = chosen_bytes_max(parse_codec(text), 1, count) + more
    made = payload(text, values, Terms(bytes_max=bytes_max))
    assert len(made) <= bytes_max
    free = payload(text, values, Terms())
    assert len(made) <= len(free) or kind == "huge"
    assert decoded(text, made, count).any() == decoded(text, free, count).any()


def test_more_bytes_send_more() -> None:
    values = heavy(20_000)
    counts = [sent("topk:0.3", values, Terms(bytes_max=size)) for size in range(100, 30_000, 500)]
    assert counts == sorted(counts)
    assert counts[0] < 60
    assert counts[-1] == kept_values(0.3, 20_000)


@pytest.fixture
def small_chunks() -> Iterator[None]:
    """Several chunks to a shard."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("meshwire.limits.CHUNK_BYTES", 4 * 1024)
        yield


async def spend(codec: str, budget: int, staleness: int, seed: int) -> None:
    """Three members, a change of generation; then what each part and each mean took."""
    text = f"{codec},budget={budget}"
    mesh = ShardedMesh(3, text, staleness, seed, constant_offers(3, 0, 5, seed))
    async with asyncio.timeout(60):
        await mesh.some(2000)
        await mesh.change((0, 1, 2))
        await mesh.finish()
    taken = []
    for member in mesh.members:
        memory = member.executor._memory
        for number, own in memory.own.items():
            taken.append(sum(ends[-1] - ends[0] for ends in own._ends.values()))  # type: ignore[attr-defined]
            taken.append(memory.encoded(number).size_bytes)
    assert taken
    assert max(taken) <= budget
    assert max(taken) > 0.9 * budget, "or the codec would have taken no more"
    mesh.close()


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=3)
@given(
    codec=st.sampled_from(["topk:0.3", "sidco:0.3", "threshold:rms=0.5", "topk:1..0.1/3"]),
    budget=st.integers(9_000, 25_000),
    staleness=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_no_part_and_no_mean_exceeds_the_budget(codec: str, budget: int, staleness: int, seed: int) -> None:
    """All segments of a part, and all of the mean, whoever owns them; with poison and rounds that run again."""
    assert PLAN.total_values > 100_000
    with patch.object(Executor, "forget"):
        asyncio.run(spend(codec, budget, staleness, seed))
