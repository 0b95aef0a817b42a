"""The prepared loader: every sample of an epoch exactly once on exactly one peer (X1, X4)."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from meshtrain.train.data.deal import Deal
from meshtrain.train.data.loader import DealtLoader
from meshtrain.train.data.ordering import LoaderOrder
from meshtrain.train.session import LearnerSession
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import SampleBlock
from meshwire.samples.ledger import Ledger
from meshwire.sync_modes.mode import SyncSettings
from tests.train.localdaemon import LocalDaemon


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Buckets(Sampler[list[int]]):
    """Batches of uneven length, shuffled by torch's generator."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(first, min(first + 1 + first % 4, 30))) for first in range(30)]
        flat: list[list[int]] = []
        position = 0
        while position < 30:
            batch = batches[position]
            flat.append(batch)
            position += len(batch)
        return iter([flat[index] for index in torch.randperm(len(flat)).tolist()])

    def __len__(self) -> int:
        return sum(1 for _ in iter_lengths())


def iter_lengths() -> Iterator[int]:
    position = 0
    while position < 30:
        yield 1 + position % 4
        position += 1 + position % 4


def numpy_state() -> str:
    return str(np.random.get_state(legacy=False))


def deals(loader: DataLoader[Any], members: int, seed: int = 3) -> list[Deal]:
    """Of each rank, with what it is granted before round 1."""
    made = [Deal(loader, members, seed, SyncSettings()) for _ in range(members)]
    ledger = Ledger(made[0].space(), range(members), SyncSettings())
    for rank, each in enumerate(made):
        each.grant(ledger.batches(rank), 0)
    return made


class Learner:
    """What a loader wants of one that never waits."""

    def __init__(self, blocks: list[SampleBlock], *, each_whole: bool) -> None:
        self._blocks = blocks
        self._each_whole = each_whole

    def add(self, blocks: Sequence[SampleBlock], samples: int) -> None:
        assert samples == sum(block.end - block.first for block in blocks) or self._each_whole
        self._blocks.extend(blocks)

    def wait_samples(self, until: Callable[[], bool]) -> None:
        assert until(), "it waits for samples"

    def wait_idle(self, reason: str, until: Callable[[], bool], what: str) -> None:
        raise AssertionError(f"{reason}: it waits for {what} until {until}")

    def end_period(self) -> bool:
        return False

    def begin_rehearsal(self) -> None:
        raise AssertionError("there are samples of this epoch")

    def leave_rehearsal(self) -> None:
        """None is rehearsed."""

    def end_rehearsal(self) -> None:
        """None is rehearsed."""


def deal(loader: DataLoader[Any], members: int, seed: int = 3) -> tuple[list[DealtLoader], list[list[SampleBlock]]]:
    """Loaders of all ranks whose steps are never bound, and what they hand out."""
    blocks: list[list[SampleBlock]] = [[] for _ in range(members)]

    learners = [Learner(taken, each_whole=loader.batch_size is None) for taken in blocks]
    loaders = [
        DealtLoader(loader, each, learner, torch.device("cpu"), learner)
        for learner, each in zip(learners, deals(loader, members, seed), strict=True)
    ]
    return loaders, blocks


@pytest.mark.parametrize(
    ("members", "count", "workers"),
    [(1, 24, 0), (1, 25, 0), (2, 24, 0), (2, 25, 0), (2, 31, 2), (3, 24, 0), (3, 25, 0), (3, 31, 0)],
)
def test_every_sample_once_per_epoch(members: int, count: int, workers: int) -> None:
    """X4, with prefetching workers, too; epochs differ, and all ranks take equally many steps."""
    loaders, blocks = deal(DataLoader(Numbers(count), batch_size=4, shuffle=True, num_workers=workers), members)
    orders = []
    for epoch in range(2):
        for rank_blocks in blocks:
            rank_blocks.clear()
        batches = [[batch.tolist() for batch in loader] for loader in loaders]
        assert {len(rank) for rank in batches} == {len(loader) for loader in loaders}
        assert sorted(item for rank in batches for batch in rank for item in batch) == list(range(count))
        for rank, rank_blocks in zip(batches, blocks, strict=True):
            assert [len(batch) for batch in rank] == [block.end - block.first for block in rank_blocks]
            assert {block.epoch for block in rank_blocks} == {epoch}
        orders.append(batches)
    assert orders[0] != orders[1]


def test_order_follows_the_jobs_seed_and_not_the_scripts() -> None:
    orders = []
    for script_seed, seed in ((1, 3), (2, 3), (2, 4)):
        torch.manual_seed(script_seed)
        (loader,), _ = deal(DataLoader(Numbers(20), batch_size=5, shuffle=True), 1, seed)
        orders.append([batch.tolist() for batch in loader])
    assert orders[0] == orders[1] != orders[2]


def test_sequential_order_and_drop_last() -> None:
    loaders, _ = deal(DataLoader(Numbers(21), batch_size=4, drop_last=True), 2)
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    assert batches == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]]


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler(range(5, 25)),
        WeightedRandomSampler([1.0] * 20, 16),
        RandomSampler(Numbers(20), replacement=True, num_samples=12),
        RandomSampler(Numbers(20), generator=torch.Generator().manual_seed(5)),
        SequentialSampler(Numbers(20)),
    ],
)
def test_other_samplers_give_all_ranks_one_order(sampler: Sampler[int]) -> None:
    """X4: run once per epoch under a generator that all peers seed alike; the script's generators are untouched."""
    loader = DataLoader(Numbers(25), batch_size=2, sampler=sampler)
    before = torch.get_rng_state(), random.getstate(), numpy_state()
    made = deals(loader, 2)
    dealt = [list(each) for each in made]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == numpy_state()
    order = list(LoaderOrder(loader, 2, 3).of(0))
    for each, own in zip(made, dealt, strict=True):
        for indices in own:
            (block,), samples = each.handed_out()
            assert samples == len(indices)
            assert indices == order[block.first : block.end]


def test_batches_of_an_own_sampler_are_dealt_whole() -> None:
    loader = DataLoader(Numbers(30), batch_sampler=Buckets())
    whole = {tuple(batch) for batch in Buckets()}
    loaders, blocks = deal(loader, 2)
    seen = [[batch.tolist() for batch in each] for each in loaders]
    assert len(seen[0]) == len(seen[1]) == len(loaders[0])
    assert sorted(item for rank in seen for batch in rank for item in batch) == list(range(30))
    joined = [batch for rank in seen for batch in rank if tuple(batch) not in whole]
    assert len(joined) <= 1, "only a remainder smaller than the number of peers joins another batch"
    units = sorted(unit for own in blocks for block in own for unit in range(block.first, block.end))
    assert units == list(range(len(whole)))


def test_a_batch_sampler_of_torch_is_taken_apart() -> None:
    """Its size and drop_last count, though the loader itself says neither."""
    loader = DataLoader(Numbers(23), batch_sampler=BatchSampler(SequentialSampler(Numbers(23)), 4, drop_last=True))
    loaders, _ = deal(loader, 2)
    assert [[batch.tolist() for batch in each] for each in loaders] == [
        [[0, 1, 2, 3], [8, 9, 10, 11]],
        [[4, 5, 6, 7], [12, 13, 14, 15]],
    ]
    space = deals(loader, 2)[0].space()
    assert space == SampleSpace(total=23, batch=4, whole_batches=False, drop_last=True)


def test_settings_of_the_loader_are_kept() -> None:
    def collate(items: list[int]) -> tuple[int, ...]:
        return tuple(items)

    (loader,), _ = deal(DataLoader(Numbers(6), batch_size=3, collate_fn=collate), 1)
    assert isinstance(loader, DataLoader)
    assert loader.dataset.count == 6  # type: ignore[attr-defined]
    assert list(loader) == [(0, 1, 2), (3, 4, 5)]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(4, 6))


@pytest.mark.parametrize("stream", [False, True])
def test_own_draws_differ_between_peers(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """X6: iterable data sets and hand-rolled batches get a rank-salted seed, and the log says so; W3: weight 1."""

    def script(session: LearnerSession, rank: int) -> list[float]:  # noqa: ARG001
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if stream:
            loader = DataLoader(Stream(), batch_size=2)
            session.prepare_with_loader(model, optimizer, loader)
        else:
            session.prepare(model, optimizer)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        return [float(torch.initial_seed())]

    seeds = []
    for rank in range(2):  # one after the other: torch's generator is the process's
        with LocalDaemon(1) as daemon:
            session = LearnerSession.attach(daemon.environment(0))
            session._welcome = session._welcome.model_copy(update={"rank": rank})
            seeds += script(session, rank)
            session.finish()
            assert daemon.buckets[1][0][0].weight == 1.0
    assert seeds[0] != seeds[1]
    said = " ".join(caplog.text.split())
    assert said.count("seeded by its rank") == 1, "one says it for all"
    assert ("takes every m-th item" if stream else "all devices get the same ones: use mt.rank() in the seed") in said
