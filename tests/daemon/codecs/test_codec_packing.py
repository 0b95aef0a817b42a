"""Each packing against its definition, a number at a time; C1: whatever it does not make is refused."""

from collections.abc import Callable

import numpy as np
import pytest

from meshtraind.codecs.base import CodecError
from meshtraind.codecs.bit_packing import (
    Bytes,
    pack_nibbles,
    pack_planes,
    pack_quads,
    pack_trits,
    unpack_nibbles,
    unpack_planes,
    unpack_trits,
)
from meshwire.codecs.quantizers import nibble_bytes, plane_bytes, quad_bytes, trit_bytes

COUNTS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 100, 1009, 65536]


def numbers(count: int, below: int) -> Bytes:
    return np.random.default_rng(count).integers(0, below, count, dtype=np.uint8)


def slow_planes(given: Bytes, width: int) -> bytes:
    size = plane_bytes(len(given))
    packed = bytearray(width * size)
    for place, number in enumerate(given.tolist()):
        for bit in range(width):
            packed[bit * size + place // 8] |= (number >> bit & 1) << place % 8
    return bytes(packed)


def slow_nibbles(given: Bytes) -> bytes:
    packed = bytearray(nibble_bytes(len(given)))
    for place, number in enumerate(given.tolist()):
        packed[place // 2] |= number << 4 * (place % 2)
    return bytes(packed)


def slow_quads(given: Bytes) -> bytes:
    packed = bytearray(quad_bytes(len(given)))
    for place, number in enumerate(given.tolist()):
        packed[place // 4] |= number << (6, 4, 2, 0)[place % 4]
    return bytes(packed)


def slow_trits(given: Bytes) -> bytes:
    size = trit_bytes(len(given))
    packed = bytearray(size)
    for place, number in enumerate(given.tolist()):
        packed[place % size] += number * 3 ** (place // size)
    return bytes(packed)


def packed_by(pack: Callable[[Bytes, Bytes], None], given: Bytes, size: int) -> Bytes:
    out = np.full(size, 0xA5, np.uint8)
    pack(given, out)
    return out


def unpacked_by(unpack: Callable[[Bytes, Bytes], None], packed: Bytes, count: int) -> Bytes:
    out = np.full(count, 0xA5, np.uint8)
    unpack(packed, out)
    return out


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("width", range(1, 9))
def test_planes(count: int, width: int) -> None:
    given = numbers(count, 2**width)
    packed = packed_by(lambda each, out: pack_planes(each, width, out), given, width * plane_bytes(count))
    assert packed.tobytes() == slow_planes(given, width)
    assert (unpacked_by(lambda each, out: unpack_planes(each, width, out), packed, count) == given).all()


@pytest.mark.parametrize("count", COUNTS)
def test_nibbles(count: int) -> None:
    given = numbers(count, 16)
    packed = packed_by(pack_nibbles, given, nibble_bytes(count))
    assert packed.tobytes() == slow_nibbles(given)
    assert (unpacked_by(unpack_nibbles, packed, count) == given).all()


@pytest.mark.parametrize("count", [count for count in COUNTS if count % 16 == 0])
def test_quads(count: int) -> None:
    given = numbers(count, 4)
    assert packed_by(pack_quads, given, quad_bytes(count)).tobytes() == slow_quads(given)


def test_every_quad_of_a_byte() -> None:
    """Whatever the neighbours are, nothing carries."""
    given = np.array([byte >> shift & 3 for byte in range(256) for shift in (6, 4, 2, 0)], np.uint8)
    assert packed_by(pack_quads, given, 256).tobytes() == bytes(range(256))


@pytest.mark.parametrize("count", COUNTS)
def test_trits(count: int) -> None:
    given = numbers(count, 3)
    packed = packed_by(pack_trits, given, trit_bytes(count))
    assert packed.tobytes() == slow_trits(given)
    assert (unpacked_by(unpack_trits, packed, count) == given).all()


def test_every_byte_of_five_trits() -> None:
    digits = [byte // 3**place % 3 for place in range(5) for byte in range(243)]
    out = np.empty(5 * 243, np.uint8)
    unpack_trits(np.arange(243, dtype=np.uint8), out)
    assert out.tolist() == digits


@pytest.mark.parametrize("byte", [243, 255])
def test_a_byte_that_is_no_five_trits_is_refused(byte: int) -> None:
    with pytest.raises(CodecError, match="above 242"):
        unpack_trits(np.array([0, byte], np.uint8), np.empty(10, np.uint8))


def test_what_fills_up_is_zero() -> None:
    """There is one way to write each segment."""
    out = np.empty(3, np.uint8)
    for byte in (0b1000, 0b10000000):
        with pytest.raises(CodecError, match="behind the last of 3 numbers"):
            unpack_planes(np.array([7, byte], np.uint8), 2, out)
    with pytest.raises(CodecError, match="behind the last of 3 numbers"):
        unpack_nibbles(np.array([0xFF, 0x1F], np.uint8), out)
    with pytest.raises(CodecError, match="behind the last of 3 numbers"):
        unpack_trits(np.array([27], np.uint8), out)
