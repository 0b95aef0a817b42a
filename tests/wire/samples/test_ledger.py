"""The ledger of samples: each in one round an epoch, whatever learners do, who is lost and who joins (X1 to X5)."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.messages.generation import DealState
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import Bind, SampleBlock
from meshwire.samples.epochs import rounds_per_epoch
from meshwire.samples.ledger import FIRST_BATCHES, FIRST_BATCHES_EQUAL_MAX, Ledger, first_batches
from meshwire.samples.pool import Batch
from meshwire.sync_modes.batch_sizes import in_proportion
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from tests.plannedeal import deal

LOCKSTEP = SyncSettings()
CLAIMS = SyncSettings(staleness=2, straggler="carry", shares="speed")


def space(total: int, batch: int, *, whole_batches: bool = False, drop_last: bool = False) -> SampleSpace:
    return SampleSpace(total=total, batch=batch, whole_batches=whole_batches, drop_last=drop_last)


def bind(batches: Sequence[Batch] = (), claim: int = 0, sizes: Sequence[int] = ()) -> Bind:
    blocks = tuple(block for batch in batches for block in batch)
    return Bind(round=1, step=1, base=0, weight=1.0, samples=blocks, claim=claim, sizes=tuple(sizes))


def block(epoch: int, first: int, end: int) -> SampleBlock:
    return SampleBlock(epoch=epoch, first=first, end=end)


def granted(answer: dict[int, tuple[Batch, ...]] | str) -> dict[int, tuple[Batch, ...]]:
    assert isinstance(answer, dict), answer
    return answer


def units(batches: Sequence[Batch]) -> list[tuple[int, int]]:
    """(epoch, position) of each unit."""
    return [(b.epoch, position) for batch in batches for b in batch for position in range(b.first, b.end)]


class Job:
    """The ledgers of all members, and what their learners have been told."""

    def __init__(self, samples: SampleSpace, ranks: Sequence[int], sync: SyncSettings) -> None:
        self.space, self.sync = samples, sync
        self.ledgers = [Ledger(samples, ranks, sync) for _ in range(2)]
        self.held = {rank: list(self.ledgers[0].batches(rank)) for rank in ranks}
        self.covered: dict[int, list[int]] = defaultdict(list)
        self.most_ranks = len(ranks)

    def complete(self, binds: Mapping[int, Bind]) -> None:
        answers = [
            granted(ledger.complete(dict(order))) for ledger, order in zip(self.ledgers, _orders(binds), strict=True)
        ]
        self._told(answers)
        assert answers[0].keys() == binds.keys()
        for rank, made in binds.items():
            covered = set(made.samples)
            self.held[rank] = [batch for batch in self.held[rank] if batch[0] not in covered]
            for epoch, position in units([made.samples]):
                self.covered[epoch].append(position)
            self.held[rank] += answers[0][rank]

    def enter(self, ranks: Sequence[int]) -> None:
        answers = [ledger.enter(order) for ledger, order in zip(self.ledgers, (ranks, ranks[::-1]), strict=True)]
        self._told(answers)
        self.held = {rank: [*self.held.get(rank, ()), *answers[0].get(rank, ())] for rank in sorted(ranks)}
        self.most_ranks = max(self.most_ranks, len(ranks))

    def restore(self) -> None:
        """A member comes back without a history."""
        state = DealState.load(DealState.load(self.ledgers[0].state().model_dump()).model_dump())
        self.ledgers[1] = Ledger.restored(self.space, self.sync, state)

    def _told(self, answers: Sequence[dict[int, tuple[Batch, ...]]]) -> None:
        assert answers[0] == answers[1]
        assert self.ledgers[0].state() == self.ledgers[1].state()
        for batches in answers[0].values():
            assert all(len({part.epoch for part in batch}) == 1 for batch in batches), "a batch is of one epoch"

    def check(self) -> None:
        """X1: held by one rank, covered by one round, or nobody's, and with drop_last only little of these."""
        for rank, batches in self.held.items():
            assert sorted(units(batches)) == sorted(units(self.ledgers[0].batches(rank)))
        held = [unit for batches in self.held.values() for unit in units(batches)]
        assert len(held) == len(set(held))
        last = max([*self.covered, *(epoch for epoch, _ in held)], default=0)
        for epoch in range(last + 2):
            covered = self.covered[epoch]
            of = {rank: sum(1 for unit in units(batches) if unit[0] == epoch) for rank, batches in self.held.items()}
            of = {rank: count for rank, count in of.items() if count}
            assert len(covered) == len(set(covered)), "in two rounds"
            assert not {(epoch, position) for position in covered} & set(held), "in a round, and held"
            unused = self.ledgers[0].over(epoch, set(self.held))
            assert self.ledgers[0].over(epoch, set()) == (0 if unused is not None and not of else None)
            if unused is None:
                continue
            assert unused == sum(of.values())
            missing = self.space.total - len(covered) - unused
            assert missing == 0 or self.space.drop_last

    def finish(self) -> None:
        """Everybody uses what it holds, so that all epochs before the pointer's are over."""
        self.complete({rank: bind(batches) for rank, batches in self.held.items() if batches})


def _orders(binds: Mapping[int, Bind]) -> tuple[list[tuple[int, Bind]], list[tuple[int, Bind]]]:
    items = list(binds.items())
    return items, items[::-1]


@st.composite
def other_sizes(draw: st.DrawFn, members: int, joint: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, joint - 1)), min_size=members - 1, max_size=members - 1)))
    return tuple(high - low for low, high in zip([0, *cuts], [*cuts, joint], strict=True))


@settings(max_examples=60)
@given(st.data())
def test_every_sample_is_in_one_round_under_losses_joins_and_restarts(data: st.DataObject) -> None:
    """X1, X3, X4: any claims, sizes and order; all members compute the same, also from a state; nobody's samples end.

    What is lost with a learner is granted again, and every epoch before the pointer's ends whole.
    """
    sync = data.draw(st.sampled_from([LOCKSTEP, CLAIMS]), "sync")
    members = data.draw(st.integers(1, 4), "members")
    whole = data.draw(st.booleans(), "whole batches")
    batch = 1 if whole else data.draw(st.integers(1, 6), "batch")
    drop_last = not whole and data.draw(st.booleans(), "drop_last")
    total = data.draw(st.integers(members * batch if drop_last else members, 60), "total")
    job = Job(space(total, batch, whole_batches=whole, drop_last=drop_last), range(members), sync)
    for _ in range(data.draw(st.integers(0, 15), "events")):
        event = data.draw(st.sampled_from(["round", "round", "round", "enter", "restore"]))
        if event == "restore":
            job.restore()
        elif event == "enter":
            job.enter(data.draw(st.lists(st.integers(0, 5), unique=True, max_size=5), label="learning"))
        else:
            binds = {}
            for rank in sorted(data.draw(st.sets(st.sampled_from(sorted(job.held))) if job.held else st.just(set()))):
                used = data.draw(st.integers(0, len(job.held[rank])), label=f"batches of rank {rank}")
                lowest = rank == min(job.held) and not whole and batch * len(job.held) >= len(job.held)
                changes = lowest and data.draw(st.booleans(), label="sizes")
                sizes = data.draw(other_sizes(len(job.held), batch * len(job.held))) if changes and batch > 1 else ()
                binds[rank] = bind(job.held[rank][:used], data.draw(st.integers(0, 5), label="claim"), sizes)
            job.complete(binds)
    if not job.held:
        job.enter([7])
    epoch = job.ledgers[0].state().epoch
    job.finish()
    job.check()
    for past in range(epoch):
        assert job.ledgers[0].over(past, set()) == 0
        if not drop_last:
            assert sorted(job.covered[past]) == list(range(total))


@settings(max_examples=50)
@given(
    st.integers(1, 5), st.integers(1, 6), st.integers(0, 80), st.booleans(), st.integers(1, 3), st.sampled_from([0, 2])
)
def test_in_lockstep_turns_are_the_rounds_of_a_plan(
    members: int, batch: int, more: int, drop_last: bool, epochs: int, staleness: int
) -> None:
    """X4: with constant members the same samples go to the same ranks in the same rounds as planned without a ledger.

    So every rank has equally many batches of an epoch, nobody idles inside it, and a round covers one turn.
    """
    total = (members * batch if drop_last else members) + more
    ledger = Ledger(
        space(total, batch, drop_last=drop_last), range(members), SyncSettings(staleness=staleness, straggler="wait")
    )
    held = {rank: list(ledger.batches(rank)) for rank in range(members)}
    claim = 2 * (staleness + 1) + 1
    for epoch in range(epochs):
        for index in range(rounds_per_epoch(total, [batch] * members, drop_last=drop_last)):
            planned = deal(total, [batch] * members, index, drop_last=drop_last)
            used = {rank: batches.pop(0) for rank, batches in held.items()}
            assert used == {rank: (block(epoch, *planned[rank]),) for rank in range(members)}
            grants = granted(ledger.complete({rank: bind([used[rank]], claim) for rank in used}))
            for rank, batches in grants.items():
                held[rank] += batches
        assert ledger.over(epoch, set()) == 0


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(2, 6), st.integers(0, 200), st.booleans(), st.integers(0, 2**32))
def test_in_lockstep_rounds_of_unequal_batches_are_those_of_one_process(
    members: int, batch: int, more: int, drop_last: bool, seed: int
) -> None:
    """X4, X4a: whatever sizes a round puts in force and whoever prefetches more, each round is the next joint batch,
    cut among all ranks."""
    draw, total = random.Random(seed), members * batch + more
    ledger = Ledger(space(total, batch, drop_last=drop_last), range(members), SyncSettings(shares="speed"))
    held = {rank: list(ledger.batches(rank)) for rank in range(members)}
    for epoch in range(3):
        for index in range(rounds_per_epoch(total, [batch] * members, drop_last=drop_last)):
            used = {rank: batches.pop(0) for rank, batches in held.items()}
            joint = deal(total, [batch] * members, index, drop_last=drop_last)
            assert units([used[rank] for rank in range(members)]) == [
                (epoch, at) for at in range(joint[0][0], joint[-1][1])
            ]
            sizes = in_proportion([draw.uniform(0.1, 1) for _ in range(members)], batch * members)
            changed = {0: sizes} if index % 3 == 0 else {}
            binds = {rank: bind([used[rank]], draw.randint(3, 9), changed.get(rank, ())) for rank in used}
            for rank, batches in granted(ledger.complete(binds)).items():
                held[rank] += batches
        assert ledger.over(epoch, set()) == 0


def test_in_lockstep_a_rank_that_prefetches_more_gets_no_more_of_an_epoch() -> None:
    """X4: all are kept at the largest claim; else the one who holds more ahead would end the epoch later."""
    ledger = Ledger(space(120, 2), range(3), LOCKSTEP)
    held = {rank: list(ledger.batches(rank)) for rank in range(3)}
    used: dict[int, list[int]] = defaultdict(list)
    for _ in range(60):
        binds = {rank: bind([held[rank][0]], claim) for rank, claim in ((0, 3), (1, 40), (2, 3))}
        for rank, batches in granted(ledger.complete(binds)).items():
            used[rank].append(held[rank].pop(0)[0].epoch)
            held[rank] += batches
    assert used[0] == used[1] == used[2]
    assert used[0].count(0) == 20


def test_ranks_that_accumulate_equally_stay_in_step() -> None:
    """O6, X4: k batches are covered, and k are granted; two rounds of two are four rounds of one."""
    ledger = Ledger(space(400, 5), range(2), LOCKSTEP)
    held = {rank: list(ledger.batches(rank)) for rank in range(2)}
    for round_ in range(20):
        used = {rank: [batches.pop(0), batches.pop(0)] for rank, batches in held.items()}
        for rank, batches in used.items():
            wanted = [deal(400, [5, 5], 2 * round_ + index)[rank] for index in range(2)]
            assert batches == [(block(0, *cut),) for cut in wanted]
        for rank, more in granted(ledger.complete({rank: bind(batches, 5) for rank, batches in used.items()})).items():
            held[rank] += more
    assert ledger.over(0, set()) == 0


def test_a_claim_is_what_is_to_be_held() -> None:
    """X2: so a step that is lost, or samples that come from elsewhere, need no book-keeping of claims."""
    ledger = Ledger(space(10_000, 4), range(3), CLAIMS)
    first = first_batches(ledger._space, 3, CLAIMS)
    assert [len(ledger.batches(rank)) for rank in range(3)] == [first] * 3
    assert granted(ledger.complete({})) == {}
    assert granted(ledger.complete({1: bind(ledger.batches(1)[:3], first)}))[1] == (
        (block(0, first * 12, first * 12 + 4),),
        (block(0, first * 12 + 4, first * 12 + 8),),
        (block(0, first * 12 + 8, first * 12 + 12),),
    )
    assert granted(ledger.complete({2: bind(ledger.batches(2)[:3], first - 5)})) == {2: ()}
    assert granted(ledger.complete({0: bind(), 2: bind(claim=first - 2)})) == {0: (), 2: (*ledger.batches(2)[-1:],)}


def test_who_takes_longer_periods_soon_is_granted_what_they_need() -> None:
    """C3, X2: whatever it has claimed, for it could not know; but nothing where the script has no prepared loader."""
    for sync in (LOCKSTEP, CLAIMS):
        ledger = Ledger(space(10_000, 4), range(3), sync)
        ledger.complete({0: bind(ledger.batches(0)[:1], 5), 1: bind(ledger.batches(1)[:1], 300)}, least=257)
        levels = [len(ledger.batches(rank)) for rank in (0, 1)]
        assert levels == ([300, 300] if sync is LOCKSTEP else [257, 300])
        ledger.complete({0: bind()}, least=400)
        assert len(ledger.batches(0)) == levels[0]


def test_who_is_faster_gets_more() -> None:
    """X2: only those in a round are granted more, so the others are not waited for."""
    ledger = Ledger(space(10_000, 4), range(2), CLAIMS)
    for _ in range(100):
        granted(ledger.complete({0: bind(ledger.batches(0)[:1], 7)}))
    assert len(ledger.batches(0)) == 7
    assert len(ledger.batches(1)) == first_batches(ledger._space, 2, CLAIMS)


def test_epochs_that_are_used_are_what_nobody_holds() -> None:
    ledger = Ledger(space(1000, 4), range(2), CLAIMS)
    assert ledger.epochs_used == 0
    for used in range(1, 20):
        granted(ledger.complete({rank: bind(ledger.batches(rank)[:1], 40) for rank in range(2)}))
        assert ledger.epochs_used == pytest.approx(used * 2 * 4 / 1000)
    ledger.enter([0])
    assert ledger.epochs_used == pytest.approx(19 * 2 * 4 / 1000), "what came back is still to be used"
    while ledger.epochs_used < 2:
        granted(ledger.complete({0: bind(ledger.batches(0)[:1], 40)}))
    assert ledger.epochs_used == pytest.approx(2, abs=0.01)


def test_what_a_lost_rank_held_comes_first_and_to_all() -> None:
    """X3: at once, for nobody may be left to take a step that would ask for it; the oldest first."""
    ledger = Ledger(space(24, 4), range(3), LOCKSTEP)
    held = {rank: ledger.batches(rank) for rank in range(3)}
    granted(ledger.complete({rank: bind(held[rank][:1]) for rank in range(3)}))
    answer = ledger.enter((0, 2))
    assert set(answer) == {0, 2}
    assert answer[0][0] == (block(0, 16, 18),)
    assert answer[2][0] == (block(0, 18, 20),), "the last round of its epoch, for both"
    assert answer[0][1] == (block(1, 4, 8),)
    assert answer[2][1] == (block(1, 16, 20),)
    assert ledger.state().returned == ()


def test_a_newcomer_holds_as_many_batches_as_the_others() -> None:
    """X3: not the first lot of long ago, which would keep it at work when the others have ended the epoch; and what is
    held does not grow with what the lost ones leave to the others."""
    ledger = Ledger(space(1000, 1), range(2), LOCKSTEP)
    for _ in range(200):
        granted(ledger.complete({rank: bind(ledger.batches(rank)[:1], 3) for rank in range(2)}))
    answer = ledger.enter((0, 1, 5))
    assert [len(ledger.batches(rank)) for rank in (0, 1, 5)] == [3, 3, 3]
    assert answer == {5: ledger.batches(5)}
    assert ledger.enter((0, 1, 5)) == {}, "nothing has changed"
    for _ in range(10):
        ledger.enter((0, 1))
        ledger.enter((0, 1, 5))
    assert sum(len(ledger.batches(rank)) for rank in (0, 1, 5)) <= 9 + 10 * 4


def test_a_job_whose_learners_are_all_lost_goes_on_where_it_was() -> None:
    """X3: what they held waits for whoever comes."""
    ledger = Ledger(space(100, 5), range(2), LOCKSTEP)
    granted(ledger.complete({0: bind(ledger.batches(0)[:1])}))
    assert ledger.enter(()) == {}
    assert ledger.over(0, set()) is None
    answer = ledger.enter((3,))
    assert units(answer[3])[:95] == [(0, position) for position in range(5, 100)]
    assert len(answer[3]) >= FIRST_BATCHES


def test_sizes_are_in_force_from_their_rounds_grants_on() -> None:
    """X4a: also for ranks that bound without them; until they change again. Who comes in begins with an equal share."""
    ledger = Ledger(space(1000, 4), range(2), CLAIMS)
    first = len(ledger.batches(0))
    grants = granted(ledger.complete({0: bind(claim=first + 1, sizes=[6, 2]), 1: bind(claim=first + 1)}))
    assert grants == {0: ((block(0, first * 8, first * 8 + 6),),), 1: ((block(0, first * 8 + 6, first * 8 + 8),),)}
    assert ledger.sizes == {0: 6, 1: 2}
    ledger.enter((0, 1, 2))
    assert ledger.sizes == {0: 6, 1: 2, 2: 4}
    assert isinstance(ledger.complete({0: bind(sizes=[2, 6])}), dict), "bound before the third was there (G6)"
    assert ledger.sizes == {0: 6, 1: 2, 2: 4}


def test_a_loss_keeps_the_proportions_of_the_others() -> None:
    """X4a: a round does not wait again for the slowest one until speeds are looked at; also in a state's ledger."""
    ledger = Ledger(space(10_000, 12), range(3), CLAIMS)
    ledger.complete({0: bind(sizes=[18, 12, 6])})
    other = Ledger.restored(space(10_000, 12), CLAIMS, ledger.state())
    for each in (ledger, other):
        each.enter((0, 2))
        assert each.sizes == {0: 18, 2: 6}
        each.enter((0, 1, 2))
        assert each.sizes == {0: 18, 1: 12, 2: 6}


SPEEDS = {0: 300.0, 1: 300.0, 2: 100.0, 5: 0.1}


def test_the_first_batches_follow_speeds_that_were_measured_before() -> None:
    """X4a: all that is granted at the start, whether the ranks are there at once or come in before round 1 (G9)."""
    by_speed = SyncSettings(shares="speed")
    for began in ((0, 1, 2), ()):
        ledger = Ledger(space(10_000, 14), began, by_speed, SPEEDS)
        ledger.enter((0, 1, 2))
        assert ledger.sizes == {0: 18, 1: 18, 2: 6}
        sizes = [{sum(block_.end - block_.first for block_ in batch) for batch in ledger.batches(r)} for r in range(3)]
        assert sizes == [{18}, {18}, {6}]


def test_a_ledger_that_is_restored_deals_as_the_one_that_it_was_read_from() -> None:
    """X1: before anything was granted by the same speeds, and behind that by none, whoever was lost meanwhile."""
    by_speed = SyncSettings(shares="speed")
    for began in ((0, 1, 2), ()):
        own = Ledger(space(10_000, 14), began, by_speed, SPEEDS)
        other = Ledger.restored(space(10_000, 14), by_speed, own.state(), SPEEDS)
        for ranks in ((0, 1, 2), (), (0, 1, 2), (0, 1, 2, 5)):
            late = Ledger.restored(space(10_000, 14), by_speed, own.state(), SPEEDS)
            for each in (own, other, late):
                each.enter(ranks)
                assert (each.sizes, each.state()) == (own.sizes, own.state())
        assert own.sizes == {0: 14, 1: 14, 2: 14, 5: 14}, "all were gone once"


@pytest.mark.parametrize(
    ("sync", "ranks", "whole"),
    [(SyncSettings(), (0, 1, 2), False), (SyncSettings(shares="speed"), (0, 1, 3), False),
     (SyncSettings(shares="speed"), (0, 1, 2), True)],
    ids=["equal shares", "one is not known", "whole batches"],
)  # fmt: skip
def test_else_the_first_batches_are_equal(sync: SyncSettings, ranks: tuple[int, ...], whole: bool) -> None:
    ledger = Ledger(space(10_000, 14).model_copy(update={"whole_batches": whole}), ranks, sync, SPEEDS)
    assert ledger.sizes == dict.fromkeys(ranks, 14)


def test_drop_last_leaves_out_less_than_a_joint_batch() -> None:
    """A short tail belongs to nobody, and the epoch is over when the others are covered."""
    ledger = Ledger(space(11, 2, drop_last=True), range(2), LOCKSTEP)
    covered = {rank: [b for b in ledger.batches(rank) if b[0].epoch == 0] for rank in range(2)}
    assert sorted(position for batches in covered.values() for _, position in units(batches)) == list(range(8))
    assert ledger.over(0, {0}) is None
    granted(ledger.complete({rank: bind(batches) for rank, batches in covered.items()}))
    assert ledger.over(0, set()) == 0
    with pytest.raises(ValueError, match="drop_last drops them all"):
        Ledger(space(3, 2, drop_last=True), range(2), LOCKSTEP)


def test_drop_last_with_more_ranks_than_an_epoch_has_batches() -> None:
    """A job may grow beyond what its data set was made for; batches stay whole."""
    ledger = Ledger(space(9, 4, drop_last=True), range(2), LOCKSTEP)
    answer = ledger.enter((0, 1, 2, 3))
    assert all(part.end - part.first == 4 for batches in answer.values() for (part,) in batches)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (bind([(block(0, 4, 8),)]), r"rank 0 covers samples 4 to 8 of epoch 0, which it does not hold (X1)"),
        (bind([(block(0, 0, 3),)]), "does not hold"),
        (bind([(block(7, 0, 4),)]), "does not hold"),
        (bind([(block(0, 0, 4), block(0, 0, 4))]), "twice"),
        (bind(sizes=[7, 2]), "2 batch sizes of 9 in sum, not of 8 (X4a)"),
    ],
)
def test_a_wrong_bind_is_named_and_changes_nothing(wrong: Bind, text: str) -> None:
    """X1: remote members' words never corrupt the ledger, not even those of the same round that are right."""
    ledger, untouched = (Ledger(space(50, 4), range(2), CLAIMS) for _ in range(2))
    right = bind([(block(0, 4, 8),)], 40, sizes=[5, 3])
    answer = ledger.complete({0: wrong, 1: right})
    assert isinstance(answer, str)
    assert text in answer
    assert ledger.state() == untouched.state()
    assert ledger.complete({1: right}) == untouched.complete({1: right})


def test_a_batch_is_covered_whole() -> None:
    """X1: of one that was put together from two blocks, both."""
    ledger = Ledger(space(17, 4), range(3), LOCKSTEP)
    ledger.enter((0, 1))
    apart = next(batch for batch in ledger.batches(1) if len(batch) > 1)
    assert apart == (block(0, 11, 12), block(0, 15, 17))
    assert ledger.complete({1: bind([apart[:1]])}) == "rank 1 covers a part of a batch (X1)"
    assert isinstance(ledger.complete({1: bind([apart])}), dict)


def test_whole_batches_have_no_sizes() -> None:
    ledger = Ledger(space(9, 1, whole_batches=True), range(2), CLAIMS)
    assert ledger.complete({0: bind(sizes=[1, 1])}) == "rank 0 sets batch sizes, and whole batches have none (X4a)"


def test_memory_is_what_is_granted_and_not_covered() -> None:
    """However long the job, and whatever one claims: at most what a message may ask for is held."""
    ledger = Ledger(space(6, 2), range(2), LOCKSTEP)
    for _ in range(300):
        granted(ledger.complete({rank: bind(ledger.batches(rank)[:1], 3) for rank in range(2)}))
    assert [len(ledger.batches(rank)) for rank in range(2)] == [3, 3]
    assert ledger.over(140, set()) == 0
    for _ in range(3):
        granted(ledger.complete({0: bind(claim=4096)}))
    assert len(ledger.batches(0)) == 4096


def test_the_first_lot() -> None:
    """X2: enough for a step that accumulates; in lockstep more, where an epoch is long."""
    assert first_batches(space(10**6, 1), 2, CLAIMS) == FIRST_BATCHES + 2
    assert first_batches(space(10**6, 1), 2, LOCKSTEP) == FIRST_BATCHES_EQUAL_MAX
    assert first_batches(space(300, 5), 1, LOCKSTEP) == 60
    assert first_batches(space(300, 5), 1, sync_settings("local:500")) == 500
    assert first_batches(space(10**6, 1), 2, sync_settings("local:500")) == 500
    assert first_batches(space(10**6, 1), 2, sync_settings("bsp,accumulate=200", shares="speed")) == 200
    assert first_batches(space(10**6, 1), 2, sync_settings("bsp,accumulate=200")) == 200
    assert first_batches(space(10, 5), 1, LOCKSTEP) == FIRST_BATCHES
    assert first_batches(space(4, 5), 3, LOCKSTEP) == FIRST_BATCHES
