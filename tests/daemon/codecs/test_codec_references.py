"""Codecs beside implementations that are not ours: torch's casts, quantisers, selection, distributions, Fourier
transforms and PowerSGD, what MXNet sent, and DGC as its paper has it in tensors (ALGORITHMS section 3: the numerical
cross-check)."""

import math
import struct

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshtraind.codecs import sidco
from meshtraind.codecs.cosines import Cosines
from meshwire import limits
from meshwire.model.manifest import Momentum
from tests.daemon.codectrips import Values, decoded, encoded, heavy, round_trip
from tests.daemon.contributions.test_momentum import Worker
from tests.daemon.tcpmembers import manifest_of, members

Wide = NDArray[np.float64]
FULL = limits.SEGMENT_VALUES_MAX


def with_ties() -> Values:
    """A full segment, with values halfway between two of the smaller format."""
    values = heavy(FULL, 7)
    values[:4096] = ((np.arange(4096) + 0.5) * 2.0**-12).astype(np.float32)
    return values


def test_bf16_is_torchs_cast() -> None:
    values = with_ties()
    theirs = torch.from_numpy(values).bfloat16()
    assert encoded("bf16", values) == theirs.view(torch.int16).numpy().astype("<i2").tobytes()
    assert (round_trip("bf16", values) == theirs.float().numpy()).all()


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_fp16_is_torchs_cast_of_scaled_values(scale: float) -> None:
    values = with_ties() * np.float32(scale)
    payload = encoded("fp16", values)
    (exponent,) = struct.unpack_from("<i", payload)
    theirs = (torch.from_numpy(values) * 2.0**-exponent).half()
    assert payload[4:] == theirs.view(torch.int16).numpy().astype("<i2").tobytes()
    assert (decoded("fp16", payload, FULL) == (theirs.double() * 2.0**exponent).float().numpy()).all()


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 8)])
@pytest.mark.parametrize("block", [64, 1024])
def test_nearest_steps_are_those_of_torchs_quantiser(name: str, levels: int, block: int) -> None:
    """Each block is a channel. torch multiplies by the inverse of a step, we divide: only at ties may that differ. Of
    int4 the channels are turned so that the largest is the lowest of 16 numbers, and turned back."""
    values = heavy(FULL, 3)
    channels = torch.from_numpy(values).view(-1, block)
    sides = torch.ones(len(channels), 1)
    if name == "int4":
        sides[channels.amax(1) >= -channels.amin(1)] = -1
    channels = channels * sides
    steps = (channels.abs().amax(1) / levels).bfloat16().float()
    zeros = torch.zeros(len(steps), dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(channels, steps, zeros, 0, -levels, levels - (name == "int4"))
    ours = torch.from_numpy(round_trip(f"{name}:block={block}", values)).view(-1, block) * sides
    apart = ((channels / steps[:, None]).double().abs() % 1 - 0.5).abs()
    assert torch.equal(ours[apart > 1e-5], theirs[apart > 1e-5])
    assert (apart <= 1e-5).sum() < 20


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3])
def test_top_k_is_torchs(ratio: float) -> None:
    values = np.random.default_rng(5).permutation(FULL).astype(np.float32) - FULL / 2 + 0.25  # no two magnitudes equal
    kept = torch.from_numpy(values).abs().topk(math.ceil(ratio * FULL)).indices
    theirs = torch.zeros(FULL).scatter_(0, kept, torch.from_numpy(values)[kept])
    assert (round_trip(f"topk:{ratio}+fp32", values) == theirs.numpy()).all()


@pytest.mark.parametrize("ratio", [0.25, 0.1, 0.01])
def test_sidcos_fits_are_the_quantiles_of_torchs_distributions(ratio: float) -> None:
    """Of the distribution with the parameters that the samples were drawn with; 200,000 samples give them to 2 %."""
    torch.manual_seed(4)
    exponential = torch.distributions.Exponential(2.0)
    samples = exponential.sample((200_000,)).numpy()
    assert sidco.exponential(samples, ratio) == pytest.approx(
        float(exponential.icdf(torch.tensor(1 - ratio))), rel=0.02
    )
    pareto = torch.distributions.GeneralizedPareto(0.0, 1.0, 0.1)
    samples = pareto.sample((200_000,)).numpy()
    assert sidco.pareto(samples, ratio) == pytest.approx(float(pareto.icdf(torch.tensor(1 - ratio))), rel=0.02)
    shape = torch.tensor(0.7, dtype=torch.float64)
    samples = torch.distributions.Gamma(shape, 1.0).sample((200_000,)).float().clamp(min=1e-30).numpy()
    exceeding = float(torch.special.gammaincc(shape, torch.tensor(sidco.gamma(samples, ratio), dtype=torch.float64)))
    assert exceeding == pytest.approx(ratio, rel=0.2 if ratio == 0.25 else 0.1)  # its formula is of the tail


def cosines(lines: Tensor) -> Tensor:
    """The orthonormal DCT-II of the last dimension, as the Fourier transform of each line and its mirror image."""
    count = lines.shape[-1]
    turned = torch.fft.fft(torch.cat([lines, lines.flip(-1)], -1))[..., :count]
    frequencies = torch.arange(count, dtype=torch.float64)
    found: Tensor = (turned * torch.exp(-0.5j * torch.pi * frequencies / count)).real / math.sqrt(2 * count)
    found[..., 0] /= math.sqrt(2)
    return found


def test_cosine_transforms_are_torchs_fourier_transforms() -> None:
    values, ours, back = heavy(FULL, 2), np.empty(FULL, np.float32), np.empty(FULL, np.float32)
    Cosines().forward(values, float(np.abs(values).max()), ours)
    theirs = cosines(cosines(torch.from_numpy(values).double().view(-1, 64, 64)).mT)  # frequencies across come first
    assert np.abs(ours - theirs.flatten().numpy()).max() < 1e-6 * float(theirs.abs().max())
    Cosines().inverse(np.arange(FULL), ours, float(np.abs(ours).max()), back)
    assert np.abs(back - values).max() < 1e-6 * np.abs(values).max()


# torch 2.13.0, DistributedDataParallel of one process (gloo) with powerSGD_hook and PowerSGDState(None, 3,
# start_powerSGD_iter=2, random_seed=0). Without feedback, every gradient a 40 x 60 matrix with the singular values of
# `falling`: the largest error beside the best approximation, by the matrix's largest value, from the first step that is
# not sent whole on. With feedback, every gradient that of `falling(3)`: the largest norm owed in steps 11 to 30.
TORCHS_ERRORS = (0.49826, 0.23294, 0.061093, 0.014226, 0.0034664, 0.00086068, 0.00021467, 0.000053709)
TORCHS_OWED = 1.1749


async def our_power_sgd(matrix: Values, rank: int, rounds: int, *, feedback: bool) -> list[Wide]:
    """The same of ours, whose rounds are half iterations."""
    async with members(f"powersgd:{rank},warmup=0", manifest_of([matrix.shape])) as two:
        gradient = np.zeros(two.plan.total_values, np.float32)
        gradient[: matrix.size] = matrix.ravel()
        made = []
        for _ in range(rounds):
            mean = await two.round([gradient, gradient])
            assert mean is not None
            made.append(mean[: matrix.size].reshape(matrix.shape).astype(np.float64))
            for member in (0, 1) if not feedback else ():
                two.residual(member)[:] = 0
        return made


def falling(rank: int) -> tuple[Values, Wide]:
    """(A matrix whose singular values are halved from one to the next, what of it has this rank at best.)"""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((count, 40)))[0] for count in (40, 60))
    values = 0.5 ** np.arange(40)
    matrix = (left * values @ right.T).astype(np.float32)
    return matrix, left[:, :rank] * values[:rank] @ right[:, :rank].T


@pytest.mark.asyncio
async def test_power_sgd_ends_where_torchs_does() -> None:
    """Without feedback: both find the best approximation of their rank, at the same speed. An iteration is two of our
    rounds, and divides the error by the squared ratio of singular values, 4."""
    matrix, best = falling(3)
    ours = await our_power_sgd(matrix, 3, 2 * 14, feedback=False)
    errors = [np.abs(each - best).max() / np.abs(matrix).max() for each in ours[1::2]]
    assert errors[3] / errors[7] == pytest.approx(TORCHS_ERRORS[3] / TORCHS_ERRORS[7], rel=0.1)
    assert errors[-1] < 1e-6


@pytest.mark.asyncio
async def test_power_sgd_owes_about_as_much_as_torchs() -> None:
    """With feedback what has come in and was not sent stays bounded."""
    matrix, _ = falling(3)
    made = np.stack(await our_power_sgd(matrix, 3, 60, feedback=True))
    owed = matrix * np.arange(1, 61)[:, None, None] - np.cumsum(made, 0)
    assert max(map(np.linalg.norm, owed[20:])) < 1.5 * TORCHS_OWED


@pytest.mark.asyncio
async def test_power_sgd_is_exact_for_its_rank() -> None:
    """Vogels et al. 2019; here from the second half iteration on."""
    matrix = falling(3)[1].astype(np.float32)
    _, second, third = await our_power_sgd(matrix, 3, 3, feedback=False)
    assert max(np.abs(second - matrix).max(), np.abs(third - matrix).max()) < 1e-5
    assert np.abs(sum(await our_power_sgd(matrix, 3, 2, feedback=True)) - 2 * matrix).max() < 1e-5, (
        "and nothing is owed"
    )


def test_dgc_is_its_papers_algorithm_step_by_step() -> None:
    """Lin et al. 2018: each tensor's gradient clipped to 1/sqrt(m) of the norm, momentum corrected, factors masked, the
    ratio falling in five stages. The largest are chosen in our segments, by torch."""
    momentum, members_, clip, ratio, ramp = 0.9, 4, 30.0, 0.02, 10
    worker = Worker(f"dgc:{ratio},ramp={ramp},clip={clip:g}+fp32", Momentum(factor=momentum, nesterov=False), members_)
    plan = worker.plan
    coded = plan.buckets[: plan.coded_buckets]
    u, v = torch.zeros(plan.total_values), torch.zeros(plan.total_values)
    clipped = 0
    for number in range(1, 2 * ramp):
        gradient = torch.zeros(plan.total_values)
        for span in plan.spans:
            run = slice(span.start, span.start + span.count)
            gradient[run] = torch.from_numpy(heavy(span.count, 31 * number + span.start)) * (1e3 if number % 2 else 1e2)
        worker.round(gradient.numpy())
        worker.settle()
        sent = torch.zeros(plan.total_values)
        stage = min(5, (number - 1) * 5 // ramp + 1)
        for bucket in coded:
            for index in bucket.spans:
                span = plan.spans[index]
                own = gradient[span.start : span.start + span.count]
                norm = own.double().norm().item()
                if norm > clip / math.sqrt(members_):
                    own *= clip / math.sqrt(members_) / norm
                    clipped += 1
            run = slice(bucket.start, bucket.start + bucket.count)
            u[run] = u[run] * momentum + gradient[run]
            v[run] += u[run]
            for start, count in map(bucket.segment_bounds, range(bucket.segment_count)):
                part = slice(start, start + count)
                places = start + v[part].abs().topk(math.ceil(ratio ** (stage / 5) * count)).indices
                sent[places] = v[places]
                u[places] = v[places] = 0
        ours = torch.from_numpy(worker.sent)[worker.coded]
        assert torch.equal(ours != 0, sent[worker.coded] != 0), number
        torch.testing.assert_close(ours, sent[worker.coded], rtol=1e-5, atol=1e-5)
    assert 10 < clipped < 3 * 2 * ramp - 10
