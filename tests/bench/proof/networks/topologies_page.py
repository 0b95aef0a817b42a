"""The page of what each topology takes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from tests.bench.journal import Journal
from tests.bench.proof.networks.topologies import (
    BY_LATENCY,
    BY_MEMBERS,
    BY_RATE,
    EXPECTED,
    POINTS,
    TOPOLOGIES,
    SweepPoint,
    case_name,
)

PAGE = "topologies.md"
WITHIN = 0.1  # of what is planned
IN_THE_WAY = (
    "**What stands in the way.** In a cell the air decides, and everything is within 3 % of the plan. On cables "
    "queues do: where everybody sends to everybody, each connection takes for its rate what it had when the others "
    "were done. Until links had even shares where packets are lost (`transport/uplink_share.py`), `sharded` took 0.56 "
    "s with four laptops and 1.04 with eight at 100 Mbit/s, `gather` 1.07 and 3.07, and `sharded` 0.51 with four at "
    "1000 Mbit/s and 10 MB, where it takes 0.13 now, and a ring 0.12: 3 % of the packets were sent twice, and each "
    "laptop waited for one or two timeouts of 200 ms a round; with cubic, too. Shares are found in some rounds: of "
    "eight, four laptops take the later ones in 0.49 to 0.55 s. Letting at most one, two or three links send at a "
    "time made it slower (1.1 to 1.4 s with eight), smaller receive windows changed nothing, and shares for a star's "
    "middle or a tree's root, which send what comes to them, made those slower by a fifth to a third. A star has the "
    "full queue still: each worker sends to its middle alone, and knows of no other. Why trees and butterflies take a "
    "sixth more, and rings at 10 and 30 Mbit/s, gloo's too, was not looked into."
)


def page(journal: Journal) -> str:
    """In Markdown."""
    return "\n".join(_lines(journal)).rstrip() + "\n"


def _lines(journal: Journal) -> Iterator[str]:
    yield from ("# What each topology takes", "", "```")
    yield "python -m tests.bench.proof topologies   # on a machine that does nothing else"
    yield from ("python -m tests.bench.proof --page", "```", "")
    yield "An all-reduce of a vector of fp32 by real daemons with TLS in the lab, from a common start to the end of the"
    yield "last; medians of the rounds. In each cell: seconds, and in brackets as planned, by what `plan` goes by."
    yield "*gloo*: its ring without TLS, in the same runs, the median of all of them."
    yield from ("", f"**Expected, before it ran.** {EXPECTED}", "")
    errors = [each for point in POINTS for each in errors_of(journal, point)]
    if errors:
        near = sum(abs(each) <= WITHIN for each in errors)
        yield f"Of {len(errors)} measured ways {near} are within {WITHIN:.0%} of what is planned, half of them within"
        yield f"{median(map(abs, errors)):.1%}, the worst is {max(errors, key=abs):+.0%} off."
        yield ""
        yield from (IN_THE_WAY, "")
    yield from _table("By laptops", journal, BY_MEMBERS)
    yield from _table("By rate", journal, BY_RATE)
    yield from _table("By latency", journal, BY_LATENCY)


def _table(head: str, journal: Journal, points: Sequence[SweepPoint]) -> Iterator[str]:
    names = [name for name in TOPOLOGIES if any(name in point.topologies for point in points)]
    yield from (f"## {head}", "", f"| laptops, network | MB | {' | '.join(f'`{name}`' for name in names)} | gloo |")
    yield "|---" * (len(names) + 3) + "|"
    for point in points:
        figures = figures_of(journal, point)
        cells = [_cell(figures, name) for name in names]
        beside = [each for name, values in figures.items() if name.endswith("gloo's ring") for each in values]
        yield f"| {point} | {point.mb} | {' | '.join(cells)} | {f'{median(beside):.2f}' if beside else ''} |"
    yield ""


def figures_of(journal: Journal, point: SweepPoint) -> dict[str, list[float]]:
    """The last ones; none where nothing was measured."""
    entries = journal.of(case_name(point))
    return entries[-1].figures if entries else {}


def errors_of(journal: Journal, point: SweepPoint) -> list[float]:
    """By which part of what was measured the plan is off, of each topology."""
    figures = figures_of(journal, point)
    return [figures[f"{name}, planned"][0] / median(figures[name]) - 1 for name in point.topologies if name in figures]


def _cell(figures: dict[str, list[float]], topology: str) -> str:
    if topology not in figures:
        return "not measured" if not figures else ""
    return f"{median(figures[topology]):.2f} ({figures[f'{topology}, planned'][0]:.2f})"


def write(journal: Journal, folder: Path) -> list[Path]:
    """The page; returns where it is."""
    (folder / PAGE).write_text(page(journal), encoding="utf-8")
    return [folder / PAGE]
