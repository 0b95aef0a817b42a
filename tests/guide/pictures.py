"""`python -m tests.guide.pictures`: draws the guides' topologies again, as `meshtrain topology` draws them now."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from typer.testing import CliRunner

from meshtrain.cli.app import app

FOLDER = Path(__file__).parents[1] / "bench/results"
PICTURES: Mapping[str, Sequence[str]] = {
    "topology_ring.svg": ("ring", "--peers", "4"),
    "topology_star.svg": ("star:0", "--peers", "4", "--wired", "0"),
    "topology_grid.svg": ("grid:3x2", "--peers", "6"),
    "topology_hierarchical.svg": ("hierarchical:2", "--peers", "5"),
    "topology_hub.svg": ("star:4", "--peers", "5", "--hub", "4", "--wired", "4"),
}


def draw(name: str, file: Path) -> None:
    """Has `meshtrain topology` draw one of PICTURES into a file."""
    done = CliRunner().invoke(app, ["topology", *PICTURES[name], "--svg", str(file)])
    if done.exit_code:
        raise RuntimeError(done.output)


def main() -> int:
    for name in PICTURES:
        draw(name, FOLDER / name)
        print(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
