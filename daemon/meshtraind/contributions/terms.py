"""The terms on which segments are encoded in turn: their seeds, and a budget of bytes shared out among them."""

from meshtraind.codecs.base import Terms
from meshtraind.contributions.seeds import segment_seed
from meshtraind.contributions.segments import Segment
from meshwire.encoded_layout.budget import Budget


class RunTerms:
    """The terms of segments that one member encodes one after the other, in one round.

    Args:
        seed: of the job and this member, as worker or as owner.
        number: of the round.
        budget: of bytes; what earlier segments have left of their shares is the next one's. None: there is no limit.
    """

    def __init__(self, seed: int, number: int, budget: Budget | None) -> None:
        self._seed = seed
        self._number = number
        self._budget = budget
        self._left_bytes = 0
        self._plain = Terms(number)

    def of(self, segment: Segment) -> Terms:
        """For the next segment. What its encoding takes of a limit is told to `spend`."""
        codec, budget = segment.codec, self._budget
        seed = segment_seed(self._seed, self._number, segment.start) if codec.draws else 0
        if budget is not None and codec.spec == budget.codec:
            self._left_bytes += budget.share_bytes(segment.start, segment.count)
            return Terms(self._number, seed, self._left_bytes)
        return Terms(self._number, seed) if codec.draws else self._plain

    def spend(self, length_bytes: int) -> None:
        """Takes off the budget what a segment with a limit has taken."""
        self._left_bytes -= length_bytes
