"""Buckets in which a member knows what it adds only when the sums of their precursors are here (C2, low rank).

The second phase of a bucket is an exchange like any other, of its own. A member adds to it, data, poison or nothing,
when it holds the whole precursor: so whoever holds a bucket's result holds its precursor's, too, and the rounds hear of
the former alone.
"""

from collections import deque
from collections.abc import Mapping
from typing import Protocol

from meshtraind.contributions.contribution import InTwoPhases, OwnContribution
from meshtraind.contributions.results import RoundResults
from meshtraind.runtime.timeslice import Slices
from meshwire.collectives.exchange import Part


class Adder(Protocol):
    """Who gives exchanges what this member adds."""

    def add(self, round_: RoundResults, bucket: int, part: Part, weight: float) -> None:
        """Adds this to a bucket, and does what that makes possible."""


class SecondPhases:
    """What one member adds to buckets that wait for their precursors, in one generation after the other.

    Args:
        own: this member's contributions, by round; live.
    """

    def __init__(self, own: Mapping[int, OwnContribution], adder: Adder) -> None:
        self._own = own
        self._adder = adder
        self._first: dict[tuple[int, int], tuple[Part, float]] = {}  # what was added, by round and bucket
        self._summed: deque[tuple[RoundResults, int]] = deque()
        self._slices = Slices(self._next)

    def begin(self, number: int, bucket: int, part: Part, weight: float) -> None:
        """This is about to be added to the precursor of a bucket."""
        self._first[number, bucket] = part, weight

    def summed(self, round_: RoundResults, bucket: int) -> None:
        """The result of a bucket's precursor is here, and so what was added to it. Its second phase begins at the event
        loop's next turn."""
        self._summed.append((round_, bucket))
        self._slices.run_later()

    def fence(self) -> None:
        """What has begun is void, and will begin again (G2, G6)."""
        self._first.clear()
        self._summed.clear()

    def close(self) -> None:
        """Nothing is added any more."""
        self._slices.stop()
        self.fence()

    def _next(self) -> bool:
        if not self._summed:
            return False
        round_, bucket = self._summed.popleft()
        part, weight = self._first.pop((round_.number, bucket))
        if part is Part.DATA:
            own = self._own[round_.number]
            assert isinstance(own, InTwoPhases)
            poisoned = round_.exchanges[round_.form.layout.precursors[bucket]].poisoned
            part = Part.POISON if poisoned else own.second(bucket)
        self._adder.add(round_, bucket, part, weight)
        return True
