"""Who took part in a job when: one bar for each member, along the time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshtrain.pictures.svg import hue, svg_file, svg_text
from meshwire.text import printable

WIDTH, LEFT, RIGHT, TOP, ROW = 640.0, 130.0, 14.0, 16.0, 22.0
NAME_CHARS_MAX = 18
STYLE = ".waits{opacity:.35}\n"


@dataclass(frozen=True, slots=True)
class Spell:
    """A time during which the same members took part.

    Attributes:
        present: ranks; of them `learning` computed, the others passed on what these sent, or loaded the model.
    """

    begin_s: float
    end_s: float
    present: frozenset[int]
    learning: frozenset[int]


def presence_svg(title: str, names: Sequence[str], spells: Sequence[Spell], ends: tuple[str, str]) -> str:
    """The file. `ends`: what stands below the first and the last moment."""
    begin_s, end_s = (spells[0].begin_s, spells[-1].end_s) if spells else (0.0, 1.0)
    span_s = max(end_s - begin_s, 1e-9)
    parts: list[str] = []
    for rank, name in enumerate(names):
        y = TOP + ROW * rank
        shown = printable(name)
        shown = shown if len(shown) <= NAME_CHARS_MAX else shown[: NAME_CHARS_MAX - 1] + "…"
        parts.append(svg_text(8, y + 11, f"{rank} {shown}", "small"))
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y + 7:g}" y2="{y + 7:g}"/>')
        for spell in spells:
            if rank in spell.present:
                parts += _bar(spell, rank, y, begin_s, span_s)
    foot = TOP + ROW * len(names) + 10
    parts.append(svg_text(LEFT, foot, ends[0], "small dim"))
    parts.append(f'<text class="small dim" text-anchor="end" x="{WIDTH - RIGHT:g}" y="{foot:g}">{ends[1]}</text>')
    return svg_file(title, WIDTH, foot + 8, parts, STYLE)


def _bar(spell: Spell, rank: int, y: float, begin_s: float, span_s: float) -> Iterator[str]:
    plot = WIDTH - LEFT - RIGHT
    x = LEFT + plot * (spell.begin_s - begin_s) / span_s
    width = max(0.5, plot * max(0.0, spell.end_s - spell.begin_s) / span_s)
    kind = "" if rank in spell.learning else ' class="waits"'
    yield f'<rect{kind} x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="14" fill="{hue(rank)}"/>'
