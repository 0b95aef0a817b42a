"""What this member has put into the rounds that are not complete: kept, so that it can be told again (G6)."""

from collections.abc import Callable

from meshwire.messages.rounds import Poison
from meshwire.rounds.effects import Contribute, ContributePoison


class OwnBuckets:
    """Which buckets of which own contribution are ready, and which of them are poison.

    Args:
        buckets_of: how many travel in a round.
    """

    def __init__(self, buckets_of: Callable[[int], int]) -> None:
        self._buckets_of = buckets_of
        self._buckets: dict[int, dict[int, Contribute | ContributePoison]] = {}  # by round, bucket; in the order given
        self._poison: dict[int, Poison] = {}

    def add(self, round_: int, bucket: int, poison: Poison | None) -> Contribute | ContributePoison:
        """A bucket is ready, or is poison."""
        effect: Contribute | ContributePoison = Contribute(round_, bucket)
        if poison is not None:
            effect = ContributePoison(round_, bucket)
            first = self._poison.setdefault(round_, poison)
            if first.overflow and not poison.overflow:
                self._poison[round_] = poison
        self._buckets.setdefault(round_, {})[bucket] = effect
        return effect

    def given(self, round_: int, bucket: int) -> bool:
        """The bucket was given already."""
        return bucket in self._buckets[round_]

    def missing(self, round_: int) -> list[int]:
        """Buckets that were not given."""
        return [bucket for bucket in range(self._buckets_of(round_)) if bucket not in self._buckets[round_]]

    def poison(self, round_: int) -> Poison | None:
        """The first, or the first that is no overflow (O6)."""
        return self._poison.get(round_)

    def again(self, round_: int) -> list[Contribute | ContributePoison]:
        """All that was given, as it was given."""
        return list(self._buckets[round_].values())

    def forget(self, round_: int) -> None:
        """The round is complete: it will never be told again."""
        self._buckets.pop(round_, None)
        self._poison.pop(round_, None)
