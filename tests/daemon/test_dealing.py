"""A daemon's part in the deal of samples: grants, the end of epochs, shares (X2, X4, X4a)."""

from collections.abc import Sequence

import pytest

from meshtraind.dealing import LOOK_EVERY_BINDS, Dealing
from meshwire.claims import first_batches
from meshwire.messages.learner import EpochOver, Grant, SampleSpace
from meshwire.messages.rounds import Bind, SampleBlock
from meshwire.roundevents import RoundComplete
from meshwire.syncmode import Shares
from meshwire.wiretypes import Wire


class Member:
    def __init__(self, rank: int, *, total: int = 1000, shares: Shares = "speed", whole_batches: bool = False) -> None:
        self.told: list[Wire] = []
        space = SampleSpace(total=total, batch=1 if whole_batches else 4, whole_batches=whole_batches, drop_last=False)
        self.dealing = Dealing(space, 2, rank, 0, shares, self.told.append)

    def blocks(self) -> list[SampleBlock]:
        return [block for notice in self.told if isinstance(notice, Grant) for block in notice.blocks]

    def over(self) -> list[EpochOver]:
        return [notice for notice in self.told if isinstance(notice, EpochOver)]


def complete(*binds: tuple[int, Sequence[SampleBlock], int, tuple[int, ...]]) -> RoundComplete:
    return RoundComplete(
        round=1,
        void=False,
        reason="",
        binds={
            rank: Bind(round=1, step=1, base=0, weight=1.0, samples=tuple(samples), claim=claim, sizes=sizes)
            for rank, samples, claim, sizes in binds
        },
        poisons={},
        used=b"",
        integers=(),
        squared_norm=0.0,
    )


def test_the_learner_is_granted_its_first_lot_and_what_it_claims() -> None:
    """X2: only its own, in order; a round without a claim of its own is no news."""
    members = [Member(0), Member(1)]
    for member in members:
        member.dealing.begin()
    first = [member.blocks() for member in members]
    assert [len(blocks) for blocks in first] == [first_batches(0)] * 2
    for member in members:
        assert member.dealing.complete(complete((1, first[1][:1], 2, ()), (0, first[0][:2], 0, ()))) is None
    assert len(members[0].told) == 1
    assert isinstance(members[1].told[1], Grant)
    position = first_batches(0) * 2 * 4
    assert [(block.first, block.end) for block in members[1].told[1].blocks] == [
        (position, position + 4),
        (position + 4, position + 8),
    ]


def test_a_wrong_bind_is_told() -> None:
    member = Member(0)
    wrong = member.dealing.complete(complete((1, [SampleBlock(epoch=0, first=0, end=4)], 1, ())))
    assert wrong == "rank 1 covers samples 0 to 4 of epoch 0, which it does not hold (X1)"
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
        assert member.dealing.complete(complete((0, own, 0, ()))) is None
        assert len(member.over()) == epoch
        assert member.dealing.complete(complete((1, other, 0, ()))) is None
        assert member.over()[-1] == EpochOver(epoch=epoch, unused=0)


def test_nobody_waits_for_samples_of_a_learner_that_has_finished() -> None:
    """Its blocks are told as unused; the same for a learner in a barrier, until it has left it."""
    member = Member(0, total=8)
    member.dealing.begin()
    blocks = member.blocks()
    for epoch in range(2):
        assert member.dealing.complete(complete((0, [b for b in blocks if b.epoch == epoch], 0, ()))) is None
    assert not member.over()
    member.dealing.in_barrier(1, True)
    assert member.over() == [EpochOver(epoch=0, unused=4), EpochOver(epoch=1, unused=4)]
    member.dealing.in_barrier(1, False)
    assert member.dealing.complete(complete((0, [b for b in blocks if b.epoch == 2], 0, ()))) is None
    assert len(member.over()) == 2
    member.dealing.finished(1)
    assert member.over()[2:] == [EpochOver(epoch=2, unused=4)]


def looks(dealing: Dealing) -> list[tuple[int, ...]]:
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
    assert member.dealing.complete(complete((0, [], 0, (6, 2)))) is None
    assert member.dealing.batch == 6
    assert not any(looks(member.dealing))


@pytest.mark.parametrize(
    "member", [Member(1), Member(0, shares="equal"), Member(0, whole_batches=True)], ids=["rank 1", "equal", "whole"]
)
def test_nobody_else_decides_sizes(member: Member) -> None:
    member.dealing.measured(0, 300.0)
    member.dealing.measured(1, 100.0)
    assert not any(looks(member.dealing))
