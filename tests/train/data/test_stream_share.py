"""Streams on several devices: every m-th item each, unless the data set takes its part itself (X6)."""

import pickle
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import meshtrain as mt
from meshtrain.train.data import stream_share
from meshtrain.train.data.stream_share import StreamShare, shared_stream

COUNT = 23


class Numbers(IterableDataset[int]):
    """With workers, each reads a part of its own, as torch's documentation has it."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(100 * self.epoch + first, 100 * self.epoch + COUNT, step))


class Measured(Numbers):
    def __len__(self) -> int:
        return COUNT


class OwnPart(IterableDataset[int]):
    """Takes its part itself."""

    def __iter__(self) -> Iterator[int]:
        yield from range(mt.rank(), COUNT, mt.world_size())


@pytest.fixture(autouse=True)
def nobody_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_share, "_asked", 0)


def items(loader: Any) -> list[int]:
    return [int(item) for batch in loader for item in batch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_item_is_taken_once(count: int, workers: int) -> None:
    loader = DataLoader(Numbers(), batch_size=4, num_workers=workers)
    parts = [items(shared_stream(loader, rank, count)) for rank in range(count)]
    assert sorted(chain(*parts)) == list(range(COUNT))
    assert max(map(len, parts)) - min(map(len, parts)) <= max(1, workers)


def test_settings_of_the_loader_are_kept() -> None:
    def collate(batch: list[int]) -> tuple[int, ...]:
        return tuple(batch)

    loader = DataLoader(Numbers(), batch_size=5, drop_last=True, collate_fn=collate)
    assert list(shared_stream(loader, 1, 2)) == [(1, 3, 5, 7, 9), (11, 13, 15, 17, 19)]
    batches = DataLoader(Numbers(), batch_size=None)
    assert [int(item) for item in shared_stream(batches, 0, 8)] == [0, 8, 16]


def test_the_data_set_is_there_as_before() -> None:
    """As libraries call it in each epoch."""
    shared = shared_stream(DataLoader(Numbers(), batch_size=4), 1, 2)
    shared.dataset.set_epoch(3)
    assert items(shared)[0] == 301
    with pytest.raises(AttributeError, match="no_such_thing"):
        shared.dataset.no_such_thing  # noqa: B018
    again = pickle.loads(pickle.dumps(shared.dataset))
    assert list(again) == list(range(301, 300 + COUNT, 2))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_its_length_is_that_of_its_part(count: int) -> None:
    for rank in range(count):
        share = StreamShare(Measured(), rank, count)
        assert len(share) == len(list(share))
    with pytest.raises(TypeError):
        len(StreamShare(Numbers(), 0, 2))


def test_a_data_set_that_takes_its_part_itself_is_read_as_it_is() -> None:
    shared = shared_stream(DataLoader(OwnPart(), batch_size=4), 1, 2)  # without a job its rank is 0 of 1
    assert items(shared) == list(range(COUNT))
    assert items(shared) == list(range(COUNT)), "in each epoch"


def test_a_loop_that_asks_for_its_rank_changes_nothing() -> None:
    taken = []
    for batch in shared_stream(DataLoader(Numbers(), batch_size=2), 1, 2):
        taken += [int(item) for item in batch]
        assert mt.rank() == 0
    assert taken == list(range(1, COUNT, 2))


def test_who_has_asked_before_has_taken_a_part(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Numbers(), batch_size=4)
    assert mt.rank() == 0
    assert shared_stream(loader, 0, 2) is loader
    assert "asked for before mt.prepare" in caplog.text


def test_a_loader_of_its_own_kind_is_left_alone() -> None:
    class Own(DataLoader[int]):
        pass

    own = Own(Numbers(), batch_size=4)
    assert shared_stream(own, 0, 2) is own
