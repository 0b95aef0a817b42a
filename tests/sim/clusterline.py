"""The line of entitled generations: no two of them go on apart, and what one has committed is never given up (G4)."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from meshwire.messages.job import Generation


@dataclass(frozen=True, slots=True)
class Kept:
    """What all members of an entitled generation know that all of them hold (G5)."""

    round: int
    chain: bytes


class Line:
    """Fed with every generation that anybody enters, and goes on in. Raises AssertionError.

    Of a history that nobody holds any more nothing is asked: its holders have all been killed.
    """

    def __init__(self, first: Generation) -> None:
        self._entered = {first.hash64(): first}
        self._went_on = {first.hash64()}  # entitled ones
        self._kept: dict[int, Kept] = {}

    def entered(self, generation: Generation) -> None:
        self._entered[generation.hash64()] = generation

    def went_on(self, generation: Generation, held: Collection[Generation]) -> None:
        """All members have entered it: rounds can be completed. `held`: where all live daemons are that have rounds."""
        if generation.provisional or generation.hash64() in self._went_on:
            return
        own = set(self._ancestors(generation))
        others = {key for other in held for key in self._ancestors(other)} & self._went_on
        for key in others - own:
            other = self._entered[key]
            assert generation.hash64() in self._ancestors(other), (
                f"G4: two entitled parts go on apart, {told(other)} and {told(generation)}"
            )
        self._went_on.add(generation.hash64())

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
