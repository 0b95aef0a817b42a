"""Values over the rounds of a job, drawn: one panel for each, its axis fitted to what there is."""

import math
from collections.abc import Iterator, Mapping, Sequence

from meshtrain.pictures.svg import hue, svg_file, svg_text
from meshwire.text import printable

WIDTH, PANEL = 640.0, 150.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 24.0, 20.0  # around a panel's plot
PANELS_MAX = 6
NAME_CHARS_MAX = 60


def curves_svg(title: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """The file. Values that are no numbers leave gaps; a value that was seen once is a dot."""
    shown = list(curves.items())[:PANELS_MAX]
    parts: list[str] = []
    for at, (name, points) in enumerate(shown):
        parts += _panel(at, name, points)
    if not shown:
        parts.append(svg_text(LEFT, TOP, "nothing was logged: mt.log(loss=loss)", "dim"))
    return svg_file(title, WIDTH, PANEL * len(shown) if shown else 2 * TOP, parts)


def _panel(at: int, name: str, points: Sequence[tuple[int, float]]) -> Iterator[str]:
    top, bottom = at * PANEL + TOP, (at + 1) * PANEL - BOTTOM
    finite = [(round_, value) for round_, value in points if math.isfinite(value)]
    last = f" {points[-1][1]:.4g}" if points else ""
    yield svg_text(LEFT, top - 8, printable(name[:NAME_CHARS_MAX]) + last)
    if not finite:
        return
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    first, until = points[0][0], max(points[-1][0], points[0][0] + 1)
    span = high - low or abs(high) or 1.0

    def x_of(round_: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (round_ - first) / (until - first)

    def y_of(value: float) -> float:
        return bottom - (bottom - top) * ((value - low) / span if high > low else 0.5)

    for value in {low, high}:
        y = y_of(value)
        yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text_at_right(LEFT - 6, y + 3, f"{value:.4g}")
    yield svg_text(LEFT, bottom + 14, f"round {first}", "small dim")
    yield _text_at_right(WIDTH - RIGHT, bottom + 14, str(points[-1][0]))
    colour = hue(at)
    for piece in _pieces(points):
        if len(piece) == 1:
            yield f'<circle cx="{x_of(piece[0][0]):.1f}" cy="{y_of(piece[0][1]):.1f}" r="2.5" fill="{colour}"/>'
            continue
        way = " ".join(f"{x_of(round_):.1f},{y_of(value):.1f}" for round_, value in piece)
        yield f'<polyline fill="none" stroke-width="1.6" stroke="{colour}" points="{way}"/>'


def _text_at_right(x: float, y: float, text: str) -> str:
    return f'<text class="small dim" text-anchor="end" x="{x:g}" y="{y:.1f}">{text}</text>'


def _pieces(points: Sequence[tuple[int, float]]) -> Iterator[list[tuple[int, float]]]:
    """Runs of finite values."""
    piece: list[tuple[int, float]] = []
    for point in points:
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece
