"""What a submitted job ships: the script, the working directory around it, a data folder."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from meshwire.jobs.files import FileManifest, check_path

if TYPE_CHECKING:
    from meshtrain.packing.tree import Packed

DATA_FOLDER = "data"  # below the working directory


def relative_script(root: Path, script: str) -> str:
    """The script as a POSIX path below the working directory. Raises CliError."""
    path = Path(script)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise CliError(f"{script} {what}; name the training script", "meshtrain init --example gpt, for one that works")
    if path.suffix == ".ipynb":
        raise CliError(
            f"{script} is a notebook, and a job runs a Python script",
            f"jupyter nbconvert --to script {script} && meshtrain submit {path.with_suffix('.py')}",
        )
    try:
        return path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise CliError(
            f"{script} lies outside the working directory {root}, which is what is shipped",
            f"cd {path.resolve().parent} && meshtrain submit {path.name}",
        ) from None


def pack(
    root: Path, script: str, data: Path | None, include: Sequence[str], exclude: Sequence[str], stages: Stages
) -> "tuple[Packed, Packed | None]":
    """Reads the working directory `root`, and the data folder, which is not shipped twice.

    Raises CliError, also where the script itself would stay behind.
    """
    from meshtrain.packing.tree import PackError, PackProgress, scan, scan_data

    def show(what: str, at: PackProgress) -> None:
        verb = "reading" if at.files_done or at.bytes_done else "looking through"
        stages.show(f"{verb} {what}", at.bytes_done, at.bytes_found)

    try:
        packed_data = None
        if data is not None:
            if not data.is_dir():
                raise CliError(f"--data {data} is not a folder")
            packed_data = scan_data(data, lambda at: show("the data folder", at), include)
            exclude = (*exclude, *(_anchored(root, at) for at in _places(root, data)))
        source = scan(root, include, exclude, lambda at: show("the working directory", at))
    except PackError as error:
        raise CliError(str(error)) from error
    if not any(entry.path == script for entry in source.manifest.entries):
        raise CliError(
            f"{script} would not be shipped: it is left out by --exclude, a .gitignore, or its name, as a secret",
            f"meshtrain submit --include {script} {script}",
        )
    return source, packed_data


def data_place(root: Path, data: Path, source: FileManifest) -> str | None:
    """The place where the script finds the data folder below its working directory: where it is here, else ./data,
    unless something else is there, or the folder is the working directory itself."""
    if data.resolve() == root.resolve():
        return None
    places = _places(root, data)
    if places:  # other systems may not take the name; then only mt.data_dir() finds it
        return places[0] if check_path(places[0]) is None else None
    first_parts = {entry.path.partition("/")[0].casefold() for entry in source.entries}
    return None if DATA_FOLDER in first_parts else DATA_FOLDER


def _places(root: Path, data: Path) -> tuple[str, ...]:
    """The data folder's names below `root`: as it was typed, and where links lead; none where it lies elsewhere."""
    named = Path(os.path.abspath(data)), data.resolve()
    roots = Path(os.path.abspath(root)), root.resolve()
    below = (path.relative_to(at).as_posix() for path in named for at in roots if path.is_relative_to(at))
    return tuple(dict.fromkeys(path for path in below if path != "."))


def _anchored(root: Path, place: str) -> str:
    """The pattern that names a folder below `root`, so that data is not shipped a second time as source."""
    escaped = "".join(f"\\{char}" if char in "\\*?[]!# " else char for char in place)
    return f"/{escaped}" if (root / place).is_symlink() else f"/{escaped}/"


def write(manifest: FileManifest, file: Path) -> str:
    """Puts a manifest where the daemon reads it. Returns that path."""
    file.write_bytes(manifest.pack())
    return str(file)
