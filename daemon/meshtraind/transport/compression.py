"""The lossless stage of one link (W5): payloads as LZ4 blocks, where that is quicker than sending them as they are.

Most encoded gradients are noise and do not shrink. Those of embeddings and of units that are off are full of zeros, and
2-bit codes of a few symbols; `tests/bench/results/lossless.md` shows when that pays. A link that never held its sender
back has nothing to gain, so the stage sleeps until the link's rate is known, and on links that are fast.
"""

import time
from collections.abc import Callable

import lz4.block

from meshwire import limits

RATE_BYTES_PER_S_MAX = 125e6  # beyond, looking at each payload takes more time than most of them would save
RATE_WEIGHT = 0.25  # of the newest measurement
SPEED_WEIGHT = 0.125  # a sample is quick, and the operating system may interrupt it
PAYLOAD_BYTES_MIN = 32 * limits.KIB  # of less there is little to save, and a sample of it says little
SAMPLE_PART = 16
GAIN_MIN = 2.0  # times the sender's seconds: the receiver has to unpack, and the learner wants the core

Clock = Callable[[], float]


class LinkRate:
    """How fast a link takes bytes, measured while it holds its sender back: only then it is the link that is slow.

    Attributes:
        bytes_per_s: smoothed; None before it has held back.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.bytes_per_s: float | None = None
        self._clock = clock
        self._full: tuple[float, int] | None = None

    def full(self, queued_bytes: int) -> None:
        """Notes that the link takes no more for now."""
        self._full = self._clock(), queued_bytes

    def drained(self, queued_bytes: int) -> None:
        """Notes that the link takes bytes again."""
        if self._full is None:
            return
        (began_s, before_bytes), self._full = self._full, None
        passed_s = self._clock() - began_s
        if passed_s > 0 and before_bytes > queued_bytes:
            newest = (before_bytes - queued_bytes) / passed_s
            known = newest if self.bytes_per_s is None else self.bytes_per_s
            self.bytes_per_s = known + RATE_WEIGHT * (newest - known)


class Lossless:
    """Decides for each payload of a link, by a sample of it, the link's rate and the measured speed of compressing.

    Attributes:
        rate: of the link.
        spared_bytes: that were not sent, because their payloads were packed.
    """

    def __init__(self, rate: LinkRate, clock: Clock = time.perf_counter) -> None:
        self.rate = rate
        self.spared_bytes = 0
        self._clock = clock
        self._s_per_byte: float | None = None

    def packed(self, payload: memoryview | bytes, capped_bytes_per_s: float | None = None) -> bytes | None:
        """The payload in fewer bytes; None: it is to be sent as it is.

        Args:
            capped_bytes_per_s: what this machine's owner lets all links have; None: as much as they take.
        """
        rates = [rate for rate in (self.rate.bytes_per_s, capped_bytes_per_s) if rate is not None]
        rate = min(rates, default=None)
        if rate is None or rate > RATE_BYTES_PER_S_MAX or len(payload) < PAYLOAD_BYTES_MIN:
            return None
        spared = self._sampled_saving(payload) * len(payload)
        assert self._s_per_byte is not None
        if spared / rate <= GAIN_MIN * self._s_per_byte * len(payload):
            return None
        packed: bytes = lz4.block.compress(payload, store_size=False)
        if len(packed) >= len(payload):
            return None
        self.spared_bytes += len(payload) - len(packed)
        return packed

    def _sampled_saving(self, payload: memoryview | bytes) -> float:
        """The part of its bytes that a piece from the middle loses; at the ends lie headers and padding."""
        size = len(payload) // SAMPLE_PART
        start = (len(payload) - size) // 2
        began_s = self._clock()
        packed = lz4.block.compress(payload[start : start + size], store_size=False)
        newest = (self._clock() - began_s) / size
        known = newest if self._s_per_byte is None else self._s_per_byte
        self._s_per_byte = known + SPEED_WEIGHT * (newest - known)
        return 1 - len(packed) / size


def unpack_into(packed: memoryview, place: memoryview) -> str | None:
    """Writes the payload into its place, whose length was agreed before a byte arrived; returns what is wrong with it.

    LZ4 writes no byte beyond the length that it is told, so a small payload cannot become a large one here.
    """
    try:
        payload = lz4.block.decompress(packed, uncompressed_size=len(place))
    except lz4.block.LZ4BlockError:
        return f"{len(packed)} packed bytes that are no LZ4 block of {len(place)} bytes"
    if len(payload) != len(place):
        return f"{len(packed)} packed bytes that hold {len(payload)} bytes where {len(place)} were due"
    place[:] = payload
    return None
