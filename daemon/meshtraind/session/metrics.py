"""What one rank reports about itself once a second: steps, rounds, times, bytes."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import Connection
from meshwire import limits
from meshwire.messages.job import Metrics, Part, RankReport, Stage
from meshwire.messages.learner import LearnerStepped

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds

STEPS_REMEMBERED = 50
SPEEDS_REMEMBERED = 15  # fewer: batch sizes follow them (X4a)
SPEEDS_MIN = 5


class MetricsKeeper:
    """Collects what the learner and the links say.

    Attributes:
        values: the script's own, from mt.log.
        exit_code: of the learner's process, once it has ended and no other follows.
        failure: of the newest learner that failed here.
        part: what this rank does for the job.
        stage: where its learner is before its first step has ended.
        rounds_planned: until which round its script goes on; 0: it has not said.
    """

    def __init__(self, links: Mapping[int, Connection]) -> None:
        self._links = links
        self._before: dict[Connection, tuple[int, int]] = {}  # bytes sent on it, and of them payload, at first sight
        self._of_past_links = [0, 0]
        self._look_at_links()
        self._step_times_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._speeds: deque[float] = deque(maxlen=SPEEDS_REMEMBERED)  # samples/s while it computed
        self._used: deque[tuple[int, float]] = deque(maxlen=STEPS_REMEMBERED)  # samples of a step, and its seconds
        self._step = 0
        self._exposed_s = 0.0
        self._frozen: tuple[int, int, Literal["kernel", "link"]] | None = None
        self.values: tuple[tuple[str, float], ...] = ()
        self.exit_code: int | None = None
        self.failure: str | None = None
        self.part: Part = "computes"
        self.stage: Stage | None = None
        self.rounds_planned = 0

    @property
    def step(self) -> int:
        """How many steps this learner's process has taken."""
        return self._step

    def begin_anew(self) -> None:
        """Counts from 0: another process counts its steps from 1."""
        self._step = 0
        self.stage = "starting"

    def stepped(self, message: LearnerStepped) -> None:
        """Takes the figures of a step that has ended."""
        if self._step:  # the first step of a process compiles and allocates
            self._used.append((message.samples, message.step_s))
        self._step = message.step
        self.stage = None
        self._exposed_s += message.exposed_s
        self._step_times_s.append(message.step_s)
        busy_s = message.step_s - message.exposed_s
        if message.samples and busy_s > 0:
            self._speeds.append(min(message.samples / busy_s, limits.SAMPLES_MAX))

    def report(self, job: Job, rounds: "Rounds | None", starts: int) -> RankReport:
        """What the other members are told. `starts`: of the script here."""
        return RankReport(
            job=job.spec.job,
            rank=job.rank,
            state=job.state,
            exit_code=self.exit_code,
            error=job.error,
            failure=self.failure,
            restarts=max(0, starts - 1),
            part=self.part,
            metrics=self._snapshot(rounds),
            given_up=job.given_up,
        )

    def why_none(self, job: Job, given_up: Iterable[str] = ()) -> str:
        """Why no learner computes any more: the newest failure here, or of the lowest rank that told of one, or why a
        daemon has given the job up."""
        told = [report.failure for _, report in sorted(job.reports.items()) if report.failure is not None]
        told += given_up
        return self.failure or next(iter(told), "no device can run the script any more: those that computed were lost")

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
                "throughput_samples_s": self._throughput_samples_s(),
                "stage": self.stage,
                "rounds_planned": self.rounds_planned,
                "samples_per_s": statistics.median(self._speeds) if len(self._speeds) >= SPEEDS_MIN else 0.0,
                **(rounds.measures() if rounds is not None else {}),
            }
        )

    def _throughput_samples_s(self) -> float:
        spent_s = sum(step_s for _, step_s in self._used)
        return min(sum(samples for samples, _ in self._used) / spent_s, limits.SAMPLES_MAX) if spent_s > 0 else 0.0

    def freeze(self) -> None:
        """Keeps the byte counts of the job's end; the links go on."""
        if self._frozen is None:
            self._frozen = self._bytes()

    def _bytes(self) -> tuple[int, int, Literal["kernel", "link"]]:
        self._look_at_links()
        counter: Literal["kernel", "link"] = "kernel"
        sent_bytes, payload_bytes = self._of_past_links
        for link, (sent_before, payload_before) in self._before.items():
            count, source = link.socket_bytes_sent()
            if source == "link":
                counter = "link"
            sent_bytes += max(0, count - sent_before)
            payload_bytes += link.chunk_payload_bytes_sent - payload_before
        return sent_bytes, payload_bytes, counter

    def _look_at_links(self) -> None:
        """Notes which links there are. They come and go; those that have gone keep their count."""
        now = set(self._links.values())
        for link in [link for link in self._before if link not in now]:
            sent_before, payload_before = self._before.pop(link)
            self._of_past_links[0] += max(0, link.socket_bytes_sent()[0] - sent_before)
            self._of_past_links[1] += link.chunk_payload_bytes_sent - payload_before
        for link in now - self._before.keys():
            self._before[link] = (link.socket_bytes_sent()[0], link.chunk_payload_bytes_sent)
