"""LGC's convolutional autoencoder in numpy: values to latents and back (`meshwire.encoded_layout.lgc_autoencoder`).

Back, all members must get equal bits from equal latents, whatever their processors: there every value is made of single
additions and multiplications in one order, as in `orthonormal.py`. There, only the sender's own result counts: BLAS
may sum as it likes.
"""

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshwire.encoded_layout.lgc_autoencoder import (
    BLOCK_VALUES,
    GROUP_VALUES,
    HIDDEN,
    LATENT_MAX,
    SLOPE,
    STRIDE,
    WEIGHT_MAX,
    Architecture,
)

BLOCK_GROUPS = BLOCK_VALUES // GROUP_VALUES
MARGIN = STRIDE // 2  # of zeros that a convolution sees on both sides


def starting_weights(architecture: Architecture) -> Values:
    """The weights before anything is learnt: so many values of a group as it has latents pass as they are, evenly
    spaced."""
    weights = np.zeros(architecture.weight_count, np.float32)
    first, second, third, fourth = _kernels(weights, architecture)
    for place in range(STRIDE):  # a value and its negative: what the LeakyReLU makes of both is (1 + slope) apart
        for channel, sign in ((2 * place, 1.0), (2 * place + 1, -1.0)):
            first[channel, 0, MARGIN + place] = sign
            fourth[channel, 0, MARGIN + place] = sign
    for latent in range(architecture.channels):
        quarter, place = divmod(latent * GROUP_VALUES // architecture.channels, STRIDE)
        for channel, sign in ((2 * place, 1.0), (2 * place + 1, -1.0)):
            second[latent, channel, MARGIN + quarter] = sign / (1 + SLOPE)
            third[latent, channel, MARGIN + quarter] = sign / (1 + SLOPE)
    return weights


def check_weights(weights: Values, architecture: Architecture) -> None:
    """Raises CodecError unless there are as many as the architecture has, all of them numbers up to WEIGHT_MAX."""
    if weights.shape != (architecture.weight_count,):
        raise CodecError(f"{weights.size} weights of an autoencoder that has {architecture.weight_count}")
    if not np.abs(weights).max() <= WEIGHT_MAX:
        raise CodecError(f"a weight of the autoencoder is not a number, or beyond {WEIGHT_MAX:g}")


class Autoencoder:
    """Encodes and decodes with the weights that all members were told. Owns scratch memory: use it from one thread.

    Args:
        weights: `weight_count` of them, copied.

    Raises CodecError as `check_weights`.
    """

    def __init__(self, architecture: Architecture, weights: Values) -> None:
        check_weights(weights, architecture)
        self.architecture = architecture
        self.weights: Values = weights.copy()
        first, second, third, fourth = _kernels(self.weights, architecture)
        channels = architecture.channels
        # A window is two neighbouring strides of what is convolved: each kernel is a matrix for either of them.
        self._first = [np.ascontiguousarray(half[:, 0].T) for half in _halves(first)]
        self._second = [np.ascontiguousarray(half.transpose(2, 1, 0)).reshape(-1, channels) for half in _halves(second)]
        self._third = [half.reshape(channels, HIDDEN * STRIDE, 1) for half in map(np.ascontiguousarray, _halves(third))]
        self._fourth = [half.reshape(HIDDEN, STRIDE, 1) for half in map(np.ascontiguousarray, _halves(fourth))]
        self._padded: Values = np.empty(BLOCK_VALUES + 2 * MARGIN, np.float32)
        self._hidden: Values = np.empty((STRIDE * (BLOCK_GROUPS + 1), HIDDEN), np.float32)
        self._spread: Values = np.empty((HIDDEN * STRIDE, BLOCK_GROUPS + 1), np.float32)
        self._lines: Values = np.empty((HIDDEN, STRIDE * (BLOCK_GROUPS + 1)), np.float32)
        self._out: Values = np.empty((STRIDE, STRIDE * BLOCK_GROUPS + 1), np.float32)
        self._term: Values = np.empty(HIDDEN * STRIDE * BLOCK_GROUPS, np.float32)

    def encode_into(self, values: Values, out: Values) -> None:
        """The latents of values, group by group.

        Args:
            out: `latent_count(len(values))` of them.

        Raises CodecError when one is not a number, or beyond LATENT_MAX; `out` is then undefined.
        """
        channels = self.architecture.channels
        with np.errstate(over="ignore", invalid="ignore"):  # found in the latents
            for start in range(0, len(values), BLOCK_VALUES):
                block = values[start : start + BLOCK_VALUES]
                first = start // GROUP_VALUES * channels
                groups = -(-len(block) // GROUP_VALUES)
                self._encode_block(block, groups, out[first : first + groups * channels].reshape(groups, channels))
        _check_latents(out)

    def decode_into(self, latents: Values, values: Values) -> None:
        """Overwrites `values` with what latents stand for: finite, and equal to the last bit everywhere.

        Raises CodecError when a latent is not a number, or beyond LATENT_MAX; `values` is then as it was.
        """
        _check_latents(latents)
        channels = self.architecture.channels
        for start in range(0, len(values), BLOCK_VALUES):
            block = values[start : start + BLOCK_VALUES]
            first = start // GROUP_VALUES * channels
            groups = -(-len(block) // GROUP_VALUES)
            self._decode_block(latents[first : first + groups * channels].reshape(groups, channels), block)

    def _encode_block(self, values: Values, groups: int, out: Values) -> None:
        padded = self._padded[: groups * GROUP_VALUES + 2 * MARGIN]
        padded[:MARGIN] = 0.0
        padded[MARGIN : MARGIN + len(values)] = values
        padded[MARGIN + len(values) :] = 0.0
        hidden = self._hidden[: STRIDE * (groups + 1)]
        hidden[:MARGIN] = 0.0
        hidden[-MARGIN:] = 0.0
        within = hidden[MARGIN:-MARGIN]
        strides = padded.reshape(-1, STRIDE)
        np.matmul(strides[:-1], self._first[0], out=within)
        within += strides[1:] @ self._first[1]
        _leak(within, self._term)
        strides = hidden.reshape(groups + 1, STRIDE * HIDDEN)
        np.matmul(strides[:-1], self._second[0], out=out)
        out += strides[1:] @ self._second[1]

    def _decode_block(self, latents: Values, values: Values) -> None:
        groups = len(latents)
        # Of a transposed convolution each input reaches two neighbouring strides of the output.
        spread = self._spread[:, : groups + 1]
        _add_strides(np.ascontiguousarray(latents.T), self._third, spread, self._term)
        lines = self._lines[:, : STRIDE * (groups + 1)]
        np.copyto(
            lines.reshape(HIDDEN, groups + 1, STRIDE), spread.reshape(HIDDEN, STRIDE, groups + 1).transpose(0, 2, 1)
        )
        within = lines[:, MARGIN:-MARGIN]
        _leak(within, self._term)
        out = self._out[:, : STRIDE * groups + 1]
        _add_strides(within, self._fourth, out, self._term)
        np.copyto(values, out.T.reshape(-1)[MARGIN : MARGIN + len(values)])


def _kernels(weights: Values, architecture: Architecture) -> list[Values]:
    """Views of the four, as `Architecture.layers`."""
    kernels, start = [], 0
    for shape in architecture.layers:
        count = shape[0] * shape[1] * shape[2]
        kernels.append(weights[start : start + count].reshape(shape))
        start += count
    return kernels


def _halves(kernel: Values) -> tuple[Values, Values]:
    return kernel[..., :STRIDE], kernel[..., STRIDE:]


def _leak(values: Values, scratch: Values) -> None:
    """LeakyReLU, in place."""
    term = scratch[: values.size].reshape(values.shape)
    np.multiply(values, np.float32(SLOPE), out=term)
    np.maximum(values, term, out=values)


def _add_strides(inputs: Values, weights: list[Values], out: Values, scratch: Values) -> None:
    """out[:, n] = sum over c of weights[0][c] x inputs[c, n] + weights[1][c] x inputs[c, n - 1], in that order.

    Args:
        inputs: channels x n.
        weights: two of channels x rows x 1.
        out: rows x (n + 1).
    """
    count = inputs.shape[1]
    term = scratch[: out.shape[0] * count].reshape(out.shape[0], count)
    out.fill(0.0)
    for line, here, next_ in zip(inputs, *weights, strict=True):
        np.multiply(here, line, out=term)
        np.add(out[:, :-1], term, out=out[:, :-1])
        np.multiply(next_, line, out=term)
        np.add(out[:, 1:], term, out=out[:, 1:])


def _check_latents(latents: Values) -> None:
    if not np.abs(latents).max(initial=0.0) <= LATENT_MAX:
        raise CodecError(f"a latent of the autoencoder is not a number, or beyond {LATENT_MAX:g}")
