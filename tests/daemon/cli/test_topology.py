"""`meshtrain topology`: drawn from the programs, in the terminal and as a picture. No daemon is asked."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from meshtrain.cli.app import app
from meshwire.collectives.load import transfers_of
from meshwire.collectives.strategy import TOPOLOGIES, topology_of


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["topology", *arguments])


def test_all_are_listed_with_a_line_each() -> None:
    lines = run().stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(TOPOLOGIES)
    assert [each["about"] in line for each, line in zip(json.loads(run("--json").stdout), lines[1:], strict=True)]


def test_a_ring_as_a_table() -> None:
    """2 (m - 1) rows, one column for each rank; sums first, then results."""
    drawn = run("ring", "--peers", "3").stdout
    rows = [line.split() for line in drawn.splitlines() if line[:1].isdigit()][:4]
    assert rows == [
        ["1", "a>1", "b>2", "c>0"],
        ["2", "c>1", "a>2", "b>0"],
        ["3", "b=1", "c=2", "a=0"],
        ["4", "a=1", "b=2", "c=0"],
    ]


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("peers", [1, 2, 5, 30])
def test_the_picture_and_the_document_hold_every_transfer(name: str, peers: int, tmp_path: Path) -> None:
    name = f"{name}:{peers // 3},{peers // 2}" if name == "hierarchical" else name
    file = tmp_path / "picture.svg"
    told = json.loads(run(name, "--peers", str(peers), "--svg", str(file), "--wired", "0", "--json").stdout)
    transfers = list(transfers_of(topology_of(name).programs(tuple(range(peers)))))
    assert sum(len(step) for step in told["steps"]) == len(transfers)
    assert len(told["steps"]) == told["latencies"]
    assert [each["wired"] for each in told["members"]] == [True] + [False] * (peers - 1)
    elements = list(ElementTree.fromstring(file.read_text()).iter())
    ways = [each for each in elements if "way" in each.get("class", "").split()]
    assert len(ways) == len(transfers)
    solid = [each for each in ways if "part" not in each.get("class", "")]
    assert len(solid) == sum(each["does"] == "copy" for step in told["steps"] for each in step)
    assert sum(each.tag.endswith("rect") and each.get("class") == "mark" for each in elements) == 1, "one has a cable"


def test_bytes_and_seconds_are_those_of_the_codec_and_the_cell() -> None:
    """4 (m - 1)^2 / m vectors of a ring cross the air of a cell with one cable."""
    told = json.loads(
        run("tree", "--values", "8e6", "--codec", "bf16", "--wired", "0", "--mbits", "50", "--json").stdout
    )
    assert told["vector_bytes"] == 16e6
    assert told["ring"]["air_bytes"] == 9 * 16e6
    assert told["ring"]["air_s"] == pytest.approx(9 * 16e6 * 8 / 50e6)
    assert told["members"][0]["sent_bytes"] == told["sent_bytes_max"] == 2 * 16e6


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["moon"], "there is no such topology; there are ring, tree, butterfly"),
        (["parameter-server"], "an owner's optimizer would be lost with it: use star:RANK, or sharded"),
        (["moshpit"], "a round goes along all its dimensions: use grid"),
        (["gossip"], "mixing weights with neighbours is a mode: use --sync local:32,gossip=4"),
        (["tree", "--codec", "int8"], "--topology tree is not for --codec int8: use sharded or star"),
        (["tree", "--codec", "int9"], "int9"),
        (["hierarchical"], "the ranks at which another group begins, hierarchical:3"),
        (["ring", "--wired", "4"], "--wired 4: the ranks of 4 devices are 0 to 3"),
        (["star:9"], "star:9: the ranks of 4 devices are 0 to 3"),
        (["hierarchical:2,4"], "meshtrain topology hierarchical:2,4 --peers 5"),
        (["ring", "--values", "inf"], "Invalid value for '--values'"),
        (["ring", "--mbits", "inf"], "Invalid value for '--mbits'"),
        (["ring", "--peers", "65"], "less than or equal to 64"),
        (["ring", "--svg", "/nowhere/x.svg"], "/nowhere/x.svg cannot be written: No such file"),
    ],
)
def test_what_does_not_go_is_said(arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert done.exit_code in (1, 2)
    assert complaint in done.stderr
