"""`python -m tests.bench.goals SECTION ...`: whether the goals of speed hold, by pairs of runs whose sides take turns.

Each section is a command that can be stopped at any time: what is measured is in a file, and the same command goes on
behind it. `all` means all sections that need a machine without other work; `loss` does not need one. With the lab
(root, `ip`, `tc`, `nft`), `limited` and `lossy` are measured, too.

    python -m tests.bench.goals all               # about half an hour
    python -m tests.bench.goals loopback          # one section
    python -m tests.bench.goals all --page        # and write results/goals.md from all that is measured
    python -m tests.bench.goals learner --profile # where the time goes, instead
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMeshError
from meshtrain.examples.digits import DigitsError
from meshtraind.bench.settings import BenchError
from tests.bench.goals import profiles
from tests.bench.goals.catalogue import SECTIONS
from tests.bench.goals.page import REASONS, page, reasons_of
from tests.bench.goals.sides import SidesError
from tests.bench.journal import Journal, Section, measure, say
from tests.bench.kept_lines import KeptLinesError
from tests.bench.overlap_lab import OverlapError
from tests.bench.soak import interruptible
from tests.lab.lab import LabError

RESULTS = Path(__file__).parents[1] / "results"
FAILED = (
    *(BenchError, SidesError, OverlapError, LabError, LocalMeshError, RequestError, ConnectionLost),
    *(DigitsError, TimeoutError, OSError),
)
PROFILES = ("learner", "tiny", "loopback")


def main() -> int:
    """The exit code: 1 when a case could not be measured. Whether goals are met is the page's to say."""
    options = _options()
    sections = [one for one in SECTIONS if one.name in options.sections or ("all" in options.sections and one.quiet)]
    try:
        if options.profile:
            return _profile(sections)
        journal = Journal(options.resume)
        missing = journal.missing(sections, options.repeats, short=options.short)
        missing = [(case, repeat) for case, repeat in missing if options.only in case.name]
        with interruptible():
            failed = measure(journal, SECTIONS, missing, FAILED, short=options.short)
        if options.page:
            path = RESULTS / "goals.md"
            path.write_text(page(journal, reasons_of(REASONS.read_text("utf-8"))), encoding="utf-8")
            say(f"wrote {path}")
    except (KeptLinesError, *FAILED) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on behind what is in {options.resume}")
        return 130
    return int(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.goals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["all", *(section.name for section in SECTIONS)]
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(names))
    parser.add_argument("--repeats", type=int, default=3, help="of each case (default %(default)s)")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name holds this")
    parser.add_argument("--short", action="store_true", help="few rounds: shows that it works, and is no result")
    parser.add_argument("--resume", type=Path, default=RESULTS / "goals.jsonl", metavar="FILE", help="%(default)s")
    parser.add_argument("--page", action="store_true", help="write results/goals.md from the file at the end")
    parser.add_argument("--profile", action="store_true", help=f"instead: where the time goes ({', '.join(PROFILES)})")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in names]:
        parser.error(f"{unknown[0]}: choose from {', '.join(names)}")
    if not options.sections and not options.page:
        parser.error(f"which section? Choose from {', '.join(names)}")
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.profile and not set(options.sections) <= set(PROFILES):
        parser.error(f"--profile: of {', '.join(PROFILES)}")
    return options


def _profile(sections: Sequence[Section]) -> int:
    for section in sections:
        if section.name == "loopback":
            for tls in (False, True):
                print(profiles.all_reduce(tls=tls), flush=True)
        else:
            for table in profiles.learners(section.name):
                print(table, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
