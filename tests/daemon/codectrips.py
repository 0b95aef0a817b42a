"""Segments there and back, for the tests of single codecs."""

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Codec, CodecError, Terms

Values = NDArray[np.float32]


@cache
def codec(text: str) -> Codec:
    return codec_named(text)


def encoded(text: str, values: Values, seed: int = 0) -> bytes:
    out = memoryview(bytearray(codec(text).spec.segment_bytes_max(len(values))))
    return bytes(out[: codec(text).encode_into(values, out, Terms(seed=seed))])


def decoded(text: str, payload: bytes | memoryview, count: int) -> Values:
    out = np.full(count, np.nan, np.float32)
    codec(text).decode_into(memoryview(payload), out)
    return out


def round_trip(text: str, values: Values, seed: int = 0) -> Values:
    return decoded(text, encoded(text, values, seed), len(values))


def refused(text: str, payload: bytes, count: int, match: str) -> None:
    """DESIGN section 8: what no encoder makes is a protocol error."""
    with pytest.raises(CodecError, match=match):
        decoded(text, payload, count)


def heavy(count: int, seed: int = 1) -> Values:
    """As gradients are: most are near zero, some are large."""
    return (np.random.default_rng(seed).standard_t(3, count) * 1e-3).astype(np.float32)
