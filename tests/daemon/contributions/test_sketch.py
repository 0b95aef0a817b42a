"""Sums of sparse vectors in cells: adding without decoding, finding the values again, and knowing when that fails."""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshtraind.codecs.base import CodecError, Terms
from meshtraind.codecs.homomorphic import Homomorphic, Recovered
from meshtraind.codecs.sketch import cells_of, peel, poured
from meshtraind.contributions.segments import Segment
from meshtraind.contributions.sketch import Shares
from meshwire.codecs.registry import parse_codec
from meshwire.codecs.sketch import LIMIT, STEP, cells_for
from meshwire.limits import MEMBERS_MAX
from tests.daemon.codectrips import Values

CODEC = Homomorphic(parse_codec("homomorphic:0.05"))
COUNT = 2000
ROOM = CODEC.room(COUNT)


def encoded(values: Values, seed: int, most: int | None = None) -> tuple[bytes, Values]:
    """The bytes, and what stays behind."""
    rest, out = values.copy(), bytearray(CODEC.spec.segment_bytes_max(len(values)))
    CODEC.encode_rest_into(rest, memoryview(out), Terms(seed=seed, values_max=most))
    return bytes(out), rest


def added(parts: Sequence[bytes], count: int = COUNT) -> bytes:
    def both(one: bytes, other: bytes) -> bytes:
        total = bytearray(other)
        CODEC.add_encoded(memoryview(one), memoryview(total), count)
        return bytes(total)

    return functools.reduce(both, parts)


def sparse(seed: int, kept: int, scale: float = 1.0) -> Values:
    """Values at random places, of which some add up to zero with another's."""
    rng = np.random.default_rng(seed)
    values = np.zeros(COUNT, np.float32)
    places = rng.choice(COUNT, kept, replace=False)
    values[places] = rng.choice([-1, 1, 0.37, 2**-20, 3e4], kept) * rng.choice([1, 1.7], kept) * scale
    return values


def recovered(payload: bytes, count: int = COUNT) -> tuple[Values, int, bool]:
    out = np.full(count, np.nan, np.float32)
    found = CODEC.recover_into(memoryview(payload), out)
    return out, *found


SUPPORTS = st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, ROOM)), min_size=1, max_size=6)


@settings(max_examples=25)
@given(SUPPORTS, st.integers(0, 2**64 - 1), st.randoms(use_true_random=False))
def test_sums_are_equal_bit_by_bit_in_any_order(
    supports: list[tuple[int, int]], seed: int, chance: random.Random
) -> None:
    """O9: commutative and associative, where cells overflow, too; so a ring may begin anywhere."""
    parts = [encoded(sparse(*each, scale=LIMIT), seed)[0] for each in supports]
    shuffled = sorted(parts, key=lambda _: chance.random())
    middle = len(parts) // 2
    nested = [added(each) for each in (parts[:middle], parts[middle:]) if each]
    assert added(parts) == added(shuffled) == added(nested)


@settings(max_examples=50)
@given(SUPPORTS, st.integers(0, 2**64 - 1))
def test_a_sum_is_found_exactly_or_known_not_to_be(supports: list[tuple[int, int]], seed: int) -> None:
    """Lossless: what was sent and what stays are what came, and the sum is that of what was sent, to the last bit of
    fp32. It fails exactly where some places share all their cells with others (the 2-core)."""
    came = [sparse(*each) for each in supports]
    parts = [encoded(values, seed) for values in came]
    sent = [values.astype(np.float64) - rest for values, (_, rest) in zip(came, parts, strict=True)]
    total, places, whole = recovered(added([part for part, _ in parts]))
    marked = np.flatnonzero(np.any(sent, axis=0))
    assert places == len(marked)
    assert whole == (not core(seed, marked))
    assert (total == (np.sum(sent, axis=0).astype(np.float32) if whole else 0)).all()


def core(seed: int, places: NDArray[np.intp]) -> set[int]:
    """The places that are left when whoever is alone in a cell has gone, one after the other."""
    where = dict(zip(places.tolist(), cells_of(seed, places, cells_for(ROOM)).T.tolist(), strict=True))
    left = set(where)
    while True:
        taken = Counter(cell for place in left for cell in where[place])
        alone = {place for place in left if any(taken[cell] == 1 for cell in where[place])}
        if not alone:
            return left
        left -= alone


def test_the_largest_that_all_members_can_send_does_not_overflow() -> None:
    """MEMBERS_MAX times the largest value in the same place, of either sign."""
    for sign in (1, -1):
        part, rest = encoded(np.full(COUNT, sign * 1e30, np.float32), 3, 1)
        total, places, whole = recovered(added([part] * MEMBERS_MAX))
        assert (places, whole) == (1, True)
        assert total.sum() * sign == pytest.approx(MEMBERS_MAX * LIMIT, rel=1e-6)
        assert rest.min() >= 0 if sign > 0 else rest.max() <= 0


def test_what_is_below_a_step_waits() -> None:
    values = np.full(COUNT, 0.49 * STEP, np.float32)
    part, rest = encoded(values, 3)
    assert (rest == values).all()
    assert recovered(part)[1:] == (0, True)


def test_most_sums_of_what_fits_are_found() -> None:
    """Those of as many places as there is room for, and fewer; it is the other cells of another seed that find more."""
    failed = 0
    for seed in range(60):
        members = [encoded(sparse(1000 * seed + rank, ROOM // 4), seed)[0] for rank in range(4)]
        failed += not recovered(added(members))[2]
    assert failed < 4


def test_segments_of_other_rounds_or_lengths_are_refused() -> None:
    one, other = (encoded(sparse(1, 10), seed)[0] for seed in (1, 2))
    with pytest.raises(CodecError, match="different seeds"):
        added([one, other])
    with pytest.raises(CodecError, match="bytes for 2000 values"):
        added([one[:-1], one])
    with pytest.raises(CodecError, match="bytes for 2000 values"):
        added([one, one + b"\0"])


def test_what_is_no_sum_of_segments_is_refused() -> None:
    """DESIGN 8: cells that hold something else, and places beyond the segment."""
    part = bytearray(encoded(sparse(1, 10), 1)[0])
    part[-1] ^= 0x40
    with pytest.raises(CodecError, match="hold more than"):
        recovered(bytes(part))
    short = bytearray(encoded(sparse(1, 0)[:1999], 1)[0])
    short[8 + 249] |= 0x80
    with pytest.raises(CodecError, match="a place beyond"):
        recovered(bytes(short), 1999)


def test_a_chain_that_only_hostile_bytes_make_takes_no_long_time() -> None:
    """One place is found in each pass, and there are thousands."""
    places = np.arange(5000)
    where = np.stack([places, places + 1, np.full(5000, 5001)])
    cells = poured(where, np.ones(5000, np.int64), 5002)
    assert peel(where[:, :150], poured(where[:, :150], np.ones(150, np.int64), 5002)) is not None
    assert peel(where, cells) is None


@settings(max_examples=3)
@given(members=st.sampled_from([1, 2, 5, MEMBERS_MAX]), overlap=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_whatever_the_supports_all_of_it_arrives(members: int, overlap: float, seed: int) -> None:
    """Retried with other cells, and fewer values while they do not fit: nobody starves, and nothing is lost (P1)."""
    count = 500
    rng = np.random.default_rng(seed)
    common = rng.permutation(count)
    owed = np.zeros((members, count), np.float32)
    for row in owed:
        order = common if rng.random() < overlap else rng.permutation(count)
        row[order[:100]] = rng.integers(1, 2**10, 100)
    came, arrived = owed.sum(axis=0, dtype=np.float64), np.zeros(count)
    segment = Segment(CODEC, 0, CODEC.spec.segment_bytes_max(count), 0, count, measured=True)
    shares = [Shares() for _ in owed]
    room = CODEC.room(count)
    for each in shares:  # they have overlapped for long, and do not any more
        each.learn(segment, room, 1.0, Recovered(room, whole=True))
    for number in itertools.count():
        if not owed.any():
            break
        assert number < 400
        filled = [share.of(segment, members) for share in shares]
        before, parts = owed.copy(), []
        for rank, share in enumerate(filled):
            part, owed[rank] = encoded(owed[rank], seed + number, max(1, int(share * room)))
            parts.append(part)
        out = np.empty(count, np.float32)
        found = CODEC.recover_into(memoryview(added(parts, count)), out)
        if not found.whole:
            owed = before
        arrived += out
        for each, share in zip(shares, filled, strict=True):
            each.learn(segment, room, share, found)
        assert (arrived + owed.sum(axis=0) == came).all()
