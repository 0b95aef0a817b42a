"""How a followed job looks: log lines with the rank's name in front, and one line that says where the job stands."""

import math
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Self, TextIO

from meshtrain.cli.ui.log_pieces import raw_bytes
from meshtrain.cli.ui.peer_table import waits
from meshtrain.cli.ui.prediction import speed_text
from meshtrain.cli.ui.terminal import console, human_seconds, human_step, say
from meshwire.jobs.lifecycle import TERMINAL_STATES, JobState
from meshwire.messages.job import JobSummary, Metrics, Stage
from meshwire.peer_news import losses, news, script_failed
from meshwire.text import printable

STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")
VALUES_SHOWN = 3
RATE_OVER_S = 60.0  # rounds of so long say how long the rest will take
RATE_ROUNDS_MIN = 3
STAGES: dict[Stage, str] = {  # the last to come first
    "starting": "the script has started",
    "script": "the script runs, up to mt.prepare",
    "preparing": "at mt.prepare",
    "loading": "taking over the model",
    "first step": "the first step",
    "process group": "training by torch.distributed",
}
FAILURE_HOLD_S = 2.0  # news of a script that has failed waits so long: if it fails everywhere, the end tells it


def prefixes(names: Sequence[str]) -> list[str]:
    """`[rank name] `, equally wide for all ranks."""
    made = [f"[{rank} {printable(name)}]" for rank, name in enumerate(names)]
    width = max(map(len, made), default=0)
    return [text.ljust(width) + " " for text in made]


def status_text(job: JobSummary, lasting: Collection[int] = (), left_s: float | None = None) -> str:
    """One line that says where a job stands.

    Args:
        lasting: ranks that have been waiting for the same for a while; the others' waiting is the step's own.
        left_s: until its end, where the script has said when that is.
    """
    reports = job.ranks
    parts = [f"{printable(job.name)} {printable(job.state)}"]
    if job.present and len(job.present) < len(job.members):
        parts.append(f"{len(job.present)} of {len(job.members)} peers")
    if job.waiting_for:
        parts.append(f"waiting: {printable(job.waiting_for)}")
    if not reports:
        return " · ".join(parts)
    metrics = [report.metrics for report in reports]
    if (stages := stages_text(job)) is not None:
        parts.append(stages)
    if rounds := newest_round(job):
        planned = max(one.rounds_planned for one in metrics)
        parts.append(f"round {rounds:,}" + (f" of {planned:,}" if planned >= rounds else ""))
    if (epochs := max(one.epochs for one in metrics)) > 0:
        number = math.ceil(epochs)
        parts.append(f"epoch {number}, {epochs - number + 1:.0%}")
    parts += [f"{printable(name)} {value:.4g}" for name, value in _means(metrics)[:VALUES_SHOWN]]
    slowest_s = max(one.step_s for one in metrics)
    if (speed := speed_text(job)) is not None:
        parts.append(speed)
    elif slowest_s > 0:
        parts.append(f"{human_step(slowest_s)}/step")
    if left_s is not None:
        parts.append(f"{human_seconds(left_s)} left")
    for rank, reason in waits(job).items():
        if rank in lasting:
            parts.append(f"{printable(job.members[rank].name)} waits: {reason}")
            break
    return " · ".join(parts)


def newest_round(job: JobSummary) -> int:
    """The newest that any member has told of; 0 before the first."""
    return max([job.rounds, *(report.metrics.round for report in job.ranks)])


def stages_text(job: JobSummary) -> str | None:
    """What those do who compute, before any of them has taken a step; None from then on."""
    members = [report for report in job.ranks if report.rank in job.learning or not job.learning]
    if job.state in TERMINAL_STATES or any(report.metrics.step or report.metrics.stage is None for report in members):
        return None
    by_stage: dict[Stage, list[str]] = {}
    for report in members:
        assert report.metrics.stage is not None
        by_stage.setdefault(report.metrics.stage, []).append(printable(job.members[report.rank].name))
    there = [stage for stage in STAGES if stage in by_stage]
    if len(there) == 1 and len(by_stage[there[0]]) == len(job.members):
        return STAGES[there[0]]
    return "; ".join(f"{', '.join(by_stage[stage])}: {STAGES[stage]}" for stage in there) or None


class TimeLeft:
    """When a job will have had as many rounds as its script wants, by how fast they came lately."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def left_s(self, now_s: float, round_: int, planned: int) -> float | None:
        """None where it is not known.

        Args:
            planned: rounds; 0: it has not said.
        """
        if self._seen and round_ < self._seen[-1][1]:
            self._seen.clear()  # rounds were given up
        self._seen.append((now_s, round_))
        while len(self._seen) > 2 and now_s - self._seen[1][0] > RATE_OVER_S:
            self._seen.popleft()
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if not last or planned <= last or last - first < RATE_ROUNDS_MIN or last_s <= first_s:
            return None
        return (planned - last) * (last_s - first_s) / (last - first)


def _means(metrics: Sequence[Metrics]) -> list[tuple[str, float]]:
    """The script's own values, averaged over the ranks that have them, in order of appearance."""
    values: dict[str, list[float]] = {}
    for one in metrics:
        for name, value in one.values:
            values.setdefault(name, []).append(value)
    return [(name, sum(column) / len(column)) for name, column in values.items()]


class View:
    """The screen on which a followed job is shown. On a terminal the status line stays below the log; in a pipe each
    change of state is a line on stderr. What happens to a member is a line in both.

    Args:
        names: of the members, by rank.
        shown: the ranks whose logs are shown; one alone needs no prefix.
        logs: where log lines go, which are safe to show;
        raw: or as `RawLines` has them. Then nothing is drawn, and without prefixes not a byte is added.
    """

    def __init__(
        self, names: Sequence[str], shown: Sequence[int], logs: TextIO | None = None, *, raw: bool = False
    ) -> None:
        self._prefixes = prefixes(names) if len(shown) > 1 else [""] * len(names)
        self._logs = logs or sys.stdout
        self._console = console(stderr=self._logs is sys.stderr)
        self._live = None
        self._raw = raw
        self._seen: JobSummary | None = None
        self._held: list[str] = []  # news, in order
        self._held_until_s = 0.0
        self._waits: dict[int, str] = {}  # when the job was shown last
        self._time_left = TimeLeft()
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

    def lines(self, rank: int, lines: Sequence[str]) -> None:
        """Shows log lines of one rank."""
        if not lines:
            return
        prefix = self._prefixes[rank]
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
        waiting = waits(job)
        lasting = [rank for rank, reason in waiting.items() if self._waits.get(rank) == reason]
        self._waits = waiting
        planned = max((report.metrics.rounds_planned for report in job.ranks), default=0)
        left_s = self._time_left.left_s(time.monotonic(), newest_round(job), planned)
        if self._live is not None:
            from rich.text import Text

            text = status_text(job, lasting, left_s)
            self._live.update(Text(text, style="bold", overflow="ellipsis", no_wrap=True))
        else:
            self._tell_state(job)
        for line in self._news(job):
            self.say(line)
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

    def _news(self, job: JobSummary) -> list[str]:
        """The lines about members that are to be shown now."""
        now_s = time.monotonic()
        if self._seen is None:
            return losses(job)
        if script_failed(self._seen, job):
            self._held_until_s = now_s + FAILURE_HOLD_S
        self._held += news(self._seen, job)
        if job.state is JobState.FAILING or job.state in TERMINAL_STATES:  # its end tells all of it
            self._held.clear()
        elif now_s < self._held_until_s:
            return []
        told, self._held = self._held, []
        return told
