"""Where two histories part: what is told of rounds that are given up begins there."""

from meshwire import limits
from meshwire.membership.lineage import Path
from meshwire.messages.job import Generation, Member
from tests.computing import computing

JOB = "j" + "0" * 11
MEMBERS = tuple(Member(device=f"{n + 1:064x}", incarnation=n + 10, name=f"peer{n}") for n in range(4))
FIRST = computing(JOB, MEMBERS[0].device, MEMBERS)


def after(before: Generation, *ranks: int) -> Generation:
    parent = before.digest()
    changes = {"number": before.number + 1, "parent": parent, "ranks": ranks, "learning": ranks}
    return before.model_copy(update={**changes, "proposer": MEMBERS[ranks[0]].device})


def walked(*steps: tuple[Generation, int]) -> Path:
    path = Path()
    for generation, cut in steps:
        path.entered(generation, cut, cut * 8)
    return path


LEFT = after(FIRST, 0, 1)  # two sides of a partition
RIGHT = after(FIRST, 2, 3)
ALONE = after(LEFT, 0)


def test_what_comes_after_the_last_common_generation_is_lost() -> None:
    path = walked((FIRST, 0), (LEFT, 100), (ALONE, 400))
    parted = path.parted(RIGHT, [FIRST.hash64()])
    assert parted is not None
    assert (parted.cut, parted.samples) == (100, 800)


def test_of_generations_in_common_nothing_is_lost() -> None:
    """Who was left out, or was asleep, has made nothing that others lack."""
    assert walked((FIRST, 0)).parted(RIGHT, [FIRST.hash64()]) is None
    assert walked((FIRST, 0), (LEFT, 100)).parted(ALONE, [LEFT.hash64(), FIRST.hash64()]) is None
    assert walked((FIRST, 0), (LEFT, 100)).parted(LEFT, []) is None
    assert walked().parted(RIGHT, []) is None


def test_a_generation_that_the_other_side_has_only_promised_is_left_by_the_next_one() -> None:
    path = walked((FIRST, 0), (LEFT, 100), (ALONE, 100))
    parted = path.parted(RIGHT, [LEFT.hash64(), FIRST.hash64()])
    assert parted is not None
    assert parted.generation == ALONE.hash64()


def test_too_long_ago_to_be_named_it_is_known_by_who_was_there() -> None:
    """The other side has changed so often that it names none in common."""
    many = list(range(limits.ANCESTORS_MAX))
    parted = walked((FIRST, 0), (LEFT, 100), (ALONE, 400)).parted(RIGHT, many)
    assert parted is not None
    assert parted.cut == 100


def test_who_takes_a_history_over_knows_what_it_has_gone_through() -> None:
    """And can tell what is given up of it when those that made it are lost."""
    path = Path(walked((FIRST, 0), (LEFT, 100)).tell())
    path.entered(ALONE, 400, 3200)
    parted = path.parted(RIGHT, [FIRST.hash64()])
    assert parted is not None
    assert (parted.cut, parted.samples) == (100, 800)
    assert Path().parted(RIGHT, [FIRST.hash64()]) is None
    many = list(range(limits.ANCESTORS_MAX))
    unnamed = path.parted(RIGHT, many)
    assert unnamed is not None
    assert unnamed.cut == 400, "who was there it knows of those that it has entered itself"


def test_what_began_after_a_state_that_all_go_back_to_is_none_of_it() -> None:
    """J3."""
    path = walked((FIRST, 0), (LEFT, 100), (ALONE, 40))
    assert [step.cut for step in path.tell()] == [0, 40]
    parted = path.parted(RIGHT, [FIRST.hash64(), LEFT.hash64()])
    assert parted is not None
    assert parted.cut == 40
