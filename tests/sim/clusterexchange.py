"""The exchange of one daemon in virtual time: a bucket's result is there when the parts of all members are.

Stands for the executor: what a fence stops, what is kept over it, where results are decoded, when memory is free.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A member's part in one bucket. `name` identifies the contribution; empty: it only forwards."""

    generation: int
    complete: int
    round: int
    bucket: int
    name: str
    weight: float
    poison: bool


@dataclass(frozen=True, slots=True)
class Result:
    """All parts of one bucket together."""

    names: tuple[tuple[int, str], ...]  # by rank, of those that are no poison
    contributors: int
    weight: float
    poisoned: bool


class Exchange:
    """Of one daemon.

    Args:
        send: a part to all other members.
        on_result: a bucket's result is there.
        on_decoded: a round's means lie in the result slot.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        buckets: int,
        complete: int,
        send: Callable[[Part], None],
        on_result: Callable[[int, int, Result], None],
        on_decoded: Callable[[int], None],
    ) -> None:
        self._ranks = ranks
        self._rank = rank
        self._buckets = buckets
        self._send = send
        self._on_result = on_result
        self._on_decoded = on_decoded
        self._own: dict[tuple[int, int], tuple[str, float, bool]] = {}
        self._arrived: dict[tuple[int, int], dict[int, Part]] = {}
        self._results: dict[int, dict[int, Result]] = {}
        self._whole: set[int] = set()
        self._outbox: list[Part] | None = None
        self._fenced = False
        self._slot = complete + 1

    @property
    def rounds_kept(self) -> int:
        """In memory."""
        return len({round_ for round_, _ in self._own} | {round_ for round_, _ in self._arrived} | self._whole)

    def contribute(self, part: Part) -> None:
        """G6: a part that is given again is the same, or is taken back."""
        told = part.name, part.weight, part.poison
        known = self._own.setdefault((part.round, part.bucket), told)
        assert known == told or not part.name, "G6: rounds keep their bytes"
        self._own[part.round, part.bucket] = told
        if self._fenced:
            return
        if self._outbox is not None:
            self._outbox.append(part)
            return
        self._send(part)
        self.receive(self._rank, part)

    def receive(self, rank: int, part: Part) -> None:
        """Takes a part of this generation."""
        if part.round in self._whole:
            return
        arrived = self._arrived.setdefault((part.round, part.bucket), {})
        assert rank not in arrived, "one part for each member and bucket"
        arrived[rank] = part
        if len(arrived) == len(self._ranks):
            assert set(arrived) == set(self._ranks), "G3: of the members of this generation"
            self._result(part.round, part.bucket, arrived)

    def _result(self, round_: int, bucket: int, parts: dict[int, Part]) -> None:
        del self._arrived[round_, bucket]
        given = {rank: part for rank, part in sorted(parts.items()) if part.name}
        result = Result(
            names=tuple((rank, part.name) for rank, part in given.items()),
            contributors=sum(1 << rank for rank in given),
            weight=sum(part.weight for part in given.values()),
            poisoned=any(part.poison for part in parts.values()),
        )
        results = self._results.setdefault(round_, {})
        results[bucket] = result
        if len(results) == self._buckets:
            self._whole.add(round_)
        self._on_result(round_, bucket, result)
        self._decode()

    def _decode(self) -> None:
        if self._slot in self._whole:
            self._on_decoded(self._slot)

    def names(self, round_: int) -> list[Result]:
        """What was summed, by bucket. Raises KeyError when it is gone."""
        return [result for _, result in sorted(self._results[round_].items())]

    def encoded(self, round_: int) -> list[Result]:
        """A complete round, to be served. Raises KeyError when it is gone."""
        if round_ not in self._whole:
            raise KeyError(round_)
        return self.names(round_)

    def take_served(self, round_: int, results: list[Result]) -> None:
        """Others hold it whole."""
        self._results[round_] = dict(enumerate(results))
        self._whole.add(round_)
        for bucket in range(self._buckets):
            self._arrived.pop((round_, bucket), None)
        self._decode()

    def open_slot(self, round_: int) -> None:
        """The result slot is free for this round."""
        self._slot = round_
        self._decode()

    def fence(self) -> None:
        self._fenced = True
        self._outbox = None

    def enter(self, ranks: tuple[int, ...], cut: int) -> None:
        """What is above the cut begins anew, but for the own parts."""
        self._ranks = ranks
        self._fenced, self._outbox = False, []
        self._arrived.clear()
        self._whole = {round_ for round_ in self._whole if round_ <= cut}
        self._results = {round_: results for round_, results in self._results.items() if round_ <= cut}

    def resume(self) -> None:
        outbox, self._outbox = self._outbox or [], None
        for part in outbox:
            self.contribute(part)

    def forget(self, round_: int) -> None:
        self._whole.discard(round_)
        self._results.pop(round_, None)
        for bucket in range(self._buckets):
            self._own.pop((round_, bucket), None)
