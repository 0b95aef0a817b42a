"""Hands out a budget of bytes to segments that are encoded one after the other."""

from meshtraind.contributions.segments import Segment
from meshwire.layout.budget import Budget


class ByteBudget:
    """A budget of bytes for segments in turn: what earlier ones have left of their shares is the next one's.

    Args:
        budget: None: there is no limit.
    """

    def __init__(self, budget: Budget | None) -> None:
        self._budget = budget
        self._left_bytes = 0

    def reserve(self, segment: Segment) -> int | None:
        """Adds a segment's share, and returns how many bytes it may take; None for one of another codec, or without a
        limit."""
        if self._budget is None or not self._limits(segment):
            return None
        self._left_bytes += self._budget.share_bytes(segment.start, segment.count)
        return self._left_bytes

    def spend(self, segment: Segment, length_bytes: int) -> None:
        """Takes the bytes that a segment has taken off the budget."""
        if self._limits(segment):
            self._left_bytes -= length_bytes

    def _limits(self, segment: Segment) -> bool:
        return self._budget is not None and segment.codec.spec == self._budget.codec
