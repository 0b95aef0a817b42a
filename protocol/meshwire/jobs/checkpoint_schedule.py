"""When a job's state is saved, and on which members: each daemon knows it by itself, and a round never waits for it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

CHECKPOINT_EVERY = "5"
EVERY_PATTERN = r"^(off|[1-9][0-9]{0,8}r|[1-9][0-9]{0,4}(\.[0-9]{1,3})?|0\.[0-9]{0,2}[1-9])$"


@dataclass(frozen=True)
class CheckpointSchedule:
    """Time or rounds are cut into slots. In each of them some members save their state, once.

    Slots of time begin with the job, by the wall clock: members whose clocks differ save at other rounds, which is
    harmless, for every checkpoint stands for itself.

    Args:
        every_s: length of a slot.
        every_rounds: length of a slot in rounds, in place of `every_s`.
        copies: members that save in one slot.
        keep: checkpoints that each of them keeps.
    """

    every_s: float = 300.0
    every_rounds: int | None = None
    copies: int = 2
    keep: int = 3

    def __post_init__(self) -> None:
        if self.every_s <= 0 or (self.every_rounds is not None and self.every_rounds < 1):
            raise ValueError("a slot takes some time, or at least one round")
        if self.copies < 1 or self.keep < 1:
            raise ValueError("at least one member keeps at least one checkpoint")

    def slot(self, round_: int, age_s: float) -> int:
        """The slot of now.

        Args:
            round_: the newest complete one.
            age_s: Unix time since the job was created.
        """
        if self.every_rounds is not None:
            return round_ // self.every_rounds
        return int(age_s // self.every_s)

    def writers(self, slot: int, learning: Sequence[int]) -> tuple[int, ...]:
        """The ranks that save in a slot: in turns, from the lowest on, so that each pays alike.

        Args:
            learning: ranks whose learners compute, ascending.
        """
        count = min(self.copies, len(learning))
        return tuple(sorted(learning[(slot * count + place) % len(learning)] for place in range(count)))


def schedule_of(every: str) -> CheckpointSchedule | None:
    """What `--checkpoint-every` says: minutes, rounds as in `500r`, or `off`. Raises ValueError."""
    if every == "off":
        return None
    if not re.fullmatch(EVERY_PATTERN, every):
        raise ValueError(f"--checkpoint-every {every}: use minutes (5), rounds (500r), or off")
    if every.endswith("r"):
        return CheckpointSchedule(every_rounds=int(every[:-1]))
    return CheckpointSchedule(every_s=60 * float(every))


class CheckpointTurn:
    """One member's: when it is to save.

    Args:
        slot: of the moment from which on it counts: nothing is saved in that slot.
        always: it saves in each slot, beside those whose turn it is.
    """

    def __init__(self, schedule: CheckpointSchedule, rank: int, slot: int, *, always: bool = False) -> None:
        self._schedule = schedule
        self._rank = rank
        self._slot = slot
        self._always = always

    def due(self, round_: int, age_s: float, learning: Sequence[int]) -> bool:
        """Whether to save now; true once in each slot in which it is this member's turn. See `CheckpointSchedule`."""
        slot = self._schedule.slot(round_, age_s)
        if slot <= self._slot:
            return False
        self._slot = slot
        return self._always or self._rank in self._schedule.writers(slot, learning)
