"""`python -m tests.bench.trace_picture TRACE [TRACE...] -o FILE.svg`: some seconds of a job, one lane for each rank.

The traces are of one job whose daemons ran on one machine, so that their times are of one clock. Nothing is drawn that
the replay does not confirm.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from meshtrain.pictures.svg import hue, svg_file
from meshtraind.replay.replay import DifferenceError, Replayed, replay
from meshtraind.replay.summary import Waits
from meshtraind.replay.trace_file import TraceError, TraceFile
from meshwire.messages.rounds import Bind, Null
from meshwire.rounds.effects import Broadcast, LearnerCutOff, RoundComplete, StepDropped
from meshwire.rounds.inputs import LearnerAbsent, LearnerPresent, StartStep
from meshwire.rounds.learner_state import Phase, RoundSettings

SVG_BYTES_MAX = 60_000
STEPS_SHOWN = 12  # of the median learner, when no --seconds is given

WIDTH = 960
LEFT, RIGHT = 92, 18
TOP = 46  # below the legend
LANE, BAR = 62, 24
ROUNDS_LANE = 56
AXIS = 34
DIGIT = 6.5  # width of one at the size of labels

STYLE = """
.cross{stroke:#cf222e;stroke-width:2}.dot{fill:#24292f}
.early{opacity:.4}.lost{fill-opacity:.15;stroke-dasharray:3 2}.wait{fill:url(#hatch)}.hatch{stroke:#6e7781}
.to{fill:none;stroke-width:1.2;opacity:.75}
@media(prefers-color-scheme:dark){.dot{fill:#e6edf3}.hatch{stroke:#9da7b1}}
"""


@dataclass
class Step:
    """A learner's step on the clock of its trace; `end_s` stays None if the trace ends first."""

    number: int
    base: int
    begin_s: float
    bound_s: float | None = None
    round: int | None = None
    end_s: float | None = None
    lost: bool = False


@dataclass
class Lane:
    """What one rank's trace says."""

    settings: RoundSettings
    steps: list[Step] = field(default_factory=list)
    nulls: list[tuple[int, float]] = field(default_factory=list)  # round, when
    complete: dict[int, tuple[float, RoundComplete]] = field(default_factory=dict)
    absences: list[tuple[float, float, str]] = field(default_factory=list)  # from, to, why
    waits: Waits = field(default_factory=Waits)
    begin_s: float = math.inf
    end_s: float = -math.inf

    def take(self, replayed: Replayed) -> None:
        """The next input."""
        now_s, input_, phase = replayed.now_s, replayed.input, replayed.machine.phase
        self.begin_s, self.end_s = min(self.begin_s, now_s), max(self.end_s, now_s)
        if isinstance(input_, StartStep) and phase is Phase.COMPUTING:
            self.steps.append(Step(input_.step, replayed.machine.applied, now_s))
        for effect in replayed.effects:
            match effect:
                case Broadcast(message=Bind(round=round_)):
                    self.steps[-1].round, self.steps[-1].bound_s = round_, now_s
                case Broadcast(message=Null(round=round_)):
                    self.nulls.append((round_, now_s))
                case RoundComplete(round=round_):
                    self.complete[round_] = (now_s, effect)
                case StepDropped():
                    self.steps[-1].lost = True
                case LearnerCutOff(round=round_) if round_ is not None:
                    self.steps[-1].lost = True
                case _:
                    pass
        if self.steps and self.steps[-1].end_s is None and phase in (Phase.BOUNDARY, Phase.ABSENT):
            self.steps[-1].end_s = now_s
            self.steps[-1].lost |= phase is Phase.ABSENT
            if phase is Phase.ABSENT and self.steps[-1].round is None:
                del self.steps[-1]  # it went idle instead
        if isinstance(input_, LearnerAbsent):
            self.absences.append((now_s, math.inf, input_.reason))
        elif isinstance(input_, LearnerPresent) and self.absences:
            begin_s, _, reason = self.absences[-1]
            self.absences[-1] = (begin_s, now_s, reason)
        self.waits.take(now_s, self.steps[-1].number if self.steps else 0, replayed.machine)

    def median_step_s(self) -> float:
        """Of the steps that have ended."""
        return statistics.median([step.end_s - step.begin_s for step in self.steps if step.end_s is not None] or [1.0])


def read(paths: Sequence[Path]) -> list[Lane]:
    """By rank. Raises OSError, TraceError, DifferenceError, ValueError."""
    lanes = []
    for path in paths:
        with TraceFile(path) as trace:
            lane = Lane(trace.settings)
            for replayed in replay(trace):
                lane.take(replayed)
        lanes.append(lane)
    lanes.sort(key=lambda lane: lane.settings.rank)
    ranks = lanes[0].settings.ranks
    if [lane.settings.rank for lane in lanes] != list(ranks):
        raise ValueError(f"give one trace for each of the job's {len(ranks)} members")
    if not any(lane.steps for lane in lanes):
        raise ValueError("no learner has begun a step in these traces")
    return lanes


class Picture:
    """The seconds from `begin_s` after the first input on, `seconds` of them."""

    def __init__(self, lanes: list[Lane], names: Sequence[str], begin_s: float, seconds: float) -> None:
        self._lanes = lanes
        self._names = names
        self._begin_s = min(lane.begin_s for lane in lanes) + begin_s
        self._offset_s = begin_s
        self._seconds = seconds
        self._rounds_y = TOP + len(lanes) * LANE + ROUNDS_LANE / 2
        self._axis_y = TOP + len(lanes) * LANE + ROUNDS_LANE
        self._height = self._axis_y + AXIS

    def svg(self) -> str:
        """A whole file. Raises ValueError when it is larger than SVG_BYTES_MAX."""
        settings = self._lanes[0].settings
        title = f"{len(self._lanes)} learners, bound s = {settings.staleness}, {settings.straggler}"
        parts = [
            '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><path class="hatch" d="M0 0V5"/></pattern>'
            f'<clipPath id="plot"><rect x="{LEFT}" y="0" width="{WIDTH - LEFT - RIGHT}" height="{self._height:g}"/>'
            "</clipPath></defs>",
            *self._legend(),
            *self._axis(),
            *self._labels(),
            '<g clip-path="url(#plot)">',
            *self._contributions(),
            *(part for lane in self._lanes for part in self._lane(lane)),
            *self._completions(),
            "</g>",
        ]
        text = svg_file(title, WIDTH, self._height, parts, STYLE)
        if len(text) > SVG_BYTES_MAX:
            raise ValueError(f"{len(text)} bytes, more than {SVG_BYTES_MAX}: show less with --seconds")
        return text

    def _x(self, at_s: float) -> float:
        return LEFT + (at_s - self._begin_s) / self._seconds * (WIDTH - LEFT - RIGHT)

    def _shown(self, begin_s: float, end_s: float) -> bool:
        return begin_s < self._begin_s + self._seconds and end_s > self._begin_s

    def _y(self, rank: int) -> float:
        """Middle of a lane's bars."""
        return TOP + rank * LANE + LANE / 2

    def _lane(self, lane: Lane) -> Iterator[str]:
        rank = lane.settings.rank
        y, colour = self._y(rank), hue(rank)
        yield f'<path class="grid" d="M{LEFT} {y:g}H{WIDTH - RIGHT}"/>'
        for wait in lane.waits.waits:
            if self._shown(wait.begin_s, wait.end_s):
                yield self._rect(wait.begin_s, wait.end_s, y, 'class="wait"')
        for begin_s, end_s, reason in lane.absences:
            x, room = self._x(max(begin_s, self._begin_s)) + 6, self._x(min(end_s, lane.end_s)) - self._x(begin_s)
            if self._shown(begin_s, end_s) and room > DIGIT * len(reason) + 12:
                yield f'<text class="small dim" x="{x:.1f}" y="{y - 4:g}">{escape(reason)}</text>'
        for step in lane.steps:
            end_s = step.end_s if step.end_s is not None else lane.end_s
            if self._shown(step.begin_s, end_s):
                yield from self._step(step, end_s, y, colour)
        for round_, at_s in lane.nulls:
            if self._shown(at_s, at_s):
                x = self._x(at_s)
                yield f'<circle class="mark" cx="{x:.1f}" cy="{y - BAR / 2 - 8:g}" r="7"/>'
                yield f'<text class="small mid" x="{x:.1f}" y="{y - BAR / 2 - 4.5:g}">{round_}</text>'

    def _step(self, step: Step, end_s: float, y: float, colour: str) -> Iterator[str]:
        edge = f'fill="{colour}" stroke="{colour}"'
        bound_s = step.bound_s if step.bound_s is not None else end_s
        lost = "lost" if step.lost else ""
        yield self._rect(step.begin_s, bound_s, y, f'{edge} class="{lost or "early"}"')
        if step.round is None:
            return
        yield self._rect(bound_s, end_s, y, edge + (f' class="{lost}"' if lost else ""))
        age, width = step.round - 1 - step.base, self._x(end_s) - self._x(bound_s)
        if width > DIGIT * len(str(step.round)) + 2:
            middle = (self._x(bound_s) + self._x(end_s)) / 2
            kind = "small mid" if step.lost else "on"
            yield f'<text class="{kind}" x="{middle:.1f}" y="{y + 4:g}">{step.round}</text>'
        if age and self._x(end_s) - self._x(step.begin_s) > 30:
            x = self._x(step.begin_s) + 2
            yield f'<text class="small dim" x="{x:.1f}" y="{y + BAR / 2 + 11:g}">age {age}</text>'

    def _contributions(self) -> Iterator[str]:
        """A line from each bar to the moment at which the last member held its round."""
        complete = self._complete()
        for lane in self._lanes:
            rank = lane.settings.rank
            for step in lane.steps:
                if step.round not in complete or step.end_s is None:
                    continue
                at_s, _ = complete[step.round]
                if self._shown(step.end_s, at_s):
                    x, to_x, y = self._x(step.end_s), self._x(at_s), self._y(rank) + BAR / 2
                    bend = (y + self._rounds_y) / 2
                    curve = f"M{x:.1f} {y:g}C{x:.1f} {bend:g} {to_x:.1f} {bend:g} {to_x:.1f} {self._rounds_y:g}"
                    yield f'<path class="to" stroke="{hue(rank)}" d="{curve}"/>'

    def _completions(self) -> Iterator[str]:
        y = self._rounds_y
        labels: list[tuple[float, int, int]] = []  # x, first and last round: those on one spot share a label
        for round_, (at_s, done) in self._complete().items():
            if not self._shown(at_s, at_s):
                continue
            x = self._x(at_s)
            if done.void:
                yield f'<path class="cross" d="M{x - 4:.1f} {y - 4:g}l8 8m0 -8l-8 8"/>'
            else:
                yield f'<circle class="dot" cx="{x:.1f}" cy="{y:g}" r="3.5"/>'
            if labels and x - labels[-1][0] < 3 * DIGIT:
                labels[-1] = (*labels[-1][:2], round_)
            else:
                labels.append((x, round_, round_))
        for x, first, last in labels:
            text = f"{first}" if first == last else f"{first}\u2013{last}"
            yield f'<text class="small mid" x="{x:.1f}" y="{y + 15:g}">{text}</text>'

    def _complete(self) -> dict[int, tuple[float, RoundComplete]]:
        """By round, in order: when the last member held it."""
        on_all = set.intersection(*(set(lane.complete) for lane in self._lanes))
        held = {round_: [lane.complete[round_] for lane in self._lanes] for round_ in sorted(on_all)}
        return {round_: max(times, key=lambda time: time[0]) for round_, times in held.items()}

    def _labels(self) -> Iterator[str]:
        for lane in self._lanes:
            rank = lane.settings.rank
            yield f'<text x="12" y="{self._y(rank) - 1:g}">{escape(self._names[rank])}</text>'
            pace = f"{_seconds(lane.median_step_s())} a step"
            yield f'<text class="small dim" x="12" y="{self._y(rank) + 13:g}">{pace}</text>'
        yield f'<text x="12" y="{self._rounds_y + 4:g}">rounds</text>'

    def _axis(self) -> Iterator[str]:
        tick_s = next(tick for tick in _ticks() if self._seconds / tick <= 12)
        yield f'<path class="line" d="M{LEFT} {self._axis_y:g}H{WIDTH - RIGHT}"/>'
        for number in range(
            math.ceil(self._offset_s / tick_s), math.floor((self._offset_s + self._seconds) / tick_s) + 1
        ):
            x = self._x(self._begin_s - self._offset_s + number * tick_s)
            yield f'<path class="grid" d="M{x:.1f} {TOP}V{self._axis_y:g}"/>'
            text = _seconds(number * tick_s)
            yield f'<text class="small dim mid" x="{x:.1f}" y="{self._axis_y + 16:g}">{text}</text>'

    def _legend(self) -> Iterator[str]:
        x, y = 12.0, 24.0
        colour = hue(0)
        edge = f'fill="{colour}" stroke="{colour}"'
        for mark, text in (
            (f'<rect x="{{x}}" y="{y - 10}" width="16" height="12" fill="{colour}" class="early"/>', "computing"),
            (f'<rect x="{{x}}" y="{y - 10}" width="16" height="12" fill="{colour}"/>', "bound to the round in it"),
            (f'<rect x="{{x}}" y="{y - 10}" width="16" height="12" class="wait"/>', "waits at the bound"),
            (f'<rect x="{{x}}" y="{y - 10}" width="16" height="12" {edge} class="lost"/>', "lost"),
            (f'<circle class="mark" cx="{{mid}}" cy="{y - 4}" r="6"/>', "round without it (null)"),
            (f'<path class="to" stroke="{colour}" d="M{{x}} {y - 9}c10 0 6 10 16 10"/>', "contribution"),
            (f'<circle class="dot" cx="{{mid}}" cy="{y - 4}" r="3.5"/>', "round complete on all"),
        ):
            yield mark.format(x=f"{x:g}", mid=f"{x + 8:g}")
            yield f'<text x="{x + 22:g}" y="{y:g}">{text}</text>'
            x += 22 + 6.1 * len(text) + 16

    def _rect(self, begin_s: float, end_s: float, y: float, how: str) -> str:
        # Clipped here: a stroke or a pattern far outside would only cost bytes.
        left = max(self._x(begin_s), LEFT - 4.0)
        right = min(self._x(end_s), WIDTH - RIGHT + 4.0)
        return f'<rect x="{left:.1f}" y="{y - BAR / 2:g}" width="{max(right - left, 0.0):.1f}" height="{BAR}" {how}/>'


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if 0 < seconds < 0.1 else f"{round(seconds, 2):g} s"


def _ticks() -> Iterator[float]:
    """1, 2, 5, 10 ... in milliseconds and up."""
    for power in range(-3, 9):
        yield from (digit * 10.0**power for digit in (1, 2, 5))


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.trace_picture", description=__doc__)
    parser.add_argument("traces", metavar="TRACE", type=Path, nargs="+", help="DATA/jobs/ID/trace.jsonl of each member")
    parser.add_argument("-o", "--output", metavar="FILE.svg", type=Path, required=True)
    parser.add_argument("--names", metavar="A,B,..", help="of the members by rank")
    parser.add_argument("--begin", metavar="S", type=float, default=0.0, help="seconds after the first step's start")
    parser.add_argument("--seconds", metavar="S", type=float, help=f"how many (default: {STEPS_SHOWN} median steps)")
    options = parser.parse_args()
    try:
        lanes = read(options.traces)
        names = options.names.split(",") if options.names else [f"rank {rank}" for rank in range(len(lanes))]
        if len(names) != len(lanes):
            raise ValueError(f"--names holds {len(names)} names, the job has {len(lanes)} members")
        seconds = options.seconds or STEPS_SHOWN * statistics.median(lane.median_step_s() for lane in lanes)
        text = Picture(lanes, names, options.begin, seconds).svg()
        options.output.write_text(text, encoding="utf-8")
    except (OSError, TraceError, DifferenceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {len(text)} bytes, {_seconds(seconds)} from {_seconds(options.begin)} on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
