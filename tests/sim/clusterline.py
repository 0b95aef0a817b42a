"""The line of entitled generations: no two of them go on apart, and what one has committed is never given up (G4)."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from meshwire.messages.job import Generation

Life = tuple[str, int]
"""A device with its incarnation."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What all members of an entitled generation know that all of them hold (G5)."""

    round: int
    chain: bytes


class Line:
    """Fed with every generation that anybody promises, enters, and goes on in. Raises AssertionError.

    Of a history that nobody holds any more nothing is asked: its holders have all been killed.
    """

    def __init__(self, first: Generation) -> None:
        self._entered = {first.hash64(): first}
        self._went_on = {first.hash64()}  # entitled ones
        self._kept: dict[int, Kept] = {}
        self._parted: set[frozenset[int]] = set()  # by the first generations of both sides
        self._met: dict[int, set[int]] = {}  # by generation: the others of which those knew that promised it

    def promised(self, generation: Generation, met: Iterable[Generation]) -> None:
        """A member promises it, and somebody who lives has told that member before that he is in these others.

        What it is told later counts for its next promise: nothing that it says of this one depends on it, so it might
        as well have been told after this one was entered.
        """
        self._met.setdefault(generation.hash64(), set()).update(other.hash64() for other in met)

    def entered(self, generation: Generation) -> None:
        self._entered[generation.hash64()] = generation

    def went_on(
        self,
        generation: Generation,
        held: Collection[Generation],
        is_gone: Callable[[Life], bool],
    ) -> None:
        """All members have entered it: rounds can be completed.

        What an incarnation that is gone had promised nobody knows (G4, gone): where all that made a generation are
        gone, those that only they had taken in and those that were apart can both go on, until they meet: then no
        member promises another generation that is entitled, but one after the newer root.

        Args:
            held: where all live daemons are that have rounds.
            is_gone: whether this process has ended, and a member knows that.
        """
        if generation.provisional or generation.hash64() in self._went_on:
            return
        own = set(self._ancestors(generation))
        others = {key for other in held for key in self._ancestors(other)} & self._went_on
        for key in others - own:
            other = self._entered[key]
            if generation.hash64() in self._ancestors(other):
                continue  # others are ahead
            if self._parted_by_the_gone(generation, other, is_gone):
                apart = {one for one in self._entered if key in self._ancestors(self._entered[one])} - own
                root = max(self._entered[one].root for one in own if one != generation.hash64())
                met = [self._entered[one] for one in apart & self._met.get(generation.hash64(), set())]
                newest = max(met, key=lambda one: one.root, default=None)
                if newest is not None and newest.root > root:
                    raise AssertionError(f"G4: {told(newest)} is known, and {told(generation)} is entitled")
                continue
            raise AssertionError(f"G4: two entitled parts go on apart, {told(other)} and {told(generation)}")
        self._went_on.add(generation.hash64())

    def _parted_by_the_gone(self, own: Generation, other: Generation, is_gone: Callable[[Life], bool]) -> bool:
        """Of those that count in the newest entitled generation of both histories: had everybody gone who was in the
        first one of the other history, when this one first went on without them?"""
        mine, theirs = ([*self._entitled(one)] for one in (own, other))
        common = next(one for one in theirs if one in mine)
        first, of_mine = theirs[theirs.index(common) - 1], mine[mine.index(common) - 1]
        pair = frozenset((first.hash64(), of_mine.hash64()))
        counted = {(one.device, one.incarnation) for rank, one in common.live.items() if rank in common.counted}
        made_by = {(one.device, one.incarnation) for one in first.live.values()} & counted
        if all(is_gone(life) for life in made_by):
            self._parted.add(pair)
        return pair in self._parted

    def _entitled(self, generation: Generation) -> Iterator[Generation]:
        """Those among its ancestors, the newest first."""
        found = (self._entered[key] for key in self._ancestors(generation))
        return (one for one in found if not one.provisional)

    def committed(self, generation: int, round_: int, chain: bytes) -> None:
        """A member of this generation, by its hash, knows that all hold the round."""
        kept = self._kept.get(generation)
        if not self._entered[generation].provisional and (kept is None or kept.round < round_):
            self._kept[generation] = Kept(round_, chain)

    def check(self, path: Collection[bytes], held: Collection[Collection[bytes]] | None = None) -> None:
        """In a history that is left is all that an entitled generation has committed.

        Args:
            held: histories that anybody still has: what is in none of them died with its holders. None: nobody died.
        """
        for key, kept in self._kept.items():
            if held is None or any(kept.chain in other for other in held):
                assert kept.chain in path, f"G4: round {kept.round}, committed in {told(self._entered[key])}, is lost"

    def _ancestors(self, generation: Generation) -> Iterator[int]:
        """By their hashes, itself included."""
        while True:
            yield generation.hash64()
            if generation.parent is None:
                return
            parent = int.from_bytes(generation.parent[:8], "little")
            generation = self._entered[parent]


def told(generation: Generation) -> str:
    """For people."""
    return f"generation {generation.number} of {list(generation.ranks)}"
