"""Who listens to an executor in tests: what is told is given to functions."""

from collections.abc import Callable
from dataclasses import dataclass

from meshtraind.executor.by_codec import ExecutorsByCodec
from meshtraind.executor.executor import Executor
from meshtraind.rounds.driver import Rounds


@dataclass
class Told:
    """A `RoundHost` that leaves it to others."""

    on_bucket: Callable[[int, int, bool, int, float, float], None]
    on_result: Callable[[int], None]
    on_broken: Callable[[int | None, str], None]
    newest: Callable[[], int]

    @property
    def complete(self) -> int:
        return self.newest()

    def bucket_complete(
        self, round_: int, bucket: int, poisoned: bool, contributors: int, weight: float, squared_norm: float
    ) -> None:
        self.on_bucket(round_, bucket, poisoned, contributors, weight, squared_norm)

    def result_decoded(self, round_: int) -> None:
        self.on_result(round_)

    def chunk_broken(self, rank: int | None, text: str) -> None:
        self.on_broken(rank, text)


def executor_of(rounds: Rounds) -> Executor:
    """What moves the bytes of the newest of a daemon's rounds."""
    plane = rounds._parts.plane
    assert isinstance(plane, ExecutorsByCodec)
    return plane._turns[-1].executor
