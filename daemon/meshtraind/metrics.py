"""What one rank reports about itself once a second: steps, rounds, times, bytes."""

import statistics
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from meshtraind.connection import Connection
from meshtraind.job import Job
from meshwire import limits
from meshwire.messages.job import Metrics, RankReport
from meshwire.messages.learner import LearnerStepped

if TYPE_CHECKING:
    from meshtraind.rounds import Rounds

STEPS_REMEMBERED = 50
SPEEDS_REMEMBERED = 15  # fewer: batch sizes follow them (X4a)
SPEEDS_MIN = 5


class MetricsKeeper:
    """Collects what the learner and the links say.

    Attributes:
        values: the script's own, from mt.log.
        exit_code: of the learner's process, once it has ended.
    """

    def __init__(self, links: Mapping[int, Connection]) -> None:
        self._links = links
        self._sent_before = {rank: link.socket_bytes_sent()[0] for rank, link in links.items()}
        self._payload_before = {rank: link.chunk_payload_bytes_sent for rank, link in links.items()}
        self._step_times_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._speeds: deque[float] = deque(maxlen=SPEEDS_REMEMBERED)  # samples/s while it computed
        self._step = 0
        self._exposed_s = 0.0
        self._frozen: tuple[int, int, Literal["kernel", "link"]] | None = None
        self.values: tuple[tuple[str, float], ...] = ()
        self.exit_code: int | None = None

    def stepped(self, message: LearnerStepped) -> None:
        """A step has ended."""
        self._step = message.step
        self._exposed_s += message.exposed_s
        self._step_times_s.append(message.step_s)
        busy_s = message.step_s - message.exposed_s
        if message.samples and busy_s > 0:
            self._speeds.append(min(message.samples / busy_s, limits.SAMPLES_MAX))

    def report(self, job: Job, rank: int, rounds: "Rounds | None") -> RankReport:
        """What the other members are told."""
        return RankReport(
            job=job.spec.job,
            rank=rank,
            state=job.state,
            exit_code=self.exit_code,
            error=job.error,
            metrics=self._snapshot(rounds),
        )

    def _snapshot(self, rounds: "Rounds | None") -> Metrics:
        sent_bytes, payload_bytes, counter = self._frozen or self._bytes()
        return Metrics.model_validate(
            {
                "step": self._step,
                "values": self.values,
                "step_s": statistics.median(self._step_times_s) if self._step_times_s else 0.0,
                "exposed_s": self._exposed_s,
                "sent_bytes": sent_bytes,
                "payload_bytes": payload_bytes,
                "counter": counter,
                "samples_per_s": statistics.median(self._speeds) if len(self._speeds) >= SPEEDS_MIN else 0.0,
                **(rounds.measures() if rounds is not None else {}),
            }
        )

    def freeze(self) -> None:
        """Keeps the byte counts of the job's end; the links go on."""
        if self._frozen is None:
            self._frozen = self._bytes()

    def _bytes(self) -> tuple[int, int, Literal["kernel", "link"]]:
        counter: Literal["kernel", "link"] = "kernel"
        sent_bytes = payload_bytes = 0
        for rank, link in self._links.items():
            count, source = link.socket_bytes_sent()
            if source == "link":
                counter = "link"
            sent_bytes += max(0, count - self._sent_before[rank])
            payload_bytes += link.chunk_payload_bytes_sent - self._payload_before[rank]
        return sent_bytes, payload_bytes, counter
