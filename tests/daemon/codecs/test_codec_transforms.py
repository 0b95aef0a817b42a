"""What holds for every codec that turns whole tensors into a shorter vector (ALGORITHMS section 3, P1 to P5; V1).

As `test_codec_conformance` for segments, in the form that it has where two members' sums meet: over TCP, from slots to
means. A family is in as soon as it is registered; P5 is in `test_codec_bytes`.
"""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.codecs.registry import FAMILIES, parse_codec
from tests.daemon.codectrips import heavy
from tests.daemon.tcpmembers import Members, Values, manifest_of, members, placed

MORE = ("powersgd:2,min_rate=1,warmup=0", "powersgd:1,warmup=0+fp16", "powersgd:64,warmup=0")
BRISK = {"lgc": "lgc:0.25,refresh=1,train=2,warmup=1"}  # of what sends a hundredth, little has come after 150 rounds
USUAL = [BRISK.get(name, f"{name}:warmup=1") for name in FAMILIES if FAMILIES[name].transforms]
CODECS = sorted({*(str(parse_codec(text)) for text in USUAL), *MORE})
LOW_RANK = [codec for codec in CODECS if codec.startswith("powersgd")]  # lgc: other places are due in the next round
SLOW = ("powersgd:1,warmup=0+fp16", "powersgd:64,warmup=0")  # one direction a round takes 300; all are sent at once
SHAPES = ((40, 60), (64, 3, 5, 5), (1, 300), (33,), (1,), (), (1, 1), (0, 7), (0,), (130, 2))
MANIFEST = manifest_of(SHAPES, buffers=20)
LARGEST = float(np.finfo(np.float32).max)


def rounding(codec: str) -> float:
    """Of what is sent: of factors in fp32, or of casts, of which a warm-up's leave no residual."""
    return 1e-5 if parse_codec(codec).choice("values") == "fp32" and not parse_codec(codec).warmup else 3e-3


def gradients(two: Members, seed: int) -> list[Values]:
    return [placed(two.plan, heavy(two.plan.total_values, 2 * seed + rank)) for rank in (0, 1)]


def parameters(two: Members) -> slice:
    return slice(two.plan.buckets[two.plan.parameter_buckets].start)


def owed(two: Members) -> Values:
    return placed(two.plan, two.residual(0) + two.residual(1))


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", CODECS)
async def test_sent_and_owed_are_what_came(codec: str) -> None:
    """P1, over rounds of all forms and of various weights; in units of g."""
    async with members(codec, MANIFEST) as two:
        run = parameters(two)
        came, applied = np.zeros(two.plan.total_values), np.zeros(two.plan.total_values)
        for seed in range(7):
            made, weight = gradients(two, seed), (64.0, 3.0, 100.0)[seed % 3]
            mean = await two.round([np.float32(weight) * each for each in made], weight)
            assert mean is not None
            came += np.add(*made, dtype=np.float64)
            applied += 2.0 * placed(two.plan, mean)
            error = np.abs(applied + owed(two) / weight - came)[run].max()
            assert error <= rounding(codec) * np.abs(came).max()
        assert not owed(two)[run.stop :].any(), "O5"


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", LOW_RANK)
async def test_what_is_decoded_is_sent_as_it_is(codec: str) -> None:
    """P2: a mean that both have as their gradient comes back, once the bases are of it. Not where each round sends
    other places than the one before: see `test_latents`."""
    async with members(codec, MANIFEST) as two:
        for seed in range(4):
            mean = await two.round(gradients(two, seed))
        assert mean is not None
        for rank in (0, 1):
            two.residual(rank)[:] = 0
        again = await two.round([mean, mean])
        assert again is not None
        run = parameters(two)
        assert np.abs(placed(two.plan, again - mean))[run].max() <= max(rounding(codec), 1e-4) * np.abs(mean).max()


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", CODECS)
async def test_what_stays_behind_is_no_larger_than_what_came(codec: str) -> None:
    """P3: a basis is orthonormal, so a product with it takes away what it sends, of a matrix or of chosen values."""
    async with members(codec, MANIFEST) as two:
        for seed in range(3):
            made = gradients(two, seed)
            before = [two.residual(rank).astype(np.float64) + made[rank] for rank in (0, 1)]
            assert await two.round(made) is not None
            for rank in (0, 1):
                assert np.linalg.norm(two.residual(rank)) <= np.linalg.norm(before[rank]) * (1 + rounding(codec))


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec not in SLOW])
async def test_with_error_feedback_the_optimum_is_reached(codec: str) -> None:
    """P4: of sum_i |w - a_i|^2, where members disagree by far more than they have in common."""
    async with members(codec, manifest_of([(24, 20), (9,)])) as two:
        rng, count = np.random.default_rng(4), two.plan.total_values
        optimum = placed(two.plan, rng.standard_normal(count).astype(np.float32))
        apart = placed(two.plan, 10 * rng.standard_normal(count).astype(np.float32))
        model = np.zeros(count, np.float32)
        for turn in range(150):
            mean = await two.round([model - optimum - apart, model - optimum + apart])
            assert mean is not None
            model -= np.float32(0.2 / (1 + turn / 40)) * placed(two.plan, mean)
        assert np.linalg.norm(model - optimum) < 0.1 * np.linalg.norm(optimum)


def edges(count: int) -> dict[str, Values]:
    """Finite gradients of every awkward kind."""
    normal = np.random.default_rng(2).standard_normal(count).astype(np.float32)
    sizes = 10.0 ** np.random.default_rng(3).integers(-44, 25, count)
    spike = np.zeros(count, np.float32)
    spike[count // 2] = -3e20
    return {
        "zeros": np.zeros(count, np.float32),
        "negative zeros": np.full(count, -0.0, np.float32),
        "constant": np.full(count, -0.3, np.float32),
        "denormal": (normal * 1e-40).astype(np.float32),
        "tiniest": np.where(normal > 0, np.float32(1e-45), np.float32(-1e-45)),
        "of all sizes": (normal * sizes).astype(np.float32),
        "spike": spike,
        "huge": (normal.clip(-3, 3) * 1e37).astype(np.float32),
        "largest": np.where(normal > 0, np.float32(LARGEST), np.float32(-LARGEST)),
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", CODECS)
async def test_every_finite_gradient_is_a_finite_mean_or_a_void_round(codec: str) -> None:
    """V1: what is too large to be summed is poison, and leaves what is owed as it was; nothing warns."""
    async with members(codec, MANIFEST) as two:
        await two.round(gradients(two, 0))
        for name, values in edges(two.plan.total_values).items():
            values = placed(two.plan, values)
            before = [two.residual(rank).tobytes() for rank in (0, 1)]
            mean = await two.round([values, values])
            if mean is None:
                assert name in ("huge", "largest"), name
                assert [two.residual(rank).tobytes() for rank in (0, 1)] == before, name
            else:
                assert np.isfinite(mean).all(), name
                assert np.isfinite(owed(two)).all(), name
        for rank in (0, 1):
            two.residual(rank)[:] = 0
        assert await two.round(gradients(two, 1)) is not None, "and the next round is one like any other"


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_what_is_not_finite_makes_its_round_void(codec: str, value: float) -> None:
    """V1: wherever it stands, and whoever has it; what is owed is that of before, to the bit."""
    async with members(codec, MANIFEST) as two:
        for seed in range(2):
            await two.round(gradients(two, seed))
        before = [two.residual(rank).tobytes() for rank in (0, 1)]
        for place in (two.plan.spans[0].start, *(span.start + span.count - 1 for span in two.plan.spans if span.count)):
            made = gradients(two, 2)
            made[place % 2][place] = value
            assert await two.round(made) is None
            assert [two.residual(rank).tobytes() for rank in (0, 1)] == before


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", CODECS)
async def test_the_same_gradients_give_the_same_means(codec: str) -> None:
    """Whatever was drawn was drawn from the job's seed."""
    told = []
    for _ in range(2):
        async with members(codec, MANIFEST) as two:
            told.append([await two.round(gradients(two, seed)) for seed in range(4)])
    for one, other in zip(*told, strict=True):
        assert one is not None
        assert other is not None
        assert one.tobytes() == other.tobytes()


def values(value: float) -> Callable[[memoryview], None]:
    """A payload that is this value everywhere."""

    def damage(payload: memoryview) -> None:
        whole = np.full(-(-len(payload) // 4), value, np.float32).tobytes()
        payload[:] = whole[: len(payload)]

    return damage


def bits(seed: int) -> Callable[[memoryview], None]:
    """A payload of which some bytes are any."""

    def damage(payload: memoryview) -> None:
        rng = np.random.default_rng(seed)
        area = np.frombuffer(payload, np.uint8)
        area[rng.integers(0, len(area), 1 + seed % 9)] = rng.integers(0, 256, 1 + seed % 9)

    return damage


DAMAGES = st.one_of(
    st.sampled_from([np.nan, np.inf, -np.inf, LARGEST, 1e-45]).map(values), st.integers(0, 99).map(bits)
)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=8)
@given(damage=DAMAGES)
def test_hostile_payloads_are_finite_means_void_rounds_or_refused(
    codec: str, damage: Callable[[memoryview], None]
) -> None:
    """DESIGN section 8: never an exception elsewhere, which would end the link here, and never a mean that is not
    finite: with bases that follow from what was hostile, too."""

    async def check() -> None:
        async with members(codec, MANIFEST) as two:
            await two.round(gradients(two, 0))
            two.ends[1].damage = damage
            for seed in (1, 2):
                await two.exchange(gradients(two, seed))
                if two.broken:
                    assert all("round" in said for said in two.broken)
                    return
                if (mean := await two.finish(1)) is not None:
                    assert np.isfinite(mean).all()
            assert not two.ends[1].losses

    asyncio.run(check())
