"""Codecs beside implementations that are not ours: torch's casts, quantisers, selection, distributions and Fourier
transforms, and what MXNet sent (ALGORITHMS section 3: the numerical cross-check)."""

import math
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from meshtraind.codecs import sidco
from meshtraind.codecs.base import Terms
from meshtraind.codecs.cosines import Cosines
from meshwire import limits
from tests.daemon.codectrips import Values, codec, decoded, encoded, heavy, round_trip

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


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("block", [64, 1024])
def test_nearest_steps_are_those_of_torchs_quantiser(name: str, levels: int, block: int) -> None:
    """Each block is a channel. torch multiplies by the inverse of a step, we divide: only at ties may that differ."""
    values = heavy(FULL, 3)
    channels = torch.from_numpy(values).view(-1, block)
    steps = (channels.abs().amax(1) / levels).bfloat16().float()
    zeros = torch.zeros(len(steps), dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(channels, steps, zeros, 0, -levels, levels)
    ours = torch.from_numpy(round_trip(f"{name}:block={block}", values)).view(-1, block)
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


# (eighths of a gradient, what was pulled after it was pushed), round after round, from MXNet 1.9.1 on a CPU:
# mx.kv.create("device"), set_gradient_compression({"type": "2bit", "threshold": 0.5}), a second worker that pushes 0.
MXNET_ROUNDS = (
    ([0, 10, -5, 10, -2, -1, 5, -1, 0, -13, 3, 0, -2, 4, -2, 0], "0+-+00+00-000+00"),
    ([-6, -1, -4, -3, 3, -3, 0, 14, 11, 3, 0, -3, -5, 12, 0, -6], "-+-00-0++-00-+0-"),
    ([1, 4, 1, 8, -11, 0, 0, -9, 1, 5, 1, -3, 5, 0, 0, 3], "0+0+-000+0+-0+00"),
    ([-5, 4, 2, 4, -4, 4, -4, -8, 5, 6, 6, 0, -3, -19, 2, 3], "-+0+-+0-+++00-0+"),
)


def test_two_bits_are_those_that_mxnet_sent() -> None:
    """The gradients are such that the root mean square with what was left out keeps the threshold at a half."""
    residual, out = np.zeros(16, np.float32), memoryview(bytearray(codec("twobit").spec.segment_bytes_max(16)))
    for eighths, sent in MXNET_ROUNDS:
        residual += np.array(eighths, np.float32) / 8
        codec("twobit").encode_rest_into(residual, out, Terms())
        assert decoded("twobit", out, 16).tolist() == [{"0": 0, "+": 0.5, "-": -0.5}[sign] for sign in sent]
