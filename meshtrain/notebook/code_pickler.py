"""A function and its arguments as cloudpickle makes them, with the source of their code beside them.

What was defined in the notebook travels as compiled code; what was imported travels by name, and is imported there. So
the function runs what the notebook has now. This is code of the person's own, sent to devices that are paired and run
it as their user, as they run scripts; it is loaded in the learner's process and nowhere else, least of all in a daemon.
"""

import io
import linecache
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

FILENAME_AT = 10  # among the arguments of CodeType, from Python 3.11 on; cloudpickle puts "<dynamic-code>" there
PROTOCOL = 4  # read by every Python that meshtrain runs on


class CodeSources:
    """Gives code that travels the name of a file that travels with it, so that tracebacks show its lines there.

    Args:
        folder: that is shipped; files below it keep their place.

    Attributes:
        texts: by name, of cells and of files from elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.texts: dict[str, str] = {}
        self._folder = folder
        self._names: dict[str, str] = {}
        self._others = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))

    def name_for(self, filename: str) -> str:
        """What code from this file calls its file over there."""
        if filename not in self._names:
            self._names[filename] = self._named(filename)
        return self._names[filename]

    def _named(self, filename: str) -> str:
        path = Path(filename)
        if path.is_absolute() and path.is_relative_to(self._folder):
            return path.relative_to(self._folder).as_posix()
        lines = linecache.getlines(filename)
        if not lines or filename.startswith(self._others):
            return filename
        name = cell_name(filename) or path.name.strip("<>")
        while name in self.texts:
            name = f"{name}'"
        self.texts[name] = "".join(lines)
        return name


def cell_name(filename: str) -> str | None:
    """What a notebook calls the cell that was compiled under this name: "In[3]"; None for no cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    formatted = shell.compile.format_code_name(filename) if shell is not None else None
    return None if formatted is None else str(formatted[1])


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """cloudpickle's pickler, which notes what it sends.

    Attributes:
        functions: those whose code travels.
        modules: names of those that are imported over there.
    """

    def __init__(self, file: io.BytesIO, sources: CodeSources) -> None:
        self.functions: list[FunctionType] = []
        self.modules: set[str] = set()
        self._sources = sources
        table = cloudpickle.Pickler.dispatch_table
        self._reduce_code: Callable[[CodeType], Any] = table[CodeType]
        self.dispatch_table = ChainMap({CodeType: self._reduce_renamed}, *table.maps)  # which the next line reads
        super().__init__(file, protocol=PROTOCOL)

    def reducer_override(self, obj: Any) -> Any:
        """cloudpickle's way to reduce functions and classes."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, ModuleType):
            self.modules.add(obj.__name__)
        elif isinstance(obj, FunctionType | type):
            if reduced is not NotImplemented and isinstance(obj, FunctionType):
                self.functions.append(obj)
            elif reduced is NotImplemented and isinstance(obj.__module__, str):
                self.modules.add(obj.__module__)
        return reduced

    def _reduce_renamed(self, code: CodeType) -> Any:
        made, args = self._reduce_code(code)
        name = self._sources.name_for(code.co_filename)
        return made, (*args[:FILENAME_AT], name, *args[FILENAME_AT + 1 :])
