"""How a job's script failed: from the exception in its process to the lines that a person is shown."""

import json
import os
import re
import signal
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

RECORD_BYTES_MAX = 16 * 1024
CHARS_MAX = 2000  # of what is shown; all of it is in the log
LINES_MAX = 12
OURS = ("meshtrain.errors", __name__)
NOT_THEIRS = ("site-packages", "dist-packages")  # a virtual environment may lie in the folder that was submitted
# Of ours: the script has no part in it. Not RequestError: what the daemon refuses it refuses again.
OF_THE_MESH = ("ConnectionLost", "JobStopped")
HOPELESS = (
    "UsageError",
    "NotSupported",
    "NonFiniteGradient",
)  # of ours: the script itself is to be changed
OF_TORCH = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
IN_A_WORKER = "Original Traceback (most recent call last):"  # torch's DataLoader hands on the worker's as text
FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?$', re.MULTILINE)
MISSING_PACKAGE = re.compile(r"^ModuleNotFoundError: No module named '([^'.]+)")


@dataclass(frozen=True)
class ScriptError:
    """What a script's process tells its daemon of the exception that ends it.

    Attributes:
        kind: the exception's class.
        what: class and message, as Python shows them; of meshtrain's own errors the message alone.
        place: the person's file and line, e.g. "train.py, line 6, in hook"; empty where no line of theirs was running.
        code: that line.
        hopeless: the same script would end by it again.
        of_mesh: it was the mesh that failed, not the script.
    """

    kind: str
    what: str
    place: str
    code: str
    hopeless: bool
    of_mesh: bool = False

    @classmethod
    def of(cls, error: BaseException, root: Path) -> "ScriptError":
        """Describes an exception.

        Args:
            root: the folder that was submitted, as the script sees it; paths are shown relative to it.
        """
        kind = type(error).__name__
        if isinstance(error, SyntaxError) and (file := _theirs(error.filename or "<none>", root)) is not None:
            place = f"{file}, line {error.lineno}"
            return cls(kind, f"{kind}: {error.msg}", place, (error.text or "").strip(), hopeless=True)
        place, code = _place(error.__traceback__, root)
        ours = type(error).__module__ in OURS
        hopeless = isinstance(error, ImportError) or (ours and kind in HOPELESS)
        if isinstance(error, SystemExit):
            return cls(kind, _exit_text(error), place, code, hopeless=False)
        what = "".join(traceback.format_exception_only(error)).strip()
        if ours:
            what = what.partition(": ")[2] or what
        elif IN_A_WORKER in what:
            what, place, code = _in_worker(what, place, code, root)
        return cls(kind, what, place, code, hopeless, ours and kind in OF_THE_MESH)

    def text(self) -> str:
        """The error in a person's words: where, what, and the line of code."""
        lines = (f"{self.place}: {self.what}" if self.place else self.what).splitlines()
        text = "\n".join(lines[:LINES_MAX])
        if len(lines) > LINES_MAX or len(text) > CHARS_MAX:
            text = f"{text[:CHARS_MAX]} ..."
        if self.code:
            text += f"\n    {self.code[:CHARS_MAX]}"
        if package := MISSING_PACKAGE.match(self.what):
            text += (
                f"\nInstall {package[1]} into the Python environment of meshtraind there; if it is a file of yours, "
                "submit from a folder that holds it."
            )
        return text

    @property
    def of_another_rank(self) -> bool:
        """Whether it may follow from the end of another rank's script, of which gloo tells no more."""
        return self.kind in ("ConnectionLost", *OF_TORCH) or (self.kind == "RuntimeError" and "gloo" in self.what)

    def same(self, other: "ScriptError | None") -> bool:
        """Whether this is the same exception at the same line."""
        return other is not None and (self.kind, self.place) == (other.kind, other.place)

    def pack(self) -> bytes:
        """The bytes that `unpack` reads; what is too long is cut."""
        cut = {name: value[:CHARS_MAX] if isinstance(value, str) else value for name, value in asdict(self).items()}
        return json.dumps(cut).encode("utf-8", "backslashreplace")

    @classmethod
    def unpack(cls, record: bytes) -> "ScriptError | None":
        """Reads what `pack` has made; None for anything else: a process that was killed may have written half of it."""
        try:
            values = json.loads(record)
            made = cls(**values)
        except (ValueError, TypeError, RecursionError):
            return None
        strings = all(isinstance(value, str) for value in (made.kind, made.what, made.place, made.code))
        return made if strings and isinstance(made.hopeless, bool) and isinstance(made.of_mesh, bool) else None


def explain_end(code: int, error: ScriptError | None) -> str:
    """Why a script's process ended, for a person.

    Args:
        code: its exit code; negative: the signal that killed it.
        error: what it has told.
    """
    if code >= 0:
        return error.text() if error is not None else f"the script ended with exit code {code}"
    try:
        name = f"{-code} ({signal.Signals(-code).name})"
    except ValueError:
        name = str(-code)
    killed = name.endswith("(SIGKILL)")
    memory = "; Linux does that when memory runs out" if killed else ""
    return f"the script was killed by signal {name}{memory}"


def _exit_text(error: SystemExit) -> str:
    return f"the script ended with exit code {error.code}" if isinstance(error.code, int) else str(error.code)


def _place(trace: TracebackType | None, root: Path) -> tuple[str, str]:
    """The innermost line of the person's, and its code."""
    for frame in reversed(traceback.extract_tb(trace)):
        if (file := _theirs(frame.filename, root)) is not None:
            return _named(file, frame.lineno or 0, frame.name), (frame.line or "").strip()
    return "", ""


def _named(file: str, line: int, function: str) -> str:
    inside = "" if function in ("<module>", "") else f", in {function}"
    return f"{file}, line {line}{inside}"


def _theirs(file: str, root: Path) -> str | None:
    """A file of the person's, relative to the folder that was submitted; None for any other."""
    folder = os.path.realpath(root)
    relative = os.path.relpath(os.path.realpath(os.path.join(folder, file)), folder)
    parts = Path(relative).parts
    if file.startswith("<") or parts[:1] == ("..",) or any(name in parts for name in NOT_THEIRS):
        return None
    return relative


def _in_worker(what: str, place: str, code: str, root: Path) -> tuple[str, str, str]:
    """What has happened in a DataLoader's worker process, whose traceback is the message: (what, place, code)."""
    text = what.rpartition(IN_A_WORKER)[2]
    rest = text
    for frame in FRAME.finditer(text):
        below = text[frame.end() :].lstrip("\n").splitlines()
        depth = next((at for at, line in enumerate(below) if not line.startswith("    ")), len(below))
        rest = "\n".join(below[depth:])
        if (file := _theirs(frame["file"], root)) is not None:
            place = _named(file, int(frame["line"]), frame["function"] or "")
            code = below[0].strip() if depth else ""
    return rest.strip() or what, place, code
