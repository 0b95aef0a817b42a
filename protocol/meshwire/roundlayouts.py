"""How the vector of each round is laid out: a function of the job's codec and the round's number alone.

So all members agree on it without a word, whenever they came in, and a round that runs again keeps it (C1).
"""

from meshwire.codec import FP16, CodecSpec
from meshwire.layout import EncodedLayout, Phase
from meshwire.plan import Plan
from meshwire.transforms import TRANSFORMS


class RoundLayouts:
    """One job's. All of them allow the same reduction, so that the members send each other all rounds in one way.

    Attributes:
        all: each of them once.
    """

    def __init__(self, plan: Plan, codec: CodecSpec) -> None:
        self._codec = codec
        self._transform = TRANSFORMS[codec.name] if codec.family.transforms else None
        dense = (Phase((EncodedLayout(plan, codec, FP16),), codec.warmup),) if codec.warmup else ()
        steady = (
            (Phase((EncodedLayout(plan, codec),)),) if self._transform is None else self._transform.phases(plan, codec)
        )
        self._phases: tuple[Phase, ...] = (*dense, *steady)
        self._steady = steady
        self.all: tuple[EncodedLayout, ...] = tuple(layout for phase in self._phases for layout in phase.layouts)

    def of(self, number: int) -> EncodedLayout:
        """That of a round, numbered from 1."""
        for phase in self._phases:
            if phase.until is None or number <= phase.until:
                return phase.layouts[number % len(phase.layouts)]
        raise AssertionError("the last phase has no end")

    def ends_with(self, number: int) -> bool:
        """No later round is laid out as this one."""
        return any(number == phase.until for phase in self._phases)

    @property
    def bytes_max(self) -> int:
        """The longest encoded vector of any round."""
        return max(layout.total_bytes for layout in self.all)

    def transform_bytes(self, staleness: int) -> int:
        """What a daemon keeps to turn vectors into shorter ones, beside rounds and residuals. 0 for other codecs."""
        return 0 if self._transform is None else self._transform.kept_bytes(self._steady, self._codec, staleness)
