"""LGC's convolutional autoencoder: what it computes, to the last bit where members must agree, and what it refuses."""

import numpy as np
import pytest

from meshtraind.codecs.base import CodecError, Values
from meshtraind.projection.lgc.autoencoder import Autoencoder, check_weights, starting_weights
from meshwire.encoded_layout.lgc_autoencoder import (
    BLOCK_VALUES,
    GROUP_VALUES,
    HIDDEN,
    LATENT_MAX,
    SLOPE,
    STRIDE,
    TAPS,
    WEIGHT_MAX,
    Architecture,
)

LENGTHS = (0, 1, 15, 16, 17, 1000, BLOCK_VALUES, BLOCK_VALUES + 1, 2 * BLOCK_VALUES + 37)

every_size = pytest.mark.parametrize("channels", [1, 3, 4, 16])


def drawn_weights(architecture: Architecture, seed: int = 1) -> Values:
    return np.random.default_rng(seed).standard_normal(architecture.weight_count).astype(np.float32)


def drawn(count: int, seed: int = 2) -> Values:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def encoded(autoencoder: Autoencoder, values: Values) -> Values:
    latents = np.full(autoencoder.architecture.latent_count(len(values)), np.nan, np.float32)
    autoencoder.encode_into(values, latents)
    return latents


def decoded(autoencoder: Autoencoder, latents: Values, count: int) -> Values:
    values = np.full(count, np.nan, np.float32)
    autoencoder.decode_into(latents, values)
    return values


def one_by_one(latents: Values, weights: Values, architecture: Architecture) -> Values:
    """A block decoded by single fp32 operations in the order that is written down, and by no other."""
    channels, groups = architecture.channels, len(latents) // architecture.channels
    half = len(weights) // 2
    of_decoder = weights[half:]
    third = of_decoder[: channels * HIDDEN * TAPS].reshape(channels, HIDDEN, TAPS)
    fourth = of_decoder[channels * HIDDEN * TAPS :].reshape(HIDDEN, TAPS)
    middle = STRIDE * groups

    def strides(inputs: Values, kernel: Values, count: int) -> list[np.float32]:
        """Outputs of a transposed convolution with one output channel; inputs are channels x places."""
        out = [np.float32(0)] * (STRIDE * (count + 1))
        for line, taps in zip(inputs, kernel, strict=True):
            for first_tap, shift in ((0, 0), (STRIDE, 1)):
                for place in range(count):
                    for tap in range(STRIDE):
                        at = (place + shift) * STRIDE + tap
                        out[at] = out[at] + taps[first_tap + tap] * line[place]
        return out[STRIDE // 2 : -STRIDE // 2]

    columns = latents.reshape(groups, channels).T
    hidden = np.array([strides(columns, third[:, channel], groups) for channel in range(HIDDEN)])
    leaked = np.where(hidden > 0, hidden, hidden * np.float32(SLOPE))
    return np.array(strides(leaked, fourth, middle), np.float32)


@every_size
def test_a_replica_decodes_to_the_last_bit_what_the_order_of_operations_says(channels: int) -> None:
    """C1: all members decode equal bits, whatever sums their processors are quick at."""
    architecture = Architecture(channels)
    weights = drawn_weights(architecture)
    latents = drawn(architecture.latent_count(48))
    values = decoded(Autoencoder(architecture, weights), latents, 48)
    np.testing.assert_array_equal(values.view(np.uint32), one_by_one(latents, weights, architecture).view(np.uint32))


@every_size
def test_it_is_positively_homogeneous(channels: int) -> None:
    """D(E(c x)) = c D(E(x)) for c > 0: exactly for powers of two, else but for rounding. So no scale is agreed on."""
    architecture = Architecture(channels)
    autoencoder = Autoencoder(architecture, drawn_weights(architecture))
    values = drawn(1000)
    back = decoded(autoencoder, encoded(autoencoder, values), 1000)
    for scale in (2.0**-60, 2.0**30):
        scaled = decoded(autoencoder, encoded(autoencoder, values * np.float32(scale)), 1000)
        np.testing.assert_array_equal(scaled, back * np.float32(scale))
    scaled = decoded(autoencoder, encoded(autoencoder, values * np.float32(3.7)), 1000)
    np.testing.assert_allclose(scaled, back * np.float32(3.7), rtol=0, atol=1e-4 * float(np.abs(back).max()))


@every_size
@pytest.mark.parametrize("count", LENGTHS)
def test_the_starting_weights_pass_evenly_spaced_values(channels: int, count: int) -> None:
    """Any length, none divisible by anything: zeros fill it up, and every block is encoded on its own."""
    architecture = Architecture(channels)
    autoencoder = Autoencoder(architecture, starting_weights(architecture))
    values = drawn(count)
    passing = [latent * GROUP_VALUES // channels for latent in range(channels)]
    expected = np.where(np.isin(np.arange(count) % GROUP_VALUES, passing), values, np.float32(0))
    back = decoded(autoencoder, encoded(autoencoder, values), count)
    np.testing.assert_allclose(back, expected, rtol=1e-6, atol=1e-6)


def test_each_block_is_encoded_on_its_own() -> None:
    architecture = Architecture(4)
    autoencoder = Autoencoder(architecture, drawn_weights(architecture))
    values = drawn(BLOCK_VALUES + 500)
    latents = encoded(autoencoder, values)
    first = architecture.latent_count(BLOCK_VALUES)
    np.testing.assert_array_equal(latents[:first], encoded(autoencoder, values[:BLOCK_VALUES]))
    back = decoded(autoencoder, latents, len(values))
    np.testing.assert_array_equal(back[BLOCK_VALUES:], decoded(autoencoder, latents[first:], 500))


@every_size
def test_the_numbers_of_weights_and_latents_are_functions_of_the_architecture_alone(channels: int) -> None:
    architecture = Architecture(channels)
    assert architecture.weight_count == sum(out * in_ * taps for out, in_, taps in architecture.layers)
    assert architecture.latent_count(GROUP_VALUES * 7) == 7 * channels
    assert architecture.latent_count(1) == channels
    assert architecture.latent_count(0) == 0


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 2 * WEIGHT_MAX])
def test_weights_that_are_no_numbers_or_too_large_are_refused(wrong: float) -> None:
    architecture = Architecture(4)
    weights = starting_weights(architecture)
    weights[-1] = wrong
    with pytest.raises(CodecError, match="a weight of the autoencoder is not a number, or beyond 1024"):
        Autoencoder(architecture, weights)


def test_a_wrong_number_of_weights_is_refused() -> None:
    with pytest.raises(CodecError, match="1279 weights of an autoencoder that has 1280"):
        check_weights(np.zeros(1279, np.float32), Architecture(4))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 3e38])
def test_values_that_are_no_numbers_or_too_large_are_refused(wrong: float) -> None:
    """V1: the bucket is sent as poison."""
    architecture = Architecture(4)
    autoencoder = Autoencoder(architecture, starting_weights(architecture))
    values = drawn(100)
    values[64] = wrong
    with pytest.raises(CodecError, match="a latent of the autoencoder is not a number"):
        encoded(autoencoder, values)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 2 * LATENT_MAX])
def test_latents_that_no_encoder_makes_are_refused(wrong: float) -> None:
    architecture = Architecture(1)
    latents = np.zeros(4, np.float32)
    latents[2] = wrong
    with pytest.raises(CodecError, match="a latent of the autoencoder is not a number"):
        decoded(Autoencoder(architecture, starting_weights(architecture)), latents, 64)


def test_the_largest_weights_and_latents_decode_to_numbers() -> None:
    """LATENT_MAX and WEIGHT_MAX bound what can be decoded, so a result is never infinite."""
    architecture = Architecture(16)
    weights = np.full(architecture.weight_count, WEIGHT_MAX, np.float32)
    latents = np.full(architecture.latent_count(64), LATENT_MAX, np.float32)
    assert np.isfinite(decoded(Autoencoder(architecture, weights), latents, 64)).all()


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-38, 1.0])
def test_zeros_denormals_and_constants_have_a_defined_result(value: float) -> None:
    architecture = Architecture(4)
    autoencoder = Autoencoder(architecture, starting_weights(architecture))
    back = decoded(autoencoder, encoded(autoencoder, np.full(100, value, np.float32)), 100)
    np.testing.assert_allclose(back[::4], np.float32(value), rtol=1e-6, atol=3e-45)
    np.testing.assert_allclose(back[1::4], 0.0, atol=1e-6 * abs(value))
