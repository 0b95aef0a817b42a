"""`codecs`: how gradients can travel. `topology`: who sends what to whom, drawn from the programs that the daemons run,
and what that costs."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from meshtrain.cli.ui.errors import BadCommandLine, CliError, reported
from meshtrain.cli.ui.options import Json
from meshtrain.cli.ui.terminal import print_json, print_table, say
from meshtrain.following.shown_text import human_step
from meshtrain.pictures.topology_picture import rows_of, shard_name, topology_svg
from meshwire import limits
from meshwire.codecs.registry import FAMILIES, FP32, parse_codec
from meshwire.codecs.schedules import Ramp
from meshwire.codecs.spec import Family, Value
from meshwire.collectives.load import Load, load_of, waves_of
from meshwire.collectives.strategy import TOPOLOGIES, Topology, collective_for, topologies_for, topology_of
from meshwire.collectives.topology import Program
from meshwire.encoded_layout.projections import bits_per_value
from meshwire.jobs.files import human_bytes
from meshwire.memory_layout.footprint import residual_bytes

VALUES_MAX, MBITS_MAX = 1e15, 1e9


@reported
def codecs(as_json: Json = False) -> None:
    """Show the codecs that --codec takes.

    Bits are those of one value in a full segment, the most where they follow the values or change over the rounds, or
    in a square matrix where factors of matrices are sent. State is what error feedback and momentum keep on each device
    under bsp. Of several exchanges the first is taken unless another is typed, as in topk:0.01,gather. --topology takes
    others in their place, which --json lists.
    """
    documents = [_codec_document(family) for family in FAMILIES.values()]
    if as_json:
        print_json(documents)
        return
    rows = [
        (
            str(each["name"]),
            f"{'' if each['fixed'] else '<= '}{each['bits_per_value']:.4g}",
            ", ".join(each["exchanges"]),
            f"{each['state_bytes_per_value']:g} B" if each["state_bytes_per_value"] else "-",
            str(each["example"]),
            str(each["about"]),
        )
        for each in documents
    ]
    print_table(("NAME", "BITS/VALUE", "EXCHANGE", "STATE/VALUE", "AS TYPED", "WHAT TRAVELS"), rows, "WHAT TRAVELS")
    say("Ranges and sources: meshtrain codecs --json. Which one when: protocol/CODECS.md")


def _codec_document(family: Family) -> dict[str, Any]:
    spec = parse_codec(family.name)
    return {
        "name": family.name,
        "about": family.about,
        "source": family.source,
        "exchanges": [topologies_for(family, reduction)[0].name for reduction in family.reductions],
        "topologies": [each.name for reduction in family.reductions for each in topologies_for(family, reduction)],
        "reductions": [reduction.text for reduction in family.reductions],
        "fixed": family.fixed,
        "bits_per_value": bits_per_value(spec),
        "error_feedback": spec.error_feedback,
        "state_bytes_per_value": residual_bytes(spec, 1, 0),
        "parameters": [
            {"name": each.name, "about": each.about, "legal": each.legal, "default": _plain(each.default)}
            for each in family.parameters
        ],
        "example": family.example or family.name,
    }


def _plain(default: Value) -> float | str:
    return str(default) if isinstance(default, Ramp) else default


@reported
def topology(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="As for --topology of submit; without it, all there are.")
    ] = None,
    peers: Annotated[
        int, typer.Option("--peers", metavar="M", min=1, max=limits.MEMBERS_MAX, help="How many devices.")
    ] = 4,
    wired: Annotated[
        list[int] | None,
        typer.Option("--wired", metavar="RANK", help="This one has a cable; repeatable. The submitter's rank is 0."),
    ] = None,
    hub: Annotated[
        list[int] | None,
        typer.Option("--hub", metavar="RANK", help="This one is a hub, which trains nothing; repeatable."),
    ] = None,
    codec: Annotated[
        str | None, typer.Option("--codec", metavar="CODEC", help="How values travel, as for submit; else as fp32.")
    ] = None,
    values: Annotated[
        float, typer.Option("--values", metavar="N", min=1, max=VALUES_MAX, help="Of the model, 11.7e6.")
    ] = 1e6,
    mbits: Annotated[
        float,
        typer.Option(
            "--mbits", metavar="N", min=0.001, max=MBITS_MAX, help="What the WiFi cell carries, in 10^6 bits a second."
        ),
    ] = 100.0,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw it into this file, too.")] = None,
    as_json: Json = False,
) -> None:
    """Show who sends what to whom in a round, what that is in bytes, and how long it takes the air.

    Each row is one step: what is in it can be on its way at once, and needs what the steps before have brought. "a>1"
    is a part of the vector, or a sum of parts, on its way to rank 1; "a=1" is the result on its way back. In one WiFi
    cell what goes from device to device crosses the air twice, to the access point and from it; a cable takes no air.
    """
    if name is None:
        _list(as_json)
        return
    try:
        chosen = topology_of(name) if codec is None else collective_for(parse_codec(codec), name).topology
        bits = bits_per_value(FP32 if codec is None else parse_codec(codec))
    except ValueError as error:
        raise BadCommandLine(str(error)) from None
    cables = frozenset(wired or ())
    if beyond := sorted(rank for rank in cables if not 0 <= rank < peers):
        raise BadCommandLine(f"--wired {beyond[0]}: the ranks of {peers} devices are 0 to {peers - 1}")
    if any(rank >= peers for rank in chosen.named):
        raise BadCommandLine(
            f"{chosen}: the ranks of {peers} devices are 0 to {peers - 1}",
            f"meshtrain topology {chosen} --peers {max(chosen.named) + 1}",
        )
    hubs = frozenset(hub or ())
    if beyond := sorted(rank for rank in hubs if not 0 <= rank < peers):
        raise BadCommandLine(f"--hub {beyond[0]}: the ranks of {peers} devices are 0 to {peers - 1}")
    if peers - len(hubs) < 1:
        raise BadCommandLine("--hub: a hub trains nothing, so one device at least is none", "fewer of them")
    ranks = tuple(range(peers))
    programs, vector_bytes = chosen.programs(ranks), values * bits / 8
    document = _document(programs, cables, vector_bytes, mbits)
    document["hubs"] = sorted(hubs)
    laptops, laptop_cables = _without(peers, hubs, cables)
    if svg is not None:
        _draw(svg, topology_svg(_name(chosen, peers, len(hubs)), chosen.about, programs, cables, hubs))
    if as_json:
        plain = load_of(topology_of("ring").programs(laptops), laptop_cables)
        print_json(
            {
                "topology": str(chosen),
                "about": chosen.about,
                "peers": peers,
                "codec": codec or str(FP32),
                "values": values,
            }
            | {"vector_bytes": vector_bytes, "mbits": mbits}
            | document
            | {"ring": _costs(plain, vector_bytes, mbits)}
        )
        return
    print(f"{_name(chosen, peers, len(hubs))}: {chosen.about}\n")
    rows = rows_of(programs)
    if rows:
        print_table(("STEP", *map(str, ranks)), rows)
        print()
    load = load_of(programs, cables)
    print_table(
        ("RANK", "SENDS", "RECEIVES", "ON A CABLE", *(("DOES",) if hubs else ())),
        [
            (
                str(rank),
                human_bytes(round(load.sent[rank] * vector_bytes)),
                human_bytes(round(load.received[rank] * vector_bytes)),
                "yes" if rank in cables else "-",
                *(("a hub" if rank in hubs else "trains",) if hubs else ()),
            )
            for rank in ranks
        ],
    )
    print()
    sides = {str(chosen): load_of(programs, cables)}
    ring = "ring" if not hubs else "ring of those that train"
    sides[ring] = load_of(topology_of("ring").programs(laptops), laptop_cables)
    _compare(sides, vector_bytes, mbits)


def _without(peers: int, hubs: Collection[int], cables: Collection[int]) -> tuple[tuple[int, ...], frozenset[int]]:
    """The devices that train, numbered anew, and which of these have a cable."""
    train = [rank for rank in range(peers) if rank not in hubs]
    return tuple(range(len(train))), frozenset(at for at, rank in enumerate(train) if rank in cables)


def _list(as_json: bool) -> None:
    there_are = TOPOLOGIES.values()
    if as_json:
        ways = [[reduction.text for reduction in each.ways] for each in there_are]
        documents = [{"name": each.name, "about": each.about, "ranks": each.takes} for each in there_are]
        print_json([each | {"reductions": of} for each, of in zip(documents, ways, strict=True)])
        return
    rows = [
        (each.name, each.about if each.takes is None else f"{each.about}. Behind a colon: {each.takes}")
        for each in there_are
    ]
    print_table(("NAME", "WHO SENDS TO WHOM"), rows, "WHO SENDS TO WHOM")
    say("draw one: meshtrain topology ring --peers 4; which codec goes over which: meshtrain codecs --json")


def _name(chosen: Topology, peers: int, hubs: int = 0) -> str:
    of_them = "" if not hubs else f", {hubs} of them {'a hub' if hubs == 1 else 'hubs'}"
    return f"{chosen}, {peers} device{'s' * (peers > 1)}{of_them}"


def _draw(file: Path, picture: str) -> None:
    try:
        file.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{file} cannot be written: {error.strerror}", "another --svg FILE") from None


def _costs(load: Load, vector_bytes: float, mbits: float) -> dict[str, Any]:
    return {
        "latencies": load.latencies,
        "sent_bytes_max": round(max(load.sent) * vector_bytes),
        "sent_bytes_all": round(sum(load.sent) * vector_bytes),
        "air_bytes": round(load.air * vector_bytes),
        "air_s": load.air * vector_bytes * 8 / (mbits * 1e6),
    }


def _document(
    programs: tuple[Program, ...], cables: frozenset[int], vector_bytes: float, mbits: float
) -> dict[str, Any]:
    load, ranks = load_of(programs, cables), programs[0].ranks
    return {
        "shards": programs[0].shard_count,
        "steps": [
            [
                {
                    "from": ranks[each.sender],
                    "to": ranks[each.receiver],
                    "shard": shard_name(each.shard),
                    "does": each.op.value,
                }
                for each in wave
            ]
            for wave in waves_of(programs)
        ],
        "members": [
            {
                "rank": rank,
                "sent_bytes": round(load.sent[position] * vector_bytes),
                "received_bytes": round(load.received[position] * vector_bytes),
                "wired": rank in cables,
                "owns": sorted(map(shard_name, programs[position].owned)),
            }
            for position, rank in enumerate(ranks)
        ],
        **_costs(load, vector_bytes, mbits),
    }


def _compare(sides: Mapping[str, Load], vector_bytes: float, mbits: float) -> None:
    """What each costs, side by side."""
    costs = {name: _costs(load, vector_bytes, mbits) for name, load in sides.items()}
    rows: list[tuple[str, ...]] = [
        ("latencies, one after the other", *(str(each["latencies"]) for each in costs.values())),
        ("sent by who sends most", *(human_bytes(each["sent_bytes_max"]) for each in costs.values())),
        ("sent by all", *(human_bytes(each["sent_bytes_all"]) for each in costs.values())),
        ("over the air of one WiFi cell", *(human_bytes(each["air_bytes"]) for each in costs.values())),
        (f"takes that air, at {mbits:g} Mbit/s", *(human_step(each["air_s"]) for each in costs.values())),
    ]
    print_table(("IN A ROUND", *costs), rows)
