"""The command behind `python -m tests.sim.cluster`."""

import argparse
import sys
import time
from collections.abc import Sequence

from tests.sim.clusterfaults import random_schedule, run, shrunk

LINES_MAX = 120  # of a failed seed's transcript, unless all is asked for


def replay(arguments: Sequence[str] | None) -> int:
    """Returns 1 if one of the seeds breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.cluster", description="Replays seeds of the cluster.")
    parser.add_argument("--seed", type=int, help="one seed, as a transcript")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("A", "B"), help="all from A to B, without B")
    parser.add_argument("--verbose", action="store_true", help="every line of the transcript")
    options = parser.parse_args(arguments)
    if (options.seed is None) == (options.seeds is None):
        parser.error("say either --seed N or --seeds A B")
    if options.seed is not None:
        return _one(options.seed, verbose=options.verbose)
    return _many(range(*options.seeds))


def _one(seed: int, *, verbose: bool) -> int:
    schedule = random_schedule(seed)
    try:
        cluster = run(schedule, recording=True)
    except (AssertionError, KeyError, ValueError):
        schedule = shrunk(schedule)
        try:
            run(schedule, recording=True)
        except (AssertionError, KeyError, ValueError) as error:
            lines = error.cluster.transcript  # type: ignore[union-attr]
            _say("\n".join([str(schedule), *(lines if verbose else lines[-LINES_MAX:])]))
            _say(f"{type(error).__name__}: {error}")
        return 1
    lines = cluster.transcript or []
    _say("\n".join([str(schedule), *(lines if verbose else lines[:LINES_MAX])]))
    _say(cluster.failed or ("nobody is left" if cluster.history_lost() else "all is well"))
    return 0


def _many(seeds: range) -> int:
    began_s, failed, ended = time.process_time(), [], 0
    for count, seed in enumerate(seeds, 1):
        try:
            ended += run(random_schedule(seed)).over
        except (AssertionError, KeyError, ValueError) as error:
            failed.append(seed)
            _say(f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0]}")
        if count % 500 == 0 or count == len(seeds):
            spent_s = time.process_time() - began_s
            _say(f"{count} seeds, {len(failed)} failed, {ended} jobs lost, {spent_s:.0f} s CPU")
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
