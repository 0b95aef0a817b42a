"""The guide to topologies says what the command says, and its pictures are those that the command draws."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshtrain.cli.app import app
from meshwire.codecs.registry import FAMILIES
from meshwire.collectives.strategy import TOPOLOGIES, topologies_for

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "protocol/TOPOLOGIES.md").read_text("utf-8")
COSTS = re.findall(r"^\| `([\w:,]+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE, re.MULTILINE)
PICTURES = {
    "topology_ring.svg": ("ring", "--peers", "4"),
    "topology_star.svg": ("star:0", "--peers", "4", "--wired", "0"),
    "topology_hub.svg": ("star:4", "--peers", "5", "--hub", "4", "--wired", "4"),
    "topology_hierarchical.svg": ("hierarchical:2", "--peers", "5"),
}


def test_all_are_in_the_table_of_costs() -> None:
    assert {row[0].partition(":")[0] for row in COSTS} == set(TOPOLOGIES)


@pytest.mark.parametrize(("topology", "latencies", "busiest", "air", "one_cable"), COSTS)
def test_the_table_of_costs(topology: str, latencies: str, busiest: str, air: str, one_cable: str) -> None:
    told = [
        json.loads(CliRunner().invoke(app, ["topology", topology, "--json", *wired]).stdout)
        for wired in ([], ["--wired", "0"])
    ]
    vectors = [told[0]["sent_bytes_max"], *(each["air_bytes"] for each in told)]
    assert told[0]["latencies"] == int(latencies)
    assert [float(each) for each in (busiest, air, one_cable)] == [
        float(f"{each / told[0]['vector_bytes']:.3g}") for each in vectors
    ]


def test_the_table_of_codecs() -> None:
    """Each line of codecs by name or kind: what is said of one is so."""
    rows = dict(re.findall(r"^\| ([^|`]+?) \| ([^|]+?) \|$", GUIDE, re.MULTILINE))
    for codecs, said in rows.items():
        for name in set(codecs.replace(",", " ").split()) & set(FAMILIES):
            family = FAMILIES[name]
            (first, *_) = family.reductions
            legal = [each.name for each in topologies_for(family, first)]
            if said == "all of them":
                assert legal == list(TOPOLOGIES)
            elif said.startswith("all but"):
                assert legal == [each for each in TOPOLOGIES if each not in re.findall(r"`(\w+)`", said)]
            else:
                assert legal == re.findall(r"`(\w+)`", said)


@pytest.mark.parametrize("file", PICTURES)
def test_the_pictures(file: str, tmp_path: Path) -> None:
    made = tmp_path / file
    assert CliRunner().invoke(app, ["topology", *PICTURES[file], "--svg", str(made)]).exit_code == 0
    assert made.read_text("utf-8") == (ROOT / "tests/bench/results" / file).read_text("utf-8")
    assert file in GUIDE
