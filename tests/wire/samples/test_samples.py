from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.samples.epochs import cuts, epoch_seed, members_most, part_of_learner, rounds_per_epoch
from tests.plannedeal import deal

BATCHES = st.lists(st.integers(1, 40), min_size=1, max_size=9) | st.builds(
    lambda members, size: [size] * members, st.integers(1, 9), st.integers(1, 40)
)


@given(st.integers(1, 16), st.integers(0, 200))
def test_learners_of_a_device_share_all_that_it_is_dealt(learners: int, more: int) -> None:
    """R6: one after the other, each at least one, and none more than one more than another."""
    count = learners + more
    parts = [part_of_learner(count, learner, learners) for learner in range(learners)]
    assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == count
    sizes = {end - first for first, end in parts}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=100)
@given(BATCHES, st.integers(0, 2000), st.booleans())
def test_every_sample_is_dealt_exactly_once(batch_sizes: list[int], more: int, drop_last: bool) -> None:
    """X4: contiguous by rank, round after round, at least one sample each, nobody idles inside an epoch."""
    members, joint = len(batch_sizes), sum(batch_sizes)
    total = (joint if drop_last else members) + more
    rounds = rounds_per_epoch(total, batch_sizes, drop_last=drop_last)
    position = 0
    for index in range(rounds):
        parts = deal(total, batch_sizes, index, drop_last=drop_last)
        assert len(parts) == members
        for first, end in parts:
            assert first == position
            assert end > first
            position = end
        counts = [end - first for first, end in parts]
        if drop_last or index < rounds - 1:
            assert counts == batch_sizes
        elif sum(counts) <= joint:
            assert all(count <= size for count, size in zip(counts, batch_sizes, strict=True))
        else:
            assert sum(counts) < joint + members
    assert position == (total // joint * joint if drop_last else total)
    for outside in (-1, rounds):
        with pytest.raises(IndexError):
            deal(total, batch_sizes, outside, drop_last=drop_last)


def test_a_remainder_smaller_than_the_members_joins_the_previous_round() -> None:
    """X4."""
    assert rounds_per_epoch(26, [4, 4, 4]) == 2
    assert [end - first for first, end in deal(26, [4, 4, 4], 1)] == [4, 5, 5]
    assert rounds_per_epoch(27, [4, 4, 4]) == 3
    assert deal(27, [4, 4, 4], 2) == ((24, 25), (25, 26), (26, 27))


def test_a_short_round_is_split_in_proportion() -> None:
    """X4a: shares may follow speed."""
    assert [end - first for first, end in deal(20, [30, 10], 0)] == [15, 5]
    assert [end - first for first, end in deal(5, [90, 1, 1], 0)] == [3, 1, 1]
    assert [end - first for first, end in deal(5, [1, 1, 90], 0)] == [1, 1, 3]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=6), st.integers(1, 400))
def test_nobody_has_a_single_sample_where_there_are_two_for_each(sizes: list[int], count: int) -> None:
    """X4a: at an epoch's end, too, for BatchNorm has no variance of one."""
    count = max(count, len(sizes))
    bounds = cuts(count, sizes)
    each = [end - first for first, end in pairwise(bounds)]
    assert sum(each) == count
    assert min(each) >= (2 if count >= 2 * len(sizes) else 1)


def test_fewer_samples_than_members_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 samples, fewer than the 3 members"):
        rounds_per_epoch(2, [1, 1, 1])
    with pytest.raises(ValueError, match="less than one joint batch of 12"):
        rounds_per_epoch(11, [4, 4, 4], drop_last=True)
    for sizes in ([], [4, 0]):
        with pytest.raises(ValueError, match="at least one sample a round"):
            deal(10, sizes, 0)


@given(st.integers(1, 200), st.integers(1, 40), st.booleans())
def test_an_epoch_is_enough_for_so_many_members(total: int, batch: int, drop_last: bool) -> None:
    most = members_most(total, batch, drop_last=drop_last)
    if most:
        assert rounds_per_epoch(total, [batch] * most, drop_last=drop_last) >= 1
    with pytest.raises(ValueError, match="fewer"):
        rounds_per_epoch(total, [batch] * (most + 1), drop_last=drop_last)


def test_epoch_seeds_are_fixed_and_distinct() -> None:
    """X4: a pure function of seed and epoch, equal on all members and in all versions."""
    assert epoch_seed(0, 0) == 7696292205685908379
    seeds = {epoch_seed(seed, epoch) for seed in range(20) for epoch in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
