"""Small numbers packed into bytes, and strictly back: what no packing makes is a CodecError.

Numbers go in and come out as uint8, one each. All of it is arithmetic on whole arrays, where possible on the several
numbers of a machine word at once; what is allocated on the way is at most a quarter of the segment.
"""

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import CodecError
from meshwire.codecs.quantizers import TRITS_PER_BYTE, plane_bytes

Bytes = NDArray[np.uint8]

FOURS: NDArray[np.intp] = np.arange(256, dtype=np.intp)[:, None] >> np.array([6, 4, 2, 0]) & 3
"""The four numbers of each byte, as `pack_quads` lays them."""

QUAD_SHIFTS = np.uint32(1 << 30 | 1 << 20 | 1 << 10 | 1)
TRIT_BYTE_MAX = 3**TRITS_PER_BYTE - 1


def pack_planes(numbers: Bytes, width: int, out: Bytes) -> None:
    """The lowest bits of all numbers, then their second lowest, and so on for `width` bits.

    Within a plane the first number is the lowest bit of the first byte; the last byte is filled up with zeros.
    """
    size = plane_bytes(len(numbers))
    for bit in range(width):
        out[bit * size : (bit + 1) * size] = np.packbits(np.bitwise_and(numbers, 1 << bit), bitorder="little")


def unpack_planes(packed: Bytes, width: int, out: Bytes) -> None:
    """Undoes `pack_planes` for as many numbers as `out` holds. Raises CodecError."""
    size = plane_bytes(len(out))
    out.fill(0)
    for bit in reversed(range(width)):
        plane = packed[bit * size : (bit + 1) * size]
        if len(out) % 8 and plane[-1] >> len(out) % 8:
            raise behind_the_last(len(out))
        np.add(out, out, out=out)  # numpy shifts bytes one by one
        np.add(out, np.unpackbits(plane, count=len(out), bitorder="little"), out=out)


def pack_nibbles(numbers: Bytes, out: Bytes) -> None:
    """Two numbers below 16 a byte, the first one in the lower half; the last half is filled up with zeros."""
    even = len(numbers) & ~1
    pairs = numbers[:even].view("<u2")
    np.copyto(out[: even // 2], pairs | pairs >> 4, casting="unsafe")
    if even < len(numbers):
        out[-1] = numbers[-1]


def unpack_nibbles(packed: Bytes, out: Bytes) -> None:
    """Undoes `pack_nibbles` for as many numbers as `out` holds. Raises CodecError."""
    even = len(out) & ~1
    pairs = out[:even].view("<u2")
    np.copyto(pairs, packed[: even // 2])
    np.bitwise_or(pairs, pairs << 4, out=pairs)
    np.bitwise_and(pairs, 0x0F0F, out=pairs)
    if even < len(out):
        if packed[-1] > 0x0F:
            raise behind_the_last(len(out))
        out[-1] = packed[-1]


def pack_quads(numbers: Bytes, out: Bytes) -> None:
    """Four numbers below 4 a byte, the first one in its two highest bits. There are four times as many as bytes.

    One multiplication moves the four bytes of a word side by side into its highest byte: byte i, at bit 8i, is
    wanted at bit 30 - 2i. Whatever else it makes lies below bit 24, where no two bits meet, so nothing carries.
    """
    words = numbers.view("<u4") * QUAD_SHIFTS
    np.copyto(out, words >> 24, casting="unsafe")


def either_sign(magnitudes: NDArray[np.float32]) -> NDArray[np.float32]:
    """What each number of 2 bits stands for: the sign is the higher one. Four magnitudes in the last dimension."""
    return magnitudes * np.array([1, 1, -1, -1], np.float32)


def pack_trits(numbers: Bytes, out: Bytes) -> None:
    """Five numbers below 3 a byte: byte j of n holds those at j, n+j, ... 4n+j, the last one as the highest digit.

    Taken from places so far apart, whole stretches of memory are added. What is missing at the end counts as 0.
    """
    size = len(out)
    out.fill(0)
    for digit in reversed(range(TRITS_PER_BYTE)):
        stretch = numbers[digit * size : (digit + 1) * size]
        np.multiply(out, 3, out=out)
        np.add(out[: len(stretch)], stretch, out=out[: len(stretch)])


def unpack_trits(packed: Bytes, out: Bytes) -> None:
    """Undoes `pack_trits` for as many numbers as `out` holds. Raises CodecError."""
    if packed.max(initial=0) > TRIT_BYTE_MAX:
        raise CodecError(f"a byte of five base-3 digits is above {TRIT_BYTE_MAX}")
    size = len(packed)
    rest = packed
    for digit in range(TRITS_PER_BYTE):
        quotients = rest // 3
        digits = rest - quotients * 3
        stretch = out[digit * size : (digit + 1) * size]
        stretch[:] = digits[: len(stretch)]
        if digits[len(stretch) :].any():
            raise behind_the_last(len(out))
        rest = quotients


def behind_the_last(count: int) -> CodecError:
    """Something is written there."""
    return CodecError(f"what fills the bytes up behind the last of {count} numbers is not zero")
