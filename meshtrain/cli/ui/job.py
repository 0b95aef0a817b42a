"""The job that a person means: found by id, prefix or name, watched until it ends, and told of when it has."""

import time
from collections.abc import Callable, Iterable, Sequence

from meshtrain.cli.ui.connection import ask
from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.terminal import human_seconds, script_text
from meshtrain.client import Client
from meshwire.jobs.lifecycle import TERMINAL_STATES, JobState
from meshwire.message_base import Wire
from meshwire.messages.job import Found, JobSummary
from meshwire.messages.local import GetJobs, Watch, Watched
from meshwire.peer_news import failures, losses, outcome_notes
from meshwire.text import printable

WATCH_TIMEOUT_S = 14 * 86400.0  # the longest that one command follows a job
WATCH_SILENCE_S = 30.0  # it is told about the job every second
MATCHES_SHOWN = 5


def list_jobs(client: Client, prefix: str = "") -> list[JobSummary]:
    """Jobs with this id prefix, the newest first."""
    found = ask(client, GetJobs(prefix=prefix), Found, name="list of jobs")
    return newest_first(found.jobs)


def newest_first(jobs: Iterable[JobSummary]) -> list[JobSummary]:
    """In the order in which people are shown jobs, wherever they are."""
    return sorted(jobs, key=lambda job: (job.created_at_s, job.job), reverse=True)


def find_job(client: Client, typed: str | None) -> JobSummary:
    """The job with this id, unambiguous prefix of one, or name; the latest when None.

    Of several jobs with one name it is that one which has not ended; if all have, the latest.

    Raises CliError, which lists candidates.
    """
    if typed == "":
        raise CliError("an empty text is no job id", "meshtrain jobs")
    jobs = list_jobs(client)
    if not jobs:
        raise CliError("there are no jobs yet", "meshtrain submit train.py")
    if typed is None:
        return jobs[0]
    matches = [job for job in jobs if job.job.startswith(typed.lower())]
    if len(matches) == 1:
        return matches[0]
    named = [job for job in jobs if job.name == typed]
    running = [job for job in named if not has_ended(job)]
    if len(running) > 1:
        raise CliError(f"{len(running)} jobs called {typed!r} have not ended:{_shown(running)}", "the id of one")
    if named:
        return (running or named)[0]
    if matches:
        raise CliError(f"{len(matches)} jobs have ids that begin with {typed!r}:{_shown(matches)}", "one more letter")
    raise CliError(
        f"no job is called {typed!r} or has an id that begins so; the latest are{_shown(jobs)}", "meshtrain jobs"
    )


def _shown(jobs: Sequence[JobSummary]) -> str:
    """The newest of these to choose from, a line each."""
    now_s = time.time()
    lines = [f"{job.job}  {printable(job.script)}, {age(job, now_s)}, {printable(job.state)}" for job in jobs]
    more = [f"and {len(lines) - MATCHES_SHOWN} more"] if len(lines) > MATCHES_SHOWN else []
    return "".join(f"\n  {line}" for line in (*lines[:MATCHES_SHOWN], *more))


def age(job: JobSummary, now_s: float) -> str:
    """How long ago it was submitted, for a person."""
    return f"{human_seconds(now_s - job.created_at_s)} ago"


def watch_job(client: Client, job: str, show: Callable[[JobSummary], None], tell: Callable[[str], None]) -> JobSummary:
    """Shows every update of a job until it has ended; returns the last state, which it has not shown.

    Args:
        tell: is given a line for each device that joins this one's meanwhile.
    """

    def on_event(event: Wire) -> None:
        if isinstance(event, Watched):
            for device in event.joined:
                tell(f"{printable(device.name)} joined, added by {printable(device.added_by)}")
            show(event.summary)

    reply = ask(
        client,
        Watch(job=job),
        Watched,
        name=f"job {job}",
        timeout_s=WATCH_TIMEOUT_S,
        on_event=on_event,
        silence_s=WATCH_SILENCE_S,
    )
    return reply.summary


def has_ended(job: JobSummary) -> bool:
    """Whether nothing of it will change any more."""
    return job.state in TERMINAL_STATES


def outcome_lines(job: JobSummary) -> list[str]:
    """How a job ended, and why it failed: for stderr."""
    took = ""
    if job.started_at_s is not None and job.ended_at_s is not None:
        took = f" after {human_seconds(job.ended_at_s - job.started_at_s)}"
    facts = [f"{job.rounds} rounds"] if job.rounds else []
    if job.replicas_equal is not None:
        verdict = "bit-equal" if job.replicas_equal else "DIFFERENT"
        many = "" if job.hashes_compared == 1 else "s"
        facts.append(f"replicas {verdict} ({job.hashes_compared} comparison{many})")
    lines = [f"job {job.job} ({printable(job.name)}) {job.state}{took}" + "".join(f", {fact}" for fact in facts)]
    if job.state == JobState.SUCCEEDED:
        return lines + [f"note: {note}" for note in outcome_notes(job)]
    notes = [f"note: {loss}" for loss in losses(job)]
    if job.state == JobState.CANCELLED:
        if job.error:
            lines = [f"{lines[0]}, {printable(job.error.removeprefix('cancelled '))}"]
        return lines + notes
    lines += [*notes, *(script_text(text) for text in failures(job))]
    if any(report.failure for report in job.ranks):
        lines.append(f"All that the scripts said: meshtrain logs {job.job}")
    return lines
