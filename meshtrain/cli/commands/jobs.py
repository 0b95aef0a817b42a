"""`jobs`, `cancel`, `rm`, `change` and `leave`."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from meshtrain.cli.ui.completion import complete_jobs
from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.errors import BadCommandLine, CliError, reported, show_error
from meshtrain.cli.ui.job import MATCHES_SHOWN, age, find_job, list_jobs
from meshtrain.cli.ui.options import DataDir, Json
from meshtrain.cli.ui.terminal import at_terminal, plain, print_json, print_table, say
from meshtrain.client import Client, ask
from meshtrain.errors import RequestError
from meshtrain.following.shown_text import human_seconds
from meshtrain.following.status_line import trains_in_groups
from meshtrain.following.watching import has_ended
from meshwire import limits
from meshwire.jobs.files import human_bytes
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.envelope import Done
from meshwire.messages.job import JobSummary
from meshwire.messages.local import (
    Cancel,
    ChangeSettings,
    GetStatus,
    Leave,
    RemoveResults,
    ResultsRemoved,
    SettingsTaken,
    Status,
)
from meshwire.peer_news import joined, losses, provisional
from meshwire.text import printable

CHANGE_TIMEOUT_S = 90.0  # more than the daemon waits for all to agree
LEAVE_TIMEOUT_S = 60.0  # the others agree on going on, then the learner gets its grace
REMOVE_TIMEOUT_S = 600.0  # a disk may have a hundred thousand files of it
CANCEL_TIMEOUT_S = 120.0  # every learner gets its grace, at peers that may be slow to answer


@reported
def jobs(
    prefix: Annotated[
        str, typer.Argument(metavar="JOB", help="Only those whose id begins so, or that are called so.")
    ] = "",
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """List jobs, the newest first; `ps` and `ls` do the same.

    Of one that is "deleted", results and logs were deleted on this device: after 90 days, or by `rm`.
    """
    with connected(data_dir) as client:
        found = list_jobs(client, prefix.lower())
        if prefix and not found:
            found = [job for job in list_jobs(client) if job.name == prefix]
    if json:
        print_json([plain(job) for job in found])
        return
    if not found:
        so = f"No job has an id that begins with {prefix!r}, or is called so. See all: meshtrain jobs"
        say(so if prefix else "No jobs. Start one: meshtrain submit train.py")
        return
    now_s = time.time()
    columns = ("ID", "NAME", "STATE", "PEERS", "ROUNDS", "CREATED", "TOOK", "SCRIPT")
    print_table(columns, [_job_row(job, now_s) for job in found])
    for job in [job for job in found if job.given_up or job.provisional][:MATCHES_SHOWN]:
        for note in (*provisional(job), *losses(job)):
            say(f"{job.job}: {note}")
    if found[0].state == JobState.LOST:
        say(f"{found[0].job} was lost. To go on from its last checkpoint: meshtrain submit --resume {found[0].job}")


def _job_row(job: JobSummary, now_s: float) -> Sequence[str]:
    took = "-"
    if job.started_at_s is not None and (job.ended_at_s is not None or not has_ended(job)):
        took = human_seconds((job.ended_at_s or now_s) - job.started_at_s)
    return (
        job.job,
        printable(job.name),
        printable(job.state) + (", deleted" if job.expired_at_s is not None else ""),
        _peers(job),
        "-" if trains_in_groups(job) else str(job.rounds),
        age(job, now_s),
        took,
        printable(job.script),
    )


def _peers(job: JobSummary) -> str:
    """How many devices take part; of how many, where some do not."""
    count = len(job.members)
    return f"{len(job.present)}/{count}" if 0 < len(job.present) < count else str(count)


@reported
def leave(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="Its id, a prefix of it, or its name.", autocompletion=complete_jobs)
    ],
    data_dir: DataDir = None,
) -> None:
    """Take this device out of a job; the others go on with it. It does not come back to the job by itself.

    Where a hub alone is left, that has the newest state first, and keeps it until another laptop of the job is up."""
    with connected(data_dir) as client:
        found = find_job(client, job)
        if has_ended(found):
            raise CliError(f"job {found.job} has ended already: {found.state}")
        kept = _kept_by(client, found)
        ask(client, Leave(job=found.job), Done, name=f"leaving {found.job}", timeout_s=LEAVE_TIMEOUT_S)
    if kept:
        say(
            f"{kept} keeps its state, for no laptop is left: it goes on when another one that was in it is up. "
            f"From here: meshtrain submit --resume {found.job}"
        )
    print(found.job)


def _kept_by(client: Client, job: JobSummary) -> str:
    """The hubs that are left of a job when this device, its last laptop, leaves; empty where laptops are."""
    hubs = [rank for rank in job.present if job.members[rank].hub]
    laptops = [job.members[rank].device for rank in job.present if not job.members[rank].hub]
    if not hubs or laptops != [ask(client, GetStatus(), Status, name="status").device]:
        return ""
    return " and ".join(printable(job.members[rank].name) for rank in hubs)


@reported
def change(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="Its id, a prefix of it, or its name.", autocompletion=complete_jobs)
    ],
    codec: Annotated[
        str | None,
        typer.Option("--codec", help="What gradients travel in from now on, such as int8; see meshtrain codecs."),
    ] = None,
    period: Annotated[
        int | None,
        typer.Option(
            "--period",
            metavar="H",
            help="Local steps in a round from now on, with --sync local:H, diloco:H, sparseloco:H, muloco:H or sma:H.",
        ),
    ] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Change a job's settings while it runs, where the network has become slower or faster: the codec, the period, or
    both.

    All members agree on the first round that goes by them; nothing is lost that the codec of before has left out. Ask
    on a device that takes part. What else is to change takes a new job: meshtrain submit --resume JOB.
    """
    if codec is None and period is None:
        raise BadCommandLine("say what is to change", f"meshtrain change {job} --codec int8, or --period 16, or both")
    if period is not None and not 1 <= period <= limits.PERIOD_MAX:
        raise BadCommandLine(f"--period {period}: a round has from 1 to {limits.PERIOD_MAX} local steps")
    with connected(data_dir) as client:
        found = find_job(client, job)
        if has_ended(found):
            raise CliError(f"job {found.job} has ended already: {found.state}")
        asked = ChangeSettings(job=found.job, codec=codec, period=period)
        taken = ask(client, asked, SettingsTaken, name=f"changing {found.job}", timeout_s=CHANGE_TIMEOUT_S)
    if json:
        print_json({"job": found.job, "first": taken.first, **plain(taken.now), "before": plain(taken.before)})
        return
    now, before, said = taken.now, taken.before, []
    if now.codec != before.codec:
        said.append(f"gradients travel in {now.codec}, not {before.codec}")
    if now.period != before.period:
        said.append(f"a period has {now.period} local steps, not {before.period}")
    say(f"job {found.job}: from round {taken.first} on {', and '.join(said)}")


@reported
def cancel(
    ids: Annotated[
        list[str], typer.Argument(metavar="JOB", help="Ids, prefixes of them, or names.", autocompletion=complete_jobs)
    ],
    now: Annotated[bool, typer.Option("--now", help="Save nothing, kill the learners.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask, also where this device has no part in the job.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """End jobs, on all their devices; `stop` does the same.

    On a device that computes for the job its state is saved first, unless it has --checkpoint-every off: `meshtrain
    submit --resume JOB` goes on from there. With --now, from the last checkpoint.

    Asks first where the job neither runs on this device nor was submitted here.
    """
    failed = False
    with connected(data_dir) as client:
        for prefix in ids:
            try:
                failed |= not _cancel_one(client, prefix, now=now, sure=yes)
            except CliError as error:
                show_error(str(error), error.hint)
                failed = True
            except (RequestError, TimeoutError) as error:
                show_error(f"job {prefix} could not be cancelled: {error}", "meshtrain cancel --now " + prefix)
                failed = True
    if failed:
        raise typer.Exit(1)


def _cancel_one(client: Client, prefix: str, *, now: bool, sure: bool) -> bool:
    """Returns whether the job ends. Raises CliError where nobody can be asked."""
    job = find_job(client, prefix)
    if has_ended(job):
        say(f"job {job.job} has ended already: {job.state}")
        return True
    if not sure and not _is_of_this_device(client, job) and not _asked(job):
        say(f"job {job.job} goes on")
        return False
    ask(client, Cancel(job=job.job, now=now), Done, name=f"cancelling {job.job}", timeout_s=CANCEL_TIMEOUT_S)
    print(job.job)
    where = ", ".join(printable(member.name) for member in job.members)
    say(f"job {job.job} ({printable(job.name)}) ends on {where}. To go on with it: meshtrain submit --resume {job.job}")
    return True


@reported
def rm(
    ids: Annotated[
        list[str], typer.Argument(metavar="JOB", help="Ids, prefixes of them, or names.", autocompletion=complete_jobs)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Delete what jobs that have ended left on this device: results, logs, checkpoints.

    Asks first, for there may be no other copy. Other devices keep what is theirs until the same is typed there; the job
    stays in the list, as "deleted". Without it, results go after 90 days.
    """
    failed = False
    with connected(data_dir) as client:
        for prefix in ids:
            try:
                failed |= not _remove_one(client, prefix, sure=yes)
            except CliError as error:
                show_error(str(error), error.hint)
                failed = True
            except (RequestError, TimeoutError) as error:
                show_error(f"nothing was deleted of job {prefix}: {error}")
                failed = True
    if failed:
        raise typer.Exit(1)


def _remove_one(client: Client, prefix: str, *, sure: bool) -> bool:
    """Returns whether it is gone. Raises CliError."""
    job = find_job(client, prefix)
    named = f"job {job.job} ({printable(job.name)})"
    if not has_ended(job):
        raise CliError(
            f"{named} has not ended: it is {printable(job.state)}", f"meshtrain cancel {job.job}, and this then"
        )
    if not sure:
        if not at_terminal():
            raise CliError(
                f"{named}: its results, logs and checkpoints on this device would be deleted",
                f"meshtrain rm --yes {job.job}",
            )
        took = f"it {printable(job.state)} {age(job, time.time())}"
        if not typer.confirm(f"Delete results, logs and checkpoints of {named}, {took}, on this device?", err=True):
            say(f"{named} stays")
            return False
    name = f"deleting what is left of {job.job}"
    removed = ask(client, RemoveResults(job=job.job), ResultsRemoved, name=name, timeout_s=REMOVE_TIMEOUT_S)
    print(job.job)
    here = ask(client, GetStatus(), Status, name="status").device
    others = joined([printable(member.name) for member in job.members if member.device != here])
    stays = f"; what lies on {others} stays" if others else ""
    say(f"{named}: {human_bytes(removed.size_bytes)} deleted on this device{stays}")
    return True


def _is_of_this_device(client: Client, job: JobSummary) -> bool:
    """Whether it takes part, or somebody submitted the job from here."""
    here = ask(client, GetStatus(), Status, name="status").device
    return here == job.submitter or any(member.device == here for member in job.members)


def _asked(job: JobSummary) -> bool:
    """Whether the person says yes. Raises CliError without a terminal."""
    where = ", ".join(printable(member.name) for member in job.members)
    fact = f"job {job.job} ({printable(job.name)}) has nothing to do with this device: it runs on {where}"
    if not at_terminal():
        raise CliError(fact, f"meshtrain cancel --yes {job.job}")
    return typer.confirm(f"{fact}. Cancel it there?", err=True)
