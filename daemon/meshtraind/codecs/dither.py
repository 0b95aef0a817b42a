"""Noise that makes rounding unbiased."""

import numpy as np

from meshtraind.codecs.base import Values

PER_WORD = 4
ODD = np.uint64(0x0001_0001_0001_0001)  # the lowest bit of each of a word's 16-bit numbers


def add_dither(values: Values, seed: int, *, scratch: Values) -> None:
    """Adds uniform noise between -1/2 and 1/2 to each value: rounded to the nearest, it is the value on average.

    Noise is an odd multiple of 2^-16: its mean is exactly 0, it never is half, and a value's mean is right to 2^-16.
    numpy promises that raw generator output never changes, and its uniform floats take ten times as long.

    Args:
        seed: the same seed gives the same noise.
        scratch: as long as `values`.
    """
    words = np.random.SFC64(seed).random_raw(-(-len(values) // PER_WORD))
    np.bitwise_or(words, ODD, out=words)
    np.copyto(scratch, words.view(np.int16)[: len(values)])
    np.multiply(scratch, np.float32(2**-16), out=scratch)
    np.add(values, scratch, out=values)
