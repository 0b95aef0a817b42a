"""The shape of LGC's convolutional autoencoder, which all members must have alike: layers, weights, numbers of latents.

Two convolutions of stride 4 with a LeakyReLU between them make a few latents of each group of 16 values; two transposed
ones, with another, make values of these (learned gradient compression, Abrahamyan et al. 2021, arXiv 2103.08870). None
has a bias, so the whole is positively homogeneous: D(E(c x)) = c D(E(x)) for c > 0, and no scale has to be agreed on.
"""

from dataclasses import dataclass

STRIDE = 4  # of each layer
TAPS = 2 * STRIDE  # of each kernel, so that neighbouring windows overlap by half
GROUP_VALUES = STRIDE**2  # values that share latents, and the most latents that they have
BLOCK_VALUES = 4096  # encoded on their own, zeros around them: they stay in the processor's cache
HIDDEN = 16  # channels between two layers: twice what it takes to pass four values through, signs apart
SLOPE = 0.25  # of the LeakyReLU, for negative values; a power of two, so it rounds nothing
WEIGHT_MAX = 2.0**10  # magnitude
LATENT_MAX = 2.0**64  # magnitude; what is decoded of it with such weights is finite: 2^64 (2^10 128)(2^10 32) < 2^97


@dataclass(frozen=True, slots=True)
class Architecture:
    """Of the autoencoders of one job.

    Attributes:
        channels: latents of a group, 1 to GROUP_VALUES.
    """

    channels: int

    @property
    def layers(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes of the four kernels in the order in which weights lie in their vector, as torch has them.

        (output channels, input channels, taps) of the encoder's; (input, output, taps) of the transposed ones.
        """
        outer, inner = (HIDDEN, 1, TAPS), (self.channels, HIDDEN, TAPS)
        return outer, inner, inner, outer

    @property
    def weight_count(self) -> int:
        """Length of the vector of weights."""
        return 2 * TAPS * HIDDEN * (1 + self.channels)

    def latent_count(self, values_count: int) -> int:
        """Latents of a vector of so many values; zeros fill its last group."""
        return -(-values_count // GROUP_VALUES) * self.channels
