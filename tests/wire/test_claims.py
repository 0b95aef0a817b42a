"""The ledger of claimed samples: each once an epoch, whatever the learners do (X1, X2, X4a, X5)."""

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire import limits
from meshwire.claims import HELD_BATCHES_MAX, PREFETCH_MAX, Ledger, first_batches
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import Bind, SampleBlock


def space(total: int, batch: int, *, whole_batches: bool = False, drop_last: bool = False) -> SampleSpace:
    return SampleSpace(total=total, batch=batch, whole_batches=whole_batches, drop_last=drop_last)


def bind(samples: Sequence[SampleBlock] = (), claim: int = 0, sizes: Sequence[int] = ()) -> Bind:
    return Bind(round=1, step=1, base=0, weight=1.0, samples=tuple(samples), claim=claim, sizes=tuple(sizes))


def block(epoch: int, first: int, end: int) -> SampleBlock:
    return SampleBlock(epoch=epoch, first=first, end=end)


def granted(answer: dict[int, tuple[SampleBlock, ...]] | str) -> dict[int, tuple[SampleBlock, ...]]:
    assert isinstance(answer, dict), answer
    return answer


@st.composite
def other_sizes(draw: st.DrawFn, members: int, joint: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, joint - 1)), min_size=members - 1, max_size=members - 1)))
    return tuple(high - low for low, high in zip([0, *cuts], [*cuts, joint], strict=True))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_sample_is_granted_and_covered_exactly_once(data: st.DataObject) -> None:
    """X1, X4: any claims, any sizes, any order of the learners; all members compute the same."""
    members = data.draw(st.integers(1, 4), "members")
    batch = data.draw(st.integers(1, 6), "batch")
    drop_last = data.draw(st.booleans(), "drop_last")
    total = data.draw(st.integers(members * batch if drop_last else 1, 60), "total")
    ledgers = [Ledger(space(total, batch, drop_last=drop_last), members, 2) for _ in range(members)]
    held = {rank: list(ledgers[0].initial(rank)) for rank in range(members)}
    order = [blocks for turn in zip(*held.values(), strict=True) for blocks in turn]
    covered: dict[int, list[SampleBlock]] = defaultdict(list)
    sizes = dict.fromkeys(order, batch)  # asked for
    for _ in range(data.draw(st.integers(0, 25), "rounds")):
        binds = {}
        for rank in sorted(data.draw(st.sets(st.integers(0, members - 1)), "contributors")):
            samples = data.draw(st.lists(st.sampled_from(held[rank]), unique=True) if held[rank] else st.just([]))
            held[rank] = [item for item in held[rank] if item not in samples]
            for item in samples:
                covered[item.epoch].append(item)
            changes = rank == 0 and data.draw(st.booleans())
            new_sizes = data.draw(other_sizes(members, members * batch)) if changes else ()
            binds[rank] = bind(samples, data.draw(st.integers(0, 4)), new_sizes)
        answers = [ledger.complete(dict(data.draw(st.permutations(list(binds.items()))))) for ledger in ledgers]
        assert all(answer == answers[0] for answer in answers)
        assert len({ledger.sizes for ledger in ledgers}) == 1
        grants = granted(answers[0])
        assert {rank: len(blocks) for rank, blocks in grants.items()} == {r: b.claim for r, b in binds.items()}
        for rank in sorted(grants):
            held[rank] += grants[rank]
            order += grants[rank]
            sizes |= dict.fromkeys(grants[rank], ledgers[0].sizes[rank])
    _check_tiling(order, total, sizes, drop_last=drop_last)
    for epoch in range(order[-1].epoch + 2):
        units = {rank: sum(i.end - i.first for i in held[rank] if i.epoch == epoch) for rank in held}
        assert ledgers[0].held(epoch) == {rank: count for rank, count in units.items() if count}
        passed = epoch < order[-1].epoch or (epoch == order[-1].epoch and ledgers[0].over(epoch, set(held)) is not None)
        assert ledgers[0].over(epoch, set()) == (0 if passed and not sum(units.values()) else None)
        assert ledgers[0].over(epoch, set(held)) == (sum(units.values()) if passed else None)
        assert len(covered[epoch]) == len(set(covered[epoch]))


def _check_tiling(order: Sequence[SampleBlock], total: int, sizes: dict[SampleBlock, int], *, drop_last: bool) -> None:
    """Blocks follow each other without gap or overlap; only a tail that is shorter than a batch is left out."""
    epoch = position = 0
    for item in order:
        if item.epoch > epoch:
            assert item.epoch == epoch + 1
            assert position == total or (drop_last and total - position < max(sizes.values()))
            epoch, position = item.epoch, 0
        assert item.first == position
        assert item.end == min(position + sizes[item], total)
        assert not drop_last or item.end - item.first == sizes[item]
        position = item.end


def test_the_first_lot_is_dealt_in_turns() -> None:
    """X2: batch 1 of ranks 0, 1, then batch 2: the joint batches of the first rounds are as in one process."""
    ledger = Ledger(space(20, 3), 2, 3)
    assert ledger.initial(0) == (block(0, 0, 3), block(0, 6, 9), block(0, 12, 15))
    assert ledger.initial(1) == (block(0, 3, 6), block(0, 9, 12), block(0, 15, 18))


def test_claims_are_granted_in_rank_order_and_go_on_in_the_next_epoch() -> None:
    """X2; a round without a contributor changes nothing."""
    ledger = Ledger(space(10, 3), 3, 1)
    assert granted(ledger.complete({})) == {}
    binds = {2: bind([block(0, 6, 9)], 1), 0: bind([block(0, 0, 3)], 2)}
    assert granted(ledger.complete(binds)) == {0: (block(0, 9, 10), block(1, 0, 3)), 2: (block(1, 3, 6),)}
    assert ledger.held(0) == {0: 1, 1: 3}
    assert ledger.over(0, set()) is None
    assert ledger.over(0, {0}) is None
    assert ledger.over(0, {0, 1}) == 4
    assert ledger.over(1, {0, 1, 2}) is None, "the pointer has not passed it"


def test_sizes_are_in_force_from_their_rounds_grants_on() -> None:
    """X4a: also for ranks that bound without them; until they change again."""
    ledger = Ledger(space(1000, 4), 2, 1)
    grants = granted(ledger.complete({0: bind([block(0, 0, 4)], 1, sizes=[6, 2]), 1: bind([block(0, 4, 8)], 1)}))
    assert grants == {0: (block(0, 8, 14),), 1: (block(0, 14, 16),)}
    assert ledger.sizes == (6, 2)
    assert granted(ledger.complete({1: bind([block(0, 14, 16)], 2)})) == {1: (block(0, 16, 18), block(0, 18, 20))}


def test_drop_last_leaves_out_less_than_one_batch() -> None:
    """A short tail belongs to nobody, and the epoch is over when the others are covered."""
    ledger = Ledger(space(11, 2, drop_last=True), 2, 2)
    assert granted(ledger.complete({0: bind(ledger.initial(0), 1)})) == {0: (block(0, 8, 10),)}
    assert ledger.over(0, set()) is None
    assert granted(ledger.complete({0: bind([block(0, 8, 10)]), 1: bind(ledger.initial(1))})) == {0: (), 1: ()}
    assert ledger.over(0, set()) == 0, "although nobody has claimed more"
    assert granted(ledger.complete({1: bind(claim=1)})) == {1: (block(1, 0, 2),)}
    with pytest.raises(ValueError, match="drop_last leaves nothing"):
        Ledger(space(3, 2, drop_last=True), 2, 1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (bind([block(0, 4, 8)], 1), r"rank 0 covers samples 4 to 8 of epoch 0, which it does not hold \(X1\)"),
        (bind([block(0, 0, 3)], 1), "does not hold"),
        (bind([block(7, 0, 4)], 1), "does not hold"),
        (bind([block(0, 0, 4), block(0, 0, 4)], 1), "twice"),
        (bind(sizes=[4]), r"1 batch sizes of 4 in sum, not 2 of 8 \(X4a\)"),
        (bind(sizes=[7, 2]), "not 2 of 8"),
    ],
)
def test_a_wrong_bind_is_named_and_changes_nothing(wrong: Bind, text: str) -> None:
    """X1: remote members' words never corrupt the ledger, not even those of the same round that are right."""
    ledger, untouched = Ledger(space(50, 4), 2, 2), Ledger(space(50, 4), 2, 2)
    right = bind([block(0, 4, 8)], 3, sizes=[5, 3])
    answer = ledger.complete({0: wrong, 1: right})
    assert isinstance(answer, str)
    assert text.replace("\\", "") in answer
    assert ledger.held(0) == untouched.held(0)
    assert ledger.sizes == (4, 4)
    assert ledger.complete({1: right}) == untouched.complete({1: right})


def test_whole_batches_have_no_sizes() -> None:
    ledger = Ledger(space(9, 1, whole_batches=True), 2, 1)
    assert ledger.complete({0: bind(sizes=[1, 1])}) == "rank 0 sets batch sizes, and whole batches have none (X4a)"


def test_what_one_member_holds_is_bounded() -> None:
    """A member that claims and never covers fills nobody's memory."""
    ledger = Ledger(space(10**9, 1), 1, 10)
    for _ in range(HELD_BATCHES_MAX // limits.CLAIM_BATCHES_MAX - 1):
        granted(ledger.complete({0: bind(claim=limits.CLAIM_BATCHES_MAX)}))
    answer = ledger.complete({0: bind(claim=limits.CLAIM_BATCHES_MAX)})
    assert isinstance(answer, str)
    assert "would hold more than" in answer
    assert granted(ledger.complete({0: bind(ledger.initial(0), claim=limits.CLAIM_BATCHES_MAX)}))


def test_past_epochs_are_forgotten() -> None:
    """Memory is what is granted and not covered, however long the job."""
    ledger = Ledger(space(6, 2), 2, 1)
    held = {rank: ledger.initial(rank) for rank in range(2)}
    for _ in range(100):
        held = granted(ledger.complete({rank: bind(held[rank], 1) for rank in range(2)}))
    assert len(ledger._units_held) <= 2
    assert sum(map(len, ledger._held)) == 2
    assert ledger.over(50, set()) == 0


def test_the_first_lot_outlasts_any_prefetch() -> None:
    """X2: what a learner wants to hold with single batches is there from the start, at every s."""
    for staleness in range(limits.STALENESS_MAX + 1):
        assert PREFETCH_MAX + (staleness + 2) + 1 <= first_batches(staleness)
