"""`top`: the peers of a job, live; `metrics`: the same figures for Prometheus."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from meshtrain.cli.ui.completion import complete_jobs
from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.errors import CliError, reported
from meshtrain.cli.ui.job import find_job, list_jobs
from meshtrain.cli.ui.options import DataDir, Json
from meshtrain.cli.ui.peer_table import print_peers, render_peers
from meshtrain.cli.ui.terminal import console, plain, print_json, say
from meshtrain.client import Client, ask
from meshtrain.following.watching import has_ended, outcome_lines, watch_job
from meshwire.messages.job import JobSummary
from meshwire.messages.local import GetPeers, GetStatus, Peers, Status

REFRESHES_PER_S = 4


@reported
def top(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Id, a prefix of it, or name; else the latest job that runs.",
            autocompletion=complete_jobs,
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON at every update.")] = False,
) -> None:
    """Show a job's devices live. Who is ahead, who is late, who waits for whom and why; ctrl-C ends it, not the job.

    PART: in, or back after it was lost; loading the state of the others; forwards, with no learner of its own; rests,
    as its owner has set; lost; left. AHEAD: rounds that a device has taken part in and not applied yet. AGE: rounds
    that were missing in the weights of its newest contribution. NULLS: rounds that went on without it. Without a
    terminal one table is printed.
    """
    with connected(data_dir) as client:
        seen = _chosen(client, job)
        try:
            if as_json:
                seen = watch_job(client, seen.job, _print_line, say)
                _print_line(seen)
            elif console().is_terminal and not has_ended(seen):
                seen = _live(client, seen)
                print_peers(seen)
            else:
                print_peers(seen)
        except KeyboardInterrupt:
            return
    if has_ended(seen) and not as_json:
        for line in outcome_lines(seen):
            say(line)


def _chosen(client: Client, prefix: str | None) -> JobSummary:
    """The job that is to be shown. Raises CliError."""
    if prefix is None:
        running = [job for job in list_jobs(client) if not has_ended(job)]
        if running:
            return running[0]
    return find_job(client, prefix)


def _live(client: Client, job: JobSummary) -> JobSummary:
    from rich.live import Live

    out = console()
    with Live(render_peers(job), console=out, transient=True, refresh_per_second=REFRESHES_PER_S) as live:
        return watch_job(client, job.job, lambda seen: live.update(render_peers(seen)), out.print)


def _print_line(job: JobSummary) -> None:
    print(json.dumps(plain(job), allow_nan=False), flush=True)


@reported
def metrics(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write there, whole or not at all, and print nothing."),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Print what this device and its jobs do, for Prometheus. A timer that writes it where node_exporter's textfile
    collector looks is enough: nothing listens for it, and nobody on the network can ask.
    """
    with connected(data_dir) as client:
        status = ask(client, GetStatus(), Status, name="status")
        peers = ask(client, GetPeers(), Peers, name="list of peers")
        jobs = [job for job in list_jobs(client) if not has_ended(job)]
    if as_json:
        print_json({"status": plain(status), **plain(peers), "jobs": [plain(job) for job in jobs]})
        return
    from meshtrain.following.exposition import exposition  # its library takes as long to import as all else here

    text = exposition(status, peers, jobs)
    if output is None:
        typer.echo(text, nl=False)
        return
    part = output.with_name(f".{output.name}.part")
    try:
        part.write_text(text, "utf-8")
        os.replace(part, output)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CliError(f"{output} cannot be written: {error.strerror}", "meshtrain metrics") from error
