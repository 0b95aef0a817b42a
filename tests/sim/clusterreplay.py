"""The command behind `python -m tests.sim.cluster`."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from tests.sim.cluster import Cluster
from tests.sim.clusterfaults import BROKEN, random_schedule, run, shrunk

LINES_MAX = 120  # of a failed seed's transcript, unless all is asked for
CHUNK = 25  # seeds that a process runs at a time
SAID_EVERY = 500  # seeds


@dataclass
class Summary:
    """Of many seeds. `ended`: jobs that nobody was left to go on with."""

    failed: dict[int, str] = field(default_factory=dict)
    seeds: int = 0
    ended: int = 0
    rounds: int = 0
    generations: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)

    def count(self, cluster: Cluster) -> None:
        self.ended += cluster.over
        self.rounds += cluster.histories.count
        self.generations += cluster.generations
        self.virtual_s += cluster.now_s
        self.faults += cluster.befallen

    def add(self, other: "Summary") -> None:
        self.failed |= other.failed
        self.seeds += other.seeds
        self.ended += other.ended
        self.rounds += other.rounds
        self.generations += other.generations
        self.virtual_s += other.virtual_s
        self.faults += other.faults

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in self.faults.most_common())
        return (
            f"{self.seeds} seeds, {len(self.failed)} failed, {self.ended} jobs ended with nobody left; "
            f"{self.rounds} rounds in {self.generations} generations, {self.virtual_s:.0f} virtual seconds\n"
            f"{self.faults.total()} faults: {faults}"
        )


def replay(arguments: Sequence[str] | None) -> int:
    """Returns 1 if one of the seeds breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.cluster", description="Replays seeds of the cluster.")
    parser.add_argument("--seed", type=int, help="one seed, as a transcript")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("A", "B"), help="all from A to B, without B")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that share the seeds")
    parser.add_argument("--verbose", action="store_true", help="every line of the transcript")
    options = parser.parse_args(arguments)
    if (options.seed is None) == (options.seeds is None):
        parser.error("say either --seed N or --seeds A B")
    if options.seed is not None:
        return _one(options.seed, verbose=options.verbose)
    return _many(range(*options.seeds), options.processes)


def _one(seed: int, *, verbose: bool) -> int:
    schedule = random_schedule(seed)
    try:
        cluster = run(schedule, recording=True)
    except BROKEN:
        schedule = shrunk(schedule)
        try:
            run(schedule, recording=True)
        except BROKEN as error:
            lines = error.cluster.transcript  # type: ignore[union-attr]
            _say("\n".join([str(schedule), *(lines if verbose else lines[-LINES_MAX:])]))
            _say(f"{type(error).__name__}: {error}")
        return 1
    lines = cluster.transcript or []
    _say("\n".join([str(schedule), *(lines if verbose else lines[:LINES_MAX])]))
    _say(cluster.failed or ("nobody is left" if cluster.history_lost() else "all is well"))
    return 0


def _many(seeds: range, processes: int) -> int:
    began_s, whole = time.monotonic(), Summary()
    with _mapped(processes) as mapped:
        for part in mapped([seeds[first : first + CHUNK] for first in range(0, len(seeds), CHUNK)]):
            for seed, why in part.failed.items():
                _say(f"seed {seed}: {why}")
            whole.add(part)
            if whole.seeds % SAID_EVERY < CHUNK and whole.seeds < len(seeds):
                spent_s = time.monotonic() - began_s
                _say(f"{whole.seeds} of {len(seeds)} seeds in {spent_s:.0f} s, {len(whole.failed)} failed")
    _say(str(whole))
    return 1 if whole.failed else 0


@contextmanager
def _mapped(processes: int) -> Iterator[partial[Iterator[Summary]]]:
    """Runs parts of the seeds, in their order, here or in processes."""
    if processes == 1:
        yield partial(map, summarized)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield partial(pool.map, summarized)


def summarized(seeds: Sequence[int]) -> Summary:
    """Runs them all."""
    summary = Summary(seeds=len(seeds))
    for seed in seeds:
        try:
            summary.count(run(random_schedule(seed)))
        except BROKEN as error:
            summary.failed[seed] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return summary


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
