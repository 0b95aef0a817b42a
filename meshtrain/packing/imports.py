"""Which packages a script cannot do without: modules that it and the files shipped with it import, whatever happens."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from meshwire import limits
from meshwire.jobs.files import FileManifest

FILES_MAX = 500  # of a script's own that are read
FILE_BYTES_MAX = 2**20
# Known otherwise: a device without torch takes part in no job, and one without meshtrain is none.
GIVEN = frozenset({"torch", "meshtrain", "meshtraind", "meshwire", "numpy"})
# A script that says where modules are found finds them where nobody else can tell.
OWN_PATHS = ("sys.path", "addsitedir", "sys.meta_path", "PYTHONPATH")


def modules_needed(source: FileManifest, root: Path, script: str, *, as_module: bool = False) -> tuple[str, ...]:
    """The top-level modules, beside Python's own, that `script` needs to get as far as its last import.

    Args:
        as_module: it is run as by `python -m`: from `root`, where its imports are looked for, and after its packages.

    Only imports at the top of a module count: what stands in a function, or below `try` or `if`, may be left out. Empty
    where a file changes where modules are found.
    """
    needed: set[str] = set()
    place = _place(script, as_module=as_module)
    for file in _followed(source, root, script, place):
        text = _text(root / file)
        if any(mark in text for mark in OWN_PATHS):
            return ()
        for module, level in _imports(text):
            name = module.partition(".")[0]
            asked = name.isascii() and len(name) <= limits.MODULE_CHARS_MAX  # others no package has
            if asked and not level and not _is_shipped(source, place / name):
                needed.add(name)
    return tuple(sorted(needed - sys.stdlib_module_names - GIVEN))


GROUPS = ("torch.distributed", "accelerate", "lightning", "pytorch_lightning", "transformers")


def uses_process_groups(source: FileManifest, root: Path, script: str, *, as_module: bool = False) -> bool:
    """Whether a script exchanges its gradients by torch.distributed, itself or by a library, and not by mt.prepare:
    none of its files imports meshtrain."""
    found = False
    for file in _followed(source, root, script, _place(script, as_module=as_module)):
        for module, level in _imports(_text(root / file)):
            if not level and module.partition(".")[0] == "meshtrain":
                return False
            found |= not level and any(module == name or module.startswith(f"{name}.") for name in GROUPS)
    return found


def _place(script: str, *, as_module: bool) -> PurePosixPath:
    """The folder in which a script's imports are looked for first."""
    return PurePosixPath() if as_module else PurePosixPath(script).parent


def _followed(source: FileManifest, root: Path, script: str, place: PurePosixPath) -> Iterator[str]:
    """The script, and every shipped file that comes with its imports, each once; of a module its packages, too."""
    there = {entry.path for entry in source.entries}
    packages = [folder for folder in PurePosixPath(script).parents if folder != place and folder.is_relative_to(place)]
    waiting = [script, *(path for folder in packages if (path := f"{folder}/__init__.py") in there)]
    begun = set(waiting)
    while waiting and len(begun) <= FILES_MAX:
        file = waiting.pop()
        yield file
        for module, level in _imports(_text(root / file)):
            bases = [place] if not level else list(PurePosixPath(file).parents)[level - 1 : level]
            for found in (path for base in bases for path in _files_of(base, module)):
                if found in there and found not in begun:
                    begun.add(found)
                    waiting.append(found)


def _imports(text: str) -> Iterator[tuple[str, int]]:
    """(module, level) of what is imported at the top of a module. What cannot be read imports nothing: its error is
    told where it runs."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module, node.level
            for alias in node.names:  # each may be a module of a package
                if node.level or "." in module:
                    yield f"{module}.{alias.name}".lstrip("."), node.level


def _files_of(base: PurePosixPath, module: str) -> Iterator[str]:
    """The files that importing a module may run, its packages' included, as paths of the manifest."""
    place = base
    for part in module.split("."):
        place = place / part if part else place
        yield f"{place}.py"
        yield f"{place}/__init__.py"


def _is_shipped(source: FileManifest, place: PurePosixPath) -> bool:
    """Whether a module of this name lies beside the script: a file, a folder, or a compiled one."""
    begins = (f"{place}.", f"{place}/")
    return any(entry.path.startswith(begins) for entry in source.entries)


def _text(path: Path) -> str:
    try:
        return path.read_bytes()[:FILE_BYTES_MAX].decode("utf-8", errors="replace")
    except OSError:
        return ""
