"""Does anything of a daemon grow without bound? Lines fitted to what it holds, judged by stated bounds. Pure.

Each bound is a step that is allowed once (caches that fill, a job's own files) and a slope that is allowed for ever.
The slope is Theil's and Sen's: the median of those between all pairs of points, which a moment of much work does not
bend.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

HOUR_S = 3600.0
POINTS_MAX = 60  # of one series: then every second one is dropped

Point = tuple[float, float]  # seconds and how much


@dataclass(frozen=True)
class Bound:
    """How much something may grow.

    Attributes:
        step: in all, however short the time.
        per_hour: beside it.
        warm_up_s: the first so many seconds of a series are not looked at.
        least_s: no line is fitted through less time.
        unit: for people.
    """

    step: float
    per_hour: float
    warm_up_s: float
    least_s: float
    unit: str

    def allows(self, lasted_s: float) -> float:
        """How much in so many seconds."""
        return self.step + self.per_hour * lasted_s / HOUR_S


MIB = 1024.0 * 1024.0

BOUNDS: Mapping[str, Bound] = {
    # One process: a kill begins another series. A peer that kept 1.7 kB a round grew by 60 MiB an hour. Each codec's
    # first job loads and lays out what it needs, 5 to 15 MiB in all: the first turn of all of them is not looked at,
    # and no line is fitted through less than another one, for they differ in what they hold.
    "memory": Bound(step=8 * MIB, per_hour=16 * MIB, warm_up_s=660.0, least_s=720.0, unit="bytes"),
    "descriptors": Bound(step=8, per_hour=4, warm_up_s=90.0, least_s=240.0, unit="descriptors"),
    "threads": Bound(step=6, per_hour=2, warm_up_s=90.0, least_s=240.0, unit="threads"),
    # One data folder, from the first start to the end: results of jobs that have ended stay, those of a soak are small.
    "disk": Bound(step=24 * MIB, per_hour=96 * MIB, warm_up_s=120.0, least_s=240.0, unit="bytes"),
    # What is said of a link that is lost, or of a generation, some lines each: here something breaks every second.
    "log": Bound(step=1 * MIB, per_hour=6 * MIB, warm_up_s=0.0, least_s=120.0, unit="bytes"),
}


def slope(points: Sequence[Point]) -> float:
    """Per second; 0 of fewer than two points."""
    between = [(b - a) / (t - s) for (s, a), (t, b) in combinations(points, 2) if t > s]
    return statistics.median(between) if between else 0.0


@dataclass(frozen=True)
class Line:
    """What was fitted to one series.

    Attributes:
        grown: by the slope, in all of the time that was looked at.
        allowed: in that time.
    """

    name: str
    what: str
    lasted_s: float
    grown: float
    allowed: float

    @property
    def too_steep(self) -> bool:
        """It grows without bound."""
        return self.grown > self.allowed

    def __str__(self) -> str:
        unit = BOUNDS[self.what].unit
        return (
            f"{self.name}: {self.what} grew by {self.grown:,.0f} {unit} in {self.lasted_s:.0f} s, "
            f"{self.allowed:,.0f} are allowed"
        )


class Growth:
    """All series of a soak: by daemon, what it is, and, where a process has it, which one."""

    def __init__(self, bounds: Mapping[str, Bound] = BOUNDS) -> None:
        self._bounds = bounds
        self._series: defaultdict[tuple[str, str, int], list[Point]] = defaultdict(list)

    def note(self, name: str, what: str, at_s: float, value: float, process: int = 0) -> None:
        """So much there is now."""
        points = self._series[name, what, process]
        points.append((at_s, value))
        if len(points) > POINTS_MAX:
            del points[1::2]

    def lines(self) -> list[Line]:
        """Of the series that last long enough, the steepest first, by what it is allowed."""
        found = []
        for (name, what, _), points in self._series.items():
            bound = self._bounds[what]
            judged = [(at_s, value) for at_s, value in points if at_s >= points[0][0] + bound.warm_up_s]
            if len(judged) >= 4 and (lasted_s := judged[-1][0] - judged[0][0]) >= bound.least_s:
                found.append(Line(name, what, lasted_s, slope(judged) * lasted_s, bound.allows(lasted_s)))
        return sorted(found, key=lambda line: line.allowed - line.grown)

    def steepest(self) -> dict[str, Line]:
        """For the summary: of each kind the one nearest to its bound."""
        return {line.what: line for line in reversed(self.lines())}
