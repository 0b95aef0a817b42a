"""A daemon's part in the deal of samples: grants, the end of epochs, shares, generations (X2 to X4a)."""

from collections.abc import Sequence

import pytest

from meshwire.messages.learner import EpochOver, Grant, SampleSpace
from meshwire.messages.rounds import Bind, SampleBlock
from meshwire.samples.grants import LOOK_EVERY_BINDS, SampleGrants
from meshwire.samples.ledger import first_batches
from meshwire.samples.pool import Batch
from meshwire.sync_modes.mode import SyncSettings

BY_SPEED = SyncSettings(shares="speed")
CLAIMS = SyncSettings(staleness=1, straggler="carry", shares="speed")


class Member:
    def __init__(
        self, rank: int, *, total: int = 1000, sync: SyncSettings = BY_SPEED, whole_batches: bool = False
    ) -> None:
        self.rank = rank
        self.space = SampleSpace(
            total=total, batch=1 if whole_batches else 4, whole_batches=whole_batches, drop_last=False
        )
        self.sync = sync
        self.dealing = SampleGrants(self.space, rank, range(2), self.sync)

    @property
    def told(self) -> list[Grant | EpochOver]:
        return self.dealing.notices

    def newcomer(self, rank: int, learning: Sequence[int]) -> "Member":
        """A member that enters with what this one holds."""
        member = Member(rank)
        member.dealing = SampleGrants(self.space, rank, learning, self.sync, state=self.dealing.state())
        return member

    def batches(self) -> list[Batch]:
        return [batch for notice in self.told if isinstance(notice, Grant) for batch in notice.batches]

    def blocks(self) -> list[SampleBlock]:
        return [block for batch in self.batches() for block in batch]

    def over(self) -> list[EpochOver]:
        return [notice for notice in self.told if isinstance(notice, EpochOver)]


def complete(*binds: tuple[int, Sequence[SampleBlock], int, tuple[int, ...]]) -> dict[int, Bind]:
    return {
        rank: Bind(round=1, step=9, base=0, weight=1.0, samples=tuple(samples), claim=claim, sizes=sizes)
        for rank, samples, claim, sizes in binds
    }


def test_the_learner_is_granted_its_first_lot_and_what_it_claims() -> None:
    """X2: only its own, in order; and it is told of every round that it is in, so that it knows what is to come."""
    members = [Member(0, sync=CLAIMS), Member(1, sync=CLAIMS)]
    for member in members:
        member.dealing.begin()
    first = [member.blocks() for member in members]
    held = first_batches(members[0].space, 2, CLAIMS)
    assert [len(blocks) for blocks in first] == [held] * 2
    position = held * 2 * 4
    for member in members:
        done = complete((1, first[1][:1], held + 1, ()), (0, first[0][:2], 0, ()))
        assert member.dealing.complete(done) == {}
        assert member.dealing.complete(complete((0, first[0][2:3], 0, ()))) == {}
    assert members[0].told[1:] == [Grant(batches=(), step=9)] * 2
    more = (SampleBlock(epoch=0, first=position, end=position + 4),)
    last = (SampleBlock(epoch=0, first=position + 4, end=position + 8),)
    assert members[1].told[1:] == [Grant(batches=(more, last), step=9)]


def test_a_wrong_bind_is_told() -> None:
    member = Member(0)
    wrong = member.dealing.complete(complete((1, [SampleBlock(epoch=0, first=0, end=4)], 1, ())))
    assert wrong == {1: "covers samples 0 to 4 of epoch 0, which it does not hold (X1)"}
    assert not member.told


def test_each_epoch_is_over_once_and_in_order() -> None:
    """X4: whether the learner waits for it yet or not."""
    members = [Member(rank, total=8) for rank in range(2)]
    for member in members:
        member.dealing.begin()
    first = [member.blocks() for member in members]
    member = members[0]
    for epoch in range(3):
        assert len(member.over()) == epoch
        own, other = ([block for block in blocks if block.epoch == epoch] for blocks in first)
        assert member.dealing.complete(complete((0, own, 0, ()))) == {}
        assert len(member.over()) == epoch
        assert member.dealing.complete(complete((1, other, 0, ()))) == {}
        assert member.over()[-1] == EpochOver(epoch=epoch, unused=0)


def test_nobody_waits_for_samples_of_a_learner_that_has_finished() -> None:
    """Its blocks are told as unused; the same for a learner in a barrier, until it has left it."""
    member = Member(0, total=8)
    member.dealing.begin()
    blocks = member.blocks()
    for epoch in range(2):
        assert member.dealing.complete(complete((0, [b for b in blocks if b.epoch == epoch], 0, ()))) == {}
    assert not member.over()
    member.dealing.in_barrier(1, True)
    assert member.over() == [EpochOver(epoch=0, unused=4), EpochOver(epoch=1, unused=4)]
    member.dealing.in_barrier(1, False)
    assert member.dealing.complete(complete((0, [b for b in blocks if b.epoch == 2], 0, ()))) == {}
    assert len(member.over()) == 2
    member.dealing.finished(1)
    assert member.over()[2:] == [EpochOver(epoch=2, unused=4)]


def test_what_a_lost_learner_held_is_told_at_once() -> None:
    """X3: the others may all be waiting at an epoch's end, and complete no round any more."""
    members = [Member(rank, total=16) for rank in range(2)]
    for member in members:
        member.dealing.begin()
    own, lost = ([block for block in member.blocks() if block.epoch == 0] for member in members)
    member = members[0]
    assert member.dealing.complete(complete((0, own, 0, ()))) == {}
    told = len(member.told)
    member.dealing.enter((0,))
    (notice,) = member.told[told:]
    assert isinstance(notice, Grant)
    assert [block for batch in notice.batches for block in batch][: len(lost)] == lost
    assert member.dealing.complete(complete((0, lost, 0, ()))) == {}
    assert member.over() == [EpochOver(epoch=0, unused=0)]


def test_a_learner_that_begins_in_the_middle_is_told_what_is_over_and_then_what_it_holds() -> None:
    """X4: once it is one of those that compute, whichever comes first; others know the same of it."""
    member = Member(0, total=8)
    member.dealing.begin()
    for epoch in range(5):
        assert member.dealing.complete(complete((0, [b for b in member.blocks() if b.epoch == epoch], 0, ()))) == {}
        other = [block for batch in member.dealing._ledger.batches(1) for block in batch if block.epoch == epoch]
        assert member.dealing.complete(complete((1, other, 0, ()))) == {}
    loading = member.newcomer(2, (0, 1))
    loading.dealing.begin()
    assert not loading.told
    for each in (member, loading):
        each.dealing.enter((0, 1, 2))
    late = member.newcomer(2, (0, 1, 2))
    late.dealing.begin()
    for each in (loading, late):
        over, grant = each.told
        assert over == EpochOver(epoch=4, unused=0)
        assert isinstance(grant, Grant)
        assert grant.batches == member.dealing._ledger.batches(2)
        assert grant.batches
        assert each.dealing.state() == member.dealing.state()


def test_a_learner_that_is_started_again_is_told_anew() -> None:
    """Nothing of what the one before it was told is its own; it has not finished, either."""
    member = Member(1, total=8)
    member.dealing.begin()
    member.dealing.finished(1)
    member.dealing.enter((0,))
    told = len(member.told)
    assert member.dealing.complete(complete((0, [], 50, ()))) == {}
    member.dealing.begin()
    assert len(member.told) == told
    member.dealing.enter((0, 1))
    (notice,) = member.told[told:]
    assert isinstance(notice, Grant)
    assert notice.batches == member.dealing._ledger.batches(1)
    assert not member.over()


def looks(dealing: SampleGrants) -> list[tuple[int, ...]]:
    return [dealing.sizes() for _ in range(LOOK_EVERY_BINDS)]


def test_rank_0_decides_the_sizes_from_the_speeds() -> None:
    """X4a: at every tenth own bind; they are in force once a round with them is complete."""
    member = Member(0)
    member.dealing.begin()
    assert not any(looks(member.dealing)), "no speed is known"
    member.dealing.measured(0, 300.0)
    member.dealing.measured(1, 100.0)
    assert looks(member.dealing) == [()] * (LOOK_EVERY_BINDS - 1) + [(6, 2)]
    assert member.dealing.batch == 4
    assert looks(member.dealing)[-1] == (6, 2), "the bind that said so may have been dropped"
    assert member.dealing.complete(complete((0, [], 0, (6, 2)))) == {}
    assert member.dealing.batch == 6
    assert not any(looks(member.dealing))


def test_speeds_of_before_the_job_are_the_first_sizes() -> None:
    """X4a."""
    member = Member(0)
    dealing = SampleGrants(member.space, 0, range(2), member.sync, speeds={0: 300.0, 1: 100.0})
    assert dealing.batch == 6
    assert SampleGrants(member.space, 1, range(2), member.sync, speeds={0: 300.0, 1: 100.0}).batch == 2


def test_the_lowest_rank_that_learns_decides_after_it() -> None:
    """X4a: of the ranks that are there now, in their order."""
    member = Member(1)
    member.dealing.enter((1, 4))
    member.dealing.measured(0, 1000.0)
    member.dealing.measured(1, 100.0)
    member.dealing.measured(4, 300.0)
    assert looks(member.dealing)[-1] == (2, 6)


@pytest.mark.parametrize(
    "member",
    [Member(1), Member(0, sync=SyncSettings()), Member(0, whole_batches=True)],
    ids=["rank 1", "equal", "whole"],
)
def test_nobody_else_decides_sizes(member: Member) -> None:
    member.dealing.measured(0, 300.0)
    member.dealing.measured(1, 100.0)
    assert not any(looks(member.dealing))
