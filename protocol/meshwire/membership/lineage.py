"""Which of two generations is ahead of the other: asked when two devices meet that were apart (G1, G2, G4).

A *root* is the newest entitled generation of a history. Entitled generations follow each other in one line
(`quorum.py`), so of two histories the one with the newer root is kept, and the other side has to follow.

Both of one root: then at least one of them went on provisionally. A generation is entered only after all its members
have promised it, and a member's promises have rising ballots. So of two entered generations with a common member the
one with the higher ballot came later, and the other can complete no round any more (G3, whose rounds count). Without a
common member, and if neither names the other among what it came after, both went on apart: they have `PARTED`, and one
of the two histories is given up (`keeps_history`).
"""

from collections import deque
from collections.abc import Collection, Iterable
from enum import Enum

from meshwire import limits
from meshwire.messages.generation import PathStep
from meshwire.messages.job import Generation


class Relation(Enum):
    """What another generation is to the own one."""

    SAME = "the same"
    OLDER = "older"
    NEWER = "newer"
    PARTED = "parted"  # of one root, and neither descends from the other: both went on provisionally


Ballot = tuple[int, int, int]


def ballot(generation: Generation) -> Ballot:
    """Total order of proposals: the higher number, then the proposer's lower rank, then its lower device id."""
    rank = rank_of(generation, generation.proposer)
    return generation.number, -limits.MEMBERS_MAX if rank is None else -rank, -int(generation.proposer, 16)


def rank_of(generation: Generation, device: str) -> int | None:
    """The device's rank among the members of all times."""
    ranks = (rank for rank, member in enumerate(generation.members) if member.device == device)
    return next(ranks, None)


def relation(own: Generation, lineage: Collection[int], other: Generation, ancestors: Collection[int]) -> Relation:
    """What `other` is to `own`.

    Args:
        lineage: what `own` came after, by hash.
        ancestors: what `other` came after.
    """
    if own.hash64() == other.hash64():
        return Relation.SAME
    if other.root != own.root:
        return Relation.NEWER if other.root > own.root else Relation.OLDER
    newer = ballot(other) > ballot(own)
    # One came after the other: whoever knows the names of its ancestors can tell.
    if not newer and other.hash64() in lineage:
        return Relation.OLDER
    if newer and own.hash64() in ancestors:
        return Relation.NEWER
    # Nobody names the other, but a common member has promised both, one after the other.
    lives = {(member.device, member.incarnation) for member in own.live.values()}
    if any((member.device, member.incarnation) in lives for member in other.live.values()):
        return Relation.NEWER if newer else Relation.OLDER
    return Relation.PARTED


def keeps_history(own: Generation, own_samples: int, other: Generation, other_samples: int) -> bool:
    """G4: of two that parted the side with more samples, then with the lowest device id, keeps its history.

    Both count from their root on, for up to it they hold the same.
    """

    def strength(generation: Generation, samples: int) -> tuple[int, int, int]:
        lowest = min(int(member.device, 16) for member in generation.live.values())
        return samples, -lowest, -generation.hash64()

    return strength(own, own_samples) > strength(other, other_samples)


def extended(lineage: Iterable[int], *newer: int) -> tuple[int, ...]:
    """`newer`, newest first, in front of `lineage`; as many as a message holds."""
    return tuple(dict.fromkeys((*newer, *lineage)))[: limits.ANCESTORS_MAX]


class Path:
    """The generations that a history has gone through, in order: where it parts from another.

    `told`: up to where a member took it over that has not entered them itself.
    """

    def __init__(self, told: Iterable[PathStep] = ()) -> None:
        self._beginnings: deque[PathStep] = deque(told, maxlen=limits.ANCESTORS_MAX)
        self._lives: dict[int, set[tuple[str, int]]] = {}  # of those that were entered here

    def entered(self, generation: Generation, cut: int, samples: int) -> None:
        """The next one; `samples` are in the rounds up to the cut. What began after the cut has been given up (J3)."""
        while self._beginnings and self._beginnings[-1].cut > cut:
            self._beginnings.pop()
        self._beginnings.append(PathStep(generation=generation.hash64(), cut=cut, samples=samples))
        kept = {one.generation for one in self._beginnings}
        self._lives = {key: lives for key, lives in self._lives.items() if key in kept}
        self._lives[generation.hash64()] = _lives(generation)

    def tell(self) -> tuple[PathStep, ...]:
        """To who takes this history over."""
        return tuple(self._beginnings)

    def parted(self, other: Generation, ancestors: Collection[int]) -> PathStep | None:
        """What is after it is not in the history of `other`, which came after `ancestors`. None: nothing is known.

        An ancestor may have been promised and never entered there; then no round was completed in it here (G3).
        """
        known = {other.hash64(), *ancestors}
        common = [number for number, one in enumerate(self._beginnings) if one.generation in known]
        if common:
            after = common[-1] + 1
            return self._beginnings[after] if after < len(self._beginnings) else None
        lives = {(member.device, member.incarnation) for member in other.live.values()}  # too long ago to be named
        apart = (one for one in self._beginnings if not lives & self._lives.get(one.generation, lives))
        return next(apart, None)


def _lives(generation: Generation) -> set[tuple[str, int]]:
    return {(member.device, member.incarnation) for member in generation.live.values()}
