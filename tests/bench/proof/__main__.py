"""`python -m tests.bench.proof SECTION ...`: what meshtrain reaches as a whole, and where it does not.

Each section says first what it costs and what was expected, and can be stopped at any time: what is measured is a line
of `results/proof.jsonl`, and the same command goes on behind it. `--page` writes the pages and pictures from it.

    python -m tests.bench.proof modes            # every mode on a text and on images; other work does not matter
    python -m tests.bench.proof steps goodput    # nothing else should run
    python -m tests.bench.proof --page
"""

import argparse
import re
import sys
from pathlib import Path

from meshtrain.cli.submission.measuring import NotMeasured
from meshtrain.cli.ui.errors import CliError
from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMeshError
from meshtrain.examples.digits import DigitsError
from tests.bench.goals.sides import SidesError
from tests.bench.journal import Journal, Section, measure, say
from tests.bench.kept_lines import KeptLinesError
from tests.bench.overlap_lab import OverlapError
from tests.bench.proof import goals_page, goodput, modes, modes_page, slow_laptop, summary_page, wifi, wifi_page
from tests.bench.proof.places import LocalPlace, ProofError
from tests.bench.soak import interruptible
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
PAGES = (summary_page.write, modes_page.write, goals_page.write, wifi_page.write)
DIGITS = 6  # a step of a small model takes milliseconds


def every_section(place: LocalPlace) -> tuple[Section, ...]:
    """In the order in which they are worth their time."""
    return (*modes.sections(place), *goodput.sections(), *slow_laptop.sections(), *wifi.sections(place))


def main() -> int:
    """The exit code: 1 when a case could not be measured. What follows from the figures is the pages' to say."""
    with LocalPlace() as place:
        sections = every_section(place)
        options = _options(sections)
        chosen = [section for section in sections if section.name in options.sections]
        failed: list[str] = []
        try:
            journal = Journal(options.resume)
            missing = journal.missing(chosen, options.repeats, short=options.short)
            missing = [(case, repeat) for case, repeat in missing if re.search(options.only, case.name)]
            if chosen:
                with interruptible():
                    failed = measure(
                        *(journal, chosen, missing, FAILED),
                        short=options.short,
                        minutes=options.minutes,
                        digits=DIGITS,
                    )
            for write in PAGES if options.page else ():
                for path in write(journal, options.into):
                    say(f"wrote {path}")
        except (KeptLinesError, *FAILED) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            say(f"interrupted; the same command goes on behind what is in {options.resume}")
            return 130
    return int(bool(failed))


def _options(sections: tuple[Section, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [section.name for section in sections]
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(names))
    parser.add_argument("--repeats", type=int, help="of each case, or seeds (default: each section's own)")
    parser.add_argument("--only", metavar="PATTERN", default="", help="only the cases in whose name this is found")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin nothing after these (default %(default)g)")
    parser.add_argument("--short", action="store_true", help="shows in little time that it works, and is no result")
    parser.add_argument("--resume", type=Path, default=RESULTS / "proof.jsonl", metavar="FILE", help="%(default)s")
    parser.add_argument("--page", action="store_true", help="write the pages and pictures from the file at the end")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER", help="of the pages (%(default)s)")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in names]:
        parser.error(f"{unknown[0]}: choose from {', '.join(names)}")
    if not options.sections and not options.page:
        parser.error(f"which section? Choose from {', '.join(names)}")
    if options.repeats is not None and options.repeats < 1:
        parser.error("--repeats must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
