"""`get`: what the scripts wrote to their output folders, from whichever devices they ran on."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated

import typer

from meshtrain.cli.connection import ask, connected
from meshtrain.cli.errors import CliError, reported
from meshtrain.cli.jobs import find_job, has_ended
from meshtrain.cli.logpieces import PIECE_TIMEOUT_S
from meshtrain.cli.options import DataDir
from meshtrain.cli.progress import Stages
from meshtrain.cli.terminal import say
from meshtrain.client import Client
from meshwire import limits
from meshwire.files import check_path, human_bytes
from meshwire.messages.job import Fetch, Fetched, JobSummary, ListOutputs, OutputFile, Outputs
from meshwire.text import printable

EXISTING_SHOWN = 5


@reported
def get(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Id or prefix of one; the latest job without it.")
    ] = None,
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="Only this file or folder, e.g. rank0/model.pt.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Where to; else a folder named by the id.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Fetch a job's results. There is one folder per rank: rank0, rank1 and so on."""
    with connected(data_dir) as client:
        summary = find_job(client, job)
        files = _chosen(client, summary, path)
        folder = output if output is not None else Path(summary.job)
        targets = {_target(folder, file): file for file in files}
        if len(targets) < len(files):
            raise CliError(f"job {summary.job} lists a file twice; nothing was fetched")
        if not force:
            _check_free(targets)
        total_bytes = sum(file.size_bytes for file in files)
        with Stages() as stages:
            done_bytes = 0
            for target, file in targets.items():

                def tell(piece_bytes: int) -> None:
                    nonlocal done_bytes
                    done_bytes += piece_bytes
                    stages.show(f"fetching results of {summary.job}", done_bytes, max(total_bytes, done_bytes))

                _fetch(client, summary.job, file, target, tell)
    for target in targets:
        print(printable(str(target)))
    say(f"{len(files)} files, {human_bytes(done_bytes)}, below {printable(str(folder))}")
    if not has_ended(summary):
        say(f"The job is {summary.state}: what it writes from now on is not here.")


def _chosen(client: Client, summary: JobSummary, path: str | None) -> list[OutputFile]:
    listed = ask(client, ListOutputs(job=summary.job), Outputs, name="list of results")
    files = list(listed.files)
    if listed.omitted:
        say(f"note: {listed.omitted} more files are not listed and not fetched: write archives, not so many files")
    if not files:
        raise CliError(
            f"job {summary.job} ({summary.state}) has written nothing to its output folders",
            "mt.output_dir() in the script: files written there are fetched by `meshtrain get`",
        )
    if path is None:
        return files
    wanted = path.strip("/")
    chosen = [
        file for file in files if any(_within(name, wanted) for name in (file.path, f"rank{file.rank}/{file.path}"))
    ]
    if not chosen:
        there = ", ".join(f"rank{file.rank}/{file.path}" for file in files[:EXISTING_SHOWN])
        more = f" and {len(files) - EXISTING_SHOWN} more" if len(files) > EXISTING_SHOWN else ""
        raise CliError(f"job {summary.job} has no result {path!r}; there are {there}{more}")
    return chosen


def _within(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(wanted + "/")


def _target(folder: Path, file: OutputFile) -> Path:
    """Where a result goes. The list came from other devices: its paths are checked before they are used."""
    wrong = check_path(file.path)
    if wrong is not None:
        raise CliError(f"rank {file.rank} offers a file whose path {file.path!r} {wrong}; nothing was fetched")
    return folder.joinpath(f"rank{file.rank}", *file.path.split("/"))


def _check_free(targets: dict[Path, OutputFile]) -> None:
    existing = [str(target) for target in targets if os.path.lexists(target)]
    if existing:
        shown = ", ".join(existing[:EXISTING_SHOWN])
        more = f" and {len(existing) - EXISTING_SHOWN} more" if len(existing) > EXISTING_SHOWN else ""
        raise CliError(f"not overwritten: {shown}{more}", "another folder with -o DIR, or --force")


def _fetch(client: Client, job: str, file: OutputFile, target: Path, tell: Callable[[int], None]) -> None:
    """Writes one result beside its place and moves it there when it is whole. Raises OSError naming the path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".meshtrain-{os.getpid()}.part")
    try:
        with part.open("xb") as file_part:
            _receive(client, job, file, file_part, tell)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _receive(client: Client, job: str, file: OutputFile, part: IO[bytes], tell: Callable[[int], None]) -> None:
    offset_bytes = 0
    while True:
        body = Fetch(
            job=job,
            what="output",
            rank=file.rank,
            path=file.path,
            offset_bytes=offset_bytes,
            max_bytes=limits.FETCH_BYTES_MAX,
        )
        name = f"rank{file.rank}/{file.path}"
        piece = ask(client, body, Fetched, name=name, timeout_s=PIECE_TIMEOUT_S)
        part.write(piece.data)
        offset_bytes += len(piece.data)
        tell(len(piece.data))
        if piece.end:
            return
        if not piece.data:
            raise CliError(f"{name} ended after {offset_bytes} of {piece.total_bytes} bytes", "the same command again")
