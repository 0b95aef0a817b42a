"""A job's curves while somebody watches it: bounded, however long that takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from meshtraind.dashboard.page_values import loss_of, newest_round
from meshwire import limits
from meshwire.messages.course import CoursePoint
from meshwire.messages.job import JobSummary, Metrics

RATE_S_MIN = 2.0  # between two looks that give a rate


@dataclass
class Chart:
    """Points by round. When there are too many every second one goes, and from then on every second one is taken.

    Attributes:
        value: what the script calls its loss.
        points: (round, mean loss, samples a second in the rounds since the point before) each; None: not known.
    """

    value: str = ""
    points: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    _stride: int = 1  # rounds between points, at least
    _rated: tuple[float, int] | None = None  # when the rate was taken last, and how many samples there were
    _rate: float | None = None

    def begin(self, kept: Sequence[CoursePoint]) -> None:
        """Takes over what the daemon has seen of the rounds before the first point."""
        before = [point for point in kept if not self.points or point.round < self.points[0][0]]
        told = [loss_of([Metrics(values=point.values)]) for point in before]
        self.value = self.value or next((one[0] for one in reversed(told) if one is not None), "")
        points = [
            (point.round, None if one is None else one[1], point.samples_s)
            for point, one in zip(before, told, strict=True)
        ]
        self._stride = max(self._stride, min((b.round - a.round for a, b in pairwise(before)), default=1))
        self.points = points + self.points
        self._thin_out()

    def look(self, job: JobSummary, now_s: float) -> bool:
        """Takes a look at the job. Returns whether there is another point."""
        self._take_rate(job, now_s)
        last = newest_round(job)
        kept = [point for point in self.points if point[0] <= last]  # rounds that are given up come again
        fell_back = len(kept) < len(self.points)
        self.points = kept
        if last < 1 or (self.points and last < self.points[-1][0] + self._stride):
            return fell_back
        told = loss_of([report.metrics for report in job.ranks if report.rank in job.learning])
        self.value, loss = told if told is not None else (self.value, None)
        self.points.append((last, loss, self._rate))
        self._thin_out()
        return True

    def _thin_out(self) -> None:
        while len(self.points) > limits.DASHBOARD_POINTS_MAX:
            self.points = self.points[::2]
            self._stride *= 2

    def _take_rate(self, job: JobSummary, now_s: float) -> None:
        samples = sum(report.metrics.samples for report in job.ranks)
        if self._rated is None or samples < self._rated[1]:  # a process that was started again counts anew
            self._rated, self._rate = (now_s, samples), None
        elif now_s - self._rated[0] >= RATE_S_MIN:
            self._rate = (samples - self._rated[1]) / (now_s - self._rated[0])
            self._rated = (now_s, samples)

    def shown(self, job: str) -> dict[str, Any]:
        """For the page."""
        return {"job": job, "value": self.value, "points": self.points}
