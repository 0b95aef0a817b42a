"""`logs`: what the learners wrote, whole or as it grows. `report`: how a job went, as a file for a browser."""

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from meshtrain.cli.ui.completion import complete_ranks
from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.errors import BadCommandLine, CliError, reported
from meshtrain.cli.ui.follow import follow_job
from meshtrain.cli.ui.follow_view import View
from meshtrain.cli.ui.job import find_job
from meshtrain.cli.ui.options import DataDir, Json, LatestJob
from meshtrain.cli.ui.progress import Stages
from meshtrain.cli.ui.since import since_time
from meshtrain.cli.ui.terminal import plain, print_json, say
from meshtrain.client import Client, ask
from meshtrain.errors import RequestError
from meshtrain.following.follower import LogPart
from meshtrain.following.log_pieces import NoTimes, log_end, read_log
from meshtrain.following.report_page import report_html
from meshtrain.following.shown_text import without_colours
from meshtrain.following.watching import has_ended
from meshwire.jobs.files import human_bytes
from meshwire.messages.course import GetCourse, JobCourse
from meshwire.messages.job import JobSummary
from meshwire.text import printable

LOG_LINES = 40  # of each rank, in a report


@reported
def logs(
    job: LatestJob = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends; ctrl-C detaches.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, metavar="N", help="Only the last N lines of each rank.")
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank",
            metavar="RANK",
            help="Only this one: its number, or its device's name.",
            autocompletion=complete_ranks,
        ),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="When each line came, to the second, in this machine's zone.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="DURATION|TIME", help="Only what came since: 10m, 1h30m, 14:05, 2026-05-01."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Every byte as the scripts wrote it, to be read by a tool.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Show the output of a job's scripts. From all its devices; with -f the exit code is the job's outcome.

    Colours are kept; other control sequences, which could change the terminal or hide text, are shown as escapes, on a
    terminal and in a pipe. Of a progress bar the last state is shown, with -f every ten seconds.

    Times are those of the clock of the device that ran the rank, which notes once a second what has come. Dashes stand
    where nobody has noted it: in logs of an earlier version, and beside a daemon that was killed.
    """
    if raw and timestamps:
        raise BadCommandLine("--raw is every byte and nothing else", "--raw or --timestamps, not both")
    part = LogPart(lines, None if since is None else since_time(since, time.time()), timestamps, raw)
    with connected(data_dir) as client:
        summary = find_job(client, job)
        ranks = _chosen(summary, rank)
        if not follow:
            _show(client, summary, ranks, part)
            return
    only = None if rank is None else ranks
    raise typer.Exit(follow_job(data_dir, summary.job, summary.members, ranks=only, part=part))


def _chosen(summary: JobSummary, typed: str | None) -> list[int]:
    if typed is None:
        return list(range(len(summary.members)))
    ranks = {str(rank): rank for rank in range(len(summary.members))}
    if typed in ranks:
        return [ranks[typed]]
    named = [rank for rank, member in enumerate(summary.members) if member.name == typed]
    if len(named) == 1:
        return named
    if named:
        numbers = " and ".join(map(str, named))
        raise BadCommandLine(f"job {summary.job} has several devices called {typed!r}", f"one of the ranks {numbers}")
    names = ", ".join(f"{rank} ({printable(member.name)})" for rank, member in enumerate(summary.members))
    raise BadCommandLine(f"job {summary.job} has no rank {typed!r}; it has {names}")


def _show(client: Client, summary: JobSummary, ranks: Sequence[int], part: LogPart) -> None:
    failed: list[str] = []
    hint = None if summary.expired_at_s is not None else "meshtrain peers"
    with View([member.name for member in summary.members], ranks, raw=part.raw, times=part.times) as view:
        for rank in ranks:
            try:
                end_bytes = log_end(client, summary.job, rank)
                begin_bytes = part.begin(client, summary.job, rank, end_bytes)
                lines = read_log(client, summary.job, rank, begin_bytes, end_bytes, raw=part.raw, times=part.times)
                for line, came_s in lines:
                    view.lines(rank, [line], came_s)
            except NoTimes as error:
                failed.append(str(error))
                hint = f"meshtrain logs {summary.job} without --since, or with -n 100"
            except RequestError as error:  # one peer that is away does not hide the others' logs
                failed.append(f"the log of rank {rank} ({summary.members[rank].name}): {error}")
    if failed:
        raise CliError("\n".join(failed), hint)
    if not has_ended(summary):
        say(f"The job is {summary.state}. Follow it: meshtrain logs -f {summary.job}")


@reported
def report(
    job: LatestJob = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file; else report-ID.html.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Write how a job went into one HTML file, to keep or to send.

    Loss, speed, devices and bytes by round, who was there when, settings and versions, how it ended and where a failure
    came from. The file opens without a network. It is of a job that this device is in, or was; one that runs is told
    of as far as it has come.
    """
    with connected(data_dir) as client:
        summary = find_job(client, job)
        course = ask(client, GetCourse(job=summary.job), JobCourse, name=f"course of job {summary.job}")
        if as_json:
            print_json(plain(course))
            return
        target = output if output is not None else Path(f"report-{summary.job}.html")
        if target.exists() and not force:
            raise CliError(f"{target} exists", "another file with -o, or --force")
        with Stages() as stages:
            ends = {rank: _log_end(client, course.summary, rank, stages) for rank in range(len(course.summary.members))}
    page = report_html(course, ends, version("meshtraind"), time.time())
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {target}: {error.strerror or error}", "another file with -o") from error
    print(printable(str(target)))
    say(f"{human_bytes(len(page.encode()))}; open it in a browser")


def _log_end(client: Client, summary: JobSummary, rank: int, stages: Stages) -> str:
    """The last lines of a rank's log; or why they are not there."""
    stages.show(f"reading the log of {printable(summary.members[rank].name)}")
    part = LogPart(tail=LOG_LINES)
    try:
        end_bytes = log_end(client, summary.job, rank)
        lines = read_log(
            client, summary.job, rank, part.begin(client, summary.job, rank, end_bytes), end_bytes, raw=False
        )
        return without_colours("\n".join(line for line, _ in lines))
    except RequestError as error:
        return f"(not here: {error})"
