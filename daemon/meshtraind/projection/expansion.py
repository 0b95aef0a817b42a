"""Turns the means of a round that sends a shorter vector into the vector that the learner reads, as they arrive."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

from meshtraind.codecs.base import Values
from meshtraind.contributions.segments import Segment
from meshwire.model.plan import Plan


class Expansion(ABC):
    """The expansion of one round, once every round before it is complete.

    Args:
        plan: of the vector that is sent.
        sent: for its values.
        values: the result slot.
    """

    def __init__(self, plan: Plan, sent: Values, values: Values) -> None:
        self._sent = sent
        self._values = values
        self._left = [bucket.segment_count for bucket in plan.buckets]
        self._void: set[int] = set()
        self._work: deque[Callable[[], None]] = deque()

    def place(self, segment: Segment) -> Values:
        """The place where a segment of the round is to be decoded."""
        return self._sent[segment.start : segment.start + segment.count]

    def took(self, bucket: int, segment_count: int, *, void: bool) -> None:
        """Hears that so many more segments of a bucket lie in their places, or are void."""
        self._left[bucket] -= segment_count
        if void:
            self._void.add(bucket)
        if not self._left[bucket] and bucket not in self._void:
            self._work.extend(self._expand(bucket))

    def expand_one(self) -> bool:
        """Does one piece of what is to be done. Returns False if there was nothing to do."""
        if not self._work:
            return False
        self._work.popleft()()
        return True

    @property
    def finished(self) -> bool:
        """Whether all that has arrived lies in the result slot."""
        return not self._work

    @abstractmethod
    def _expand(self, bucket: int) -> Iterator[Callable[[], None]]:
        """What is to be done with a bucket that has arrived, in pieces of well under a millisecond."""


class InPlace(Expansion):
    """The expansion of the model's own vector: what arrives lies where the learner reads it."""

    def took(self, bucket: int, segment_count: int, *, void: bool) -> None:
        """Nothing to do."""

    def _expand(self, bucket: int) -> Iterator[Callable[[], None]]:
        return iter(())
