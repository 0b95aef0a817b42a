"""The job that a person means: found by id, prefix or name, watched until it ends, and told of when it has."""

import time
from collections.abc import Iterable, Sequence

from meshtrain.cli.ui.errors import CliError
from meshtrain.client import Client, ask
from meshtrain.following.shown_text import human_seconds
from meshtrain.following.watching import has_ended
from meshwire.messages.job import Found, JobSummary
from meshwire.messages.local import GetJobs
from meshwire.text import printable

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
