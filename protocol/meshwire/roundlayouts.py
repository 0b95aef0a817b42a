"""How the vector of each round is laid out: a function of the job's codec and the round's number alone.

So all members agree on it without a word, whenever they came in, and a round that runs again keeps it (C1).
"""

from meshwire.codec import FP16, CodecSpec
from meshwire.layout import EncodedLayout
from meshwire.plan import Plan


class RoundLayouts:
    """One job's. All of them allow the same reduction, so that the members send each other all rounds in one way.

    Attributes:
        all: each of them once.
    """

    def __init__(self, plan: Plan, codec: CodecSpec) -> None:
        self._warmup = codec.warmup
        self._steady = EncodedLayout(plan, codec)
        self._dense = EncodedLayout(plan, codec, FP16) if codec.warmup else self._steady
        self.all: tuple[EncodedLayout, ...] = (
            (self._steady,) if self._steady is self._dense else (self._dense, self._steady)
        )

    def of(self, number: int) -> EncodedLayout:
        """That of a round, numbered from 1."""
        return self._dense if number <= self._warmup else self._steady

    def ends_with(self, number: int) -> bool:
        """No later round is laid out as this one."""
        return number == self._warmup

    @property
    def bytes_max(self) -> int:
        """The longest encoded vector of any round."""
        return max(layout.total_bytes for layout in self.all)
