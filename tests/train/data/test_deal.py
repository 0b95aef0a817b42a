"""The prepared loader: each sample once an epoch over all peers, and nobody waits for ever (X1 to X5)."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.data.deal import Deal
from meshtrain.train.data.loader import DealtLoader
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import SampleBlock
from meshwire.samples.epochs import rounds_per_epoch
from meshwire.samples.pool import Batch
from meshwire.sync_modes.mode import SyncSettings
from tests.plannedeal import deal as planned
from tests.tiers import mostly_long, mostly_slow
from tests.train.dealcluster import Cluster, Learner

LOCKSTEP = SyncSettings()


def by_speed(staleness: int) -> SyncSettings:
    """With claims above 0, in lockstep at 0."""
    return SyncSettings(staleness=staleness, straggler="carry" if staleness else "wait", shares="speed")


def lockstep(staleness: int) -> SyncSettings:
    return SyncSettings(staleness=staleness, straggler="wait")


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


@pytest.mark.parametrize("seed", [*mostly_slow(range(20), 8), *mostly_long(range(20, 40), kept=0)])
def test_exactly_once(seed: int) -> None:
    """X1, X2, X4: any speeds, s, sizes that change, accumulation, steps passed over and lost, loops left and resumed.

    A step that ends its accumulation with the epoch covers what it has; so no epoch leaves anything to the next.
    """
    draw = random.Random(seed)
    members, staleness, count = draw.randint(1, 4), draw.choice([0, 0, 1, 2, 5]), draw.randint(4, 400)
    loader = DataLoader(Numbers(count), batch_size=draw.randint(1, 5), shuffle=draw.random() < 0.5)
    cluster = Cluster(loader, members, by_speed(staleness), seed)
    epochs = 3
    cluster.run(any_script(seed, epochs))
    check_epochs(cluster, epochs - 1, count)


def any_script(seed: int, epochs: int) -> Callable[[Learner], None]:
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

    return script


@pytest.mark.parametrize("seed", [*mostly_slow(range(20), 8), *mostly_long(range(20, 40), kept=0)])
def test_exactly_once_whoever_is_lost_and_comes_back(seed: int) -> None:
    """X3, X4: also if nobody is left who would take a step; a restarted script ends with the others.

    In lockstep with s=0, and with claims at any s: what a lost learner had, in hand or in rounds that did not complete,
    is used by another before anybody turns to the next epoch.
    """
    draw = random.Random(seed)
    members, count = draw.randint(2, 4), draw.randint(4, 300)
    sync = LOCKSTEP if seed % 2 else by_speed(draw.choice([0, 1, 2, 5]))
    if draw.random() < 0.3:
        loader = DataLoader(Numbers(count + 40), batch_sampler=Runs(count + 40))
        count += 40
    else:
        loader = DataLoader(Numbers(count), batch_size=draw.randint(1, 5), shuffle=True)
    cluster = Cluster(loader, members, sync, seed, churn=0.05)
    epochs = 3

    def script(learner: Learner) -> None:
        for _ in range(epochs):
            for _ in learner.read():
                learner.step()
        assert learner.deal.epoch == epochs

    cluster.run(script)
    check_epochs(cluster, epochs, count)


@pytest.mark.parametrize("seed", [*mostly_slow(range(20), 8), *mostly_long(range(20, 40), kept=0)])
def test_exactly_once_in_periods_of_local_steps(seed: int) -> None:
    """R9, X1 to X4: any H, bound and accumulation, equal shares or claims, losses, periods that end early. An epoch's
    end ends a period, so nobody waits for a round that waits for him; and so does the end of what is held, which may be
    less than H steps."""
    draw = random.Random(seed)
    members, count = draw.randint(1, 4), draw.randint(4, 600)
    period, accumulate = draw.choice([1, 2, 5, 30, 200]), draw.choice([1, 1, 3])
    shares, s = draw.choice(["equal", "speed"]), draw.choice([0, 0, 1, 3])
    sync = SyncSettings(period=period, shares=shares, staleness=s, straggler="carry" if s else "wait")
    loader = DataLoader(Numbers(count), batch_size=draw.randint(1, 5), shuffle=True)
    cluster = Cluster(loader, members, sync, seed, churn=draw.choice([0.0, 0.02]))
    epochs = 3

    def script(learner: Learner) -> None:
        for _ in range(epochs):
            for number, _ in enumerate(learner.read(), 1):
                if number % accumulate == 0:
                    learner.local_step()
        learner.end_period()
        assert learner.deal.epoch == epochs

    cluster.run(script)
    # What is still being accumulated at the end of the last epoch is in no round.
    check_epochs(cluster, epochs if accumulate == 1 else epochs - 1, count)


def test_learners_are_lost_in_these_runs() -> None:
    """The cluster does what the test above is about."""
    cluster = Cluster(DataLoader(Numbers(2000), batch_size=2), 3, LOCKSTEP, 1, churn=0.05)

    def script(learner: Learner) -> None:
        for _ in learner.read():
            learner.step()

    cluster.run(script)
    check_epochs(cluster, 1, 2000)
    assert cluster.losses > 10


@pytest.mark.parametrize("staleness", [0, 2])
def test_in_lockstep_nobody_ever_idles(staleness: int) -> None:
    """X4: rounds are the joint batches of a plan, epoch after epoch, whoever is first in a round."""
    cluster = Cluster(DataLoader(Numbers(103), batch_size=4), 3, lockstep(staleness), 5)
    used: dict[int, list[list[int]]] = {rank: [] for rank in range(3)}

    def script(learner: Learner) -> None:
        for _ in range(4):
            assert len(learner.loader) == 9
            for batch in learner.read():
                used[learner.rank].append(batch.tolist())
                learner.step()

    cluster.run(script)
    rounds = rounds_per_epoch(103, [4] * 3)
    for rank, batches in used.items():
        cut = [planned(103, [4] * 3, number % rounds)[rank] for number in range(4 * rounds)]
        assert batches == [list(range(first, end)) for first, end in cut]
    assert not any(learner.idled for learner in cluster.learners.values())


@pytest.mark.parametrize("limit", [1, 3, 5, 13, 100])
def test_a_script_that_leaves_every_epoch_early_reads_on(limit: int) -> None:
    """Each iteration has a batch, each sample comes once an epoch; 26 batches of each of two peers."""
    cluster = Cluster(DataLoader(Numbers(104), batch_size=2), 2, LOCKSTEP, 2)
    counts: list[list[int]] = [[], []]

    def script(learner: Learner) -> None:
        for _ in range(60):
            steps = 0
            for number, _ in enumerate(learner.read(), 1):
                learner.step()
                steps += 1
                if number == limit:
                    break
            counts[learner.rank].append(steps)

    cluster.run(script)
    whole, rest = divmod(26, limit)
    once = [limit] * whole + [rest] * (rest > 0)
    assert counts[0] == counts[1] == (once * 60)[:60]
    check_epochs(cluster, sum(counts[0]) // 26, 104)


def test_steps_are_lost_and_passed_over_in_these_runs() -> None:
    """The cluster does what the tests above are about."""
    cluster = Cluster(DataLoader(Numbers(2000), batch_size=2), 3, by_speed(2), 1, speeds=[1, 3, 3])

    def script(learner: Learner) -> None:
        for _ in range(2):
            for _ in learner.read():
                learner.step()

    cluster.run(script)
    check_epochs(cluster, 2, 2000)
    assert all(learner.lost for learner in cluster.learners.values())
    taken = [sum(learner.steps) for learner in cluster.learners.values()]
    assert taken[0] < min(taken[1:]), "who is faster takes more"
    assert len({size for learner in cluster.learners.values() for size in learner.steps}) > 2


@pytest.mark.parametrize("persistent", mostly_slow([False, True]))
@pytest.mark.parametrize(
    "sync", [LOCKSTEP, pytest.param(by_speed(2), marks=pytest.mark.slow)], ids=["lockstep", "claims"]
)
@pytest.mark.parametrize("prefetch", mostly_slow([2, 30]))
def test_workers_prefetch(sync: SyncSettings, persistent: bool, prefetch: int) -> None:
    """X2: what the workers have in hand when a loop is left comes first in the next one; of any number."""
    loader = DataLoader(
        Numbers(300),
        batch_size=2,
        shuffle=True,
        num_workers=2,
        prefetch_factor=prefetch,
        persistent_workers=persistent,
    )
    cluster = Cluster(loader, 2, sync, 11, speeds=[1, 3])

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
    cluster = Cluster(DataLoader(Numbers(301), batch_sampler=Runs(301)), 3, by_speed(staleness), 3)
    assert cluster.space == SampleSpace(total=151, batch=1, whole_batches=True, drop_last=False)
    whole = {tuple(batch) for batch in Runs(301).batches}

    joined = []

    def script(learner: Learner) -> None:
        for _ in range(2):
            for batch in learner.read():
                if tuple(batch.tolist()) not in whole:
                    joined.append(batch)
                learner.step()

    cluster.run(script)
    check_epochs(cluster, 2, 301)
    assert len(joined) <= 2 * 2, "only a remainder smaller than the number of peers joins other batches"


def test_drop_last() -> None:
    """Less than a joint batch is left out."""
    cluster = Cluster(DataLoader(Numbers(203), batch_size=5, drop_last=True), 2, by_speed(1), 8)

    def script(learner: Learner) -> None:
        for _ in range(3):
            for _ in learner.read():
                learner.step()

    cluster.run(script)
    for epoch in range(3):
        covered = cluster.covered[epoch]
        assert sorted(covered) == list(range(len(covered)))
        assert 203 - len(covered) < 10
    assert cluster.unused[:3] == [0] * 3


def test_a_member_that_finishes_early_holds_nobody_up() -> None:
    """Its samples are told as unused; all others are covered once."""
    cluster = Cluster(DataLoader(Numbers(400), batch_size=2), 3, by_speed(1), 4)

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


@pytest.mark.parametrize("sync", [LOCKSTEP, lockstep(2), by_speed(0), by_speed(2)])
def test_accumulation_that_the_epoch_cuts_goes_on_in_the_next(sync: SyncSettings) -> None:
    """Nobody waits for itself: what is handed out and not bound is part of the next step's contribution."""
    cluster = Cluster(DataLoader(Numbers(103), batch_size=1), 2, sync, 6)

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
    cluster = Cluster(DataLoader(Numbers(200), batch_size=1), 2, by_speed(1), 9)

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


# One learner's deal


def batches(count: int, *, first: int = 0, epoch: int = 0) -> list[Batch]:
    return [(SampleBlock(epoch=epoch, first=index, end=index + 1),) for index in range(first, first + count)]


class PromptLearner:
    """What a loader wants of one: it never waits for samples, and `idle` is called at an epoch's end."""

    def __init__(self, deal: Deal, idle: Callable[[Deal, int], None] | None) -> None:
        self.deal = deal
        self.idle = idle
        self.handed_out: list[SampleBlock] = []
        self.rehearses = self.left = False

    def add(self, blocks: Sequence[SampleBlock], samples: int) -> None:
        assert samples >= 1
        self.handed_out.extend(blocks)

    def wait_samples(self, until: Callable[[], bool]) -> None:
        assert until(), "it waits for samples"

    def wait_idle(self, reason: str, until: Callable[[], bool], what: str) -> None:
        assert self.idle is not None, f"{reason}, it waits for {what}"
        self.idle(self.deal, self.deal.epoch)
        assert until()

    def end_period(self) -> bool:
        return False

    def begin_rehearsal(self) -> None:
        self.rehearses = True

    def leave_rehearsal(self) -> None:
        self.left = True

    def end_rehearsal(self) -> None:
        self.rehearses = self.left = False


def dealt(
    count: int = 1000,
    sync: SyncSettings = LOCKSTEP,
    loader: DataLoader[Any] | None = None,
    idle: Callable[[Deal, int], None] | None = None,
) -> tuple[Deal, DealtLoader, list[SampleBlock]]:
    loader = loader or DataLoader(Numbers(count), batch_size=1)
    deal = Deal(loader, 2, 3, sync)
    learner = PromptLearner(deal, idle)
    return deal, DealtLoader(loader, deal, learner, torch.device("cpu"), learner), learner.handed_out


def rehearses(loader: DealtLoader) -> bool:
    assert isinstance(loader._waits, PromptLearner)
    return loader._waits.rehearses


def left(loader: DealtLoader) -> bool:
    assert isinstance(loader._waits, PromptLearner)
    return loader._waits.left


@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_claims_what_it_needs_ahead(staleness: int, accumulate: int) -> None:
    """X2: 2(s+1) times the largest step and one more."""
    deal, loader, _ = dealt(sync=by_speed(staleness))
    deal.grant(batches(36), 0)
    script = iter(loader)
    assert deal.bind(1) == 2 * (staleness + 1) + 1
    for _ in range(accumulate):
        next(script)
    wanted = 2 * (staleness + 1) * accumulate + 1
    assert deal.bind(2) == wanted
    next(script)
    assert deal.bind(3) == wanted, "the next one may be as large again"


def test_a_claim_covers_what_workers_have_in_hand() -> None:
    """X2: workers * prefetch besides."""
    deal, _, _ = dealt(loader=DataLoader(Numbers(1000), num_workers=2, prefetch_factor=3))
    assert deal.bind(1) == 2 * 3 + 2 + 1


def test_a_lost_step_brings_its_samples_back() -> None:
    """R5: only if no bind has named them; the newest step only."""
    deal, loader, _ = dealt()
    deal.grant(batches(40), 0)
    script = iter(loader)
    for step in range(1, 31):
        next(script)
        deal.bind(step)
    deal.step_lost(29, retry=True)
    deal.step_lost(30, retry=False)
    assert next(script).item() == 30
    deal.bind(31)
    deal.step_lost(31, retry=True)
    assert [next(script).item() for _ in range(2)] == [30, 31]


def test_what_workers_have_drawn_ahead_comes_first_again_when_a_script_leaves_the_loop() -> None:
    """X1: they prefetch; what the script was not handed is in no bind, and would be in no round of the epoch."""
    deal, _, _ = dealt()
    deal.grant(batches(10), 0)
    ahead = iter(deal)
    drawn = [next(ahead) for _ in range(3)]
    deal.handed_out()
    deal.give_back()
    again = iter(deal)
    assert [next(again) for _ in range(2)] == drawn[1:]


def test_a_step_that_takes_all_that_is_held_is_told_so() -> None:
    """X2: it would wait for ever. Not while the round of the step before is on its way."""
    deal, loader, _ = dealt()
    deal.grant(batches(32), 0)
    with pytest.raises(UsageError, match="one step has taken 32 batches from the prepared loader"):
        list(loader)
    deal, loader, _ = dealt()
    deal.grant(batches(2), 0)
    script = iter(loader)
    next(script)
    deal.bind(1)
    next(script)
    with pytest.raises(AssertionError, match="it waits for samples"):
        next(script)


def test_an_epochs_end_is_waited_for_once() -> None:
    """X4: not where the daemon has told it already, nor where this learner itself owes a bind."""
    ended: list[int] = []

    def idle(deal: Deal, epoch: int) -> None:
        ended.append(epoch)
        deal.epoch_over(epoch)

    deal, loader, _ = dealt(idle=idle)
    deal.grant([*batches(2), *batches(2, epoch=1), *batches(2, epoch=2), *batches(1, epoch=3)], 0)
    for _ in loader:
        deal.bind(1)
    assert ended == [0]
    deal.epoch_over(1)
    for _ in loader:
        deal.bind(1)
    assert ended == [0]
    assert len(list(loader)) == 2
    assert ended == [0]
    assert deal.epoch == 3


def test_a_learner_at_an_epochs_end_goes_on_with_what_a_lost_peer_held() -> None:
    """X3, X4: in the same iteration; what comes later than that, first in the next one."""

    def idle(deal: Deal, epoch: int) -> None:
        if epoch == 0 and not ended:
            ended.append(epoch)
            deal.grant(batches(2, first=7), 0)
        else:
            deal.epoch_over(epoch)

    ended: list[int] = []
    deal, loader, handed_out = dealt(idle=idle)
    deal.grant([*batches(1), *batches(2, epoch=1), *batches(1, epoch=2)], 0)
    for _ in loader:
        deal.bind(1)
    assert [block.first for block in handed_out] == [0, 7, 8]
    deal.grant(batches(1, first=3), 0)
    for _ in loader:
        deal.bind(2)
    assert [(block.epoch, block.first) for block in handed_out[3:]] == [(0, 3), (1, 0), (1, 1)]


def test_a_script_that_begins_again_runs_through_the_epochs_that_are_over() -> None:
    """X4: with one batch of each, which counts for nothing; and then reads what it holds."""
    deal, loader, handed_out = dealt(
        loader=DataLoader(Numbers(64), batch_size=4), idle=lambda deal, epoch: deal.epoch_over(epoch)
    )
    deal.epoch_over(6)
    deal.grant([*batches(2, epoch=7), *batches(1, epoch=8)], 0)
    read: list[list[list[int]]] = []
    for epoch in range(8):
        read.append([])
        for numbers in loader:
            assert rehearses(loader) == (epoch < 7)
            read[-1].append(numbers.tolist())
            if not rehearses(loader):
                deal.bind(1)
            numbers.zero_()  # as a script may that scales its batch in place
        assert left(loader) == (epoch < 7), "at most one step behind the loop is rehearsed, too"
    assert [list(map(len, each)) for each in read] == [[4]] * 7 + [[1, 1]]
    assert all(set(batch) <= set(range(64)) for (batch,) in read[:7])
    assert {block.epoch for block in handed_out} == {7}


def test_a_loop_over_an_epoch_that_is_over_may_be_left() -> None:
    """The next iteration is of the next epoch, and what it gives counts."""
    deal, loader, handed_out = dealt(idle=lambda deal, epoch: deal.epoch_over(epoch))
    deal.epoch_over(1)
    deal.grant(batches(2, epoch=2), 0)
    for epoch in range(2):
        for _ in loader:
            assert rehearses(loader)
            break
        assert deal.epoch == epoch + 1
    assert next(iter(loader)) is not None
    assert not rehearses(loader)
    assert len(handed_out) == 1


def test_workers_load_the_batch_of_an_epoch_that_is_over() -> None:
    deal, loader, handed_out = dealt(
        loader=DataLoader(Numbers(64), batch_size=4, num_workers=1, multiprocessing_context="fork"),
        idle=lambda deal, epoch: deal.epoch_over(epoch),
    )
    deal.epoch_over(1)
    deal.grant(batches(3, epoch=2), 0)
    read = []
    for _ in range(2):
        for numbers in loader:
            read.append(numbers.tolist())
            numbers.zero_()  # as a script may that scales its batch in place
    assert read == [read[0]] * 2, "loaded once"
    assert len(set(read[0])) == 4
    assert not handed_out
    assert [len(numbers) for numbers in itertools.islice(loader, 3)] == [1, 1, 1]
    assert {block.epoch for block in handed_out} == {2}


def test_an_older_iteration_is_over_when_a_newer_one_begins() -> None:
    deal, loader, _ = dealt()
    deal.grant(batches(32), 0)
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
            whole = list(super().__iter__())
            return iter(whole[: len(whole) - torch.initial_seed() % 2])

    loader = DataLoader(Numbers(40), batch_sampler=Shrinking(40))
    deal, shrinking, _ = dealt(loader=loader)
    for epoch in range(9):
        deal.grant(batches(1, epoch=epoch), 0)
        deal.epoch_over(epoch)
    with pytest.raises(NotSupported, match=r"gives 20 in epoch \d, and its length was 21"):
        list(chain.from_iterable(shrinking for _ in range(9)))


def test_length_is_that_of_equal_shares() -> None:
    assert len(dealt(count=101)[1]) == 50
    with pytest.raises(UsageError, match="1 samples, fewer than the 2 members"):
        dealt(count=1)
