"""Asks the system's own tools, each with a deadline."""

import shutil
import subprocess
from dataclasses import dataclass
from typing import Protocol

TOOL_TIMEOUT_S = 5.0
FOLDERS = "/usr/sbin:/sbin:/usr/bin:/bin"  # a person's PATH often lacks the first two
NEEDS_ROOT = ("must be root", "need to be root", "not permitted", "not authorized", "authorization failed", "denied")


@dataclass(frozen=True, slots=True)
class Said:
    """What a tool has printed, or why that is not known: it is missing, root alone may ask, it hangs, it failed."""

    text: str | None
    problem: str | None = None
    needs_root: bool = False


class AskTool(Protocol):
    """Whoever asks the system's tools; tests answer in their place."""

    def __call__(self, *argv: str) -> Said:
        """What the tool says to these words."""


def ask_tool(*argv: str) -> Said:
    """Runs a tool that only looks. Never raises."""
    path = shutil.which(argv[0]) or shutil.which(argv[0], path=FOLDERS)
    if path is None:
        return Said(None, f"{argv[0]} is not installed")
    try:
        done = subprocess.run(
            [path, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Said(None, f"{argv[0]} has not answered within {TOOL_TIMEOUT_S:g} s")
    except OSError as error:
        return Said(None, f"{argv[0]} could not be run: {error.strerror or error}")
    if done.returncode == 0:
        return Said(done.stdout)
    told = done.stderr.strip() or done.stdout.strip()
    if any(words in told.lower() for words in NEEDS_ROOT):
        return Said(None, "only root may see it", needs_root=True)
    return Said(None, f"{argv[0]} failed: {told.splitlines()[-1] if told else f'exit code {done.returncode}'}")
