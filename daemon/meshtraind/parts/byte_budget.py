"""What segments may take that are encoded one after the other under a budget."""

from meshtraind.parts.segments import Segment
from meshwire.layout.budget import Budget


class ByteBudget:
    """What the segments before have left of their shares is the next one's.

    Args:
        budget: None: there is no limit.
    """

    def __init__(self, budget: Budget | None) -> None:
        self._budget = budget
        self._left_bytes = 0

    def reserve(self, segment: Segment) -> int | None:
        """Adds a segment's share, and returns what it may take; None for one of another codec, or without limit."""
        if self._budget is None or not self._limits(segment):
            return None
        self._left_bytes += self._budget.share_bytes(segment.start, segment.count)
        return self._left_bytes

    def spend(self, segment: Segment, length_bytes: int) -> None:
        """It took so much."""
        if self._limits(segment):
            self._left_bytes -= length_bytes

    def _limits(self, segment: Segment) -> bool:
        return self._budget is not None and segment.codec.spec == self._budget.codec
