"""How a followed job looks: log lines with the rank's name in front, and one line that says where the job stands."""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from meshtrain.cli.ui.terminal import console, say
from meshtrain.following.job_news import JobNews
from meshtrain.following.log_pieces import raw_bytes
from meshtrain.following.shown_text import clock_text
from meshtrain.following.status_line import StatusLine, prefixes, stages_text
from meshwire.messages.job import JobSummary
from meshwire.text import printable

STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


class View:
    """The screen on which a followed job is shown. On a terminal the status line stays below the log; in a pipe each
    change of state is a line on stderr. What happens to a member is a line in both.

    Args:
        names: of the members, by rank.
        shown: the ranks whose logs are shown; one alone needs no prefix.
        logs: where log lines go, which are safe to show;
        raw: or as `RawLines` has them. Then nothing is drawn, and without prefixes not a byte is added.
        times: each log line begins with its time.
    """

    def __init__(
        self,
        names: Sequence[str],
        shown: Sequence[int],
        logs: TextIO | None = None,
        *,
        raw: bool = False,
        times: bool = False,
    ) -> None:
        self._prefixes = prefixes(names) if len(shown) > 1 else [""] * len(names)
        self._logs = logs or sys.stdout
        self._console = console(stderr=self._logs is sys.stderr)
        self._live = None
        self._raw = raw
        self._times = times
        self._seen: JobSummary | None = None
        self._line = StatusLine()
        self._news = JobNews()
        self._stages: str | None = None
        if self._console.is_terminal and not raw:
            from rich.live import Live

            self._live = Live("", console=self._console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def joined(self, names: Sequence[str]) -> None:
        """Shows the logs of more members than before."""
        self._prefixes = prefixes(names)

    def lines(self, rank: int, lines: Sequence[str], came_s: float | None = None) -> None:
        """Shows log lines of one rank, with the time at which they came where that is asked for."""
        if not lines:
            return
        prefix = self._prefixes[rank] + (f"{clock_text(came_s)} " if self._times else "")
        if self._raw:
            end = "\n" if prefix else ""
            self._logs.flush()
            self._logs.buffer.write(
                raw_bytes("".join(f"{prefix}{line}{'' if line.endswith(chr(10)) else end}" for line in lines))
            )
            self._logs.buffer.flush()
            return
        if self._live is None:
            self._logs.write("".join(f"{prefix}{line}\n" for line in lines))
            self._logs.flush()
            return
        from rich.text import Text

        style = STYLES[rank % len(STYLES)]
        for line in lines:
            self._console.print(Text.assemble((prefix, style), Text.from_ansi(line)), soft_wrap=True)

    def status(self, job: JobSummary) -> None:
        """Shows where the job stands now; called about once a second."""
        line = self._line.text(job)
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(line, style="bold", overflow="ellipsis", no_wrap=True))
        else:
            self._tell_state(job)
        for told in self._news.look(job):
            self.say(told)
        self._seen = job

    def _tell_state(self, job: JobSummary) -> None:
        """In a pipe: a line for each change of state, and for each stage before the first step."""
        if self._seen is None or job.state != self._seen.state:
            say(f"job {job.job} {printable(job.state)}")
        stages = stages_text(job)
        if stages is not None and stages != self._stages:
            say(stages)
        self._stages = stages

    def say(self, line: str) -> None:
        """Shows a line for the person."""
        if self._live is None:
            say(line)
        else:
            self._console.print(line, style="yellow")
