"""One round as one daemon knows it: who bound, sealed or nulled it, and which results are here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwire.collectives.exchange import WEIGHT_TOLERANCE
from meshwire.messages.rounds import Bind, Poison, Seal
from meshwire.rounds.effects import RoundComplete

NAMED_MAX = 4  # late members in one sentence


@dataclass(frozen=True, slots=True)
class BucketResult:
    """What the exchange says about one bucket's result, from the headers of its frames (W1)."""

    contributors: int
    weight: float
    poisoned: bool
    squared_norm: float


@dataclass(slots=True)
class Round:
    """Mutable; forgotten when the round is committed (G5)."""

    number: int
    ranks: tuple[int, ...]
    buckets: int
    binds: dict[int, Bind] = field(default_factory=dict)
    seals: dict[int, Seal] = field(default_factory=dict)
    nulls: set[int] = field(default_factory=set)
    results: dict[int, BucketResult] = field(default_factory=dict)
    disputed: bool = False
    """A result contradicts the binds (R2): the round never completes."""

    def undecided(self) -> list[int]:
        """Ranks of which neither the seal nor the null is here."""
        return [rank for rank in self.ranks if rank not in self.seals and rank not in self.nulls]

    def whole(self) -> bool:
        """G3: frames, null or not, from every member, and every result."""
        return len(self.seals) + len(self.nulls) == len(self.ranks) and len(self.results) == self.buckets

    def missing(self, last_binds: Mapping[int, Bind]) -> str:
        """What it waits for, for a person to read. `last_binds`: the newest one of each rank that has sent one."""
        if ranks := self.undecided():
            late = [f"rank {rank}: {self._late(rank, last_binds.get(rank))}" for rank in ranks[:NAMED_MAX]]
            more = [f"{len(ranks) - NAMED_MAX} more"] if len(ranks) > NAMED_MAX else []
            return f"round {self.number} waits for {'; '.join(late + more)}"
        if self.disputed:
            return f"round {self.number} is not the same on all members"
        missing = self.buckets - len(self.results)
        return f"round {self.number} waits for the results of {missing} of {self.buckets} buckets"

    def _late(self, rank: int, last: Bind | None) -> str:
        if rank in self.binds:
            return f"it computes step {self.binds[rank].step} on base {self.binds[rank].base}"
        if last is None:
            return "it has contributed to no round yet"
        return f"its last contribution is of step {last.step}, to round {last.round}"

    def bound(self, bitmap: int) -> tuple[int, float] | None:
        """Contributors and summed weight of the ranks in the bitmap; None while one of them has not decided."""
        ranks = [rank for rank in range(bitmap.bit_length()) if bitmap >> rank & 1]
        if any(rank not in self.binds and rank not in self.nulls for rank in ranks):
            return None
        binding = [rank for rank in ranks if rank in self.binds]
        return sum(1 << rank for rank in binding), sum(self.binds[rank].weight for rank in binding)

    def dispute(self) -> str | None:
        """R2: every result shows the contributors and the summed weight that the binds name. None if so.

        A poisoned result is exempt: poison replaces a sum and all that it had gathered.
        """
        bound = sum(1 << rank for rank in self.binds)
        weight = sum(bind.weight for bind in self.binds.values())
        for bucket, result in sorted(self.results.items()):
            where = f"round {self.number}, bucket {bucket}: the result"
            if result.poisoned:
                continue
            if result.contributors != bound:
                return f"{where} shows the contributors {result.contributors:#x}, the binds name {bound:#x}"
            if not math.isclose(result.weight, weight, rel_tol=WEIGHT_TOLERANCE):
                return f"{where} shows the weight {result.weight}, the binds add up to {weight}"
        return None

    def verdict(self) -> tuple[bool, str]:
        """V1: is the whole round void, and why. Both of its sources, seals and results, are equal on all members."""
        reasons = [f"rank {rank}: {_told(poison)}" for rank, poison in self._poisons().items()]
        if reasons:
            return True, "; ".join(reasons)
        if buckets := [bucket for bucket, result in sorted(self.results.items()) if result.poisoned]:
            return True, f"the sum of bucket{'s' * (len(buckets) > 1)} {_listed(buckets)} is not finite"
        if not self.binds:
            return True, "no member contributed"
        return False, ""

    def differs_from(self, done: RoundComplete) -> list[int]:
        """Ranks whose part in the round is another in `done`, as far as it is known here."""
        return [
            *(rank for rank, bind in self.binds.items() if done.binds.get(rank) != bind),
            *(rank for rank in self.nulls if rank in done.binds),
        ]

    def completion(self) -> RoundComplete:
        """The round as all members see it. Call when `whole`."""
        void, reason = self.verdict()
        seals = [seal for _, seal in sorted(self.seals.items())]
        used = 0
        for seal in seals:
            used |= int.from_bytes(seal.used)
        return RoundComplete(
            self.number,
            void,
            reason,
            binds=dict(sorted(self.binds.items())),
            poisons=self._poisons(),
            used=used.to_bytes(len(seals[0].used) if seals else 0),
            integers=tuple(max(values) for values in zip(*(seal.integers for seal in seals), strict=True)),
            squared_norm=0.0 if void else math.fsum(result.squared_norm for result in self.results.values()),
        )

    def _poisons(self) -> dict[int, Poison]:
        return {rank: seal.poison for rank, seal in sorted(self.seals.items()) if seal.poison}


def _told(poison: Poison) -> str:
    parameter = f"{poison.parameter}: " if poison.parameter else ""
    return f"{parameter}{poison.reason}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
