"""A topology drawn from its programs: as a table for a terminal, and as a picture. One row for each latency, one column
for each member."""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from meshtrain.pictures.svg import hue, svg_file, svg_text
from meshwire.collectives.load import load_of, waves_of
from meshwire.collectives.topology import Op, Program, Transfer

LEFT, TOP, COLUMN, ROW = 64, 74, 76, 96
RADIUS = 13
BESIDE = 5  # of two ways between the same members
CHAR, SMALL_CHAR = 6.4, 5.4  # the widths of one
STYLE = ".way{fill:none;stroke-width:1.6}.part{stroke-dasharray:5 3}\n"


def shard_name(shard: int) -> str:
    """a, b .. z, a1, b1 .."""
    letter, turn = chr(ord("a") + shard % 26), shard // 26
    return f"{letter}{turn or ''}"


def rows_of(programs: Sequence[Program]) -> list[list[str]]:
    """For each latency, what each member sends meanwhile: "a>1" a part or sum of shard a to rank 1, "a=1" its result.
    Where the vector is not cut there are no names of shards."""
    ranks, cut = programs[0].ranks, programs[0].shard_count > 1
    rows: list[list[str]] = []
    for wave, transfers in enumerate(waves_of(programs)):
        cells = [list[str]() for _ in ranks]
        ordered = sorted(transfers, key=lambda each: (*_what(each), each.receiver))
        for (sender, final, shard), ways in groupby(ordered, _what):
            to = ",".join(str(ranks[each.receiver]) for each in ways)
            cells[sender].append(f"{shard_name(shard) if cut else ''}{'=' if final else '>'}{to}")
        rows.append([str(wave + 1), *(" ".join(cell) or "-" for cell in cells)])
    return rows


def _what(transfer: Transfer) -> tuple[int, bool, int]:
    """Of whom, whether it is final, and of which shard."""
    return transfer.sender, transfer.op is Op.COPY, transfer.shard


def topology_svg(
    name: str, about: str, programs: Sequence[Program], wired: Collection[int], hubs: Collection[int] = ()
) -> str:
    """A picture of the programs of all members.

    Args:
        about: said by screen readers.
        wired: ranks that have a cable.
        hubs: ranks that train nothing.
    """
    waves, ranks = waves_of(programs), programs[0].ranks
    foot = TOP + ROW * len(waves)
    legend = "dashed: parts and sums; solid: results"
    if programs[0].shard_count > 1:
        legend += "; one colour for each shard"
    if wired:
        legend += "; boxes have a cable"
    parts = [svg_text(12, 22, name), svg_text(12, 38, legend, "small dim")]
    for position, rank in enumerate(ranks):
        parts += _lane(_x(position), foot, "hub" if rank in hubs else str(rank), wired=rank in wired)
    for wave, transfers in enumerate(waves):
        top = TOP + ROW * wave
        parts.append(svg_text(12, top + 4, f"step {wave + 1}", "small dim"))
        ways = sorted(transfers, key=lambda each: (each.sender, each.receiver, each.shard))
        for _, side_by_side in groupby(ways, lambda each: (each.sender, each.receiver)):
            beside = list(side_by_side)
            for index, each in enumerate(beside):
                parts += _arrow(each, top, BESIDE * (index - (len(beside) - 1) / 2))
    load = load_of(programs)
    for y, what, amounts in ((foot + 22, "sends", load.sent), (foot + 38, "receives", load.received)):
        parts.append(svg_text(12, y, what, "small dim"))
        parts += [svg_text(_x(position), y, f"{amount:.3g}", "small mid") for position, amount in enumerate(amounts)]
    width = max(LEFT + COLUMN * len(ranks), 24 + CHAR * len(name), 24 + SMALL_CHAR * len(legend))
    return svg_file(f"{name}: {about}", width, foot + 52, parts, STYLE)


def _x(position: int) -> float:
    return LEFT + COLUMN * (position + 0.5)


def _lane(x: float, foot: float, name: str, *, wired: bool) -> Iterator[str]:
    y = TOP - 20
    yield f'<path class="grid" d="M{x:g} {y:g}V{foot:g}"/>'
    if wired:
        yield f'<rect class="mark" x="{x - RADIUS:g}" y="{y - RADIUS:g}" width="{2 * RADIUS}" height="{2 * RADIUS}"/>'
    else:
        yield f'<circle class="mark" cx="{x:g}" cy="{y:g}" r="{RADIUS}"/>'
    yield svg_text(x, y + 4, name, "mid")


def _arrow(transfer: Transfer, top: float, beside: float) -> Iterator[str]:
    """`beside`: so far beside the middle of the way, which several shards go."""
    begin, end = _x(transfer.sender) + beside, _x(transfer.receiver) + beside
    bottom, colour = top + ROW - 14, hue(transfer.shard)
    kind = "way" if transfer.op is Op.COPY else "way part"
    yield f'<path class="{kind}" stroke="{colour}" d="M{begin:g} {top:g}L{end:g} {bottom:g}"/>'
    yield f'<circle fill="{colour}" cx="{end:g}" cy="{bottom:g}" r="3"/>'
