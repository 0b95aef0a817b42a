"""A run as it is shown while it goes on: line, plot, news and logs; and when it cannot end well any more."""

from collections.abc import Sequence

from meshtrain.following.job_news import JobNews
from meshtrain.following.status_line import StatusLine, prefixes
from meshtrain.notebook.curves import Curves
from meshtrain.notebook.screens import RunScreen
from meshtrain.pictures.curves_picture import curves_svg
from meshwire.messages.job import JobSummary

LOG_LINES_MAX = 2000  # in one cell


class RankGaveUp(Exception):
    """The function has failed on a device for good; the others would go on without it, and without its result."""

    def __init__(self, job: JobSummary, rank: int) -> None:
        super().__init__(f"rank {rank} of job {job.job} has given up")
        self.job = job
        self.rank = rank


class RunView:
    """Shows one run on a screen, as `meshtrain.following.follower` tells of it."""

    def __init__(self, screen: RunScreen, names: Sequence[str]) -> None:
        self.curves = Curves()
        self._screen = screen
        self._prefixes = prefixes(names)
        self._line = StatusLine()
        self._news = JobNews()
        self._svg: str | None = None
        self._lines_left = LOG_LINES_MAX
        self._cut = False
        self._job = ""

    def status(self, job: JobSummary) -> None:
        """Shows where it stands. Raises RankGaveUp."""
        self._job = job.job
        if self.curves.look(job):
            self._svg = curves_svg(job.name, self.curves.points)
        self._screen.show(self._line.text(job), self._svg)
        for line in self._news.look(job):
            self.say(line)
        for report in job.ranks:
            if report.failure is not None and report.part == "forwards":
                raise RankGaveUp(job, report.rank)

    def lines(self, rank: int, lines: Sequence[str], came_s: float | None = None) -> None:
        """Shows log lines of one rank, as many as a cell bears."""
        if not lines or self._cut:
            return
        shown = lines[: self._lines_left]
        self._lines_left -= len(shown)
        self._screen.write("".join(f"{self._prefixes[rank]}{line}\n" for line in shown))
        if len(shown) < len(lines):
            self._cut = True
            self._screen.say(f"more than {LOG_LINES_MAX} lines of log; all of it: meshtrain logs {self._job}")

    def joined(self, names: Sequence[str]) -> None:
        """Shows the logs of more members than before."""
        self._prefixes = prefixes(names)

    def say(self, line: str) -> None:
        """Shows a line for the person."""
        self._screen.say(line)
