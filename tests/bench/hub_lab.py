"""`python -m tests.bench.hub_lab`: is a star at a wired hub as much faster in a WiFi cell as its airtime says, and
slower on a switch? Six measurements beside gloo, each kept in --into, where the next run goes on; then the verdict.
About five minutes; nothing else should run."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from meshtraind.bench.settings import BenchError, Settings
from tests.bench.allreduce_lab import Network, measure
from tests.bench.kept_lines import KeptLines, KeptLinesError
from tests.lab.lab import LabError, lab_unavailable

CELL_MBIT = 200.0
SWITCH_MBIT = 100.0
MB = 5
ROUNDS = 10
TOLERANCE = 0.1  # of the predicted ratio
GLOO_LEAST = 1.4  # how much faster than gloo's ring the star is to be
HUB_WIRED = frozenset({0})
RESULTS = Path(__file__).parent / "results"
PAGE = """# A wired hub in a WiFi cell

```
python -m tests.bench.hub_lab --page
```

A star at a station that has a cable, beside the ring and beside gloo's ring, in one run each: an all-reduce of {mb} MB
in fp32, TLS on, medians of {rounds} rounds; every station, its daemon and gloo's rank on this machine. The cell's air
carries {cell:.0f} Mbit/s, up and down together; a byte from station to station crosses it twice, from or to a cable
once. *limit* is what the topology's program takes on links that do nothing else.

{table}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: `peers` stations, of which one may be on a cable, and the topology of meshtrain's side."""

    name: str
    network: Network
    peers: int
    topology: str

    @property
    def settings(self) -> Settings:
        return Settings(self.peers, MB, rounds=ROUNDS, topology=self.topology)

    @property
    def limit_s(self) -> float:
        """Below which no round can be."""
        return self.network.limit_s(self.settings, self.topology)


IN_THE_CELL = Network(CELL_MBIT, cell=True, wired=HUB_WIRED)
CASES = (
    Case("star", IN_THE_CELL, 4, "star:0"),
    Case("ring", IN_THE_CELL, 4, "ring"),
    Case("star beside", IN_THE_CELL, 5, "star:0"),  # the hub and four laptops
    Case("ring without", Network(CELL_MBIT, cell=True), 4, "ring"),  # the four laptops alone
    Case("switched star", Network(SWITCH_MBIT), 4, "star:0"),
    Case("switched ring", Network(SWITCH_MBIT), 4, "ring"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of a round, in seconds."""

    ours_s: float
    gloo_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim, what was predicted, what was measured, and whether it holds."""

    claim: str
    predicted: float
    measured: float
    holds: bool


def verdicts(found: Mapping[str, Measured]) -> tuple[Verdict, ...]:
    """What the measurements say of the claims, as far as they are there."""
    limits = {case.name: case.limit_s for case in CASES}

    def ratio(slower: str, faster: str, claim: str) -> Verdict:
        predicted, measured = limits[slower] / limits[faster], found[slower].ours_s / found[faster].ours_s
        return Verdict(claim, predicted, measured, abs(measured / predicted - 1) <= TOLERANCE)

    made = []
    if {"star", "ring"} <= found.keys():
        made.append(ratio("ring", "star", "cell, 4 stations, 1 wired: star at it over the ring"))
        measured = found["star"].gloo_s / found["star"].ours_s
        claim = "the same: star over gloo's ring, at least 1.4"
        made.append(Verdict(claim, limits["ring"] / limits["star"], measured, measured >= GLOO_LEAST))
    if {"star beside", "ring without"} <= found.keys():
        made.append(ratio("ring without", "star beside", "cell: 4 laptops and a wired hub over the 4 laptops' ring"))
    if {"switched star", "switched ring"} <= found.keys():
        slower = ratio("switched star", "switched ring", "switch, 4 stations: the ring over the star")
        made.append(Verdict(slower.claim, slower.predicted, slower.measured, slower.measured > 1))
    return tuple(made)


def table(found: Mapping[str, Measured], judged: Sequence[Verdict]) -> str:
    """As it is published."""
    lines = ["| network | stations | topology | limit | meshtrain | gloo's ring |", "|---|---|---|---|---|---|"]
    for case in CASES:
        if (one := found.get(case.name)) is not None:
            lines.append(
                f"| {case.network} | {case.peers} | `{case.topology}` | {case.limit_s:.2f} s | {one.ours_s:.2f} s | "
                f"{one.gloo_s:.2f} s |"
            )
    lines += ["", "| claim | predicted | measured | |", "|---|---|---|---|"]
    for each in judged:
        holds = "holds" if each.holds else "DOES NOT HOLD"
        lines.append(f"| {each.claim} | {each.predicted:.2f} | {each.measured:.2f} | {holds} |")
    return "\n".join(lines)


def page(found: Mapping[str, Measured], judged: Sequence[Verdict]) -> str:
    """The page of results."""
    return PAGE.format(mb=MB, rounds=ROUNDS, cell=CELL_MBIT, table=table(found, judged))


@dataclass(frozen=True, slots=True)
class HubLine:
    """A case's line of the file; `report` is all that was measured."""

    case: str
    measured: Measured
    report: Mapping[str, Any]

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> "HubLine":
        """Raises KeyError."""
        return cls(parts["case"], Measured(parts["ours_s"], parts["gloo_s"]), parts)

    def parts(self) -> dict[str, Any]:
        """As it is written."""
        return {"case": self.case, **asdict(self.measured), **self.report}


def kept(into: Path) -> KeptLines[HubLine]:
    """What earlier runs have measured there. Raises OSError, KeptLinesError."""
    return KeptLines(into, HubLine.of, HubLine.parts)


def by_case(lines: KeptLines[HubLine]) -> dict[str, Measured]:
    """What was measured, the last one of each case."""
    return {line.case: line.measured for line in lines.lines}


def main() -> int:
    """Returns the exit code: 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hub_lab", description=__doc__)
    parser.add_argument("--into", type=Path, default=RESULTS / "hub.jsonl", help="where measurements are kept")
    parser.add_argument("--only", choices=[case.name for case in CASES], nargs="+", help="these alone")
    parser.add_argument("--page", action="store_true", help="write results/hub.md of all that is measured")
    options = parser.parse_args()
    if (reason := lab_unavailable()) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    try:
        lines = kept(options.into)
        found = by_case(lines)
        for number, case in enumerate(CASES, 1):
            if case.name in found or (options.only and case.name not in options.only):
                continue
            about = f"{case.network}, {case.peers} stations, {case.topology}"
            print(f"{number} of {len(CASES)}: {about}: {case.limit_s:.1f} s a round at best", file=sys.stderr)
            report = measure(case.settings, case.network)
            one = found[case.name] = Measured(median(report.meshtrain.seconds), median(report.gloo.seconds))
            lines.add(HubLine(case.name, one, report.as_json()))
    except (BenchError, LabError, KeptLinesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    judged = verdicts(found)
    print(table(found, judged))
    if options.page:
        (RESULTS / "hub.md").write_text(page(found, judged), "utf-8")
    return 0 if all(one.holds for one in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
