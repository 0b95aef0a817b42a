"""What a submitted job ships: the script, the working directory around it, a data folder."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from meshtrain.cli.ui.errors import BadCommandLine, CliError
from meshtrain.cli.ui.progress import Stages

if TYPE_CHECKING:
    from meshtrain.packing.tree import Packed


SOURCE_FOLDERS = ("src", "lib", "python")  # where packages lie in folders that hold more than them


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


def module_script(root: Path, module: str) -> str:
    """The file that `python -m MODULE` runs, started in the working directory, as a path below that. Raises
    CliError."""
    parts = module.split(".")
    is_name = all(part.isidentifier() for part in parts)
    looked_for = (PurePosixPath(*parts[:-1], f"{parts[-1]}.py"), PurePosixPath(*parts, "__main__.py"))
    for path in looked_for if is_name else ():
        if (root / path).is_file():
            return path.as_posix()
    if not is_name or parts[-1] == "py":
        meant = module.removesuffix(".py").strip("/").replace("/", ".")
        meant = meant if all(part.isidentifier() for part in meant.split(".")) else "package.module"
        raise BadCommandLine(
            f"-m {module}: behind -m stands a module's name, with dots and without .py", f"meshtrain submit -m {meant}"
        )
    tried = " and ".join(path.as_posix() for path in looked_for)
    if (root / PurePosixPath(*parts)).is_dir():
        raise CliError(
            f"-m {module}: {module} is a package without a __main__.py, so there is nothing to run in it; looked for "
            f"{tried} in {root}",
            f"meshtrain submit -m {module}.train, with the name of a module in it",
        )
    way_on = "cd into the folder that holds its outermost package, and the same again"
    for folder in SOURCE_FOLDERS:
        if any((root / folder / path).is_file() for path in looked_for):
            way_on = f"cd {folder} && meshtrain submit -m {module}"
    raise CliError(
        f"-m {module}: there is no such module in the working directory {root}, which is what is shipped; looked for "
        f"{tried} there",
        way_on,
    )


def program_of(root: Path, script: str, *, as_module: bool) -> str:
    """What is run, typed as a file or (`as_module`) as a module's name, as a path below the working directory. Raises
    CliError."""
    return module_script(root, script) if as_module else relative_script(root, script)


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
