"""`submit -r`: the packages that a script needs, read from requirements.txt or pyproject.toml."""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from meshtrain.client import Client, ask
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.local import EnvironmentMade, MakeEnvironment, SubmitProgress

MAKE_TIMEOUT_S = 3600.0  # the daemon gives up long before
PYPROJECT = "pyproject.toml"
INSTEAD = "a line with the package's name, as in einops>=0.8"


def read_requirements(files: Sequence[Path]) -> tuple[str, ...]:
    """What these files ask for, each once. Raises CliError, which names file and line."""
    found: dict[str, None] = {}
    for file in files:
        for where, text in _lines_of(file, ()):
            found[_checked(where, text)] = None
    if len(found) > limits.REQUIREMENTS_MAX:
        raise CliError(f"-r: {len(found)} packages; at most {limits.REQUIREMENTS_MAX} are installed for a job")
    return tuple(found)


def interpreter_with(client: Client, requirements: tuple[str, ...], stages: Stages) -> str:
    """The Python here that has these packages, made now if there is none: the script's steps are timed by it."""

    def show(event: Wire) -> None:
        if isinstance(event, SubmitProgress):
            stages.show(event.text)

    made = ask(
        client,
        MakeEnvironment(requirements=requirements),
        EnvironmentMade,
        name="make environment",
        timeout_s=MAKE_TIMEOUT_S,
        on_event=show,
    )
    return made.python


def _lines_of(file: Path, within: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """(where it stands, a requirement) of a file and those that it includes."""
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"-r {file} cannot be read: {error}") from error
    if file.name == PYPROJECT:
        yield from ((str(file), one) for one in _of_pyproject(file, text))
        return
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        wanted = line.split(" #", 1)[0].strip()
        where = f"{file}, line {number}"
        if not wanted or wanted.startswith("#"):
            continue
        option, _, rest = (
            wanted.replace("=", " ", 1).partition(" ") if wanted.startswith("--") else wanted.partition(" ")
        )
        if option in ("-r", "--requirement"):
            included = file.parent / rest.strip()
            if included in (file, *within):
                raise CliError(f"{where}: {included} includes itself")
            yield from _lines_of(included, (*within, file))
        elif wanted.startswith("-"):
            raise CliError(
                f"{where}: {wanted}: pip's options are each laptop's own affair (PIP_INDEX_URL or pip.conf there), and "
                "folders of this laptop are not there",
                INSTEAD,
            )
        else:
            yield where, wanted


def _of_pyproject(file: Path, text: str) -> list[str]:
    try:
        project = tomllib.loads(text).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise CliError(f"-r {file}: {error}") from error
    found = project.get("dependencies", []) if isinstance(project, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise CliError(f"-r {file}: project.dependencies is not a list of strings")
    return found


def _checked(where: str, text: str) -> str:
    try:
        wanted = Requirement(text)
    except InvalidRequirement as error:
        raise CliError(f"{where}: {text}: {str(error).splitlines()[0]}", INSTEAD) from None
    if wanted.url is not None and wanted.url.startswith("file:"):
        raise CliError(f"{where}: {text}: a file of this laptop is not there on the others", INSTEAD)
    written = str(wanted)
    if len(written) > limits.REQUIREMENT_CHARS_MAX:
        raise CliError(f"{where}: more than {limits.REQUIREMENT_CHARS_MAX} characters")
    return written
