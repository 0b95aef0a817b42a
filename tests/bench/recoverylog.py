"""What the daemons' own logs and traces tell of a loss: when it was noticed, when a generation was entered, and rounds.

All daemons and traces are of one machine. Logs have wall time, traces the monotonic one; everything here is monotonic.
"""

import json
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

LINE = re.compile(r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \w+ (?P<logger>[\w.]+): (?P<text>.*)")
LOST = re.compile(r"lost (?P<name>\S+) \(\w+\): (?P<reason>.*)")
ENTERED = re.compile(
    r"job (?P<job>\w+): generation (?P<number>\d+) entered after (?P<fenced_s>[\d.]+) s: members (?P<members>.*); "
    r"cut (?P<cut>\d+)"
)
LOADING = " (loading)"


@dataclass(frozen=True)
class Lost:
    """A daemon has closed, or found closed, its link to another."""

    at_s: float
    name: str
    reason: str


@dataclass(frozen=True)
class Entered:
    """A daemon has entered a generation.

    Attributes:
        fenced_s: since it stopped its rounds for it.
        computing, loading: names of its members.
    """

    at_s: float
    number: int
    fenced_s: float
    computing: frozenset[str]
    loading: frozenset[str]
    cut: int


@dataclass(frozen=True)
class Round:
    """A daemon holds a round whole."""

    at_s: float
    number: int
    void: bool


@dataclass(frozen=True)
class Story:
    """What one daemon tells, in the order of time."""

    name: str
    lost: tuple[Lost, ...]
    entered: tuple[Entered, ...]
    rounds: tuple[Round, ...]

    def rate(self, from_s: float, to_s: float) -> float:
        """Good rounds a second."""
        count = sum(from_s <= one.at_s < to_s and not one.void for one in self.rounds)
        return count / (to_s - from_s) if to_s > from_s else 0.0


@dataclass(frozen=True)
class Times:
    """Seconds since something broke, of the slowest of those that went on; None: it did not happen.

    Attributes:
        detected_s: the first link to a lost peer was given up.
        agreed_s: the first generation after it was entered.
        round_s: the first round that counts was complete after that.
        fenced_s: how long rounds stood still for the agreement.
    """

    detected_s: float | None
    agreed_s: float | None
    round_s: float | None
    fenced_s: float | None


def read_log(lines: Iterable[str], job: str, wall_minus_monotonic_s: float) -> tuple[list[Lost], list[Entered]]:
    """Of a daemon.log. Lines of another form, tracebacks say, are passed over."""
    lost: list[Lost] = []
    entered: list[Entered] = []
    for line in lines:
        match = LINE.fullmatch(line.rstrip("\n"))
        if match is None:
            continue
        at_s = datetime.strptime(match["at"], "%Y-%m-%d %H:%M:%S,%f").timestamp() - wall_minus_monotonic_s
        if found := LOST.fullmatch(match["text"]):
            lost.append(Lost(at_s, found["name"], found["reason"]))
        elif (found := ENTERED.fullmatch(match["text"])) and found["job"] == job:
            members = found["members"].split(", ")
            entered.append(
                Entered(
                    at_s,
                    int(found["number"]),
                    float(found["fenced_s"]),
                    frozenset(name for name in members if not name.endswith(LOADING)),
                    frozenset(name.removesuffix(LOADING) for name in members if name.endswith(LOADING)),
                    int(found["cut"]),
                )
            )
    return lost, entered


def read_rounds(lines: Iterable[str]) -> list[Round]:
    """Of a trace; what a kill cut off is passed over."""
    rounds = []
    for line in lines:
        if '"what":"RoundComplete"' in line and line.endswith("}\n"):
            entry = json.loads(line)
            rounds.append(Round(entry["t_s"], entry["round"], entry["void"]))
    return rounds


def read_story(name: str, log: Path, job_folder: Path, job: str) -> Story:
    """Of one daemon, whose traces are complete once its job has ended."""
    with log.open(errors="replace") as lines:
        lost, entered = read_log(lines, job, time.time() - time.monotonic())
    rounds: list[Round] = []
    for path in sorted(job_folder.glob("trace*.jsonl")):
        with path.open() as lines:
            rounds += read_rounds(lines)
    return Story(name, tuple(lost), tuple(entered), tuple(sorted(rounds, key=lambda one: one.at_s)))


def times(stories: Sequence[Story], broke_s: float, lost: frozenset[str]) -> Times:
    """What happened after `broke_s` on those that went on. `lost`: the names of which links were to break; empty where
    only a learner did, then the generation alone tells."""
    each = [_times_of(story, broke_s, lost) for story in stories]
    return Times(*(_slowest(getattr(one, field) for one in each) for field in Times.__dataclass_fields__))


def _times_of(story: Story, broke_s: float, lost: frozenset[str]) -> Times:
    noticed = (one.at_s - broke_s for one in story.lost if one.at_s >= broke_s and one.name in lost)
    detected_s = next(noticed, None)
    entered = next((one for one in story.entered if one.at_s >= broke_s), None)
    if entered is None:
        return Times(detected_s, None, None, None)
    good = (one for one in story.rounds if one.at_s >= entered.at_s and not one.void)
    round_s = next((one.at_s - broke_s for one in good), None)
    return Times(detected_s, entered.at_s - broke_s, round_s, entered.fenced_s)


def _slowest(values: Iterable[float | None]) -> float | None:
    """None when it did not happen everywhere."""
    known = list(values)
    return None if not known or None in known else max(value for value in known if value is not None)


def whole_again_s(stories: Sequence[Story], since_s: float, names: frozenset[str]) -> float | None:
    """When the last of these entered a generation in which all of them compute, in seconds since `since_s`."""
    return _slowest(
        next((one.at_s - since_s for one in story.entered if one.at_s >= since_s and one.computing >= names), None)
        for story in stories
    )


def rate_ratio(stories: Sequence[Story], before: tuple[float, float], during: tuple[float, float]) -> float | None:
    """Good rounds a second in one stretch over those in another, the median of all; None without rounds before."""
    ratios = [story.rate(*during) / story.rate(*before) for story in stories if story.rate(*before)]
    return statistics.median(ratios) if ratios else None
