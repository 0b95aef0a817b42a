"""Which weights a mask keeps, and which come and go (`--masks`): comparisons alone, ties by the first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshtrain.train.partial.mask_choice import largest, moved, packed, spread

# Few values, so that there are many ties; all kinds of them.
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -0.5, 1e-45, -3e38, float("inf"), float("nan")])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def order(values: torch.Tensor) -> list[int]:
    """Places by falling magnitude, then by index; NaN is the largest."""

    def rank(index: int) -> tuple[float, int]:
        magnitude = abs(float(values[index]))
        return (-float("inf"), index) if magnitude != magnitude else (-magnitude, index)

    finite_last = sorted(range(len(values)), key=rank)
    nan = [index for index in finite_last if float(values[index]) != float(values[index])]
    return nan + [index for index in finite_last if index not in nan]


@given(st.lists(VALUES, min_size=1, max_size=30), DTYPES, st.data())
def test_the_largest_are_kept_and_of_equal_ones_the_first(
    drawn: list[float], dtype: torch.dtype, data: st.DataObject
) -> None:
    values = torch.tensor(drawn).to(dtype)
    count = data.draw(st.integers(0, len(drawn)))
    assert largest(values, count).tolist() == sorted(order(values)[:count])
    assert torch.equal(largest(values.view(1, -1), count), largest(values, count))


@given(st.lists(st.tuples(VALUES, VALUES, st.booleans()), min_size=1, max_size=30), DTYPES, st.data())
def test_the_smallest_kept_leave_and_the_largest_means_come_in(
    drawn: list[tuple[float, float, bool]], dtype: torch.dtype, data: st.DataObject
) -> None:
    """RigL: drop by magnitude, grow by gradient outside of what stays. The number that is kept never changes."""
    weights = torch.tensor([weight for weight, _, _ in drawn]).to(dtype)
    mean = torch.tensor([mean for _, mean, _ in drawn])
    before = [index for index, (_, _, kept) in enumerate(drawn) if kept]
    count = data.draw(st.integers(0, len(before)))
    after = moved(torch.tensor(before, dtype=torch.int64), weights, mean, count).tolist()
    stays = [index for index in order(weights) if index in before][: len(before) - count]
    grown = [index for index in order(mean) if index not in stays][:count]
    assert after == sorted([*stays, *grown])
    assert len(after) == len(before)


def test_choices_do_not_depend_on_threads_or_layout() -> None:
    """They are the same on all peers: of any device, however the tensor lies in memory."""
    values = torch.randn(300, 200, generator=torch.Generator().manual_seed(1)).mul(8).round()
    places = largest(values, 20_000)
    assert len(places) == 20_000
    assert torch.equal(largest(values.t().contiguous().t(), 20_000), places)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(largest(values, 20_000), places)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1])
def test_a_weight_that_leaves_may_come_in_again(count: int) -> None:
    """As in RigL: then nothing has happened to it."""
    assert moved(torch.tensor([0]), torch.tensor([0.1, 0.0]), torch.tensor([2.0, 1.0]), count).tolist() == [0]


@given(st.lists(VALUES, min_size=1, max_size=30), DTYPES, st.data())
def test_what_is_packed_and_spread_is_zero_where_it_is_left_out(
    drawn: list[float], dtype: torch.dtype, data: st.DataObject
) -> None:
    """Exact zeros, also in place of what is not finite."""
    values = torch.tensor(drawn).to(dtype).view(-1, 1)
    kept = sorted(data.draw(st.sets(st.integers(0, len(drawn) - 1))))
    places = torch.tensor(kept, dtype=torch.int64)
    sparse = spread(packed(values, places), places, values.shape)
    for index in range(len(drawn)):
        assert str(float(sparse[index, 0])) == (str(float(values[index, 0])) if index in kept else "0.0")
