"""Messages as what the page shows of them: JSON in which every text is safe to show, and every number is one."""

import math
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from meshwire import limits
from meshwire.jobs.lifecycle import TERMINAL_STATES, JobState
from meshwire.messages.job import JobSummary, LogValues, Metrics, RankReport
from meshwire.peer_news import failures, losses, outcome_notes, part_of, provisional, restarts, unlinkable, with_names
from meshwire.text import printable

ABSENT = ("lost", "left", "refused")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def shown(value: Any) -> Any:
    """A message, or what it is made of, as JSON values. Texts keep their lines and nothing else that draws."""
    if isinstance(value, BaseModel):
        return shown(value.model_dump(mode="json"))
    if isinstance(value, str):
        return shown_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown(each) for each in value]
    return value


def shown_text(text: str) -> str:
    """Lines without anything that moves, hides or turns what stands beside it; as many as a page has room for."""
    if len(text) > limits.DASHBOARD_TEXT_CHARS_MAX:
        text = text[: limits.DASHBOARD_TEXT_CHARS_MAX] + " ... (the log has the rest)"
    return "\n".join(map(shown_line, text.split("\n")))


def shown_line(line: str) -> str:
    """What a terminal would show last of a line, without colours."""
    return printable(COLOURS.sub("", line.rstrip("\r").rpartition("\r")[2]).expandtabs(4))


def has_ended(job: JobSummary) -> bool:
    """Whether nothing more will happen to it."""
    return job.ended_at_s is not None or job.state in TERMINAL_STATES


def shown_job(job: JobSummary) -> dict[str, Any]:
    """A job as the page draws it."""
    ended = has_ended(job)
    notes = [*restarts(job), *provisional(job), *unlinkable(job)]
    notes += outcome_notes(job) if job.state == JobState.SUCCEEDED else losses(job)
    return {
        "job": job.job,
        "name": shown_line(job.name),
        "script": shown_line(job.script),
        "state": shown_line(job.state),
        "ended": ended,
        "created_at_s": job.created_at_s,
        "started_at_s": job.started_at_s,
        "ended_at_s": job.ended_at_s,
        "round": newest_round(job),
        "generation": job.generation,
        "waiting_for": None if job.waiting_for is None else with_names(job.waiting_for, job.members),
        "equal": job.replicas_equal,
        "hashes_compared": job.hashes_compared,
        "notes": [shown_text(note) for note in notes],
        "errors": [shown_text(error) for error in failures(job)] if ended and job.state == JobState.FAILED else [],
        "members": _members(job),
    }


def newest_round(job: JobSummary) -> int:
    """The newest round that is known of."""
    return max((job.rounds, *(report.metrics.round for report in job.ranks)))


def _members(job: JobSummary) -> list[dict[str, Any]]:
    reports = {report.rank: report for report in job.ranks}
    return [
        _member(job, rank, reports.get(rank) or RankReport(job=job.job, rank=rank, state=""))
        for rank in range(len(job.members))
    ]


def _member(job: JobSummary, rank: int, report: RankReport) -> dict[str, Any]:
    metrics, part = report.metrics, part_of(job, rank)
    waits = _waits_for(job, rank, report)
    return {
        "rank": rank,
        "device": job.members[rank].device,
        "name": shown_line(job.members[rank].name),
        "part": part,
        "restarts": report.restarts,
        **shown(
            metrics.model_dump(
                include={
                    *("step", "round", "step_s", "ahead", "age", "nulls", "batch", "samples", "samples_per_s"),
                    *("sent_bytes", "payload_bytes", "exposed_s", "exchange_s", "finished"),
                }
            )
        ),
        "values": shown(metrics.values),
        "waits_for": None if waits is None else with_names(waits, job.members),
    }


def _waits_for(job: JobSummary, rank: int, report: RankReport) -> str | None:
    blocked = not report.metrics.finished and part_of(job, rank) not in ABSENT
    return (report.metrics.waiting_for or None) if blocked else None


def waits_for_ranks(job: JobSummary, rank: int) -> list[int]:
    """Other members whose part of a round this one waits for."""
    report = next((report for report in job.ranks if report.rank == rank), None)
    waits = None if report is None else _waits_for(job, rank, report)
    named = {int(found) for found in re.findall(r"\brank (\d+)\b", waits or "")}
    return sorted(named & set(range(len(job.members))) - {rank})


def loss_of(reports: Sequence[Metrics]) -> tuple[str, float] | None:
    """What scripts call their loss, and its mean over all that have told it; None if none did."""
    named: LogValues = next((metrics.values for metrics in reports if metrics.values), ())
    if not named:
        return None
    name = next((name for name, _ in named if "loss" in name.lower()), named[0][0])
    told = [value for metrics in reports for each, value in metrics.values if each == name and math.isfinite(value)]
    return (shown_line(name), sum(told) / len(told)) if told else None
