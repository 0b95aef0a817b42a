"""A file of JSON lines in which a measurement keeps each thing that it has measured, at once: after any interruption
the same command goes on behind the last line."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

Line = TypeVar("Line")


class KeptLinesError(Exception):
    """A line of the file is not one of its own; says which."""


class KeptLines(Generic[Line]):
    """The lines that there are, and those that are added.

    Args:
        made: makes a line of its JSON object; what does not fit raises KeyError, TypeError or ValueError.
        written: makes the JSON object of a line, which is a dataclass where nothing is said.

    Raises:
        KeptLinesError, OSError: when it is made.
    """

    def __init__(
        self,
        path: Path,
        made: Callable[[dict[str, Any]], Line],
        written: Callable[[Any], dict[str, Any]] = asdict,
    ) -> None:
        self.path = path
        self._written = written
        self.lines: list[Line] = []
        texts = path.read_text("utf-8").splitlines() if path.exists() else []
        for number, text in enumerate(texts, 1):
            try:
                self.lines.append(made(json.loads(text)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise KeptLinesError(f"{path}, line {number}: {error}; remove the line") from error

    def add(self, line: Line) -> None:
        """Also behind the last line of the file."""
        self.lines.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._written(line)) + "\n")
