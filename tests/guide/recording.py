"""`python -m tests.guide.recording`: two laptops pair, train the example together and fetch its results, as an SVG.

The laptops are network namespaces with an own terminal each (root, `ip`, `tc`; `pip install pyte`). What is shown is
what their terminals showed; waits are shortened.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.guide.animation import Window, svg
from tests.guide.laptops import Terminal, TerminalError
from tests.lab.lab import Lab, lab_unavailable

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/guide/session.svg"
RATE_MBIT = 100.0
COLUMNS = 96
ROWS = (18, 12)
LABEL = (
    "Two terminals: meshtrain up on both, meshtrain pair, then submit trains the example on both, and get fetches it"
)


def session(anna: Terminal, bert: Terminal) -> None:
    """What both people type."""
    anna.run("meshtrain up", 60, bert)
    bert.run("meshtrain up", 60, anna)
    code = anna.until(r"meshtrain pair (\d{3}-\d{3})", 30, shown := anna.type("meshtrain pair"), bert)[1]
    bert.run(f"meshtrain pair {code}", 60, anna)
    anna.until_prompt(60, shown, bert)
    anna.run("mkdir disc && cd disc && meshtrain init --example mlp", 30, bert)
    # Both are one machine, on which two are not faster than one: nothing is chosen, and no speed compared.
    anna.run("clear", 10, bert)
    said = anna.run("meshtrain submit --no-plan train.py", 600, bert)
    if not re.search(r"succeeded .*replicas bit-equal", said):
        raise TerminalError(f"the job did not come to its end:\n{said[-3000:]}")
    bert.run("meshtrain get", 60, anna)
    anna.watch(1.0)


def recorded(folder: Path) -> Sequence[Window]:
    """Both terminals, from the first command to the last."""
    binaries = Path(sys.executable).parent
    homes = [folder / name for name in ("anna", "bert")]
    for home in homes:
        home.mkdir()
    with (
        Lab(2, RATE_MBIT) as lab,
        Terminal(lab, 0, "anna", homes[0], (ROWS[0], COLUMNS), binaries) as anna,
        Terminal(lab, 1, "bert", homes[1], (ROWS[1], COLUMNS), binaries) as bert,
    ):
        try:
            session(anna, bert)
        finally:
            shown = [Window(each.name, each.rows, each.columns, tuple(each.events)) for each in (anna, bert)]
            for each in (anna, bert):
                each.run("meshtrain down", 60)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=FILE)
    output = parser.parse_args().output
    why = lab_unavailable()
    if why is not None:
        print(f"error: {why}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="laptops-", ignore_cleanup_errors=True) as folder:
        windows = recorded(Path(folder))
    output.write_text(svg(windows, LABEL), "utf-8")
    print(f"{output}: {output.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
