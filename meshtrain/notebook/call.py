"""A call of a function as it travels: its bytes, the files that go with it, and the script that runs it there."""

import io
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshtrain.errors import MeshtrainError, UsageError
from meshtrain.notebook.exchange import exchange_of
from meshtrain.packing.imports import GIVEN, modules_needed
from meshtrain.packing.tree import Packed
from meshwire import limits

SCRIPT = "mesh_run.py"
CALL = "mesh_run.call"  # what the script runs
RESULT = "mesh_run.result"  # what it writes into its output folder
CALL_BYTES_MAX = 256 * limits.MIB
NAME_CHARS_MAX = 40  # of the function, in texts

_SCRIPT = '''"""Made by mt.session: runs {name} with the arguments that came from a notebook."""

EXCHANGES_BY = {exchange!r}  # the daemon looks here before it starts this

if __name__ == "__main__":
    from meshtrain.notebook.on_device import run_call

    run_call({call!r}, {result!r}, python={python!r}, cloudpickle={cloudpickle!r})
'''


@dataclass(frozen=True, slots=True)
class ShippedCall:
    """What is added to the working directory.

    Attributes:
        name: of the function.
        files: by path: the script, the pickled call, and the source of cells.
        exchange: as `exchange_of` has it.
        modules: top-level ones that have to be there.
    """

    name: str
    files: Mapping[str, bytes]
    exchange: str | None
    modules: tuple[str, ...]


def require_cloudpickle() -> None:
    """Raises UsageError where it is not installed."""
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        raise UsageError(
            "functions of a notebook are sent by cloudpickle, which is not installed here: pip install cloudpickle, "
            "here and on each laptop"
        ) from None


def name_of_function(function: Any) -> str:
    """What a person calls it, safe to show and to put into a script."""
    name = str(getattr(function, "__name__", None) or type(function).__name__)
    return "".join(each if each.isalnum() or each in "_." else "_" for each in name[:NAME_CHARS_MAX]) or "function"


def make_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], source: Packed
) -> ShippedCall:
    """Makes what is sent of a call.

    Args:
        source: the working directory, whose modules are sent as they are.

    Raises UsageError: it cannot be sent; the text says what of it.
    """
    from meshtrain.notebook.code_pickler import CodePickler, CodeSources

    name = name_of_function(function)
    if not callable(function):
        raise UsageError(f"mesh.run takes a function and its arguments, not a {type(function).__name__}")
    sources, file = CodeSources(source.root), io.BytesIO()
    pickler = CodePickler(file, sources)
    try:
        pickler.dump((function, tuple(args), dict(kwargs)))
    except MeshtrainError:
        raise
    except Exception as error:  # of whatever object it is that cannot be pickled
        raise UsageError(
            f"{name} and its arguments cannot be sent to other devices ({type(error).__name__}: {error}): open files, "
            "connections and the like inside the function"
        ) from error
    packed = file.getvalue()
    if len(packed) > CALL_BYTES_MAX:
        raise UsageError(
            f"{name}, its arguments and the variables of the notebook that it uses take "
            f"{len(packed) / limits.MIB:.0f} MiB, at most {CALL_BYTES_MAX // limits.MIB} are sent with each run: put "
            "data into files (data=), which are sent once, and load them inside the function"
        )
    own = _own_files(pickler.modules, source)
    texts = [(source.root / path).read_text("utf-8", "replace") for path in own]
    exchange = exchange_of(pickler.functions, texts, pickler.modules)
    script = _SCRIPT.format(
        name=name,
        exchange=exchange,
        call=CALL,
        result=RESULT,
        python=python_minor(platform.python_version()),
        cloudpickle=version("cloudpickle"),
    )
    files = {SCRIPT: script.encode(), CALL: packed}
    files |= {each: text.encode("utf-8", "replace") for each, text in sources.texts.items()}
    needed = _packages(pickler.modules, own, source)
    return ShippedCall(name, files, exchange, needed)


def python_minor(version_: str) -> str:
    """Of 3.11.7, 3.11: compiled code of functions goes between equal ones only."""
    return ".".join(version_.split(".")[:2])


def _own_files(modules: set[str], source: Packed) -> list[str]:
    """The shipped files of the modules that a call refers to."""
    shipped = {entry.path for entry in source.manifest.entries}
    found = []
    for name in sorted(modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).is_relative_to(source.root):
            path = Path(file).relative_to(source.root).as_posix()
            if path in shipped and path.endswith(".py"):
                found.append(path)
    return found


def _packages(modules: set[str], own: Sequence[str], source: Packed) -> tuple[str, ...]:
    """Top-level modules that the devices need, cloudpickle among them; what is shipped is not asked for."""
    there = {entry.path.partition("/")[0].removesuffix(".py") for entry in source.manifest.entries}
    needed = {name.partition(".")[0] for name in modules} - there - sys.stdlib_module_names - GIVEN - {"__main__"}
    for path in own:
        needed.update(modules_needed(source.manifest, source.root, path))
    usual = sorted(name for name in needed if name.isascii() and name.isidentifier())
    return ("cloudpickle", *(name for name in usual if name != "cloudpickle"))[: limits.MODULES_MAX]
