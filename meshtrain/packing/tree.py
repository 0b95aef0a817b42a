"""What a job ships: a folder on this machine as a manifest of its files.

Which files git would leave out is decided in `gitignore.py`, which ones look like secrets in `secret_names.py`; whether
other systems can take their names, in `meshwire.jobs.files`.
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtrain.packing import secret_names as secretnames
from meshtrain.packing.gitignore import Ignored, IgnoreError, git_rules, glob_rules
from meshtrain.packing.secret_names import SecretNames
from meshwire import limits
from meshwire.jobs.files import FileEntry, FileManifest, check_manifest, check_path, human_bytes

READ_BYTES = 1 * limits.MIB
PROGRESS_EVERY_S = 0.1
PROBLEMS_SHOWN = 10
LARGEST_SHOWN = 5

# Never of use on another machine; files of a virtual environment point into this one.
SKIPPED_NAMES = frozenset({".git", "__pycache__"})
SKIPPED_SUFFIX = ".pyc"
VIRTUAL_ENVIRONMENT_MARK = "pyvenv.cfg"


class PackError(Exception):
    """The folder cannot be shipped; the message names the files and what to do."""


@dataclass(frozen=True, slots=True)
class PackProgress:
    """How far the reading of a folder is. While files are still being found, nothing has been read."""

    files_done: int
    files_found: int
    bytes_done: int
    bytes_found: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A folder ready to be shipped.

    Attributes:
        root: the folder, without links; `root / entry.path` is the source of an entry.
        notes: what was left out and the user may not expect, one sentence each.
    """

    root: Path
    manifest: FileManifest
    notes: tuple[str, ...]


OnProgress = Callable[[PackProgress], None]


@dataclass(frozen=True, slots=True)
class _Found:
    path: str  # relative to the root, POSIX
    size_bytes: int
    executable: bool


def scan(
    root: Path,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    on_progress: OnProgress | None = None,
    *,
    may_be_empty: bool = False,
) -> Packed:
    """The source folder of a job, as git sees it: what .gitignore files name stays here, and so do secrets.

    Args:
        include: patterns in .gitignore's notation, relative to `root`, that ship although git ignores them. Secrets
            do if a pattern names them or the folder of secrets that they lie in; one that names just any folder above
            them does not mean them.
        exclude: patterns that stay here in any case.
        on_progress: called about ten times a second, in this thread.
        may_be_empty: else a folder without a file to ship is an error.

    Raises:
        PackError: a link, an unreadable file, a name that other systems refuse, too much, or nothing at all.
    """
    hint = "leave files out with --exclude or a .gitignore, and ship a data set with --data"
    return _pack(root, include, exclude, True, limits.SOURCE_BYTES_MAX, hint, on_progress, may_be_empty=may_be_empty)


def scan_data(root: Path, on_progress: OnProgress | None = None, include: Sequence[str] = ()) -> Packed:
    """A data folder, whole: data sets are what .gitignore files name. Only what can be nothing but a secret stays here.

    Args:
        include: patterns, relative to `root`, of such secrets that ship nevertheless.

    Raises:
        PackError: as `scan` does.
    """
    hint = "move what the job does not need out of the data folder"
    return _pack(root, include, (), False, limits.DATA_BYTES_MAX, hint, on_progress)


def _pack(
    root: Path,
    include: Sequence[str],
    exclude: Sequence[str],
    honour_git: bool,
    bytes_max: int,
    hint: str,
    on_progress: OnProgress | None,
    *,
    may_be_empty: bool = False,
) -> Packed:
    if not root.is_dir():
        raise PackError(f"{root} is not a folder")
    root = root.resolve()
    report = _Reporter(on_progress)
    try:
        rules = glob_rules(include, "--include"), glob_rules(exclude, "--exclude")
        walk = _Walk(root, *rules, SecretNames(in_code=honour_git), hint, report)
        walk.run(git_rules(root) if honour_git else None)
    except IgnoreError as error:
        raise PackError(str(error)) from error
    found = sorted(walk.found, key=lambda file: file.path)
    total_bytes = sum(file.size_bytes for file in found)
    if total_bytes > bytes_max:
        largest = sorted(found, key=lambda file: file.size_bytes, reverse=True)[:LARGEST_SHOWN]
        names = "\n".join(f"  {human_bytes(file.size_bytes):>10}  {file.path}" for file in largest)
        raise PackError(
            f"{root} holds {human_bytes(total_bytes)}, at most {human_bytes(bytes_max)} can be shipped. "
            f"The largest files:\n{names}\nTo make it smaller, {hint}."
        )
    _raise_problems(root, walk.problems, hint)
    if not found and not may_be_empty:
        raise PackError(f"{root} has no file to ship; see .gitignore, --include and --exclude")
    manifest = _hash(root, found, report, hint)
    reason = check_manifest(manifest, bytes_max)
    if reason is not None:
        raise PackError(f"{root} cannot be shipped: {reason}. Rename one, or {hint}.")
    where = "" if honour_git else " of the data folder"
    if walk.secrets_left_out:
        walk.notes.append(secretnames.left_out(sorted(walk.secrets_left_out), where))
    if walk.secrets_shipped:
        walk.notes.append(secretnames.shipped(sorted(walk.secrets_shipped), where and " in the data folder"))
    return Packed(root, manifest, tuple(walk.notes))


def _raise_problems(root: Path, problems: list[str], hint: str) -> None:
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:PROBLEMS_SHOWN])
        more = f"\n  ... and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
        raise PackError(f"{root} cannot be shipped:\n{shown}{more}\nMend these, or {hint}.")


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder yet to be walked.

    Attributes:
        git: git's rules above it, or None where git is not asked.
        left_out: git ignores it or it is a secret, and only what is included by name ships from it.
        included: `--include` names it or a folder above it.
        secret: it holds secrets by its own name, or a folder above it does.
    """

    path: str
    git: Ignored | None
    left_out: bool
    included: bool
    secret: bool = False


class _Walk:
    """Finds the files of a folder. Problems are collected, so that one run names them all."""

    def __init__(
        self,
        root: Path,
        include: Ignored,
        exclude: Ignored,
        secrets: SecretNames,
        hint: str,
        report: "_Reporter",
    ) -> None:
        self.found: list[_Found] = []
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.secrets_left_out: list[str] = []
        self.secrets_shipped: list[str] = []
        self._root = root
        self._include = include
        self._exclude = exclude
        self._secrets = secrets
        self._hint = hint
        self._report = report
        self._pending: list[_Folder] = []
        self._bytes_found = 0

    def run(self, git: Ignored | None) -> None:
        """Walks the whole folder, with git's rules unless `git` is None."""
        self._pending = [_Folder("", git, left_out=False, included=False)]
        while self._pending:
            self._folder(self._pending.pop())

    def _folder(self, at: "_Folder") -> None:
        try:
            with os.scandir(self._root / at.path) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self.problems.append(f"{_shown(at.path or '.')}: the folder cannot be read: {error.strerror}")
            return
        git = at.git if at.git is None or at.left_out else at.git.descend(self._root, at.path)
        for entry in listed:
            path = f"{at.path}/{entry.name}" if at.path else entry.name
            self._entry(entry, path, git, at)

    def _entry(self, entry: os.DirEntry[str], path: str, git: Ignored | None, parent: "_Folder") -> None:
        if entry.name in SKIPPED_NAMES or entry.name.endswith(SKIPPED_SUFFIX):
            return
        is_folder = entry.is_dir(follow_symlinks=False)
        if self._exclude.decide(path, is_folder):
            return
        verdict = self._include.decide(path, is_folder)
        included = parent.included if verdict is None else verdict
        ignored = parent.left_out or (git is not None and bool(git.decide(path, is_folder)))
        left_out = ignored and not included
        # A link to an environment is one as well.
        if os.path.isfile(os.path.join(entry.path, VIRTUAL_ENVIRONMENT_MARK)):
            if not left_out:
                self.notes.append(f"{_shown(path)} was left out: a virtual environment works on this machine only")
            return
        secret = parent.secret or self._secrets.names(path, is_folder)
        meant = verdict or (verdict is None and parent.secret and parent.included)
        if secret and not meant:
            if not left_out:
                self.secrets_left_out.append(_shown(path) + ("/" if is_folder else ""))
            left_out, included = True, False
        if is_folder:
            if not left_out or self._include.rules:  # a file deep inside may be included
                self._pending.append(_Folder(path, git, left_out, included, secret))
        elif not left_out:
            if secret:
                self.secrets_shipped.append(_shown(path))
            self._file(entry, path)

    def _file(self, entry: os.DirEntry[str], path: str) -> None:
        if entry.is_symlink():
            target = _shown(os.readlink(entry.path))
            self.problems.append(f"{_shown(path)}: a symbolic link (to {target}); put the file or folder itself there")
            return
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError as error:
            self.problems.append(f"{_shown(path)}: cannot be read: {error.strerror}")
            return
        if not stat.S_ISREG(status.st_mode):
            self.notes.append(f"{_shown(path)} was left out: a socket, pipe or device")
            return
        reason = check_path(path)
        if reason is not None:
            self.problems.append(f"{_shown(path)}: its path {reason}")
            return
        if len(self.found) >= limits.FILES_MAX:
            raise PackError(
                f"{self._root} has more than {limits.FILES_MAX} files, which cannot be shipped; {self._hint}, "
                "or put many small files into few large ones"
            )
        self.found.append(_Found(path, status.st_size, bool(status.st_mode & stat.S_IXUSR)))
        self._bytes_found += status.st_size
        self._report(PackProgress(0, len(self.found), 0, self._bytes_found))


def _hash(root: Path, found: list[_Found], report: "_Reporter", hint: str) -> FileManifest:
    entries: list[FileEntry] = []
    problems: list[str] = []
    bytes_found = sum(file.size_bytes for file in found)
    bytes_done = 0
    for file in found:
        sha = hashlib.sha256()
        size_bytes = 0
        try:
            with (root / file.path).open("rb") as reader:
                while block := reader.read(READ_BYTES):
                    sha.update(block)
                    size_bytes += len(block)
                    if size_bytes > file.size_bytes:
                        break
                    report(PackProgress(len(entries), len(found), bytes_done + size_bytes, bytes_found))
        except OSError as error:
            problems.append(f"{file.path}: cannot be read: {error.strerror}")
            continue
        if size_bytes != file.size_bytes:
            problems.append(f"{file.path}: changed while it was being read; something is still writing to it")
            continue
        bytes_done += size_bytes
        entries.append(
            FileEntry(path=file.path, size_bytes=size_bytes, sha256=sha.digest(), executable=file.executable)
        )
    _raise_problems(root, problems, hint)
    return FileManifest(entries=tuple(entries))


def _shown(path: str) -> str:
    """A path that any terminal can print."""
    return path if path.isprintable() else ascii(path)


class _Reporter:
    """Passes progress on, not more often than eyes can use it."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._next_s = time.monotonic() + PROGRESS_EVERY_S

    def __call__(self, progress: PackProgress) -> None:
        if self._on_progress is None or time.monotonic() < self._next_s:
            return
        self._on_progress(progress)
        self._next_s = time.monotonic() + PROGRESS_EVERY_S
