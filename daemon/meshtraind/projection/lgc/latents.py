"""Latents of chosen values: how few numbers are made of many, and back; and how the map for it is learnt.

What a member sends of its own, no other repeats: BLAS may sum as it likes. Back,
all must get equal bits (`orthonormal.py`).
"""

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import CodecError, Values
from meshtraind.projection.lgc.autoencoder import Autoencoder, starting_weights
from meshtraind.projection.orthonormal import left_factor, orthonormal, product_into
from meshwire.encoded_layout.lgc_autoencoder import GROUP_VALUES, LATENT_MAX, Architecture

FADING = 0.9  # what a round leaves of what earlier ones have shown


class AsTheyAre:
    """The map of as many latents as values: they are the values."""

    def encode_into(self, values: Values, out: Values) -> None:
        """Copies the values; arguments as of `Basis.encode_into`."""
        np.copyto(out, values.ravel())

    def decode_into(self, latents: Values, out: Values, scratch: Values) -> None:
        """Copies the latents; arguments as of `Basis.decode_into`."""
        np.copyto(out, latents.reshape(out.shape))


class Basis:
    """The map by an orthonormal basis, for the values of each block.

    Args:
        rows: (latents of a block, values of a block), as all members have heard them.
        seed: for what is drawn in the place of rows that depend on others.
    """

    def __init__(self, rows: Values, seed: int) -> None:
        self.rows = orthonormal(rows, seed)

    def encode_into(self, values: Values, out: Values) -> None:
        """Writes the latents of blocks.

        Args:
            values: (blocks, values of a block).
            out: as many as `rows` has, for each block.
        """
        left_factor(values, self.rows, out=out.reshape(len(self.rows), -1))

    def decode_into(self, latents: Values, out: Values, scratch: Values) -> None:
        """Writes the values that latents stand for. Equal to the last bit everywhere.

        Args:
            out: (blocks, values of a block).
            scratch: as many values as `out`, at least.
        """
        product_into(latents.reshape(len(self.rows), -1), self.rows, out, scratch[: out.size])


class Convolved:
    """By the autoencoder: each block is a group of it, filled up with zeros.

    Args:
        channels: latents of a block.
        weights: as all members have heard them; None, or what is no such autoencoder's: those of the start.
    """

    def __init__(self, channels: int, weights: Values | None) -> None:
        architecture = Architecture(channels)
        start = starting_weights(architecture)
        try:
            self._autoencoder = Autoencoder(architecture, start if weights is None else weights)
        except CodecError:
            self._autoencoder = Autoencoder(architecture, start)

    def encode_into(self, values: Values, out: Values) -> None:
        """Writes the latents; arguments as of `Basis.encode_into`. Raises CodecError as `Autoencoder`."""
        groups = np.zeros((len(values), GROUP_VALUES), np.float32)
        groups[:, : values.shape[1]] = values
        self._autoencoder.encode_into(groups.reshape(-1), out)

    def decode_into(self, latents: Values, out: Values, scratch: Values) -> None:
        """Writes the values; arguments as of `Basis.decode_into`. What no encoder makes is brought to what one can."""
        groups = np.empty((len(out), GROUP_VALUES), np.float32)
        bounded = np.clip(latents, -LATENT_MAX, LATENT_MAX, out=scratch[: latents.size])
        self._autoencoder.decode_into(bounded, groups.reshape(-1))
        np.copyto(out, groups[:, : out.shape[1]])


def smooth_rows(rows: int, values: int) -> Values:
    """The rows of a basis before one was announced: constant, straight, square .., for values that fall from place to
    place.

    Only additions and multiplications: the same on all machines.
    """
    line = (2 * np.arange(values, dtype=np.float64) - (values - 1)) / values
    made = np.empty((rows, values))
    power = np.ones(values)
    for row in made:
        row[:] = power
        power = power * line
    return made.astype(np.float32)


class Learning:
    """What a member has seen of values of blocks, and the basis in which the fewest of their squares are lost (PCA).

    Args:
        rows: of the basis.
        values: of a block.
    """

    def __init__(self, rows: int, values: int) -> None:
        self._rows = rows
        self._squares: NDArray[np.float64] = np.zeros((values, values))

    def begin_round(self) -> None:
        """Notes that a round begins."""
        self._squares *= FADING

    def see(self, values: Values) -> None:
        """(blocks, values of a block), none beyond 2^100."""
        wide = values.astype(np.float64)
        self._squares += wide.T @ wide

    def learnt(self) -> Values:
        """The best rows; smooth ones while nothing was seen that is not zero."""
        count = self._rows
        if not self._squares.any():
            return smooth_rows(count, len(self._squares))
        _, vectors = np.linalg.eigh(self._squares)
        return vectors.T[::-1][:count].astype(np.float32)
