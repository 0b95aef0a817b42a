"""The complete rounds of one job on this daemon: what identifies them, and what others may need of them (G4, G5)."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from meshwire import limits
from meshwire.messages.generation import DealState, ServedRound
from meshwire.messages.job import Generation
from meshwire.rounds.chain import START, chain
from meshwire.rounds.effects import RoundComplete
from meshwire.sync_modes.settings_changes import SettingsChanges

SERVED_BYTES_MAX = limits.CONTROL_BYTES_MAX // 2  # of one reply


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a member's rounds begin: at the start of the job, or at the cut at which it was taken in.

    Attributes:
        complete: the newest round that it need not do again.
        chain: of the last of them.
        samples: in them.
        deal: what the ledger of samples held then; None at the start.
        counted, learning: the newest generation that the deal is to follow, and whose learners compute in it (X3); 0:
            the one in which the rounds begin.
        anew: no member holds an earlier round: the codec begins as at the start of the job.
        changes: of settings that the history has gone through (C3).
    """

    complete: int = 0
    chain: bytes = START
    samples: int = 0
    deal: DealState | None = None
    counted: int = 0
    learning: tuple[int, ...] = ()
    anew: bool = False
    changes: SettingsChanges = ()

    def follows(self, begins_in: Generation) -> tuple[int, tuple[int, ...]]:
        """X3: number and learning ranks of the newest generation that the deal follows, if rounds begin in this one."""
        return (self.counted, self.learning) if self.counted else (begins_in.number, begins_in.learning)


class RoundHistory:
    """Fed with every complete round, in order.

    Attributes:
        complete: the newest round.
        samples: in all of them; void ones count, for their samples are not dealt again (X5).
        changes: of settings that it has gone through.
    """

    def __init__(self, entry: Entry) -> None:
        self.complete = entry.complete
        self.samples = entry.samples
        self.changes: SettingsChanges = entry.changes
        self._chains = deque([entry.chain], maxlen=limits.CHAINS_MAX)
        self._rounds: dict[int, RoundComplete] = {}

    @property
    def chain(self) -> bytes:
        """h_c, of the newest round."""
        return self._chains[-1]

    def add(self, generation: int, done: RoundComplete) -> None:
        """The next round was completed in `generation`."""
        self._take(done, chain(self._chains[-1], generation, done))

    def add_served(self, done: RoundComplete, chain_: bytes) -> None:
        """The next round was completed by others, in a generation that they know."""
        self._take(done, chain_)

    def _take(self, done: RoundComplete, chain_: bytes) -> None:
        self.complete = done.round
        self.samples += round(done.weight)
        self._chains.append(chain_)
        self._rounds[done.round] = done

    @property
    def chains(self) -> tuple[bytes, ...]:
        """h_k of the newest rounds, the last: h_c."""
        return tuple(self._chains)

    def chain_after(self, round_: int) -> bytes | None:
        """h_k of a complete round; None when it is too long ago."""
        back = self.complete - round_
        return self._chains[-1 - back] if 0 <= back < len(self._chains) else None

    def forget(self, upto: int) -> None:
        """Every member holds the rounds up to this one."""
        for round_ in [round_ for round_ in self._rounds if round_ <= upto]:
            del self._rounds[round_]

    def served(self, after: int, encoded: Mapping[int, tuple[bytes, int]]) -> tuple[ServedRound, ...]:
        """The rounds after `after`, as many as one message holds.

        Args:
            encoded: by round, the bitmap of the buckets that have no result, and the bytes of the others.

        Raises:
            KeyError: a round is not kept any more.
        """
        rounds: list[ServedRound] = []
        total_bytes = 0
        for round_ in range(after + 1, self.complete + 1):
            done = self._rounds[round_]
            poisoned, size_bytes = encoded[round_]
            served = ServedRound(
                round=round_,
                void=done.void,
                reason=done.reason[: limits.ERROR_CHARS_MAX],
                binds=tuple(done.binds.items()),
                poisons=tuple(done.poisons.items()),
                used=done.used,
                integers=done.integers,
                squared_norm=done.squared_norm,
                chain=self._chains[round_ - self.complete - 1],
                poisoned=poisoned,
                size_bytes=size_bytes,
            )
            total_bytes += len(served.pack())
            if rounds and total_bytes > SERVED_BYTES_MAX:
                break
            rounds.append(served)
        return tuple(rounds)


def completion(served: ServedRound) -> RoundComplete:
    """The round as its members hold it."""
    return RoundComplete(
        served.round,
        served.void,
        served.reason,
        binds=dict(served.binds),
        poisons=dict(served.poisons),
        used=served.used,
        integers=served.integers,
        squared_norm=served.squared_norm,
    )
