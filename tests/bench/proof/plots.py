"""Curves of several ways to train, beside each other: panels that share what is upwards, and a legend below."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshtrain.pictures.svg import hue, svg_file, svg_text

PANEL_WIDTH, HEIGHT = 320.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 26.0, 34.0  # around a panel's plot
LEGEND_ROW, LEGEND_COLUMNS = 18.0, 4
DASHES = ("", "6 3", "2 3")  # colours come again after eight

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        across: what goes to the right, with its unit; on a logarithmic scale where `log`.
        curves: by name.
    """

    title: str
    across: str
    curves: Mapping[str, Curve]
    log: bool = False


def panels_svg(title: str, panels: Sequence[Panel], log_up: bool = False) -> str:
    """The file. Points that are not finite, or not positive on a logarithmic scale, are left out.

    Args:
        log_up: what goes upwards is on a logarithmic scale, too.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    values = [y for panel in panels for curve in panel.curves.values() for _, y in curve if _shown(y, log_up)]
    parts: list[str] = []
    for at, panel in enumerate(panels):
        parts += _panel(at * PANEL_WIDTH, panel, names, (min(values), max(values)) if values else (0.0, 1.0), log_up)
    for at, name in enumerate(names):
        x = LEFT + at % LEGEND_COLUMNS * (PANEL_WIDTH * len(panels) - LEFT) / LEGEND_COLUMNS
        y = HEIGHT + LEGEND_ROW * (at // LEGEND_COLUMNS + 0.5)
        parts += [f'<line x1="{x:g}" x2="{x + 24:g}" y1="{y - 4:g}" y2="{y - 4:g}" {_stroke(at)}/>']
        parts += [svg_text(x + 30, y, name)]
    rows = -(-len(names) // LEGEND_COLUMNS)
    return svg_file(title, PANEL_WIDTH * max(1, len(panels)), HEIGHT + LEGEND_ROW * (rows + 0.5), parts)


def _panel(left: float, panel: Panel, names: Sequence[str], up: tuple[float, float], log_up: bool) -> Iterator[str]:
    from_x, to_x, top, bottom = left + LEFT, left + PANEL_WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    every_x = [x for curve in panel.curves.values() for x, y in curve if _shown(x, panel.log) and _shown(y, log_up)]
    yield svg_text(from_x, TOP - 10, panel.title)
    if not every_x:
        yield svg_text(from_x, (top + bottom) / 2, "nothing measured", "dim")
        return
    across = _Scale(min(every_x), max(every_x), from_x, to_x, panel.log)
    upward = _Scale(*up, bottom, top, log_up)
    for value in upward.marks():
        y = upward.at(value)
        yield f'<line class="grid" x1="{from_x:g}" x2="{to_x:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="small dim" text-anchor="end" x="{from_x - 5:g}" y="{y + 3:.1f}">{value:.3g}</text>'
    for value in across.marks():
        x = across.at(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}"/>'
        yield f'<text class="small dim mid" x="{x:.1f}" y="{bottom + 13:g}">{value:,.4g}</text>'
    yield f'<text class="small dim mid" x="{(from_x + to_x) / 2:g}" y="{bottom + 27:g}">{panel.across}</text>'
    for name, curve in panel.curves.items():
        points = [(x, y) for x, y in curve if _shown(x, panel.log) and _shown(y, log_up)]
        way = " ".join(f"{across.at(x):.1f},{upward.at(y):.1f}" for x, y in points)
        yield f'<polyline fill="none" {_stroke(names.index(name))} points="{way}"/>'


class _Scale:
    def __init__(self, low: float, high: float, low_at: float, high_at: float, log: bool) -> None:
        self._log, self._from = log, (low, high)
        low, high = self._of(low), self._of(high)
        self._low, self._span = low, high - low or 1.0
        self._low_at, self._length = low_at, high_at - low_at

    def _of(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def at(self, value: float) -> float:
        """Where it is drawn."""
        return self._low_at + self._length * (self._of(value) - self._low) / self._span

    def marks(self) -> list[float]:
        """Round numbers between the ends; both ends where there would be fewer than two."""
        low, high = self._from
        if self._log:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            found = [m * 10.0**power for power in powers for m in (1, 2, 5)]
        else:
            step = 10 ** math.floor(math.log10((high - low) or 1.0))
            step *= 0.5 if (high - low) / step < 3 else 1 if (high - low) / step < 7 else 2
            found = [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
        found = [value for value in found if low <= value <= high]
        return found[:: -(-len(found) // 8)] if len(found) > 1 else [low, high]


def _shown(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _stroke(at: int) -> str:
    dash = DASHES[at // 8 % len(DASHES)]
    return f'stroke-width="1.7" stroke="{hue(at)}"' + (f' stroke-dasharray="{dash}"' if dash else "")
