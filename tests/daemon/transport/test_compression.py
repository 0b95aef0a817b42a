"""W5: payloads travel as LZ4 blocks where that is quicker, land as they were, and cannot become larger than agreed."""

import os

import lz4.block
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtraind.transport.compression import (
    GAIN_MIN,
    PAYLOAD_BYTES_MIN,
    RATE_BYTES_PER_S_MAX,
    LinkRate,
    Lossless,
    unpack_into,
)
from meshwire import limits
from tests.daemon.connectionpair import chunk, every_transport, pair, run
from tests.daemon.waiting import until

NOISE = os.urandom(limits.CHUNK_BYTES)
HALF = NOISE[: limits.CHUNK_BYTES // 4] + bytes(limits.CHUNK_BYTES // 2) + NOISE[: limits.CHUNK_BYTES // 4]


class Clock:
    """Each look at it is `step_s` later."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        self.now_s += self.step_s
        return self.now_s


def stage(rate_bytes_per_s: float | None, sample_s: float = 1e-9) -> tuple[Lossless, Clock]:
    """Of a link of this rate, on a machine that takes so long for a sample."""
    clock = Clock(sample_s)
    rate = LinkRate()
    rate.bytes_per_s = rate_bytes_per_s
    return Lossless(rate, clock), clock


@given(
    pieces=st.lists(st.tuples(st.integers(0, 255), st.integers(1, 40_000)), min_size=1, max_size=8),
    noise=st.integers(0, 60_000),
    rate=st.floats(1e3, 1e9),
)
def test_what_is_packed_is_shorter_and_comes_back(pieces: list[tuple[int, int]], noise: int, rate: float) -> None:
    payload = b"".join(bytes([value]) * count for value, count in pieces) + NOISE[:noise]
    lossless, _ = stage(rate)
    packed = lossless.packed(memoryview(payload))
    if packed is None:
        assert lossless.spared_bytes == 0
        return
    assert 0 < len(packed) < len(payload)
    assert lossless.spared_bytes == len(payload) - len(packed)
    place = bytearray(len(payload))
    assert unpack_into(memoryview(packed), memoryview(place)) is None
    assert place == payload


@pytest.mark.parametrize("rate", [None, RATE_BYTES_PER_S_MAX * 1.01])
def test_a_link_that_is_fast_or_never_held_back_is_left_alone(rate: float | None) -> None:
    """Not even a sample is taken."""
    lossless, clock = stage(rate)
    assert lossless.packed(bytes(limits.CHUNK_BYTES)) is None
    assert clock.looks == 0


def test_small_payloads_are_left_alone() -> None:
    lossless, clock = stage(1e6)
    assert lossless.packed(bytes(PAYLOAD_BYTES_MIN - 1)) is None
    assert clock.looks == 0
    assert lossless.packed(bytes(PAYLOAD_BYTES_MIN)) is not None


def test_noise_travels_as_it_is_however_slow_the_link_is() -> None:
    lossless, _ = stage(1.0)
    assert lossless.packed(NOISE) is None


@pytest.mark.parametrize(("faster", "pays"), [(0.9, True), (1.1, False)])
def test_it_pays_below_the_rate_at_which_the_link_takes_so_long_as_both_ends(faster: float, pays: bool) -> None:
    """A payload whose middle is zero, on a machine that compresses 1 MB/s: nearly all of the sample is spared."""
    sample_bytes = len(HALF) // 16
    spared = 1 - len(lz4.block.compress(bytes(sample_bytes), store_size=False)) / sample_bytes
    lossless, _ = stage(faster * spared * 1e6 / GAIN_MIN, sample_s=sample_bytes / 1e6)
    assert (lossless.packed(HALF) is not None) is pays


def test_an_interrupted_sample_weighs_little() -> None:
    lossless, clock = stage(1e6)
    assert lossless.packed(HALF) is not None
    clock.step_s = 0.03  # for a sample of 16 KiB: alone it would say that 256 KiB take 0.5 s
    assert lossless.packed(HALF) is not None


def test_the_rate_is_that_of_a_link_that_is_full() -> None:
    clock = Clock(0.5)
    rate = LinkRate(clock)
    rate.drained(10)
    assert rate.bytes_per_s is None, "it was never full"
    rate.full(1_000_000)
    rate.drained(500_000)
    assert rate.bytes_per_s == 1e6
    rate.full(1_000_000)
    rate.drained(0)
    assert rate.bytes_per_s == 1.25e6, "a quarter of the way to 2 MB/s"


class Lying(Lossless):
    """Says of something that it is the payload."""

    def __init__(self, packed: bytes) -> None:
        super().__init__(LinkRate())
        self._packed = packed

    def packed(self, payload: memoryview | bytes, capped_bytes_per_s: float | None = None) -> bytes | None:
        return self._packed


HOSTILE = {
    "nothing of LZ4": b"\xff" * 100,
    "cut off": lz4.block.compress(HALF, store_size=False)[:-5],
    "too few": lz4.block.compress(bytes(1000), store_size=False),
    "too many": lz4.block.compress(bytes(limits.CHUNK_BYTES + 1), store_size=False),
    "a thousand times too many": lz4.block.compress(bytes(200 * limits.MIB), store_size=False)[:200_000],
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_block_of_another_length_is_refused(how: str) -> None:
    """No byte beyond the place is written, and none of it is taken for a payload."""
    memory = bytearray(b"\x55" * (limits.CHUNK_BYTES + 8))
    wrong = unpack_into(memoryview(HOSTILE[how]), memoryview(memory)[: limits.CHUNK_BYTES])
    assert wrong is not None
    assert "packed bytes" in wrong
    assert memory == b"\x55" * len(memory)


@given(st.binary(min_size=1, max_size=200))
def test_no_block_raises(packed: bytes) -> None:
    place = bytearray(1000)
    wrong = unpack_into(memoryview(packed), memoryview(place))
    assert wrong is None or place == bytes(1000)


@every_transport
def test_packed_chunks_land_as_they_were(loop_name: str, tls: bool) -> None:
    """The handler sees no difference; what is counted is what travelled; packed ones can be drained too (G8)."""

    async def check() -> None:
        async with pair(tls) as (client, _, _, received):
            client.lossless.rate.bytes_per_s = 1e6
            payloads = {0: HALF, 1: NOISE, 2: bytes(limits.CHUNK_BYTES), 3: bytes(100)}
            places = {bucket: bytearray(len(payload)) for bucket, payload in payloads.items()}
            received.places.update({bucket: memoryview(place) for bucket, place in places.items()})
            client.send_chunk(chunk(9, len(HALF)), HALF)  # nobody wants it
            for bucket, payload in payloads.items():
                client.send_chunk(chunk(bucket, len(payload)), memoryview(payload))
            await until(lambda: len(received.chunks) == len(payloads))
            assert places == payloads
            assert [bool(header.packed_bytes) for header in received.chunks] == [True, False, True, False]
            whole = len(HALF) + sum(map(len, payloads.values()))
            assert client.chunk_payload_bytes_sent == whole - client.lossless.spared_bytes
            assert client.lossless.spared_bytes > 1.9 * limits.CHUNK_BYTES

    run(loop_name, check())


@every_transport
def test_a_packed_payload_that_is_none_breaks_the_protocol(loop_name: str, tls: bool) -> None:
    """It ends the link, and no chunk of it is taken."""

    async def check() -> None:
        async with pair(tls) as (client, told, server, received):
            received.places[0] = memoryview(bytearray(limits.CHUNK_BYTES))
            violations: list[str] = []
            server.on_violated = violations.append
            for packed in (b"\xff" * 100, bytes(10)):
                client.lossless = Lying(packed)
                client.send_chunk(chunk(0, limits.CHUNK_BYTES), HALF)
            await until(lambda: bool(told.losses))
            assert "server refused: protocol violation: 100 packed bytes that are no LZ4 block" in told.losses[0]
            (violation,) = violations  # the jobs of that device hear of it (G10)
            assert "100 packed bytes that are no LZ4 block" in violation
            assert received.chunks == []

    run(loop_name, check())
