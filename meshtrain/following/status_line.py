"""Where a job stands, in one line: round, samples a second, loss, and who waits for whom."""

import math
import time
from collections import deque
from collections.abc import Collection, Sequence

from meshtrain.following.shown_text import human_seconds, human_step
from meshwire.job_figures import mean_values, speed_text
from meshwire.jobs.lifecycle import TERMINAL_STATES
from meshwire.messages.job import JobSummary, Stage
from meshwire.peer_news import part_of, with_names
from meshwire.text import printable

ABSENT = ("lost", "left", "refused")  # of `part_of`: who takes no part now
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
    parts += [
        f"{printable(name)} {value:.4g}" for name, value in mean_values(one.values for one in metrics)[:VALUES_SHOWN]
    ]
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


def trains_in_groups(job: JobSummary) -> bool:
    """Whether its scripts exchange by torch.distributed: it has no rounds, and their steps are not known."""
    return any(report.metrics.stage == "process group" for report in job.ranks)


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


def waits(job: JobSummary) -> dict[int, str]:
    """What each rank that is blocked waits for, with names for ranks."""
    return {
        report.rank: with_names(report.metrics.waiting_for, job.members)
        for report in job.ranks
        if report.metrics.waiting_for and not report.metrics.finished and part_of(job, report.rank) not in ABSENT
    }


class StatusLine:
    """The line, which knows what it has shown before: who has waited for a while, and how long the rest will take."""

    def __init__(self) -> None:
        self._waits: dict[int, str] = {}  # when the job was shown last
        self._time_left = TimeLeft()

    def text(self, job: JobSummary) -> str:
        """The line for where the job stands now; asked for about once a second."""
        waiting = waits(job)
        lasting = [rank for rank, reason in waiting.items() if self._waits.get(rank) == reason]
        self._waits = waiting
        planned = max((report.metrics.rounds_planned for report in job.ranks), default=0)
        return status_text(job, lasting, self._time_left.left_s(time.monotonic(), newest_round(job), planned))
