"""J5: who begins a job again that all of its daemons have lost, and when; coming up in any order, in virtual time."""

import itertools
import random
from collections.abc import Iterable, Mapping

import pytest

from meshwire import limits
from meshwire.membership.proposal_checks import list_wrong
from meshwire.messages.generation import Where
from meshwire.messages.job import Generation, Member
from meshwire.revival import Revival, is_older
from meshwire.timeouts import Timeouts
from tests.wire.membership.test_quorum import FIRST, JOB, MEMBERS, after

PATIENCE_S = 5.0
LINK_S = 1.5  # until two that are up have a link
MINUTE_S = 60.0


def restarted(rank: int) -> Member:
    return MEMBERS[rank].model_copy(update={"incarnation": 1000 + rank})


class Machines:
    """Daemons that come up one after the other, linked as soon as two are up; nobody's submission fails.

    Args:
        entered: the generation that each one entered last, by rank.
    """

    def __init__(self, entered: Mapping[int, Generation]) -> None:
        self._entered = entered
        self.up: dict[int, Revival] = {}
        self.begun: list[tuple[float, Generation]] = []
        self.where: dict[int, Generation] = {}  # of those that have the job again

    def run(self, order: Iterable[int], apart_s: float, until_s: float = 20 * MINUTE_S) -> None:
        starts = {rank: place * apart_s for place, rank in enumerate(order)}
        moments = {at_s + later_s for at_s in starts.values() for later_s in (0.0, LINK_S)}
        now_s = 0.0
        while now_s <= until_s:
            self._look(now_s, starts)
            deadlines = (machine.deadline(now_s) for machine in self.up.values())
            later = [at_s for at_s in (*moments, *deadlines) if at_s is not None and at_s > now_s]
            if not later:
                return
            now_s = min(later)

    def _look(self, now_s: float, starts: Mapping[int, float]) -> None:
        for rank, at_s in starts.items():
            if now_s >= at_s and rank not in self.up and rank not in self.where:
                self.up[rank] = Revival(restarted(rank), self._entered[rank], Timeouts(patience_s=PATIENCE_S))
        linked = [pair for pair in itertools.permutations(starts, 2) if now_s >= max(starts[r] for r in pair) + LINK_S]
        for one, other in linked:
            if one in self.up and other in self.up and restarted(other).device not in self.up[one]._told:
                assert self.up[one].told(restarted(other), self._entered[other], now_s) is None
            elif one in self.up and other in self.where:
                self._hear(one, other, now_s)
        for rank in list(self.up):
            if rank in self.up and (generation := self.up[rank].due(now_s)) is not None:
                self._begin(generation, rank, now_s)

    def _hear(self, one: int, other: int, now_s: float) -> None:
        """Of a job that goes on: it returns to it, unless it knows of something newer."""
        where = Where(job=JOB, generation=self.where[other], ancestors=(), samples=0)
        if is_older(where, self._entered[one]):
            self.up[one].lost(MEMBERS[other].device, now_s)
        else:
            self.where[one] = self.where[other]
            del self.up[one]

    def _begin(self, generation: Generation, rank: int, now_s: float) -> None:
        assert list_wrong(generation) is None
        assert not generation.provisional
        assert generation.proposer == MEMBERS[rank].device
        self.begun.append((now_s, generation))
        for one in generation.ranks:
            self.where[one] = generation
            del self.up[one]
        for other, theirs in self.where.items():
            if theirs.root < generation.root:
                self.where[other] = generation  # G4: the newer root is kept


def test_all_that_come_up_at_once_begin_at_once_and_the_lowest_rank_proposes() -> None:
    """J5: under their ranks, in their incarnations of now, in a generation after all that any of them entered."""
    mesh = Machines(dict.fromkeys(range(5), after(7, 0, 1, 2, 3, 4)))
    mesh.run((3, 1, 0, 2, 4), apart_s=0.0)
    ((at_s, generation),) = mesh.begun
    assert at_s == LINK_S
    assert (generation.number, generation.root, generation.proposer) == (8, 8, MEMBERS[0].device)
    assert generation.members == tuple(restarted(rank) for rank in range(5))
    assert generation.ranks == generation.counted == (0, 1, 2, 3, 4)
    assert not generation.learning, "G9: they come in at its beginning"
    assert generation.parent == after(7, 0, 1, 2, 3, 4).digest()


def test_machines_minutes_apart_begin_once_when_the_majority_of_the_newest_generation_is_there() -> None:
    """J5: of five, three went on without two, and two of these three without the third. Whatever the order in which
    they come up: only the last two decide, nothing older is begun, and all end in the job that those began."""
    entered = {0: after(9, 0, 1), 1: after(9, 0, 1), 2: after(8, 0, 1, 2), 3: FIRST, 4: FIRST}
    for order in itertools.permutations(range(5)):
        mesh = Machines(entered)
        mesh.run(order, apart_s=3 * MINUTE_S)
        ((_, generation),) = mesh.begun
        assert generation.root == 10, order
        assert {one.hash64() for one in mesh.where.values()} == {generation.hash64()}, order
        assert len(mesh.where) == 5, order


def test_half_begins_only_with_the_lowest_rank_and_less_never() -> None:
    """J5: two laptops: rank 0 begins alone after the patience; rank 1 waits, and says how a person goes on."""
    pair = after(3, 0, 1)
    mesh = Machines({0: pair, 1: pair})
    mesh.run((0,), apart_s=0.0)
    ((at_s, generation),) = mesh.begun
    assert at_s == PATIENCE_S
    assert generation.ranks == (0,)
    assert generation.members[:2] == (restarted(0), MEMBERS[1])
    mesh = Machines({0: pair, 1: pair})
    mesh.run((1,), apart_s=0.0, until_s=60 * MINUTE_S)
    assert not mesh.begun
    text = mesh.up[1].waiting()
    assert text == (
        "peer0, for all of its devices have lost its state, and of the 2 laptops that decide 1 are here; "
        f"to go on without: meshtrain submit --resume {JOB}"
    )


def test_a_hub_begins_with_any_laptop_and_never_alone() -> None:
    """H3, J5: the last laptop has left the job on the hub; whichever laptop comes, the hub's newest generation counts
    the hub alone, so both are enough. Alone it waits, and says for whom."""
    with_hub = tuple(one.model_copy(update={"hub": rank == 2}) for rank, one in enumerate(FIRST.members[:3]))
    trained, kept = (
        after(number, *ranks).model_copy(update={"members": with_hub, "learning": learning, "counted": counted})
        for number, ranks, learning, counted in ((4, (0, 2), (0,), (0,)), (5, (2,), (), (2,)))
    )
    mesh = Machines({2: kept})
    mesh.run((2,), apart_s=0.0)
    assert not mesh.begun
    assert mesh.up[2].waiting() == (
        "a laptop that was in it (peer0, peer1): this hub keeps its state; from another one: meshtrain submit --resume "
        f"{JOB}"
    )
    for laptop in (0, 1):
        mesh = Machines({2: kept, laptop: trained})
        mesh.run((2, laptop), apart_s=MINUTE_S)
        ((at_s, generation),) = mesh.begun
        assert at_s == MINUTE_S + LINK_S
        assert (generation.ranks, generation.counted) == ((laptop, 2), (laptop,))


def test_a_majority_waits_for_the_rest_as_long_as_it_may_be_on_its_way() -> None:
    """J5: who is linked within the patience begins with the others, and need not load."""
    three = after(4, 0, 1, 2)
    together, late = Machines(dict.fromkeys(range(3), three)), Machines(dict.fromkeys(range(3), three))
    together.run((2, 1, 0), apart_s=PATIENCE_S - 1)
    assert [generation.ranks for _, generation in together.begun] == [(0, 1, 2)]
    late.run((2, 1, 0), apart_s=MINUTE_S)
    assert [generation.ranks for _, generation in late.begun] == [(1, 2)]
    assert late.where[0] == late.begun[0][1]


def test_of_a_provisional_generation_the_electorate_is_that_of_its_root() -> None:
    """J5: who went on provisionally decides no more than before, however far it got."""
    root = after(2, 0, 1, 2)
    apart = after(5, 2, root=2, counted=(0, 1, 2))
    alone = Machines({0: root, 1: root, 2: apart})
    alone.run((2,), apart_s=0.0)
    assert not alone.begun
    two = Machines({0: root, 1: root, 2: apart})
    two.run((2, 1), apart_s=MINUTE_S)
    ((_, generation),) = two.begun
    assert (generation.ranks, generation.root) == ((1, 2), 6)


@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_last_up_the_newest_electorate_is_never_outvoted(seed: int) -> None:
    """J5, G4: of a random line of entitled generations, each with the majority of the one before."""
    draw = random.Random(seed)
    for _ in range(60):
        line = [after(1, 0, 1, 2, 3, 4)]
        while draw.random() < 0.7 and len(line[-1].ranks) > 1:
            ranks = line[-1].ranks
            kept = sorted(draw.sample(ranks, draw.randint(len(ranks) // 2 + 1, len(ranks))))
            line.append(after(len(line) + 1, *kept))
        entered = {rank: max((g for g in line if rank in g.ranks), key=lambda g: g.number) for rank in range(5)}
        mesh = Machines(entered)
        order = draw.sample(range(5), 5)
        mesh.run(order, apart_s=draw.choice((2.0, MINUTE_S, 3 * MINUTE_S)))
        newest = line[-1]
        begun = [generation for _, generation in mesh.begun if set(generation.ranks) & set(newest.ranks)]
        assert len(begun) == 1, (entered, order, mesh.begun)
        assert 2 * len(set(begun[0].ranks) & set(newest.ranks)) >= len(newest.ranks)
        assert {one.hash64() for one in mesh.where.values()} == {begun[0].hash64()}


def test_who_refuses_is_left_out_where_the_others_are_enough_and_tries_come_later_each_time() -> None:
    """J5: a full disk on one of three holds nobody up; on one of two that are needed it does."""
    three = after(4, 0, 1, 2)
    machine = Revival(restarted(0), three, Timeouts(patience_s=PATIENCE_S))
    for rank in (1, 2):
        machine.told(restarted(rank), three, 0.0)
    assert machine.due(0.0) is not None
    machine.failed(0.0, MEMBERS[1].device)
    assert machine.due(0.0) is None
    again = machine.due(10.0)
    assert again is not None
    assert again.ranks == (0, 2)
    machine.failed(10.0, MEMBERS[2].device)
    again = machine.due(60.0)
    assert again is not None
    assert again.ranks == (0, 1, 2), "without both nobody could go on"
    waits: list[float] = []
    for _ in range(9):
        before_s = 1000.0 * (len(waits) + 1)
        machine.failed(before_s)
        deadline_s = machine.deadline(before_s)
        assert deadline_s is not None
        waits.append(deadline_s - before_s)
    assert waits == sorted(waits)
    assert waits[-1] == 60.0


def test_the_next_rank_proposes_where_the_first_does_not() -> None:
    """J5: its disk may hang."""
    three = after(4, 0, 1, 2)
    machine = Revival(restarted(1), three, Timeouts(patience_s=PATIENCE_S))
    for rank in (0, 2):
        machine.told(restarted(rank), three, 0.0)
    assert machine.due(59.0) is None
    generation = machine.due(60.0)
    assert generation is not None
    assert generation.proposer == MEMBERS[1].device


def test_a_job_that_comes_no_further_rests_before_it_begins_again() -> None:
    """J5, J3: also where all are there, and the next rank as much later as ever."""
    three = after(4, 0, 1, 2)
    for mine, due_s in ((0, 30.0), (1, 90.0)):
        machine = Revival(restarted(mine), three, Timeouts(patience_s=PATIENCE_S), rests_until_s=30.0)
        for rank in {0, 1, 2} - {mine}:
            machine.told(restarted(rank), three, 0.0)
        assert machine.deadline(0.0) == due_s


def test_what_cannot_be_is_not_believed() -> None:
    """W1: numbers far above what is known, ranks that are none, another job, a list without the sender."""
    machine = Revival(restarted(0), FIRST, Timeouts())
    wrongs = (
        after(2**31, 0, 1), after(2, 0, 1, root=3), after(2, 0, 1, counted=(7,)),
        after(2, 0, 1, job="k" + "0" * 11), after(2, 0).model_copy(update={"members": MEMBERS[:1]}),
    )  # fmt: skip
    for wrong in wrongs:
        assert machine.told(restarted(1), wrong, 0.0) is not None, wrong
    assert machine.deadline(0.0) is None


def test_who_entered_something_newer_does_not_give_it_up_for_those_that_go_on() -> None:
    """J5, G4: a newer root, or one of the same number that is not among their ancestors."""

    def where(generation: Generation, *ancestors: int) -> Where:
        return Where(job=JOB, generation=generation, ancestors=ancestors, samples=0)

    own = after(4, 0, 1)
    other = after(4, 1, 2)
    assert is_older(where(after(9, 2, root=3)), own)
    assert not is_older(where(after(5, 0)), own)
    assert not is_older(where(own), own)
    assert not is_older(where(after(6, 0, root=4), own.hash64()), own)
    assert is_older(where(other), own)
    assert not is_older(where(other, *range(limits.ANCESTORS_MAX)), own), "its ancestors are more than it can tell"
    assert not is_older(where(after(7, 1, root=4)), after(6, 0, root=4)), "samples decide between these"
