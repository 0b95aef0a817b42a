"""`meshtraind replay FILE`: a trace of rounds or a recorded membership, as its first line says."""

from pathlib import Path
from typing import TextIO

from meshtraind.replay import membership_replay
from meshtraind.replay import replay as round_replay


def replay(path: Path, *, as_json: bool, out: TextIO, errors: TextIO) -> int:
    """Decides it again and tells what happened. Returns the exit code: 0 same, 1 different, 2 it cannot be read."""
    try:
        of_membership = membership_replay.is_membership(path)
    except OSError:
        of_membership = False  # the other one says what is wrong with the file
    run = membership_replay.run if of_membership else round_replay.run
    return run(path, as_json=as_json, out=out, errors=errors)
