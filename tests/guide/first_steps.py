"""`python -m tests.guide.first_steps`: from a fresh clone to the first common step, on two laptops, against the clock.

Clones this repository twice, installs it in a new virtual environment, and types what the guide says into two
terminals in network namespaces (root, `ip`, `tc`; `pip install pyte`). Exit code 1: a limit was missed. With --write
the transcript and the times go into deploy/guide/FIRST_STEPS.md. On a busy machine the times mean little.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from meshtrain.client import Client
from meshwire.messages.local import GetPeers, Peers
from tests.guide.animation import shown_text
from tests.guide.laptops import Terminal
from tests.lab.lab import Lab, lab_unavailable

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "deploy/guide/FIRST_STEPS.md"
BEGIN, END = "<!-- transcript: begin -->", "<!-- transcript: end -->"

COMMANDS_MAX = 3  # on each laptop, after the install
LISTED_MAX_S = 10.0  # from the code to both being listed
FIRST_STEP_MAX_S = 120.0  # from the end of the install to the first common step

RATE_MBIT = 100.0
SIZE = (24, 120)  # rows, columns
INSTALL_TIMEOUT_S = 900.0
STEP_TIMEOUT_S = 300.0
SCRIPT = "deploy/recipes/plain.py"


@dataclass
class Walk:
    """What was typed where, what came of it, and when."""

    blocks: list[tuple[str, str]] = field(default_factory=list)  # the laptop, its terminal from prompt to prompt
    typed: dict[str, int] = field(default_factory=dict)
    install_s: float = 0.0
    listed_s: float = 0.0
    first_step_s: float = 0.0

    def note(self, terminal: Terminal, since: int) -> None:
        """A command that has ended."""
        shown = shown_text(terminal.events[since:], terminal.columns).splitlines()
        lines = [line for line in shown if line != f"{terminal.name}:~/meshtrain$"]
        self.blocks.append((terminal.name, "$ " + "\n".join(lines).strip("\n")))
        self.typed[terminal.name] = self.typed.get(terminal.name, 0) + 1

    def missed(self) -> list[str]:
        """The limits that do not hold."""
        found = [f"{count} commands on {name}" for name, count in self.typed.items() if count > COMMANDS_MAX]
        if self.listed_s > LISTED_MAX_S:
            found.append(f"{self.listed_s:.1f} s from the code to both being listed")
        if self.first_step_s > FIRST_STEP_MAX_S:
            found.append(f"{self.first_step_s:.1f} s from the install to the first common step")
        return found

    def page(self) -> str:
        """What stands between the marks of the guide's page."""
        cores = os.cpu_count()
        rows = [
            f"| commands after the install | {' and '.join(map(str, self.typed.values()))} | {COMMANDS_MAX} each |",
            f"| from the code to both being listed | {self.listed_s:.1f} s | {LISTED_MAX_S:.0f} s |",
            f"| from the end of the install to the first common step | {self.first_step_s:.1f} s "
            f"| {FIRST_STEP_MAX_S:.0f} s |",
        ]
        parts = [
            f"Clones and one `pip install '.[torch]'` took {self.install_s:.0f} s, from a package index nearby. Both "
            f"laptops are one machine of {cores} cores, on a network of {RATE_MBIT:.0f} Mbit/s.\n",
            "| | measured | limit |\n|---|---|---|\n" + "\n".join(rows) + "\n",
        ]
        parts += [f"On {name}:\n\n```\n{text}\n```\n" for name, text in self.blocks]
        return "\n".join(parts)


def install(folder: Path, homes: Sequence[Path]) -> Path:
    """Clones into each home and installs what the first one holds. Returns the folder of the commands."""
    for home in homes:
        home.mkdir()
        _do("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(home / "meshtrain"))
    _do(sys.executable, "-m", "venv", str(folder / "venv"))
    binaries = folder / "venv/bin"
    _do(str(binaries / "pip"), "install", "--quiet", ".[torch]", cwd=homes[0] / "meshtrain")
    return binaries


def _do(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, timeout=INSTALL_TIMEOUT_S)


def wait_listed(terminals: Sequence[Terminal]) -> None:
    """Returns when each lists another one that it is linked with."""
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    for terminal in terminals:
        with closing(Client.connect(terminal.data_dir)) as client:
            while True:
                reply = client.request(GetPeers(), timeout_s=10.0, name="list of peers")
                assert isinstance(reply, Peers)
                if any(peer.state == "linked" for peer in reply.peers):
                    break
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{terminal.name} lists no other one")
                time.sleep(0.05)


def walk(anna: Terminal, bert: Terminal, done: Walk, installed_s: float) -> None:
    """What two people type."""
    for terminal, other in ((anna, bert), (bert, anna)):
        since = len(terminal.events)
        terminal.run("meshtrain up", 60, other)
        done.note(terminal, since)

    since = len(anna.events)
    code = anna.until(r"meshtrain pair (\d{3}-\d{3})", 30, anna.type("meshtrain pair"), bert)[1]
    since_bert = len(bert.events)
    typed = bert.type(f"meshtrain pair {code}")
    code_s = time.monotonic()
    wait_listed((anna, bert))
    done.listed_s = time.monotonic() - code_s
    bert.until_prompt(60, typed, anna)
    anna.until_prompt(60, since, bert)
    done.note(anna, since)
    done.note(bert, since_bert)

    since = len(anna.events)
    typed = anna.type(f"meshtrain submit --peers 2 {SCRIPT}")
    anna.until(r"\bround [1-9]", STEP_TIMEOUT_S, typed, bert)
    done.first_step_s = time.monotonic() - installed_s
    anna.until_prompt(STEP_TIMEOUT_S, typed, bert)
    done.note(anna, since)
    if not re.search(r"succeeded after", anna.text(typed)):
        raise RuntimeError(f"the job has not succeeded:\n{anna.text(typed)[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the transcript into {PAGE.relative_to(ROOT)}")
    write = parser.parse_args().write
    why = lab_unavailable()
    if why is not None:
        print(f"error: {why}", file=sys.stderr)
        return 1
    done = Walk()
    with tempfile.TemporaryDirectory(prefix="laptops-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        homes = [folder / each for each in ("anna", "bert")]
        begun_s = time.monotonic()
        binaries = install(folder, homes)
        installed_s = time.monotonic()
        done.install_s = installed_s - begun_s
        with (
            Lab(2, RATE_MBIT) as lab,
            Terminal(lab, 0, "anna", homes[0], SIZE, binaries) as anna,
            Terminal(lab, 1, "bert", homes[1], SIZE, binaries) as bert,
        ):
            for each in (anna, bert):
                each.run("cd meshtrain", 10)
            try:
                walk(anna, bert, done, installed_s)
            finally:
                for each in (anna, bert):
                    each.run("meshtrain down", 60)
    print(done.page())
    if write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{done.page()}{END}{rest.partition(END)[2]}", "utf-8")
    for what in done.missed():
        print(f"missed: {what}", file=sys.stderr)
    return 1 if done.missed() else 0


if __name__ == "__main__":
    sys.exit(main())
