"""`python -m tests.bench.proof SECTION ...`: what meshtrain reaches as a whole, and where it does not.

Each section says first what it costs and what was expected, and can be stopped at any time: what is measured is a line
of `results/proof.jsonl`, and the same command goes on behind it. `--page` writes the pages and pictures from it.

    python -m tests.bench.proof modes            # every mode on a text and on images; other work does not matter
    python -m tests.bench.proof steps goodput    # nothing else should run
    python -m tests.bench.proof --page
"""

import argparse
import sys
from pathlib import Path

from meshtrain.cli.submission.measuring import NotMeasured
from meshtrain.cli.ui.errors import CliError
from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMeshError
from meshtrain.examples.digits import DigitsError
from tests.bench.goals.sides import SidesError
from tests.bench.journal import Journal, Section, add_options, parsed, run
from tests.bench.overlap_lab import OverlapError
from tests.bench.proof import (
    goals_page,
    goodput,
    modes,
    modes_page,
    slow_laptop,
    stragglers,
    stragglers_page,
    summary_page,
)
from tests.bench.proof.networks import (
    grid,
    grid_page,
    predicted,
    predicted_page,
    target,
    target_page,
    topologies,
    topologies_page,
    wifi,
    wifi_page,
)
from tests.bench.proof.places import LocalPlace, ProofError
from tests.lab.lab import LabError

RESULTS = Path(__file__).parents[1] / "results"
FAILED = (
    *(
        ProofError,
        SidesError,
        NotMeasured,
        CliError,
        OverlapError,
        LabError,
        LocalMeshError,
        RequestError,
        ConnectionLost,
    ),
    *(DigitsError, TimeoutError, OSError),
)
PAGES = (
    *(summary_page.write, modes_page.write, goals_page.write, stragglers_page.write),
    *(wifi_page.write, target_page.write, grid_page.write, predicted_page.write, topologies_page.write),
)
DIGITS = 6  # a step of a small model takes milliseconds


def every_section(place: LocalPlace) -> tuple[Section, ...]:
    """In the order in which they are worth their time."""
    return (
        *modes.sections(place),
        *goodput.sections(),
        *slow_laptop.sections(),
        *stragglers.sections(),
        *predicted.sections(place),
        *topologies.sections(place),
        *wifi.sections(place),
        *target.sections(place),
        *grid.sections(place),
    )


def main() -> int:
    """The exit code: 1 when a case could not be measured. What follows from the figures is the pages' to say."""
    with LocalPlace() as place:
        sections = every_section(place)
        options = _options([section.name for section in sections])
        chosen = [section for section in sections if section.name in options.sections]

        def written(journal: Journal) -> list[Path]:
            return [path for write in PAGES for path in write(journal, options.into)]

        return run(options, chosen, FAILED, written, digits=DIGITS)


def _options(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, names, RESULTS / "proof.jsonl", None)
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER", help="of the pages (%(default)s)")
    return parsed(parser, names)


if __name__ == "__main__":
    sys.exit(main())
