"""The file in which every measured case is a line, so that the same command goes on after any interruption."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil

from tests.bench.goals.catalogue import Case, Section
from tests.bench.goals.measures import Figures

BUSY_OVER_S = 1.0


@dataclass(frozen=True)
class Conditions:
    """Under which a case was measured.

    Attributes:
        load: of the minute before, this command's own work included.
        busy_percent: of all cores in the second before, in which this command did nothing.
        at: the beginning, UTC.
    """

    load: float
    busy_percent: float
    at: str
    versions: dict[str, str]

    @classmethod
    def now(cls) -> "Conditions":
        """Takes BUSY_OVER_S."""
        return cls(
            round(os.getloadavg()[0], 2),
            psutil.cpu_percent(BUSY_OVER_S),
            datetime.now(UTC).isoformat(timespec="seconds"),
            _versions(),
        )


def _versions() -> dict[str, str]:
    describe = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        commit = done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "not a git clone"
    return {"commit": commit, "torch": version("torch"), "python": platform.python_version()}


@dataclass(frozen=True)
class Entry:
    """One repeat of a case.

    Attributes:
        short: it shows that the command works, and is no result.
    """

    case: str
    repeat: int
    short: bool
    figures: Figures
    conditions: Conditions


class JournalError(Exception):
    """A line of the file is not one of its own; says which."""


@dataclass
class Journal:
    """What there is already. Raises JournalError, OSError."""

    path: Path
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        lines = self.path.read_text("utf-8").splitlines() if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                parts = json.loads(line)
                conditions = Conditions(**parts.pop("conditions"))
                self.entries.append(Entry(**parts, conditions=conditions))
            except (ValueError, KeyError, TypeError) as error:
                raise JournalError(f"{self.path}, line {number}: {error}; remove the line") from error

    def add(self, entry: Entry) -> None:
        """Also behind the last line of the file, at once."""
        self.entries.append(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def missing(self, sections: Iterable[Section], repeats: int, *, short: bool) -> list[tuple[Case, int]]:
        """What is to be measured: all cases of a section once, then all of them again.

        A repeat is another one when it comes later: so what the machine does meanwhile does not fall on one case alone.
        """
        done = {(entry.case, entry.repeat) for entry in self.entries if entry.short == short}
        return [
            (case, repeat)
            for section in sections
            for repeat in range(repeats)
            for case in section.cases
            if (case.name, repeat) not in done
        ]

    def figures(self, case: str, figure: str) -> list[float]:
        """All that a case's repeats found; nothing of short ones."""
        found = (entry.figures.get(figure, []) for entry in self.entries if entry.case == case and not entry.short)
        return [value for values in found for value in values]

    def repeats(self, case: str) -> int:
        """How often it was measured."""
        return sum(entry.case == case and not entry.short for entry in self.entries)


def spread(values: list[float], digits: int = 2) -> str:
    """Median, and from the least to the most."""
    if min(values) == max(values):
        return f"{values[0]:.{digits}f}"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
