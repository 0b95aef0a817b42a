"""Known vectors of any length whose mean can be checked piece by piece, so that checking takes no memory."""

import hashlib

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]

PERIOD = 65_521  # prime: no piece that lands in another place than its own looks right
TOLERANCE = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-2}  # of the largest value; sums are rounded at every hop
ANYTHING = 1e30  # other codecs leave out what they please: that all have the same must do


def fill(out: Values, rank: int) -> None:
    """Writes rank's vector: PERIOD normal numbers, over and over."""
    pattern = _pattern(rank)
    for start in range(0, len(out), PERIOD):
        piece = out[start : start + PERIOD]
        piece[:] = pattern[: len(piece)]


def wrong_value(result: Values, members: int, codec: str) -> str | None:
    """What is wrong with `result` as the mean of all ranks' vectors, None when it is right."""
    patterns = np.stack([_pattern(rank) for rank in range(members)]).astype(np.float64)
    expected = patterns.mean(axis=0)
    allowed = TOLERANCE.get(codec, ANYTHING) * float(np.abs(patterns).max())
    for start in range(0, len(result), PERIOD):
        piece = result[start : start + PERIOD]
        error = np.abs(piece - expected[: len(piece)])
        if not error.max() <= allowed:
            at = int(np.argmax(~(error <= allowed)))
            return f"value {start + at} of the mean is {piece[at]}, expected {expected[at]:.7g} +- {allowed:.1g}"
    return None


def digest(result: Values) -> str:
    """SHA-256 of the bytes."""
    return hashlib.sha256(result.data).hexdigest()


def _pattern(rank: int) -> Values:
    return np.random.default_rng(rank).standard_normal(PERIOD).astype(np.float32)
