"""What a function logs by mt.log, seen about once a second while it runs: points for a plot, bounded however long that
takes."""

from collections.abc import Mapping, Sequence

from meshtrain.following.status_line import newest_round
from meshwire.job_figures import mean_values
from meshwire.messages.job import JobSummary

POINTS_MAX = 1000
NAMES_MAX = 32

Points = Sequence[tuple[int, float]]


class Curves:
    """(round, mean over the devices) by the name of each logged value."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._stride = 1  # rounds between points, at least

    @property
    def points(self) -> Mapping[str, Points]:
        """What was seen so far."""
        return self._points

    def look(self, job: JobSummary) -> bool:
        """Takes a look at the job. Returns whether there is another point."""
        round_ = newest_round(job)
        taken = False
        for name, value in mean_values(report.metrics.values for report in job.ranks):
            if name not in self._points and len(self._points) >= NAMES_MAX:
                continue
            points = self._points.setdefault(name, [])
            while points and points[-1][0] > round_:  # rounds that were given up come again
                points.pop()
            if points and round_ < points[-1][0] + self._stride:
                continue
            points.append((round_, value))
            taken = True
        if any(len(points) > POINTS_MAX for points in self._points.values()):
            self._points = {name: points[::2] for name, points in self._points.items()}
            self._stride *= 2
        return taken
