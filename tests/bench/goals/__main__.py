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
from tests.bench.journal import Journal, Section, add_options, parsed, run
from tests.bench.overlap_lab import OverlapError
from tests.lab.lab import LabError

RESULTS = Path(__file__).parents[1] / "results"
FAILED = (
    *(BenchError, SidesError, OverlapError, LabError, LocalMeshError, RequestError, ConnectionLost),
    *(DigitsError, TimeoutError, OSError),
)
NAMES = ("all", *(section.name for section in SECTIONS))
PROFILES = ("learner", "tiny", "loopback")


def main() -> int:
    """The exit code: 1 when a case could not be measured. Whether goals are met is the page's to say."""
    options = _options()
    chosen = [one for one in SECTIONS if one.name in options.sections or ("all" in options.sections and one.quiet)]
    if not options.profile:
        return run(options, chosen, FAILED, _written)
    try:
        return _profile(chosen)
    except FAILED as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.goals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, NAMES, RESULTS / "goals.jsonl", 3)
    parser.add_argument("--profile", action="store_true", help=f"instead: where the time goes ({', '.join(PROFILES)})")
    options = parsed(parser, NAMES)
    if options.profile and not set(options.sections) <= set(PROFILES):
        parser.error(f"--profile: of {', '.join(PROFILES)}")
    return options


def _written(journal: Journal) -> list[Path]:
    path = RESULTS / "goals.md"
    path.write_text(page(journal, reasons_of(REASONS.read_text("utf-8"))), encoding="utf-8")
    return [path]


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
