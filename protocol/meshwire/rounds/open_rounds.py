"""What one daemon knows of the rounds in flight: every member's decisions, checked as they arrive, and G3 and G5.

Members decide the rounds one after the other, so a member's messages are a sequence in which each has one legal place.
That order, and what a member can know, bound everything that a message can make a daemon keep.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwire.collectives.exchange import WEIGHT_TOLERANCE
from meshwire.messages.rounds import Bind, Call, Null, Poison, Seal
from meshwire.rounds.effects import RoundComplete
from meshwire.rounds.learner_state import RoundSettings

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


class OpenRounds:
    """The rounds after the committed one. Methods that take a message return what is wrong with it, or None.

    Own messages enter by the same methods. What is wrong changes nothing.

    Args:
        complete: the cut at which all members of the generation enter: nobody has decided anything above it.

    Attributes:
        own_decided: the last round that this member bound or nulled (R0: d).
        complete: the last round that it holds whole, as it does all before it (G5).
        committed: the last round that every member has announced complete (G5).
    """

    def __init__(self, settings: RoundSettings, complete: int) -> None:
        self._settings = settings
        self._rank = settings.rank
        self._rounds: dict[int, Round] = {}
        self._decided = dict.fromkeys(settings.ranks, complete)
        self._complete = dict.fromkeys(settings.ranks, complete)
        self._last_binds: dict[int, Bind] = {}
        self.own_decided = self.complete = self.committed = complete

    def entered(self, settings: RoundSettings, promised: Mapping[int, int]) -> "OpenRounds":
        """The table of the next generation, entered at `complete` (G6). The members tell their decisions again.

        Args:
            promised: what each rank held whole when it promised (G5). Those not named hold the cut, or need nothing.
        """
        table = OpenRounds(settings, self.complete)
        table.committed = self.committed
        for rank in settings.ranks:
            if rank != self._rank:
                table._complete[rank] = min(promised.get(rank, self.complete), self.complete)
        table._last_binds = {rank: bind for rank, bind in self._last_binds.items() if rank in settings.ranks}
        return table

    def __len__(self) -> int:
        return len(self._rounds)

    def own(self, round_: int) -> tuple[Bind, Seal | None] | None:
        """What this member decided: its bind, with its seal if it was given, or None: a null."""
        state = self._rounds[round_]
        bind = state.binds.get(self._rank)
        return None if bind is None else (bind, state.seals.get(self._rank))

    @property
    def decided_by_all(self) -> int:
        """The last round that nobody has still to bind or null."""
        return min(self._decided.values())

    def settled(self, rank: int) -> int:
        """The last round that the member nulled or sealed. No daemon can hold a later one whole (G3)."""
        return self._decided[rank] - self._open(rank)

    # One message each.

    def bind(self, rank: int, bind: Bind) -> str | None:
        age, bound = bind.round - 1 - bind.base, self._settings.staleness
        if wrong := self._out_of_turn(rank, bind.round, "bound"):
            return wrong
        if not 0 <= age <= bound:
            return f"bound round {bind.round} on base {bind.base}: age {age} is not within 0 to {bound} (R0)"
        if bind.base > self.settled(self._rank):
            return f"bound round {bind.round} on base {bind.base}, a round that this member has not ended (G3)"
        self._decide(rank, bind.round, bind.base).binds[rank] = self._last_binds[rank] = bind
        return None

    def null(self, rank: int, null: Null) -> str | None:
        if wrong := self._out_of_turn(rank, null.round, "nulled"):
            return wrong
        if null.round > self._reachable():
            return f"nulled round {null.round}; nobody can have called a round after {self._reachable()} (R0, R3)"
        self._decide(rank, null.round, null.round - self._settings.staleness - 1).nulls.add(rank)
        return None

    def seal(self, rank: int, seal: Seal) -> str | None:
        if not self._open(rank) or seal.round != self._decided[rank]:
            return f"sealed round {seal.round}, in which it has no open contribution (W2)"
        if len(seal.used) != self._settings.used_bytes or len(seal.integers) != self._settings.integers:
            return (
                f"sealed round {seal.round} with {len(seal.used)} bytes of used parameters and {len(seal.integers)} "
                f"integers; the manifest has {self._settings.used_bytes} and {self._settings.integers}"
            )
        self._rounds[seal.round].seals[rank] = seal
        return None

    def call(self, rank: int, call: Call) -> str | None:
        if call.round <= self.committed:
            return None
        if call.round not in self._rounds or rank not in self._rounds[call.round].binds:
            return f"called round {call.round} without a contribution to it (R3)"
        return None

    def announce(self, rank: int, complete: int) -> str | None:
        """The member's `complete` counter, of any frame. An older value than known is no error: control overtakes."""
        if complete > self.settled(self._rank):
            return f"announced round {complete} complete, which this member has not ended (G3)"
        self._complete[rank] = max(self._complete[rank], complete)
        return None

    def is_news(self, rank: int, complete: int) -> bool:
        """Whether `announce` would change anything, or find it wrong."""
        return complete > self._complete[rank]

    def result(self, round_: int, bucket: int, result: BucketResult) -> str | None:
        """All values of one bucket's result are here."""
        state = self._rounds.get(round_)
        if state is None or round_ > self.own_decided:
            return f"result of round {round_}, to which this member has not added its part"
        buckets = state.buckets
        if not 0 <= bucket < buckets or bucket in state.results:
            return f"result of round {round_}, bucket {bucket}: expected once, of buckets 0 to {buckets - 1}"
        state.results[bucket] = result
        return None

    def served(self, done: RoundComplete) -> str | None:
        """Others hold this round whole; it counts as complete here too."""
        state = self.next_round()
        if done.round != state.number:
            return f"was served round {done.round}; the next one that it lacks is {state.number} (G4)"
        if done.round > self.settled(self._rank):
            return f"was served round {done.round}, to which it has not added its part (G3)"
        if ranks := state.differs_from(done):
            return f"was served round {done.round} of another history: the part of rank {ranks[0]} is not the same (G4)"
        self.count_complete()
        return None

    # What follows from them.

    def bound(self, round_: int, bitmap: int) -> tuple[int, float] | None:
        """As `Round.bound`; None, too, of a round of which nobody has said anything."""
        state = self._rounds.get(round_)
        return None if state is None else state.bound(bitmap)

    def awaits_own(self) -> list[int]:
        """Ranks that have bound the round that this member decides next: it does not end without this member."""
        state = self._rounds.get(self.own_decided + 1)
        return [] if state is None else sorted(state.binds)

    def next_round(self) -> Round:
        """The oldest round that this daemon does not hold whole."""
        number = self.complete + 1
        return self._rounds.get(number) or self._new_round(number)

    def waiting(self) -> str:
        """What `next_round` waits for, and of whom."""
        return self.next_round().missing(self._last_binds)

    def count_complete(self) -> None:
        """`next_round` is whole and was handed on."""
        self.complete += 1
        self._complete[self._rank] = self.complete

    def commit(self) -> bool:
        """G5: forgets what every member has announced complete. True if that is more than before."""
        before, self.committed = self.committed, max(self.committed, min(self._complete.values()))
        for round_ in range(before + 1, self.committed + 1):
            self._rounds.pop(round_, None)  # those up to the cut of the generation were not told again
        return self.committed > before

    def _decide(self, rank: int, number: int, holds: int) -> Round:
        """The member has decided this round, which it can have only with all rounds up to `holds` (R0, R5): who
        announces less would make all others keep them for ever."""
        self._decided[rank] = number
        if rank == self._rank:
            self.own_decided = number
        self._complete[rank] = max(self._complete[rank], holds)
        return self._round(number)

    def _open(self, rank: int) -> bool:
        """Bound and not sealed: a member has one such round at a time."""
        state = self._rounds.get(self._decided[rank])
        return state is not None and rank in state.binds and rank not in state.seals

    def _out_of_turn(self, rank: int, round_: int, did: str) -> str | None:
        if self._open(rank):
            return f"{did} round {round_} before it sealed round {self._decided[rank]} (R2)"
        if round_ != self._decided[rank] + 1:
            return f"{did} round {round_}; after round {self._decided[rank]} it can only decide the next one (R2, R4)"
        return None

    def _reachable(self) -> int:
        """The newest round that anybody can have bound: on a base that needs this member's part, with age s at most."""
        return self.settled(self._rank) + self._settings.staleness + 1

    def _round(self, number: int) -> Round:
        state = self._rounds.get(number)
        if state is None:
            state = self._rounds[number] = self._new_round(number)
        return state

    def _new_round(self, number: int) -> Round:
        return Round(number, self._settings.ranks, self._settings.buckets_of(number))


def _told(poison: Poison) -> str:
    parameter = f"{poison.parameter}: " if poison.parameter else ""
    return f"{parameter}{poison.reason}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
