"""What the check of the line of entitled generations allows, and what it does not (G4, gone)."""

from collections.abc import Collection

import pytest

from meshwire.messages.job import Generation, Member
from tests.computing import computing
from tests.sim.clusterline import Life, Line

JOB = "j" + "0" * 11
MEMBERS = tuple(Member(device=f"{n + 1:064x}", incarnation=n + 10, name=f"peer{n}") for n in range(4))
FIRST = computing(JOB, MEMBERS[0].device, MEMBERS[:2])


def after(parent: Generation, number: int, *ranks: int, root: int | None = None) -> Generation:
    update = {"number": number, "ranks": ranks, "learning": ranks, "counted": ranks, "root": root or number}
    extra = {"proposer": MEMBERS[ranks[0]].device, "parent": parent.digest(), "members": MEMBERS}
    return FIRST.model_copy(update={**update, **extra})


THEIRS = after(FIRST, 2, 0, 3)  # 0 takes 3 in, without 1
NEWER = after(THEIRS, 9, 3)  # and is killed: 3 goes on alone
MINE = after(FIRST, 3, 1)  # as 1 does, who cannot know it


class Parted:
    """The line after 0 was killed, and of those that it has left behind both parts have gone on."""

    def __init__(self) -> None:
        self.line = Line(FIRST)
        self._gone: set[Life] = set()
        self.goes_on(THEIRS, [FIRST])
        self._gone.add((MEMBERS[0].device, MEMBERS[0].incarnation))
        self.goes_on(NEWER, [FIRST])
        self.goes_on(MINE, [NEWER])

    def goes_on(self, generation: Generation, held: Collection[Generation], met: Collection[Generation] = ()) -> None:
        """`met`: others of which its members had been told when they promised it."""
        self.line.promised(generation, met)
        self.line.entered(generation)
        self.line.went_on(generation, [*held, generation], lambda life: life in self._gone)


def test_where_all_that_made_a_generation_are_gone_two_parts_go_on_until_they_meet() -> None:
    """G4: 1 and 2 go on together, entitled, as long as neither knows of 3 when it promises."""
    Parted().goes_on(after(MINE, 4, 1, 2), [NEWER])
    with pytest.raises(AssertionError, match=r"generation 9 of \[3\] is known, and generation 4 of \[1, 2\]"):
        Parted().goes_on(after(MINE, 4, 1, 2), [NEWER], met=[NEWER])
    Parted().goes_on(after(MINE, 4, 1, 2, root=3), [NEWER], met=[NEWER])  # provisionally


def test_who_is_told_of_a_newer_root_after_its_promise_goes_on_in_what_it_promised_and_in_nothing_after_it() -> None:
    """G4: 1 and 2 have promised generation 4; then 3 tells 1 where it is; then all enter. The word came on another link
    than the one to enter: it might as well have come after it, as in generation 5."""
    parted, promised = Parted(), after(MINE, 4, 1, 2)
    parted.line.promised(promised, [])
    parted.goes_on(promised, [NEWER])
    with pytest.raises(AssertionError, match=r"generation 9 of \[3\] is known, and generation 5 of \[1\]"):
        parted.goes_on(after(promised, 5, 1), [NEWER], met=[NEWER])


def test_who_lives_and_made_a_generation_parts_from_nobody() -> None:
    """G4: had 0 lived, or were its end known to nobody, two parts would be on apart."""
    line = Line(FIRST)
    for generation in (THEIRS, NEWER, MINE):
        line.entered(generation)
    line.went_on(THEIRS, [FIRST], lambda _life: False)
    with pytest.raises(AssertionError, match="two entitled parts go on apart"):
        line.went_on(MINE, [THEIRS], lambda _life: False)
