"""`get`: what the scripts wrote to their output folders, from those devices they ran on that can be reached."""

import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.errors import CliError, reported
from meshtrain.cli.ui.exits import EXIT_INCOMPLETE
from meshtrain.cli.ui.job import find_job
from meshtrain.cli.ui.options import DataDir, Json, LatestJob
from meshtrain.cli.ui.progress import Stages
from meshtrain.cli.ui.terminal import print_json, say
from meshtrain.client import Client, ask
from meshtrain.following.outputs import OutputBroken, output_pieces
from meshtrain.following.watching import has_ended
from meshwire.jobs.files import check_path, human_bytes
from meshwire.messages.job import JobSummary, ListOutputs, OutputFile, Outputs
from meshwire.peer_news import joined, name_of
from meshwire.text import printable

EXISTING_SHOWN = 5
FAILURES_MAX = 2  # in a row, of one rank: it is away, and to wait for each of its files in vain takes long
COARSE_NS = 2 * 10**9  # some file systems, of memory sticks for example, keep times in steps of two seconds

Targets = Mapping[Path, OutputFile]


class Incomplete(CliError):
    """What could be reached is here, and the rest can be fetched later."""

    exit_code = EXIT_INCOMPLETE


@reported
def get(
    job: LatestJob = None,
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="Only this file or folder, e.g. rank0/model.pt.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Where to; else a folder named by the id.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist and differ.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="What can be reached is all: exit with 0 without the rest.")
    ] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Fetch a job's results. There is one folder per rank: rank0, rank1 and so on.

    Where a device is away, what can be reached is fetched, and the exit code is 4. The same command completes it when
    the device is back; what is there already is not fetched again. If it never comes back, --partial says that this is
    all.
    """
    with connected(data_dir) as client:
        summary = find_job(client, job)
        listed = ask(client, ListOutputs(job=summary.job), Outputs, name="list of results")
        missing = {rank: why for rank, why in listed.unreached if _may_have(rank, path)}
        files = _chosen(listed, summary, path, known=not missing)
        folder = output if output is not None else Path(summary.job)
        targets = {_target(folder, file): file for file in files}
        if len(targets) < len(files):
            raise CliError(f"job {summary.job} lists a file twice; nothing was fetched")
        wanted = {target: file for target, file in targets.items() if not _is_here(target, file)}
        if not force:
            _check_free(wanted)
        _check_space(folder, wanted, summary)
        lacking = _fetch_all(client, summary.job, wanted, missing)
    if json:
        print_json(_document(summary, folder, targets, missing, lacking))
    _show(folder, targets, wanted, lacking, paths=not json)
    if missing:
        command = " ".join(("meshtrain", "get", summary.job, *(shlex.quote(word) for word in _options(path, output))))
        who = joined([name_of(summary, rank) for rank in sorted(missing)])
        what = "not everything is here:" + "".join(_lines(summary, missing, lacking))
        way_on = f"{command}    (once `meshtrain peers` shows {who} as linked; what is here is not fetched again)"
        if len(lacking) == len(targets):
            raise Incomplete(what, way_on)
        if not partial:
            enough = f"\n  or {command} --partial    (if {who} will not come back: what is here is all)"
            raise Incomplete(what, way_on + enough)
        say(f"note: {what}")
    if not has_ended(summary):
        say(f"The job is {summary.state}: what it writes from now on is not here.")


def _options(path: str | None, output: Path | None) -> list[str]:
    return [*([path] if path is not None else []), *(["-o", str(output)] if output is not None else [])]


def _may_have(rank: int, path: str | None) -> bool:
    """Whether a rank's list could hold what is wanted."""
    named = re.match(r"/*rank([0-9]+)(/|$)", path or "")
    return named is None or int(named[1]) == rank


def _chosen(listed: Outputs, summary: JobSummary, path: str | None, *, known: bool) -> list[OutputFile]:
    """The results that are wanted, of those that are listed. Raises CliError where there is nothing, if all is
    `known`."""
    files = list(listed.files)
    if listed.omitted:
        say(f"note: {listed.omitted} more files are not listed and not fetched: write archives, not so many files")
    if not files and known:
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
    if not chosen and known:
        there = ", ".join(f"rank{file.rank}/{file.path}" for file in files[:EXISTING_SHOWN])
        more = f" and {len(files) - EXISTING_SHOWN} more" if len(files) > EXISTING_SHOWN else ""
        raise CliError(f"job {summary.job} has no result {path!r}; there are {there}{more}")
    return chosen


def _within(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(wanted + "/")


def _target(folder: Path, file: OutputFile) -> Path:
    """The file that a result is written to. The list came from other devices: its paths are checked before they are
    used."""
    wrong = check_path(file.path)
    if wrong is not None:
        raise CliError(f"rank {file.rank} offers a file whose path {file.path!r} {wrong}; nothing was fetched")
    return folder.joinpath(f"rank{file.rank}", *file.path.split("/"))


def _is_here(target: Path, file: OutputFile) -> bool:
    """Whether an earlier `get` has fetched it, and it has changed on neither side: its size and time are the same."""
    try:
        about = target.lstat()
    except OSError:  # then it is not, whatever is in its way
        return False
    if not stat.S_ISREG(about.st_mode) or about.st_size != file.size_bytes or file.changed_ns is None:
        return False
    apart_ns = abs(about.st_mtime_ns - file.changed_ns)
    return apart_ns == 0 or (about.st_mtime_ns % 10**9 == 0 and apart_ns < COARSE_NS)


def _check_free(targets: Targets) -> None:
    existing = [str(target) for target in targets if os.path.lexists(target)]
    if existing:
        shown = ", ".join(existing[:EXISTING_SHOWN])
        more = f" and {len(existing) - EXISTING_SHOWN} more" if len(existing) > EXISTING_SHOWN else ""
        raise CliError(f"not overwritten: {shown}{more}", "another folder with -o DIR, or --force")


def _check_space(folder: Path, targets: Targets, job: JobSummary) -> None:
    """Raises CliError where the results do not fit on the disk."""
    wanted_bytes = sum(file.size_bytes for file in targets.values())
    existing = next((place for place in (folder, *folder.absolute().parents) if place.is_dir()), Path.cwd())
    free_bytes = shutil.disk_usage(existing).free
    if wanted_bytes > free_bytes:
        raise CliError(
            f"{human_bytes(wanted_bytes)} are to be fetched, and {human_bytes(free_bytes)} are free in {existing}",
            f"another disk with -o DIR, or some of it: meshtrain get {job.job} rank0",
        )


def _fetch_all(client: Client, job: str, targets: Targets, missing: dict[int, str]) -> list[OutputFile]:
    """Fetches in the order of the list, in which this device comes first.

    Returns what could not be fetched; of whom, and why, is added to `missing`. Raises CliError where the disk refuses.
    """
    total_bytes = sum(file.size_bytes for file in targets.values())
    lacking: list[OutputFile] = []
    failures: dict[int, int] = {}  # in a row, by rank
    with Stages() as stages:
        done_bytes = 0

        def tell(piece_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += piece_bytes
            stages.show(f"fetching results of {job}", done_bytes, max(total_bytes, done_bytes))

        for target, file in targets.items():
            if failures.get(file.rank, 0) >= FAILURES_MAX:
                lacking.append(file)
                continue
            try:
                _fetch(client, job, file, target, tell)
                failures[file.rank] = 0
            except OutputBroken as error:
                lacking.append(file)
                failures[file.rank] = failures.get(file.rank, 0) + 1
                missing[file.rank] = str(error)
            except OSError as error:
                raise CliError(
                    f"cannot write {target}: {error.strerror or error}; what was fetched before it stays",
                    "the same command again, which fetches only what is missing, or another disk with -o DIR",
                ) from error
    return lacking


def _fetch(client: Client, job: str, file: OutputFile, target: Path, tell: Callable[[int], None]) -> None:
    """Writes one result beside its place and moves it there when it is whole. Raises OSError, OutputBroken."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".meshtrain-{os.getpid()}.part")
    try:
        with part.open("xb") as file_part:
            for piece in output_pieces(client, job, file):
                file_part.write(piece)
                tell(len(piece))
        if file.changed_ns is not None:
            os.utime(part, ns=(file.changed_ns, file.changed_ns))  # by which `_is_here` knows it
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _document(
    job: JobSummary, folder: Path, targets: Targets, missing: Mapping[int, str], lacking: Sequence[OutputFile]
) -> dict[str, Any]:
    gone = {(file.rank, file.path) for file in lacking}
    return {
        "job": job.job,
        "folder": str(folder),
        "files": [
            {
                "rank": file.rank,
                "path": str(target),
                "size_bytes": file.size_bytes,
                "here": (file.rank, file.path) not in gone,
            }
            for target, file in targets.items()
        ],
        "missing": [{"rank": rank, "device": name_of(job, rank), "why": why} for rank, why in sorted(missing.items())],
    }


def _show(
    folder: Path, targets: Targets, wanted: Targets, lacking: Sequence[OutputFile], *, paths: bool = True
) -> None:
    """Prints all that is there now, on stdout (`paths`), and what was done for it."""
    gone = {(file.rank, file.path) for file in lacking}
    here = [target for target, file in targets.items() if (file.rank, file.path) not in gone]
    for target in here if paths else ():
        print(printable(str(target)))
    fetched = [file for file in wanted.values() if (file.rank, file.path) not in gone]
    if here:
        old, where = len(here) - len(fetched), f"below {printable(str(folder))}"
        before = f"{_files(old) if not fetched else old} {'was' if old == 1 else 'were'} here already"
        if not fetched:
            say(f"Nothing is new: {before}, {where}")
            return
        size = human_bytes(sum(file.size_bytes for file in fetched))
        say(f"{_files(len(fetched))} fetched, {size}, {where}{f', {before}' if old else ''}")


def _lines(job: JobSummary, missing: Mapping[int, str], lacking: Sequence[OutputFile]) -> list[str]:
    """A line for each device of whose results something is missing: what, and why."""
    lines = []
    for rank, why in sorted(missing.items()):
        files = [file for file in lacking if file.rank == rank]
        what = (
            f"{_files(len(files))}, {human_bytes(sum(file.size_bytes for file in files))}"
            if files
            else "its files are not known"
        )
        lines.append(f"\n  rank{rank} ({name_of(job, rank)}): {what}; {why}")
    return lines


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
