"""A terminal session as an animated SVG: what a terminal emulator (pyte) shows at each moment, line by line.

Each line is written once, with the time from when to when it stands; CSS shows it then. So the file is small, plays in
a README, follows light and dark, and stands still at its last picture for readers who want no motion.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

import pyte
from pyte.screens import Char

FRAME_S = 0.15  # what changes sooner after the last picture is in the next one
PAUSE_MAX_S = 0.9  # nothing happens for longer: the reader does not wait
PLAY_MAX_S = 40.0  # what takes longer is played faster
END_S = 6.0  # the last picture stays
SVG_BYTES_MAX = 150_000
TEXT_ROWS = 300

FONT_PX = 14.0
CELL_PX = 8.43  # the width of a character of common monospaced fonts at that size
LINE_PX = 18.0
MARGIN_PX = 12.0
TITLE_PX = 26.0

COLOURS = {"red": "r", "green": "g", "brown": "y", "yellow": "y", "blue": "b", "magenta": "m", "cyan": "c"}
STYLE = """
text{{font:{font:g}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
text{{fill:#24292f}}
.w{{fill:#f6f8fa;stroke:#d0d7de}}.t{{font-weight:bold;fill:#57606a}}.B{{font-weight:bold}}.D{{fill:#6e7781}}
.r{{fill:#cf222e}}.g{{fill:#116329}}.y{{fill:#7d4e00}}.b{{fill:#0550ae}}.m{{fill:#8250df}}.c{{fill:#1b7c83}}
@media(prefers-color-scheme:dark){{text{{fill:#e6edf3}}.w{{fill:#161b22;stroke:#30363d}}.t,.D{{fill:#9da7b1}}
.r{{fill:#ff7b72}}.g{{fill:#7ee787}}.y{{fill:#e3b341}}.b{{fill:#79c0ff}}.m{{fill:#d2a8ff}}.c{{fill:#76e3ea}}}}
@media(prefers-reduced-motion:no-preference){{.a{{animation:{seconds:.2f}s step-end infinite}}
{keyframes}}}
.a{{visibility:hidden}}.a.z{{visibility:visible}}
"""


@dataclass(frozen=True)
class Window:
    """A terminal and what it was sent: (seconds, bytes), in order."""

    title: str
    rows: int
    columns: int
    events: Sequence[tuple[float, bytes]]


Run = tuple[int, str, str]  # column, text, classes
Line = tuple[Run, ...]


@dataclass
class Standing:
    """A line from when on it stands where."""

    window: int
    row: int
    line: Line
    from_s: float
    to_s: float = math.inf


def short_times(events: Sequence[tuple[float, object]]) -> list[float]:
    """When each event is shown: no pause is longer than PAUSE_MAX_S, and all takes PLAY_MAX_S at most."""
    shown: list[float] = []
    last_s, now_s = events[0][0], 0.0
    for at_s, _ in events:
        now_s += min(at_s - last_s, PAUSE_MAX_S)
        last_s = at_s
        shown.append(now_s)
    return [each * min(1.0, PLAY_MAX_S / now_s) if now_s else 0.0 for each in shown]


def shown_text(events: Sequence[tuple[float, bytes]], columns: int) -> str:
    """What stands on a terminal after all this, with all that has scrolled away."""
    screen = pyte.Screen(columns, TEXT_ROWS)
    stream = pyte.ByteStream(screen)
    for _, said in events:
        stream.feed(said)
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


def standing(windows: Sequence[Window]) -> tuple[list[Standing], float]:
    """Every line that ever stood, and how long all takes."""
    screens = [pyte.Screen(each.columns, each.rows) for each in windows]
    streams = [pyte.ByteStream(screen) for screen in screens]
    merged = sorted(
        ((at_s, (number, said)) for number, each in enumerate(windows) for at_s, said in each.events),
        key=lambda event: event[0],
    )
    times = short_times(merged)
    now: dict[tuple[int, int], Standing] = {}
    ever: list[Standing] = []
    drawn_s = -math.inf
    for at, ((_, (number, said)), time_s) in enumerate(zip(merged, times, strict=True)):
        streams[number].feed(said)
        last = at + 1 == len(merged)
        if not last and times[at + 1] - drawn_s < FRAME_S:
            continue
        drawn_s = time_s
        for window, screen in enumerate(screens):
            for row in range(screen.lines):
                line = _line(screen, row)
                before = now.get((window, row))
                if before is not None and before.line == line:
                    continue
                if before is not None:
                    before.to_s = time_s
                if line:
                    now[window, row] = Standing(window, row, line, time_s)
                    ever.append(now[window, row])
                else:
                    now.pop((window, row), None)
    return [each for each in ever if each.to_s > each.from_s], times[-1] + END_S


def _line(screen: pyte.Screen, row: int) -> Line:
    cells: list[tuple[int, Char]] = [(column, screen.buffer[row][column]) for column in range(screen.columns)]
    while cells and not cells[-1][1].data.strip():
        cells.pop()
    runs: list[Run] = []
    for classes, group in groupby(cells, key=lambda cell: _classes(cell[1])):
        part = list(group)
        text = "".join(char.data for _, char in part)
        if text.strip():
            lead = len(text) - len(text.lstrip())
            runs.append((part[0][0] + lead, text.strip(), classes))
    return tuple(runs)


def _classes(char: Char) -> str:
    if not char.data.strip():
        return ""
    bright = char.fg.startswith("bright")
    colour = COLOURS.get(char.fg.removeprefix("bright"), "D" if bright else "")
    return " ".join(filter(None, [colour, "B" if char.bold else ""]))


def svg(windows: Sequence[Window], label: str) -> str:
    """The file. Raises ValueError if it is larger than SVG_BYTES_MAX.

    Args:
        windows: from top to bottom.
        label: for readers who do not see it.
    """
    lines, seconds = standing(windows)
    width = MARGIN_PX * 2 + CELL_PX * max(each.columns for each in windows)
    tops: list[float] = []
    height = 0.0
    for each in windows:
        tops.append(height)
        height += TITLE_PX + each.rows * LINE_PX + MARGIN_PX + 6
    spans = sorted({(each.from_s, each.to_s) for each in lines if each.from_s > 0 or each.to_s < math.inf})
    names = {span: f"k{number}" for number, span in enumerate(spans)}
    keyframes = "\n".join(_keyframes(names[span], *span, seconds) for span in spans)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{escape(label)}</title>",
        f"<style>{STYLE.format(font=FONT_PX, seconds=seconds, keyframes=keyframes)}</style>",
    ]
    for each, top in zip(windows, tops, strict=True):
        tall = height_of(each)
        body.append(f'<rect class="w" x=".5" y="{top + 0.5:.1f}" width="{width - 1:.0f}" height="{tall:.0f}" rx="8"/>')
        body.append(f'<text class="t" x="{MARGIN_PX:g}" y="{top + 18:.0f}">{escape(each.title)}</text>')
    for line in lines:
        y = tops[line.window] + TITLE_PX + (line.row + 0.75) * LINE_PX
        texts = "".join(_texts(line.line, y))
        span = (line.from_s, line.to_s)
        if span not in names:
            body.append(f"<g>{texts}</g>")
        else:
            kept = " z" if line.to_s == math.inf else ""
            body.append(f'<g class="a{kept}" style="animation-name:{names[span]}">{texts}</g>')
    text = "\n".join([*body, "</svg>", ""])
    if len(text.encode()) > SVG_BYTES_MAX:
        raise ValueError(
            f"{len(text.encode())} bytes, at most {SVG_BYTES_MAX}: record less, or fewer pictures a second"
        )
    return text


def height_of(window: Window) -> float:
    """Pixels that a window takes from top to bottom, its title and margin included."""
    return TITLE_PX + window.rows * LINE_PX + MARGIN_PX


def _texts(line: Line, y: float) -> Iterator[str]:
    for column, text, classes in line:
        kind = f' class="{classes}"' if classes else ""
        # The length keeps columns where they are with every font.
        length = f' textLength="{len(text) * CELL_PX:.0f}"' if len(text) > 1 else ""
        yield f'<text{kind} x="{MARGIN_PX + column * CELL_PX:.0f}" y="{y:.0f}"{length}>{escape(text)}</text>'


def _keyframes(name: str, from_s: float, to_s: float, seconds: float) -> str:
    begin = 100 * from_s / seconds
    end = "" if to_s == math.inf else f"{100 * to_s / seconds:.2f}%{{visibility:hidden}}"
    hidden = "0%{visibility:hidden}" if begin > 0 else ""
    return f"@keyframes {name}{{{hidden}{begin:.2f}%{{visibility:visible}}{end}}}"
