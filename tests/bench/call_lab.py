"""`python -m tests.bench.call_lab`: what becomes of a neighbour's video call while two laptops train in the same cell.

The access point has one queue for all that goes down, as plain routers have. The call is measured alone, beside a job
that takes what it can, and beside one that yields (`meshtrain config yield_to_calls`); the last two in turn. Ends with
exit code 1 where the call beside the job that yields is not what it was alone.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMeshError
from meshwire.messages.config import SetConfig
from meshwire.messages.local import Cancel
from tests.bench.overlap_lab import OverlapError, StationDaemon, paired
from tests.daemon import realjobs as jobs
from tests.lab.lab import Cell, Lab, LabError, lab_unavailable
from tests.lab.videocall import Heard, VideoCall

NEIGHBOUR = 2
WARM_UP_S = 5.0
DELAY_ALLOWED_MS = 50.0  # beyond what it is alone, of 95 % of the packets
LOSS_ALLOWED_PERCENT = 1.0

SCRIPT = """
import sys, torch
import meshtrain as mt

torch.set_num_threads(1)
model = torch.nn.Linear(int(sys.argv[1]) // 100, 100, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = mt.prepare(model, optimizer)
for step in mt.steps(1_000_000):
    optimizer.zero_grad()
    (model.weight * torch.randn_like(model.weight)).sum().backward()  # nothing that could be packed
    optimizer.step()
"""


@dataclass(frozen=True)
class Beside:
    """What the call heard in some seconds, and what a job did meanwhile."""

    call: str
    up: Heard
    down: Heard
    rounds_s: float | None


def listened(lab: Lab, name: str, seconds: float, call_mbit: float, job: "Job | None") -> Beside:
    """The call for so long."""
    rounds = job.rounds() if job is not None else 0
    began_s = time.monotonic()
    with VideoCall(lab, NEIGHBOUR, call_mbit) as call:
        time.sleep(seconds)
    took_s = time.monotonic() - began_s
    assert call.up is not None
    assert call.down is not None
    return Beside(name, call.up, call.down, None if job is None else (job.rounds() - rounds) / took_s)


class Job:
    """A job of the two daemons that runs until it is cancelled."""

    def __init__(self, daemon: StationDaemon, folder: Path, values: int) -> None:
        self._daemon = daemon
        submitted = jobs.submit(daemon, folder, SCRIPT, args=(str(values),), hash_every=0)
        self.id = submitted.job

    def rounds(self) -> int:
        """How many are complete."""
        summary = jobs.summary(self._daemon, self.id)
        if summary.error is not None:
            raise OverlapError(f"the job is {summary.state}: {summary.error}")
        return summary.rounds

    def wait(self) -> None:
        """Returns when it trains."""
        deadline_s = time.monotonic() + jobs.TIMEOUT_S
        while self.rounds() < 2:
            if time.monotonic() > deadline_s:
                raise OverlapError(f"no round of the job in {jobs.TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def end(self) -> None:
        """Cancels it."""
        self._daemon.request(Cancel(job=self.id, now=True), jobs.TIMEOUT_S, "cancelling")


def measure(options: argparse.Namespace) -> list[Beside]:
    """All cases, printed as they end. Raises what labs and daemons raise."""
    results = []

    def say(one: Beside) -> None:
        results.append(one)
        rounds = "" if one.rounds_s is None else f"{one.rounds_s:.2f}"
        ways = " | ".join(
            f"{way.lost_percent:.1f} | {way.median_ms:.1f} | {way.p95_ms:.1f} | {way.worst_ms:.0f}"
            for way in (one.up, one.down)
        )
        print(f"| {one.call} | {ways} | {rounds} |", flush=True)

    with ExitStack() as stack:
        lab = stack.enter_context(Lab(3, cell=Cell(options.rate, one_queue=True)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
        daemons = [StationDaemon(lab, station, name, folder / name) for station, name in enumerate(("anna", "bert"))]
        for daemon in daemons:
            daemon.wait()
        paired(*daemons)
        say(listened(lab, "alone", options.seconds, options.call, None))
        job = Job(daemons[0], folder, options.values)
        stack.callback(job.end)
        job.wait()
        for _ in range(options.turns):
            for yields in (False, True):
                for daemon in daemons:
                    ask = SetConfig(key="yield_to_calls", value=json.dumps(yields))
                    daemon.request(ask, jobs.TIMEOUT_S, "setting")
                time.sleep(WARM_UP_S)
                name = f"beside a job that {'yields' if yields else 'does not'}"
                say(listened(lab, name, options.seconds, options.call, job))
    return results


def judged(results: list[Beside]) -> bool:
    """Prints what it comes to. Returns whether the call stayed what it was beside the job that yields."""
    alone, *others = results
    yielding = [one for one in others if one.call.endswith("yields")]
    not_yielding = [one for one in others if one not in yielding]
    kept = all(
        way.p95_ms - before.p95_ms <= DELAY_ALLOWED_MS and way.lost_percent <= LOSS_ALLOWED_PERCENT
        for one in yielding
        for way, before in ((one.up, alone.up), (one.down, alone.down))
    )
    paid = median(one.rounds_s or 0.0 for one in yielding) / median(one.rounds_s or 0.0 for one in not_yielding)
    print(f"\nthe job that yields makes {paid:.2f} of the other's rounds; the call stays what it was: {kept}")
    return kept


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.call_lab", description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="of the cell, Mbit/s")
    parser.add_argument("--call", type=float, default=1.5, help="of the call, each way, Mbit/s")
    parser.add_argument("--values", type=int, default=250_000, help="of the model")
    parser.add_argument("--seconds", type=float, default=12.0, help="that each case is listened to")
    parser.add_argument("--turns", type=int, default=2, help="of each of the two jobs")
    options = parser.parse_args()
    if (reason := lab_unavailable("nft")) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    print(f"cell of {options.rate:g} Mbit/s, call of {options.call:g} each way; load {os.getloadavg()[0]:.2f}\n")
    ways = " | ".join(f"{way}: lost % | median ms | 95 % | worst" for way in ("up", "down"))
    print(f"| the call | {ways} | rounds/s |\n{'|---' * 10}|", flush=True)
    try:
        results = measure(options)
    except (LabError, LocalMeshError, OverlapError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(not judged(results))


if __name__ == "__main__":
    sys.exit(main())
