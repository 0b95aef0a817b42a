"""The peers of a running job, one line each: how fast, how far ahead, how late, and who waits for whom and why."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtrain.cli.ui.terminal import made_table, print_table
from meshtrain.following.shown_text import human_step
from meshtrain.following.status_line import ABSENT, stages_text, trains_in_groups
from meshwire.messages.job import JobSummary, Member, Metrics, RankReport
from meshwire.peer_news import losses, name_of, part_of, provisional, restarts, unlinkable, with_names
from meshwire.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("NAME", "PART", "STEP", "STEP TIME", "AHEAD", "AGE", "NULLS", "BATCH", "WAITS FOR")
WRAPPING = COLUMNS[-1]


def peer_rows(job: JobSummary) -> list[tuple[str, ...]]:
    """Cells of `COLUMNS`, by rank. PART: `part_of`, and which run of its script. AHEAD: rounds that it has taken part
    in and not applied. AGE: how many rounds were missing in what it computed its newest contribution on. NULLS: rounds
    that went on without it."""
    reports = {report.rank: report for report in job.ranks}
    ranks = range(len(job.members)) if job.generation else sorted(reports)
    return [_row(job, reports.get(rank) or RankReport(job=job.job, rank=rank, state="")) for rank in ranks]


def print_peers(job: JobSummary) -> None:
    """The table under a line about the job, on stdout."""
    print(_title(job))
    if job.ranks:
        print_table(COLUMNS, peer_rows(job), WRAPPING)
    for note in _notes(job):
        print(f"note: {note}")


def render_peers(job: JobSummary) -> "RenderableType":
    """The table, to be drawn anew in place."""
    from rich.console import Group
    from rich.text import Text

    notes = (Text(f"note: {note}") for note in _notes(job))
    return Group(Text(_title(job)), made_table(COLUMNS, peer_rows(job), WRAPPING), *notes)


def _notes(job: JobSummary) -> list[str]:
    return [*restarts(job), *provisional(job), *losses(job), *unlinkable(job)]


def _title(job: JobSummary) -> str:
    rounds = max((report.metrics.round for report in job.ranks), default=0)
    facts = [printable(job.state)]
    facts += [] if trains_in_groups(job) else [f"round {max(job.rounds, rounds)}"]
    facts += [f"generation {job.generation}"] if job.generation else []
    told = [stages] if (stages := stages_text(job)) is not None else []
    told += [f"waiting: {printable(job.waiting_for)}"] if job.waiting_for else []
    return f"{job.job} {printable(job.name)} " + "; ".join([", ".join(facts), *told])


def _row(job: JobSummary, report: RankReport) -> tuple[str, ...]:
    metrics, part = report.metrics, part_of(job, report.rank)
    counts = (str(metrics.step), str(metrics.ahead), str(metrics.nulls))
    step, ahead, nulls = ("-",) * len(counts) if metrics.stage == "process group" else counts
    return (
        name_of(job, report.rank),
        part + (f" (run {report.restarts + 1})" if report.restarts else ""),
        step,
        human_step(metrics.step_s) if metrics.step_s else "-",
        ahead,
        "-" if metrics.age is None else str(metrics.age),
        nulls,
        str(metrics.batch) if metrics.batch else "-",
        "-" if part in ABSENT else _waits_for(job.members, metrics),
    )


def _waits_for(members: Sequence[Member], metrics: Metrics) -> str:
    if metrics.finished:
        return "(has finished)"
    return with_names(metrics.waiting_for, members) if metrics.waiting_for else "-"
