"""Codecs beside implementations that are not ours: torch's casts, quantisers, selection, distributions, Fourier
transforms and PowerSGD, what MXNet sent, and DGC as its paper has it in tensors (ALGORITHMS section 3: the numerical
cross-check)."""

import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshtraind.codecs import sidco
from meshtraind.codecs.cosines import Cosines
from meshtraind.contributions.seeds import segment_seed
from meshtraind.projection.orthonormal import orthonormal
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
# start_powerSGD_iter=2, random_seed=0), on the gradients of `moving`. Without feedback: the norms of what some of the
# steps leave out; with it, the mean norm of what is owed after steps 21 to 60.
TORCHS_LEFT_OUT = {11: 0.2789145, 21: 0.3708261, 31: 0.3499485, 41: 0.4791040, 51: 0.5064877, 60: 0.3871318}
TORCHS_OWED = 0.91234
RANK = 3


def falling(rng: np.random.Generator) -> Wide:
    """A 40 x 60 matrix whose singular values are halved from one to the next."""
    left, right = (np.linalg.qr(rng.standard_normal((count, 40)))[0] for count in (40, 60))
    matrix: Wide = left * 0.5 ** np.arange(40) @ right.T
    return matrix


def moving(count: int) -> list[Values]:
    """Gradients that turn by 0.3 a step: half an iteration hides behind one that stands still."""
    rng = np.random.default_rng(0)
    one, other = falling(rng), falling(rng)
    return [(np.cos(0.3 * at) * one + np.sin(0.3 * at) * other).astype(np.float32) for at in range(count)]


def norms(matrices: Wide) -> Wide:
    """The Frobenius norm of each matrix."""
    found: Wide = np.linalg.norm(matrices, axis=(1, 2))
    return found


async def our_power_sgd(codec: str, rounds: Sequence[tuple[Values, Values]], *, feedback: bool = True) -> Wide:
    """The means of rounds in which two members have these gradients."""
    matrix = rounds[0][0]
    async with members(codec, manifest_of([matrix.shape])) as two:
        made = []
        for of_members in rounds:
            gradients: Values = np.zeros((2, two.plan.total_values), np.float32)
            gradients[:, : matrix.size] = [each.ravel() for each in of_members]
            mean = await two.round(list(gradients))
            assert mean is not None
            made.append(mean[: matrix.size].reshape(matrix.shape).astype(np.float64))
            for member in (0, 1) if not feedback else ():
                two.residual(member)[:] = 0
        return np.stack(made)


@pytest.mark.asyncio
async def test_power_sgd_leaves_out_what_torchs_does_of_a_matrix_that_moves() -> None:
    """Without feedback, when what both have drawn at first is forgotten. Half an iteration a round is behind."""
    matrices = moving(60)
    alike = [(each, each) for each in matrices]
    full = norms(await our_power_sgd(f"powersgd:{RANK},warmup=0", alike, feedback=False) - matrices)
    half = norms(await our_power_sgd(f"powersgd:{RANK},half,warmup=0", alike, feedback=False) - matrices)
    for step, left_out in TORCHS_LEFT_OUT.items():
        assert full[step - 1] == pytest.approx(left_out, rel=2e-3)
    assert half[20:].mean() > 1.3 * full[20:].mean()


@pytest.mark.asyncio
async def test_power_sgd_owes_as_much_as_torchs_of_a_matrix_that_moves() -> None:
    """With feedback what is owed depends on what was drawn at first, its mean over 40 steps hardly does."""
    matrices = moving(60)
    alike = [(each, each) for each in matrices]
    full = norms(np.cumsum(matrices - await our_power_sgd(f"powersgd:{RANK},warmup=0", alike), 0))
    half = norms(np.cumsum(matrices - await our_power_sgd(f"powersgd:{RANK},half,warmup=0", alike), 0))
    assert full[20:].mean() == pytest.approx(TORCHS_OWED, rel=0.05)
    assert half[20:].mean() > 1.4 * TORCHS_OWED


@pytest.mark.asyncio
async def test_power_sgd_is_its_papers_algorithm_step_by_step() -> None:
    """Vogels et al. 2019, algorithms 1 and 2, of two members with gradients of their own, in float64 and by LAPACK's
    orthonormalisation: from the same first basis, the same means."""
    rng, matrices = np.random.default_rng(1), moving(30)
    rounds = [(each, (each + 0.3 * rng.standard_normal(each.shape)).astype(np.float32)) for each in matrices]
    ours = await our_power_sgd(f"powersgd:{RANK},warmup=0", rounds)
    basis = orthonormal(np.zeros((RANK, 60), np.float32), segment_seed(7, 1, 0)).T.astype(np.float64)
    owed = np.zeros((2, 40, 60))
    for mean, of_members in zip(ours, rounds, strict=True):
        owed += of_members
        left = np.linalg.qr(np.mean([each @ basis for each in owed], 0))[0]
        rights = [each.T @ left for each in owed]
        basis = np.mean(rights, 0)
        assert np.abs(mean - left @ basis.T).max() < 1e-3 * np.abs(ours).max()
        owed -= [left @ right.T for right in rights]


@pytest.mark.asyncio
async def test_power_sgd_is_exact_for_its_rank() -> None:
    """Vogels et al. 2019: the sums of left factors span its columns, whatever the first basis; so from round 1 on."""
    left, right = (np.random.default_rng(2).standard_normal((RANK, count)) for count in (40, 60))
    matrix = (left.T @ right).astype(np.float32)
    for feedback in (False, True):
        made = await our_power_sgd(f"powersgd:{RANK},warmup=0", [(matrix, matrix)] * 3, feedback=feedback)
        assert np.abs(made - matrix).max() < 1e-5 * np.abs(matrix).max(), "and nothing is owed"
    _, second, third = await our_power_sgd(f"powersgd:{RANK},half,warmup=0", [(matrix, matrix)] * 3, feedback=False)
    assert max(np.abs(each - matrix).max() for each in (second, third)) < 1e-5 * np.abs(matrix).max()


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
