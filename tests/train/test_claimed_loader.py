"""The prepared loader under claims: each sample once an epoch over all peers, and nobody waits for ever (X1 to X5)."""

import random
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.claimed import ClaimedDeal, ClaimedLoader
from meshwire.claims import PREFETCH_MAX, first_batches
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import SampleBlock
from tests.train.claimcluster import Cluster, Learner


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Runs(Sampler[list[int]]):
    """Whole batches of uneven length, in an order of torch's generator."""

    def __init__(self, total: int) -> None:
        self.batches: list[list[int]] = []
        position = 0
        while position < total:
            end = min(position + 1 + len(self.batches) % 3, total)
            self.batches.append(list(range(position, end)))
            position = end

    def __iter__(self) -> Iterator[list[int]]:
        return iter([self.batches[index] for index in torch.randperm(len(self.batches)).tolist()])

    def __len__(self) -> int:
        return len(self.batches)


def check_epochs(cluster: Cluster, epochs: int, total: int) -> None:
    """X1, X4: the epochs that all learners have read to their end."""
    for epoch in range(epochs):
        covered = cluster.covered[epoch]
        assert len(covered) == len(set(covered)), f"epoch {epoch}: a sample in two contributions"
        assert sorted(covered) == list(range(total)), f"epoch {epoch}"
    assert cluster.unused[:epochs] == [0] * epochs


@pytest.mark.parametrize("seed", range(40))
def test_exactly_once(seed: int) -> None:
    """X1, X2, X4: any speeds, s, sizes that change, accumulation, steps passed over and lost, loops left and resumed.

    A step that ends its accumulation with the epoch covers what it has; so no epoch leaves anything to the next.
    """
    draw = random.Random(seed)
    members, staleness, count = draw.randint(1, 4), draw.choice([0, 0, 1, 2, 5]), draw.randint(4, 400)
    loader = DataLoader(Numbers(count), batch_size=draw.randint(1, 5), shuffle=draw.random() < 0.5)
    cluster = Cluster(loader, members, staleness, seed)
    epochs = 3

    def script(learner: Learner) -> None:
        own = random.Random(seed * 100 + learner.rank)
        accumulate = own.randint(1, 4)
        for epoch in range(epochs):
            while learner.deal.epoch == epoch:
                limit = own.choice([None, own.randint(1, 20)])
                for number, _ in enumerate(learner.read(count=limit), 1):
                    if number % accumulate == 0:
                        learner.step()
                if learner.pending:
                    learner.step()

    cluster.run(script)
    check_epochs(cluster, epochs - 1, count)


def test_steps_are_lost_and_passed_over_in_these_runs() -> None:
    """The cluster does what the tests above are about."""
    cluster = Cluster(DataLoader(Numbers(2000), batch_size=2), 3, 2, 1, speeds=[1, 3, 3])

    def script(learner: Learner) -> None:
        for _ in range(2):
            for _ in learner.read():
                learner.step()

    cluster.run(script)
    check_epochs(cluster, 2, 2000)
    assert all(learner.lost for learner in cluster.learners)
    taken = [sum(learner.steps) for learner in cluster.learners]
    assert taken[0] < min(taken[1:]), "who is faster takes more"
    assert len({size for learner in cluster.learners for size in learner.steps}) > 2


def test_lockstep_reads_what_one_process_reads() -> None:
    """R7: at s=0 with equal sizes every joint batch is that of a single process, whoever is first in a round."""
    cluster = Cluster(DataLoader(Numbers(1200), batch_size=4), 3, 0, 5, sizes_change=False)
    rounds: list[list[int]] = [[] for _ in range(100)]

    def script(learner: Learner) -> None:
        for number, batch in enumerate(learner.read()):
            rounds[number] += batch.tolist()
            learner.step()

    cluster.run(script)
    assert [sorted(items) for items in rounds] == [list(range(first, first + 12)) for first in range(0, 1200, 12)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("staleness", [0, 2])
def test_workers_prefetch(staleness: int, persistent: bool) -> None:
    """X2: what the workers have in hand when a loop is left comes first in the next one."""
    loader = DataLoader(Numbers(300), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent)
    cluster = Cluster(loader, 2, staleness, 11, speeds=[1, 3])

    def script(learner: Learner) -> None:
        for epoch in range(2):
            limit: int | None = 5
            while learner.deal.epoch == epoch:
                for _ in learner.read(count=limit):
                    learner.step()
                limit = None

    cluster.run(script)
    check_epochs(cluster, 2, 300)


@pytest.mark.parametrize("staleness", [0, 3])
def test_whole_batches(staleness: int) -> None:
    """Units are batches of the script's own sampler; weights are samples."""
    cluster = Cluster(DataLoader(Numbers(301), batch_sampler=Runs(301)), 3, staleness, 3)
    assert cluster.space == SampleSpace(total=151, batch=1, whole_batches=True, drop_last=False)
    whole = {tuple(batch) for batch in Runs(301).batches}

    def script(learner: Learner) -> None:
        for _ in range(2):
            for batch in learner.read():
                assert tuple(batch.tolist()) in whole
                learner.step()

    cluster.run(script)
    check_epochs(cluster, 2, 301)


def test_drop_last() -> None:
    """No batch is shorter than its size; less than a batch is left out."""
    cluster = Cluster(DataLoader(Numbers(203), batch_size=5, drop_last=True), 2, 1, 8)

    def script(learner: Learner) -> None:
        for _ in range(3):
            for _ in learner.read():
                learner.step()

    cluster.run(script)
    for epoch in range(3):
        covered = cluster.covered[epoch]
        assert sorted(covered) == list(range(len(covered)))
        assert 203 - len(covered) < 9
    assert cluster.unused[:3] == [0] * 3


def test_a_member_that_finishes_early_holds_nobody_up() -> None:
    """Its samples are told as unused; all others are covered once."""
    cluster = Cluster(DataLoader(Numbers(400), batch_size=2), 3, 1, 4)

    def script(learner: Learner) -> None:
        for _ in range(3):
            for number, _ in enumerate(learner.read()):
                learner.step()
                if learner.rank == 1 and number == 9:
                    return

    cluster.run(script)
    for epoch in range(3):
        covered = cluster.covered[epoch]
        assert len(covered) == len(set(covered)) == 400 - cluster.unused[epoch]
    assert cluster.unused[0] > 0


@pytest.mark.parametrize("staleness", [0, 2])
def test_accumulation_that_the_epoch_cuts_goes_on_in_the_next(staleness: int) -> None:
    """Nobody waits for itself: what is handed out and not bound is part of the next step's contribution."""
    cluster = Cluster(DataLoader(Numbers(103), batch_size=1), 2, staleness, 6)

    def script(learner: Learner) -> None:
        number = 0
        for _ in range(3):
            for _ in learner.read():
                number += 1
                if number % 3 == 0:
                    learner.step()

    cluster.run(script)
    check_epochs(cluster, 2, 103)


def test_nobody_waits_for_samples_of_a_peer_in_a_barrier() -> None:
    """A loop that one peer has left early, then a barrier; then the rest of the samples."""
    cluster = Cluster(DataLoader(Numbers(200), batch_size=1), 2, 1, 9)

    def script(learner: Learner) -> None:
        for _ in learner.read(count=3 if learner.rank else None):
            learner.step()
        learner.barrier()
        cluster.in_barrier = set()
        while learner.deal.epoch == 0:
            for _ in learner.read():
                learner.step()

    cluster.run(script)
    assert sorted(cluster.covered[0]) == list(range(200))


# One learner's claims


def blocks(count: int, *, first: int = 0, epoch: int = 0) -> list[SampleBlock]:
    return [SampleBlock(epoch=epoch, first=index, end=index + 1) for index in range(first, first + count)]


def claimed(
    count: int = 1000, staleness: int = 0, loader: DataLoader[Any] | None = None, ended: list[int] | None = None
) -> tuple[ClaimedDeal, ClaimedLoader, list[SampleBlock]]:
    loader = loader or DataLoader(Numbers(count), batch_size=1)
    deal = ClaimedDeal(loader, 2, 3, staleness)
    handed_out: list[SampleBlock] = []

    def on_batch(more: Sequence[SampleBlock], samples: int) -> None:
        assert samples >= 1
        handed_out.extend(more)

    def wait(until: Any, what: str) -> None:
        assert until(), f"it waits for {what}"

    def end_epoch(epoch: int) -> None:
        assert ended is not None, "the epoch has ended"
        ended.append(epoch)
        deal.epoch_over(epoch)

    return deal, ClaimedLoader(loader, deal, on_batch, torch.device("cpu"), wait, end_epoch), handed_out


@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_claims_what_is_missing(staleness: int, accumulate: int) -> None:
    """X2: (s+2) times the largest step and one more are held or claimed after every bind, never more than needed."""
    deal, loader, handed_out = claimed(staleness=staleness)
    granted = first_batches(staleness)
    deal.grant(blocks(granted))
    wanted = (staleness + 2) * accumulate + 1
    batches = iter(loader)
    outstanding: list[int] = []
    for step in range(1, 60):
        for _ in range(accumulate):
            next(batches)
        outstanding.append(deal.bind(step, handed_out[-accumulate:]))
        assert granted - len(handed_out) + sum(outstanding) == max(wanted, first_batches(staleness) - len(handed_out))
        if len(outstanding) > staleness:
            due = outstanding.pop(0)
            deal.grant(blocks(due, first=granted))
            granted += due
    assert handed_out == blocks(len(handed_out))


def test_a_claim_covers_what_workers_have_in_hand() -> None:
    """X2: workers * prefetch besides."""
    deal, _, _ = claimed(loader=DataLoader(Numbers(1000), num_workers=2, prefetch_factor=3))
    deal.grant(blocks(32))
    drawn = iter(deal)
    for _ in range(26):
        next(drawn)
    for _ in range(25):
        deal.handed_out()
    assert deal.bind(1, blocks(1)) == 2 * 3 + 2 + 1 - 7


def test_a_lost_step_brings_its_samples_back_and_takes_its_claim_back() -> None:
    """R5: only if no bind has named them; the newest step only."""
    deal, loader, handed_out = claimed()
    deal.grant(blocks(32))
    batches = iter(loader)
    for step in range(1, 31):
        next(batches)
        claim = deal.bind(step, handed_out[-1:])
    assert claim == 1
    deal.step_lost(29, retry=True)
    deal.step_lost(30, retry=False)
    assert next(batches).item() == 30
    assert deal.bind(31, handed_out[-1:]) == 1
    deal.step_lost(31, retry=True)
    assert [next(batches).item() for _ in range(2)] == [30, 31]
    assert deal.bind(32, handed_out[-2:]) == 4, "of 2 * 2 + 1, one is claimed by step 30"


def test_a_step_that_takes_all_that_is_held_is_told_so() -> None:
    """X2: it would wait for ever."""
    deal, loader, _ = claimed()
    deal.grant(blocks(32))
    with pytest.raises(UsageError, match="one step has taken 32 batches from the prepared loader"):
        list(loader)


def test_an_epochs_end_is_waited_for_once() -> None:
    """X4: not where the daemon has told it already, nor where this learner itself owes a bind."""
    ended: list[int] = []
    deal, loader, handed_out = claimed(ended=ended)
    deal.grant([*blocks(2), *blocks(2, epoch=1), *blocks(2, epoch=2), *blocks(1, epoch=3)])
    for _ in loader:
        deal.bind(1, handed_out[-1:])
    assert ended == [0]
    deal.epoch_over(1)
    for _ in loader:
        deal.bind(1, handed_out[-1:])
    assert ended == [0]
    assert len(list(loader)) == 2
    assert ended == [0]
    assert deal.epoch == 3


def test_an_older_iteration_is_over_when_a_newer_one_begins() -> None:
    deal, loader, _ = claimed()
    deal.grant(blocks(32))
    older = iter(loader)
    assert next(older).item() == 0
    newer = iter(loader)
    assert next(newer).item() == 1
    with pytest.raises(UsageError, match="ended by a later iter"):
        next(older)
    assert next(newer).item() == 2


def test_an_epoch_of_another_length_is_refused() -> None:
    """All peers deal by the number that they have agreed on."""

    class Shrinking(Runs):
        def __iter__(self) -> Iterator[list[int]]:
            batches = list(super().__iter__())
            return iter(batches[: len(batches) - torch.initial_seed() % 2])

    loader = DataLoader(Numbers(40), batch_sampler=Shrinking(40))
    deal, dealt, _ = claimed(loader=loader)
    for epoch in range(9):
        deal.grant(blocks(1, epoch=epoch))
        deal.epoch_over(epoch)
    with pytest.raises(NotSupported, match=r"gives 20 in epoch \d, and its length was 21"):
        list(chain.from_iterable(dealt for _ in range(9)))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_prefetch_is_bounded_by_what_is_dealt_ahead(caplog: pytest.LogCaptureFixture) -> None:
    """X2: a sampler that is empty before the first claims are granted would starve the workers."""
    _, loader, _ = claimed(loader=DataLoader(Numbers(99), num_workers=7, prefetch_factor=9))
    assert loader.prefetch_factor == PREFETCH_MAX // 7
    assert "prefetch_factor is 4, not 9" in caplog.text
    with pytest.raises(NotSupported, match="num_workers=29"):
        claimed(loader=DataLoader(Numbers(99), num_workers=PREFETCH_MAX + 1))


def test_length_is_that_of_equal_shares() -> None:
    assert len(claimed(count=101)[1]) == 50
    with pytest.raises(UsageError, match="1 samples, fewer than the 2 members"):
        claimed(count=1)
