"""Git's rules for what to leave out: .gitignore files at every level, the deepest that has an opinion decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec, RegexPattern

GITIGNORE = ".gitignore"
FOLDER_MARK = "ps_d"  # pathspec's group at the end of a folder's name


class IgnoreError(Exception):
    """Patterns that cannot be read; the message names their file or option."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One line of a .gitignore. It is matched level by level, as git does, where pathspec would match whole paths.

    pathspec's patterns also match what lies below a folder that they name, and mark where that folder ends. Such
    matches do not count here: with "*", "!*/", "!*.py" they would let a folder's name decide about its files.
    """

    parsed: RegexPattern
    keep: bool  # "!..."
    anchored: bool  # with a slash before its end it matches from its folder on, else the last part of any path

    def names(self, path: str, is_folder: bool) -> bool:
        text = path if self.anchored else path.rpartition("/")[2]
        match = self.parsed.match_file(text)
        if match is not None and match.match.groupdict().get(FOLDER_MARK) is None:
            return True
        if not is_folder:
            return False
        match = self.parsed.match_file(text + "/")
        return (
            match is not None and FOLDER_MARK in match.match.groupdict() and match.match.start(FOLDER_MARK) == len(text)
        )


@dataclass(frozen=True, slots=True)
class _Rules:
    """The patterns of one file, and the folder they are relative to: "" or "a/b/" from the top."""

    patterns: tuple[_Pattern, ...]
    folder: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """The rules that hold in one folder, the outermost first.

    Attributes:
        base: "" or "a/b/": from the top, where the outermost rules lie, to the root of the scan.
    """

    rules: tuple[_Rules, ...] = ()
    base: str = ""

    def decide(self, path: str, is_folder: bool) -> bool | None:
        """True: named by the patterns; False: named by a negated one ("!..."); None: not mentioned.

        Args:
            path: relative to the root of the scan, POSIX. Folders above it must have been decided before: git
                does not look into a folder that it ignores.
        """
        from_top = self.base + path
        for rules in reversed(self.rules):
            relative = from_top.removeprefix(rules.folder)
            for pattern in reversed(rules.patterns):
                if pattern.names(relative, is_folder):
                    return not pattern.keep
        return None

    def descend(self, root: Path, folder: str) -> "Ignored":
        """The rules inside `folder` (relative to `root`; "" is `root`), its own .gitignore included."""
        patterns = _read(root / folder / GITIGNORE)
        if not patterns:
            return self
        return Ignored((*self.rules, _Rules(patterns, f"{self.base}{folder}/" if folder else self.base)), self.base)


def git_rules(root: Path) -> Ignored:
    """The rules that folders above `root` impose on it, up to the top of its git repository.

    `root`'s own .gitignore comes with `descend`. Where the repository ignores `root` itself, somebody who submits
    from there wants it nevertheless, and only the rules below it hold.
    """
    top = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), root)
    above = Ignored()
    folder = ""
    for part in root.relative_to(top).parts:
        above = above.descend(top, folder)
        folder = f"{folder}/{part}" if folder else part
        if above.decide(folder, is_folder=True):
            return Ignored()
    return Ignored(above.rules, f"{folder}/" if folder else "")


def glob_rules(patterns: Sequence[str], option: str) -> Ignored:
    """Rules of the command line, in .gitignore's notation, relative to the root of the scan."""
    return Ignored((_Rules(_parse(patterns, option), ""),)) if patterns else Ignored()


def _read(file: Path) -> tuple[_Pattern, ...]:
    if file.is_symlink() or not file.is_file():  # git follows no link here either
        return ()
    try:
        text = file.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise IgnoreError(f"{file} cannot be read: {error.strerror}") from error
    return _parse(text.splitlines(), str(file))


def _parse(lines: Sequence[str], origin: str) -> tuple[_Pattern, ...]:
    patterns = []
    for line in lines:
        body = line.removeprefix("!").rstrip(" ").removesuffix("/").removeprefix("**/")
        try:
            parsed = GitIgnoreSpec.from_lines([line]).patterns
        except ValueError as error:
            raise IgnoreError(f"{origin}: {line!r} is not a pattern that git knows") from error
        for pattern in parsed:  # one, or none for a blank line
            if pattern.include is not None:  # a comment, or what git takes for no pattern
                patterns.append(_Pattern(pattern, keep=not pattern.include, anchored="/" in body))
    return tuple(patterns)
