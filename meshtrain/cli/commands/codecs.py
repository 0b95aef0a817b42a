"""`codecs`: how gradients can travel."""

from typing import Any

from meshtrain.cli.ui.errors import reported
from meshtrain.cli.ui.options import Json
from meshtrain.cli.ui.terminal import print_json, print_table, say
from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.codecs.schedules import Ramp
from meshwire.codecs.spec import Family, Value
from meshwire.collectives.strategy import topologies_for
from meshwire.layout.projections import bits_per_value
from meshwire.memory_layout.footprint import residual_bytes


@reported
def codecs(as_json: Json = False) -> None:
    """Show the codecs that --codec takes.

    Bits are those of one value in a full segment, the most where they follow the values or change over the rounds, or
    in a square matrix where factors of matrices are sent. State is what error feedback and momentum keep on each device
    under bsp. Of several exchanges the first is taken unless another is typed, as in topk:0.01,gather. --topology takes
    others in their place, which --json lists.
    """
    documents = [_document(family) for family in FAMILIES.values()]
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


def _document(family: Family) -> dict[str, Any]:
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
