"""What commands of several sections have in common: their cases, what they cost, the file in which every measured case
is a line, going on behind it, and the pages that are made from it."""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.bench.kept_lines import KeptLines, KeptLinesError
from tests.bench.soak import interruptible

BUSY_OVER_S = 1.0

Figures = dict[str, list[float]]
"""What one repeat found: the ratios of all its turns, a curve, or a single number."""

Measure = Callable[[int, bool], Figures]
"""One repeat: its number, and whether it is to be short."""


@dataclass(frozen=True)
class Case:
    """What is measured at once.

    Attributes:
        seconds: that a repeat takes, about.
        measure: of a repeat, whose number is the seed where there is one.
        lacks: what this machine lacks for it, and what to do; None: nothing.
    """

    name: str
    seconds: int
    measure: Measure
    lacks: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class Section:
    """Cases that belong together.

    Attributes:
        quiet: what it measures depends on what else the machine does.
        repeats: of each case, where nothing else is asked for.
        expected: before it ran, in a sentence or more.
    """

    name: str
    about: str
    cases: tuple[Case, ...]
    quiet: bool = True
    repeats: int = 3
    expected: str = ""

    @property
    def minutes(self) -> float:
        """That all repeats of all cases take, about."""
        return self.repeats * sum(case.seconds for case in self.cases) / 60


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


def _entry(parts: dict[str, Any]) -> Entry:
    conditions = Conditions(**parts.pop("conditions"))
    return Entry(**parts, conditions=conditions)


class Journal(KeptLines[Entry]):
    """What there is already. Raises KeptLinesError, OSError."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _entry)

    def missing(self, sections: Iterable[Section], repeats: int | None, *, short: bool) -> list[tuple[Case, int]]:
        """What is to be measured: all cases of a section once, then all of them again.

        A repeat is another one when it comes later: so what the machine does meanwhile does not fall on one case alone.

        Args:
            repeats: None: as many as each section says.
        """
        done = {(entry.case, entry.repeat) for entry in self.lines if entry.short == short}
        return [
            (case, repeat)
            for section in sections
            for repeat in range(section.repeats if repeats is None else repeats)
            for case in section.cases
            if (case.name, repeat) not in done
        ]

    def of(self, case: str) -> list[Entry]:
        """All repeats of a case but short ones, by their numbers."""
        found = [entry for entry in self.lines if entry.case == case and not entry.short]
        return sorted(found, key=lambda entry: entry.repeat)

    def figures(self, case: str, figure: str) -> list[float]:
        """All that a case's repeats found; nothing of short ones."""
        return [value for entry in self.of(case) for value in entry.figures.get(figure, [])]

    def repeats(self, case: str) -> int:
        """How often it was measured."""
        return len(self.of(case))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and from the least to the most."""
    if min(values) == max(values):
        return f"{values[0]:.{digits}f}"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def measure(
    journal: Journal,
    sections: Sequence[Section],
    missing: Sequence[tuple[Case, int]],
    failures: tuple[type[BaseException], ...],
    *,
    short: bool,
    minutes: float | None = None,
    digits: int = 4,
) -> list[str]:
    """Measures these, and says beforehand what it takes. Returns the names of cases that failed; each is told of.

    Args:
        missing: of these sections.
        failures: of one case, which stop no other.
        minutes: begins nothing any more when these are over; None: it ends when all is measured.
    """
    _say_cost(sections, missing, journal.path, short=short)
    failed = []
    for case in dict.fromkeys(case for case, _ in missing):
        if (lack := case.lacks()) is not None:
            failed.append(case.name)
            say(f"not measured, {case.name}: {lack}")
    missing = [(case, repeat) for case, repeat in missing if case.name not in failed]
    started_s = time.monotonic()
    for at, (case, repeat) in enumerate(missing, 1):
        began_s = time.monotonic()
        if minutes is not None and began_s - started_s > 60 * minutes:
            say(f"{minutes:g} minutes are over; the same command goes on")
            break
        conditions = Conditions.now()
        head = f"[{at}/{len(missing)}] {section_of(sections, case.name).name}, {case.name}, repeat {repeat}"
        say(f"{head}: load {conditions.load:g}, other work {conditions.busy_percent:.0f} % of the cores")
        try:
            figures = case.measure(repeat, short)
        except failures as error:
            failed.append(case.name)
            say(f"  failed after {time.monotonic() - began_s:.0f} s: {error}")
            continue
        rounded = {name: [round(value, digits) for value in values] for name, values in figures.items()}
        journal.add(Entry(case.name, repeat, short, rounded, conditions))
        shown = ", ".join(f"{name} {spread(values)}" for name, values in rounded.items() if values)
        say(f"  {time.monotonic() - began_s:.0f} s: {shown}")
    if failed:
        say(f"not measured: {', '.join(dict.fromkeys(failed))}; the same command tries them again")
    return failed


def _say_cost(sections: Sequence[Section], missing: Sequence[tuple[Case, int]], path: Path, *, short: bool) -> None:
    total_s = 0
    for section in sections:
        own = [(case, repeat) for case, repeat in missing if case in section.cases]
        if own:
            seconds = sum(case.seconds for case, _ in own)
            total_s += seconds
            say(f"{section.name}: {section.about}")
            if section.expected:
                say(f"  expected: {section.expected}")
            for case in dict.fromkeys(case for case, _ in own):
                times = sum(one is case for one, _ in own)
                say(f"  {case.name}: {times} x about {case.seconds} s")
    if missing:
        say(f"{len(missing)} to measure, about {total_s / 60:.0f} min{' at most, as they are short' * short}")
    else:
        say(f"nothing is missing in {path}")


def section_of(sections: Sequence[Section], case: str) -> Section:
    """Which of these a case belongs to."""
    return next(section for section in sections if case in [one.name for one in section.cases])


def say(line: str) -> None:
    """Progress goes to stderr."""
    print(line, file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser, sections: Sequence[str], journal: Path, repeats: int | None) -> None:
    """What every such command takes.

    Args:
        sections: names that can be asked for.
        journal: the file, unless another one is typed.
        repeats: of each case where nothing is typed; None: as many as each section says.
    """
    default = "each section's own" if repeats is None else "%(default)s"
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(sections))
    parser.add_argument("--repeats", type=int, default=repeats, help=f"of each case, or seeds (default: {default})")
    parser.add_argument("--only", metavar="PATTERN", default="", help="only the cases in whose name this is found")
    parser.add_argument("--short", action="store_true", help="shows in little time that it works, and is no result")
    parser.add_argument("--resume", type=Path, default=journal, metavar="FILE", help="%(default)s")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin nothing after these (default %(default)g)")
    parser.add_argument("--page", action="store_true", help="write the pages and pictures from the file at the end")


def parsed(parser: argparse.ArgumentParser, sections: Sequence[str]) -> argparse.Namespace:
    """What was typed; what makes no sense is refused as argparse does."""
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in sections]:
        parser.error(f"{unknown[0]}: choose from {', '.join(sections)}")
    if not options.sections and not options.page:
        parser.error(f"which section? Choose from {', '.join(sections)}")
    if options.repeats is not None and options.repeats < 1:
        parser.error("--repeats must be at least 1")
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only {options.only}: {error}")
    return options


def run(
    options: argparse.Namespace,
    sections: Sequence[Section],
    failures: tuple[type[BaseException], ...],
    write: Callable[[Journal], Iterable[Path]],
    *,
    digits: int = 4,
) -> int:
    """Measures what is missing of some sections, and writes the pages if that was asked for.

    Args:
        options: of `parsed`.
        failures: of one case, which stop no other; of a page they end the command.
        write: the pages; says where they are.
        digits: as of `measure`.

    Returns:
        The exit code: 1 when a case could not be measured. What follows from the figures is the pages' to say.
    """
    failed: list[str] = []
    ending: tuple[type[BaseException], ...] = (KeptLinesError, *failures)
    try:
        journal = Journal(options.resume)
        missing = journal.missing(sections, options.repeats, short=options.short)
        missing = [(case, repeat) for case, repeat in missing if re.search(options.only, case.name)]
        if sections:
            with interruptible():
                failed = measure(
                    *(journal, sections, missing, failures), short=options.short, minutes=options.minutes, digits=digits
                )
        for path in write(journal) if options.page else ():
            say(f"wrote {path}")
    except ending as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on behind what is in {options.resume}")
        return 130
    return int(bool(failed))
