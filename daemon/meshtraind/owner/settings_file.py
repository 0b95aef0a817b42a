"""DATA/config.toml: what a person has set, by `meshtrain config` or with an editor. Whatever else is in it stays."""

import contextlib
import json
import os
import re
import stat
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

from meshtraind.owner.settings import KEYS, OwnerSettings, SettingsError, Value
from meshwire import limits

NAME = "config.toml"
WIDTH = 100
HEAD = """\
# How much of this machine meshtraind may take. `meshtrain config` shows all of this and sets it; what is changed here
# counts within seconds. To set a key, take away the # before it.
"""


@dataclass(frozen=True, slots=True)
class Stamp:
    """By which a changed file is known."""

    changed_ns: int
    size_bytes: int
    inode: int


class SettingsFile:
    """The file, read and written. Calls block for a disk's answer; the file is small.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def stamp(self) -> Stamp | None:
        """Changes whenever the file does; None: it is not there, or cannot be looked at."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return Stamp(found.st_mtime_ns, found.st_size, found.st_ino)

    def make(self) -> None:
        """Writes the file with every key at its default, if it is not there. Raises SettingsError."""
        if not os.path.lexists(self.path):
            self._write(template())

    def read(self) -> OwnerSettings:
        """What it says; a file that is not there says nothing. Raises SettingsError, which names the file."""
        return self._parsed(self._text())[0]

    def change(self, key: str, value: Value | None) -> OwnerSettings:
        """Sets one key, or takes it back to its default; all else in the file stays as it is. Returns what counts now.

        Raises SettingsError; then the file is as it was.
        """
        text = self._text() or template()
        _, before = self._parsed(text)
        after = {name: old for name, old in before.items() if name != key}
        if value is not None:
            after[key] = value
        changed = with_value(text, key, value)
        settings, found = self._parsed(changed)
        if found != after:
            raise SettingsError(f"{self.path}: the line of {key} cannot be told from the rest: change it there by hand")
        self._write(changed)
        return settings

    def _text(self) -> str:
        try:
            found = self.path.stat()
            if not stat.S_ISREG(found.st_mode):  # a pipe would keep the daemon waiting
                raise SettingsError(f"{self.path} is no file: move it away")
            if found.st_size > limits.CONFIG_BYTES_MAX:
                raise SettingsError(f"{self.path} has more than {limits.CONFIG_BYTES_MAX} bytes: shorten it")
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError:
            raise SettingsError(f"{self.path} is not UTF-8: write it anew, or move it away") from None
        except OSError as error:
            raise SettingsError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _parsed(self, text: str) -> tuple[OwnerSettings, dict[str, object]]:
        try:
            values = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise SettingsError(f"{self.path}: {error or 'nested too deeply'}") from None
        try:
            return OwnerSettings.read(values), values
        except SettingsError as error:
            raise SettingsError(f"{self.path}: {error}") from None

    def _write(self, text: str) -> None:
        there = self.path.resolve()  # who keeps such files elsewhere, by a link, goes on to
        new = there.with_name(f".{NAME}.new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(there)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            raise SettingsError(f"{self.path} cannot be written: {error.strerror or error}") from error


def template() -> str:
    """The file in which nothing is set yet."""
    parts = [HEAD]
    for key in KEYS:
        about = textwrap.wrap(OwnerSettings.about(key), WIDTH, initial_indent="# ", subsequent_indent="# ")
        parts.append("\n".join(("", *about, _line(key, None), "")))
    return "".join(parts)


def with_value(text: str, key: str, value: Value | None) -> str:
    """The text with another line for this key, in the place of the one that sets it, or that only shows it."""
    line = _line(key, value)
    for pattern in (rf"^[ \t]*{key}[ \t]*=.*$", rf"^#[ \t]*{key}[ \t]*=.*$"):
        if (found := re.search(pattern, text, re.MULTILINE)) is not None:
            return f"{text[: found.start()]}{line}{text[found.end() :]}"
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n"


def toml(value: Value) -> str:
    """A value as TOML writes it. Texts have been checked to be printable, which JSON writes as TOML does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _line(key: str, value: Value | None) -> str:
    return f"#{key} = {toml(OwnerSettings.default(key))}" if value is None else f"{key} = {toml(value)}"
