"""How the vector of each round is laid out: a function of the job's codec and the round's number alone.

So all members agree on it without a word, whenever they came in, and a round that runs again keeps it (C1).
"""

from meshwire.codec import FP16, CodecSpec, values_codec
from meshwire.layout import EncodedLayout
from meshwire.lowrank import builds_on, factors_of, side_of
from meshwire.plan import VALUE_BYTES, Plan


class RoundLayouts:
    """One job's. All of them allow the same reduction, so that the members send each other all rounds in one way.

    Attributes:
        all: each of them once.
    """

    def __init__(self, plan: Plan, codec: CodecSpec) -> None:
        self._codec = codec
        self._warmup = codec.warmup
        self._dense: tuple[EncodedLayout, ...] = (EncodedLayout(plan, codec, FP16),) if codec.warmup else ()
        self._steady = _steady(plan, codec)
        self.all: tuple[EncodedLayout, ...] = (*self._dense, *self._steady)

    def of(self, number: int) -> EncodedLayout:
        """That of a round, numbered from 1."""
        return self._dense[0] if number <= self._warmup else self._steady[number % len(self._steady)]

    def ends_with(self, number: int) -> bool:
        """No later round is laid out as this one."""
        return number == self._warmup

    @property
    def bytes_max(self) -> int:
        """The longest encoded vector of any round."""
        return max(layout.total_bytes for layout in self.all)

    def bases_bytes(self, staleness: int) -> int:
        """What a daemon keeps for low rank beside rounds and residuals: bases of the rounds that can be on their way,
        the rounds that those are made of, and factors where they are computed and where they arrive. With s=0 own parts
        too, which otherwise are a part of the rounds. 0 for other codecs.
        """
        if not self._codec.family.low_rank:
            return 0
        encoded_bytes = max(layout.total_bytes for layout in self._steady)
        values = max(layout.plan.total_values for layout in self._steady)
        rounds = builds_on(self._codec, staleness) + (0 if staleness else 2)
        return rounds * encoded_bytes + (staleness + 2 + 2) * VALUE_BYTES * values


def _steady(plan: Plan, codec: CodecSpec) -> tuple[EncodedLayout, ...]:
    """After all warm-up: of even rounds, then of odd ones where those differ."""
    if not codec.family.low_rank:
        return (EncodedLayout(plan, codec),)
    values = values_codec(codec)
    made = (factors_of(plan, codec, side_of(number)) for number in range(2))
    return tuple(EncodedLayout(each.plan, codec, values, each) for each in made)
