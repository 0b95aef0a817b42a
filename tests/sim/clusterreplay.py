"""The command behind `python -m tests.sim.cluster`."""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from tests.sim.cluster import Cluster
from tests.sim.clusterfaults import BROKEN, Schedule, random_schedule, run, shrunk
from tests.sim.clusterstorms import harsh_schedule

LINES_MAX = 120  # of a failed seed's transcript, unless all is asked for
CHUNK = 25  # seeds that a process runs at a time
SAID_EVERY = 500  # seeds


@dataclass
class Summary:
    """Of many seeds.

    Attributes:
        ended: jobs that nobody was left to go on with.
        slowest: the longest time until all was well again once faults had stopped, in patiences, and of which seed.
    """

    failed: dict[int, str] = field(default_factory=dict)
    seeds: int = 0
    ended: int = 0
    rounds: int = 0
    generations: int = 0
    virtual_s: float = 0.0
    slowest: tuple[float, int] = (0.0, 0)
    faults: Counter[str] = field(default_factory=Counter)

    def count(self, schedule: Schedule, cluster: Cluster) -> None:
        self.ended += cluster.over
        self.rounds += cluster.histories.count
        self.generations += cluster.generations
        self.virtual_s += cluster.now_s
        self.faults += cluster.befallen
        if not cluster.over:
            recovered = (cluster.now_s - schedule.calm_at_s) / schedule.setting.patience_s
            self.slowest = max(self.slowest, (recovered, schedule.seed))

    def add(self, other: "Summary") -> None:
        self.failed |= other.failed
        self.seeds += other.seeds
        self.ended += other.ended
        self.rounds += other.rounds
        self.generations += other.generations
        self.virtual_s += other.virtual_s
        self.slowest = max(self.slowest, other.slowest)
        self.faults += other.faults

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in self.faults.most_common())
        return (
            f"{self.seeds} seeds, {len(self.failed)} failed, {self.ended} jobs ended with nobody left; "
            f"{self.rounds} rounds in {self.generations} generations, {self.virtual_s:.0f} virtual seconds\n"
            f"all well again after {self.slowest[0]:.0f} patiences at most (seed {self.slowest[1]})\n"
            f"{self.faults.total()} faults: {faults}"
        )


def replay(arguments: Sequence[str] | None) -> int:
    """Returns 1 if one of the seeds breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.cluster", description="Replays seeds of the cluster.")
    parser.add_argument("--seed", type=int, help="one seed, as a transcript")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("A", "B"), help="all from A to B, without B")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that share the seeds")
    parser.add_argument("--harsh", action="store_true", help="partitions, storms and long sleeps, which overlap")
    parser.add_argument("--verbose", action="store_true", help="every line of the transcript")
    options = parser.parse_args(arguments)
    logging.getLogger("meshtraind").addHandler(logging.NullHandler())  # it is in the transcript
    if (options.seed is None) == (options.seeds is None):
        parser.error("say either --seed N or --seeds A B")
    if options.seed is not None:
        return _one(drawn(options.seed, harsh=options.harsh), verbose=options.verbose)
    return _many(range(*options.seeds), options.processes, harsh=options.harsh)


def drawn(seed: int, *, harsh: bool) -> Schedule:
    """What this seed stands for."""
    return harsh_schedule(seed) if harsh else random_schedule(seed)


def _without_warnings() -> None:
    """The daemons' own: what befalls them is meant, and stands in the transcript."""
    logging.getLogger("meshtraind").setLevel(logging.ERROR)


def _one(schedule: Schedule, *, verbose: bool) -> int:
    _without_warnings()
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


def _many(seeds: range, processes: int, *, harsh: bool) -> int:
    began_s, whole = time.monotonic(), Summary()
    with _mapped(processes) as mapped:
        parts = [seeds[first : first + CHUNK] for first in range(0, len(seeds), CHUNK)]
        for part in mapped(partial(summarized, harsh=harsh), parts):
            for seed, why in part.failed.items():
                _say(f"seed {seed}: {why}")
            whole.add(part)
            if whole.seeds % SAID_EVERY < CHUNK and whole.seeds < len(seeds):
                spent_s = time.monotonic() - began_s
                _say(f"{whole.seeds} of {len(seeds)} seeds in {spent_s:.0f} s, {len(whole.failed)} failed")
    _say(str(whole))
    return 1 if whole.failed else 0


@contextmanager
def _mapped(processes: int) -> Iterator[Callable[..., Iterable[Summary]]]:
    """Runs parts of the seeds, in their order, here or in processes."""
    if processes == 1:
        yield map
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield pool.map


def summarized(seeds: Sequence[int], *, harsh: bool) -> Summary:
    """Runs them all."""
    _without_warnings()
    summary = Summary(seeds=len(seeds))
    for seed in seeds:
        schedule = drawn(seed, harsh=harsh)
        try:
            summary.count(schedule, run(schedule))
        except BROKEN as error:
            summary.failed[seed] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return summary


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
