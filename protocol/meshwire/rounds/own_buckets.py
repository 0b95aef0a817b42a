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
        self._buckets: dict[int, dict[int, bool]] = {}  # by round, bucket: is it poison; in the order given
        self._poison: dict[int, Poison] = {}

    def add(self, round_: int, bucket: int, poison: Poison | None) -> Contribute | ContributePoison:
        """A bucket is ready, or is poison."""
        self._buckets.setdefault(round_, {})[bucket] = poison is not None
        if poison is not None:
            first = self._poison.setdefault(round_, poison)
            if first.overflow and not poison.overflow:
                self._poison[round_] = poison
        return _effect(round_, bucket, poison is not None)

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
        return [_effect(round_, bucket, poisoned) for bucket, poisoned in self._buckets[round_].items()]

    def forget(self, round_: int) -> None:
        """The round is complete: it will never be told again."""
        self._buckets.pop(round_, None)
        self._poison.pop(round_, None)


def _effect(round_: int, bucket: int, poisoned: bool) -> Contribute | ContributePoison:
    return ContributePoison(round_, bucket) if poisoned else Contribute(round_, bucket)
