"""What a submitted job ships: the script, the working directory around it, a data folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages

if TYPE_CHECKING:
    from meshtrain.packing.tree import Packed


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
    from meshtrain.packing.shipped_folders import pack_folders
    from meshtrain.packing.tree import PackError, PackProgress

    def show(what: str, at: PackProgress) -> None:
        verb = "reading" if at.files_done or at.bytes_done else "looking through"
        stages.show(f"{verb} {what}", at.bytes_done, at.bytes_found)

    try:
        source, packed_data = pack_folders(root, data, include, exclude, show)
    except PackError as error:
        raise CliError(str(error)) from error
    if not any(entry.path == script for entry in source.manifest.entries):
        raise CliError(
            f"{script} would not be shipped: it is left out by --exclude, a .gitignore, or its name, as a secret",
            f"meshtrain submit --include {script} {script}",
        )
    return source, packed_data
