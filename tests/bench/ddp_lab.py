"""`python -m tests.bench.ddp_lab`: a DDP script over the mesh beside the same script over gloo, on limited links.

One rank of each side per station, the sides in turn: TLS through the daemons, plain TCP with gloo. Prints a row for
each rate and number of peers, as a ratio of speeds (above 1: the mesh is faster), and whether the losses are equal.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMeshError
from tests.bench.overlap_lab import OverlapError, StationDaemon, linked_stations
from tests.daemon import realjobs as jobs
from tests.lab.lab import Lab, LabError, lab_unavailable

NAMES = ("anna", "bert", "cleo", "dora")
RANKS = Path(__file__).with_name("ddp_ranks.py")
WARM_UP = 2  # rounds before a connection has reached its rate
GLOO_PORT = 29400
TIMEOUT_S = 300.0
EXCHANGE_S = 0.6  # at the stations' rate, of the vector that is chosen for it
BACKWARD = 1.1  # as long as the exchange
LOSS_TOLERANCE = 1e-6
LEVEL = 0.95  # of gloo's speed
Said = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One network. Seconds are medians of all rounds of a side.

    Attributes:
        limit_s: 2(m-1)/m of the bytes at the stations' rate.
        all_reduce_s, ddp_step_s: of the mesh, and of gloo.
        ratios: gloo's by the mesh's, of each pair of runs: all-reduce, DDP step.
        losses_differ: by how much at most.
    """

    peers: int
    rate_mbit: float
    mb: float
    limit_s: float
    all_reduce_s: tuple[float, float]
    ddp_step_s: tuple[float, float]
    ratios: tuple[tuple[float, float], ...]
    losses_differ: float

    def __str__(self) -> str:
        whole, step = zip(*self.ratios, strict=True)
        exposed_ms = [1000 * (seconds - BACKWARD * self.limit_s) for seconds in self.ddp_step_s]
        return (
            f"| {self.peers} | {self.rate_mbit:g} | {self.mb:.2f} | {1000 * self.limit_s:.0f} "
            f"| {1000 * self.all_reduce_s[0]:.0f} | {1000 * self.all_reduce_s[1]:.0f} | {_spread(whole)} "
            f"| {1000 * self.ddp_step_s[0]:.0f} | {1000 * self.ddp_step_s[1]:.0f} | {_spread(step)} "
            f"| {exposed_ms[0]:.0f} | {exposed_ms[1]:.0f} "
            f"| {'bit-equal' if not self.losses_differ else f'{self.losses_differ:.1e}'} |"
        )


HEAD = (
    "| peers | Mbit/s | MB | limit | all-reduce: mesh | gloo | ratio (range) | DDP step: mesh | gloo | ratio (range) "
    "| exposed: mesh | gloo | losses differ by |"
)


def _spread(ratios: tuple[float, ...]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def over_the_mesh(daemons: list[StationDaemon], folder: Path, arguments: tuple[str, ...]) -> list[Said]:
    """What each rank of a job says. Raises OverlapError."""
    ended = jobs.run(daemons[0], folder, RANKS.read_text(), args=arguments)
    if ended.state != "succeeded":
        raise OverlapError(f"the job {ended.state}: {ended.error}")
    logs = [jobs.read(daemons[0], ended.job, "log", rank) for rank in range(len(daemons))]
    return [json.loads(log.splitlines()[-1]) for log in logs]


def over_gloo(lab: Lab, peers: int, folder: Path, arguments: tuple[str, ...]) -> list[Said]:
    """What each rank says. Raises OverlapError."""
    processes, paths = [], []
    for rank in range(peers):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(peers),
            "MASTER_ADDR": lab.host(0),
            "MASTER_PORT": str(GLOO_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        paths.append(folder / f"gloo-{rank}.log")
        with paths[-1].open("wb") as log:
            command = ["python", str(RANKS), *arguments]
            processes.append(lab.run(rank, command, stdout=log, stderr=subprocess.STDOUT, env=env))
    said = []
    for process, path in zip(processes, paths, strict=True):
        process.wait(TIMEOUT_S)
        text = path.read_text(errors="replace")
        results = [line for line in text.splitlines() if line.startswith("{")]
        if not results:  # the exit code says less: torch 2.13 aborts a rank of DDP now and then, behind its last line
            raise OverlapError(f"gloo: {text[-2000:]}")
        said.append(json.loads(results[-1]))
    return said


def measure(peers: int, rate_mbit: float, rounds: int, repeats: int) -> Row:
    """Both sides in turn in one lab. Raises LabError, OverlapError, and what clients raise."""
    values = int(EXCHANGE_S * rate_mbit * 1e6 / 8 / 4 * peers / (2 * (peers - 1)))
    limit_s = 2 * (peers - 1) / peers * values * 4 * 8e-6 / rate_mbit
    arguments = (str(values), str(rounds + WARM_UP), f"{BACKWARD * limit_s:.4f}")
    sides: tuple[list[Said], list[Said]] = ([], [])
    ratios = []
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(peers, rate_mbit))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
        daemons = linked_stations(lab, NAMES[:peers], folder)
        for _ in range(repeats):
            pair = over_the_mesh(daemons, folder, arguments), over_gloo(lab, peers, folder, arguments)
            for side, said in zip(sides, pair, strict=True):
                side.extend(said)
            ratios.append((_of(pair[1], "all_reduce_s") / _of(pair[0], "all_reduce_s"), _step_ratio(pair)))
    losses = [said["losses"] for side in sides for said in side]
    return Row(
        peers=peers,
        rate_mbit=rate_mbit,
        mb=values * 4e-6,
        limit_s=limit_s,
        all_reduce_s=(_of(sides[0], "all_reduce_s"), _of(sides[1], "all_reduce_s")),
        ddp_step_s=(_of(sides[0], "ddp_step_s"), _of(sides[1], "ddp_step_s")),
        ratios=tuple(ratios),
        losses_differ=max(abs(a - b) for other in losses for a, b in zip(losses[0], other, strict=True)),
    )


def _step_ratio(pair: tuple[list[Said], list[Said]]) -> float:
    return _of(pair[1], "ddp_step_s") / _of(pair[0], "ddp_step_s")


def _of(said: list[Said], what: str) -> float:
    """The median of the rounds of all ranks behind the warm-up."""
    return float(median(seconds for each in said for seconds in each[what][WARM_UP:]))


def main() -> int:
    """The exit code: 1 where the mesh is below 0.95 of gloo, or losses differ by more than 1e-6."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ddp_lab", description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rate", type=float, nargs="+", default=[20.0, 100.0, 300.0], help="Mbit/s each way")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, in turn")
    options = parser.parse_args()
    if (reason := lab_unavailable()) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    jobs.TIMEOUT_S = TIMEOUT_S
    print(f"load before: {os.getloadavg()[0]:.2f}\n\n{HEAD}\n|{'---|' * (HEAD.count('|') - 1)}", flush=True)
    fell_short = False
    try:
        for peers in options.peers:
            for rate_mbit in options.rate:
                row = measure(peers, rate_mbit, options.rounds, options.repeats)
                print(row, flush=True)
                reached = all(median(ratios) >= LEVEL for ratios in zip(*row.ratios, strict=True))
                fell_short = fell_short or not reached or row.losses_differ > LOSS_TOLERANCE
    except (LabError, LocalMeshError, OverlapError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(fell_short)


if __name__ == "__main__":
    sys.exit(main())
