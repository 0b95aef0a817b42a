"""`python -m tests.bench.stragglers`: one of three learners is 3x slower, or stops for a while; who waits for whom?

Three daemons in rate-limited stations. The learners are paced: a step is stated to take so long a sample, and the real
compute beside it is printed. The link is what limits the exchange, which takes `--exchange` of a step. Ends with exit
code 1 when an aim is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalDaemon, LocalMeshError
from meshwire.messages.job import JobSummary
from meshwire.messages.local import Watch, Watched
from meshwire.rounds.learner_state import StepTimes
from meshwire.sync_modes.mode import sync_settings
from tests.bench import paced
from tests.bench.overlap_lab import OverlapError, StationDaemon, paired
from tests.daemon import realjobs as jobs
from tests.lab.lab import Lab, LabError, lab_unavailable

NAMES = ("anna", "bert", "cleo")
MEMBERS = len(NAMES)
SLOWNESS = 3.0
VALUES = 800_000
BATCH = 16
WARM_UP = 0.25  # of a run: connections reach their rate
STOP_S = 5.0
GRACE_S = 0.5
JOB_TIMEOUT_S = 500.0


@dataclass(frozen=True)
class Case:
    """How a job is run, and what is wanted of it."""

    name: str
    options: dict[str, str]
    slowness: tuple[float, ...]
    steps: int


@dataclass(frozen=True)
class Run:
    """One job, ended."""

    summary: JobSummary
    steps: list[list[paced.Step]]  # by rank

    def window(self) -> tuple[float, float]:
        """The stretch in which all ranks were at work: after its first part, and once batches had their last size."""
        first_s = max(steps[0].began_s for steps in self.steps)
        last_s = min(steps[-1].ended_s for steps in self.steps)
        return max(first_s + WARM_UP * (last_s - first_s), *map(_settled_s, self.steps)), last_s

    def settled_step(self) -> int:
        """Steps of the first rank before its batches had their last size; 0 if that never changed."""
        return sum(step.began_s < _settled_s(self.steps[0]) for step in self.steps[0])

    def speeds(self) -> list[float]:
        """Samples a second of every rank in the window."""
        return [paced.speed(steps, *self.window()) for steps in self.steps]

    def contributors(self) -> float:
        """Mean over all rounds: every contribution is counted under its age."""
        return sum(jobs.ages(self.summary)) / max(1, self.summary.rounds)


def _settled_s(steps: list[paced.Step]) -> float:
    """When this rank's batches had the size that they kept; an epoch's last one may be smaller."""
    changed = [step.began_s for before, step in pairwise(steps[:-1]) if step.samples != before.samples]
    return changed[-1] if changed else steps[0].began_s


def run(
    daemons: Sequence[LocalDaemon], folder: Path, script_options: str, script: str = paced.SCRIPT, **options: object
) -> Run:
    """Runs one job to its end. Raises OverlapError when it fails."""
    submitted = jobs.submit(daemons[0], folder, script, args=(script_options,), hash_every=0, **options)
    reply = daemons[0].request(Watch(job=submitted.job), JOB_TIMEOUT_S, "end of the job")
    assert isinstance(reply, Watched)
    if reply.summary.state != "succeeded":
        raise OverlapError(f"the job {reply.summary.state}: {reply.summary.error}")
    return ended(daemons[0], reply.summary, len(submitted.members))


def ended(daemon: LocalDaemon, summary: JobSummary, members: int) -> Run:
    """A job that has succeeded, with what its ranks have written of their steps."""
    return Run(summary, [paced.steps(daemon, summary.job, rank) for rank in range(members)])


def step_s(rate_mbit: float, exchange: float) -> float:
    """A fast step's length: its exchange on links of this rate takes `exchange` of it."""
    return 2 * (MEMBERS - 1) / MEMBERS * VALUES * 32e-6 / rate_mbit / exchange


def cases() -> list[Case]:
    """With one slow learner."""
    slow = (1.0, 1.0, SLOWNESS)
    return [
        Case("bsp, equal", {"sync": "bsp", "shares": "equal"}, slow, 24),
        Case("ssp:3 wait, equal", {"sync": "ssp:3", "straggler": "wait", "shares": "equal"}, slow, 24),
        Case("ssp:3 carry, equal", {"sync": "ssp:3", "straggler": "carry", "shares": "equal"}, slow, 80),
        Case("bsp, speed", {"sync": "bsp", "shares": "speed"}, slow, 90),
        Case("ssp:3 carry, speed", {"sync": "ssp:3", "straggler": "carry", "shares": "speed"}, slow, 80),
        Case("local:8, equal", {"sync": "local:8", "shares": "equal"}, slow, 6 * 8),
        Case("local:8,ssp:1", {"sync": "local:8,ssp:1"}, slow, 16 * 8),
    ]


def measure_slow(daemons: list[StationDaemon], folder: Path, fast_step_s: float, only: str) -> list[bool]:
    """Every case beside one learner alone. Prints as it goes; returns whether each aim was met."""
    sample_s = fast_step_s / BATCH

    def script(slowness: tuple[float, ...], count: int) -> str:
        return paced.options(values=VALUES, sample_s=sample_s, batch=BATCH, slowness=slowness, count=count)

    alone = run(daemons, folder, script((1.0,), 20), on=(NAMES[0],), sync="bsp", shares="equal")
    own = alone.speeds()[0]
    compute_s = sum(step.cpu_s for step in alone.steps[0]) / len(alone.steps[0])
    print(
        f"a fast step is stated to take {fast_step_s * 1000:.0f} ms for {BATCH} samples, its real compute takes "
        f"{compute_s * 1000:.0f} ms ({fast_step_s / compute_s:.1f} times less); alone it does {own:.1f} samples/s\n"
    )
    columns = (
        "case",
        "samples/s by rank",
        "of own speed",
        "of the sum",
        "contributors",
        "ages",
        "nulls",
        "batches",
        "since step",
        "aim",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    met = []
    for case in cases():
        if only not in case.name:
            continue
        done = run(daemons, folder, script(case.slowness, case.steps), **case.options)
        speeds = done.speeds()
        shares = [speed / (own / slowness) for speed, slowness in zip(speeds, case.slowness, strict=True)]
        of_sum = sum(speeds) / sum(own / slowness for slowness in case.slowness)
        metrics = [report.metrics for report in done.summary.ranks]
        ages = jobs.ages(done.summary)
        aim, reached = _judged(case, shares, of_sum, done.contributors(), ages)
        met.append(reached)
        print(
            f"| {case.name} | {' '.join(f'{speed:.1f}' for speed in speeds)} "
            f"| {' '.join(f'{share:.2f}' for share in shares)} | {of_sum:.2f} | {done.contributors():.2f} "
            f"| {' '.join(map(str, ages))} | {' '.join(str(one.nulls) for one in metrics)} "
            f"| {' '.join(str(one.batch or BATCH) for one in metrics)} | {done.settled_step()} "
            f"| {aim}: {'PASS' if reached else 'FAIL'} |",
            flush=True,
        )
    return met


def _judged(case: Case, shares: list[float], of_sum: float, contributors: float, ages: list[int]) -> tuple[str, bool]:
    bound = sync_settings(case.options["sync"]).staleness
    if any(ages[bound + 1 :]):
        return f"no age above {bound}", False
    if case.name == "bsp, equal":
        return "fast ones at about a third", 0.25 < shares[0] < 0.4
    if case.name == "ssp:3 carry, equal":
        return "fast ones > 0.9, contributors >= 2.2", min(shares[:2]) > 0.9 and contributors >= 2.2
    if case.name == "local:8,ssp:1":
        return "fast ones > 0.95, > 0.95 of the sum", min(shares[:2]) > 0.95 and of_sum > 0.95
    if case.name == "bsp, speed":
        return "> 0.85 of the sum", of_sum > 0.85
    return "none", True


def measure_stops(daemons: list[StationDaemon], folder: Path, fast_step_s: float) -> list[bool]:
    """Rank 2 stops for STOP_S: before its step's first bucket (R5), and with half of its buckets sent (V2)."""
    print(f"\nrank 2 is stopped for {STOP_S:.0f} s in step 20 (SIGSTOP)\n")
    columns = ("case", "stopped", "deadline", "the others stood still", "nulls", "void", "steps lost", "aim")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    met = []
    for sync in ("ssp:2", "bsp"):
        for where, layer in (("before its forward pass", None), ("in its backward pass", 3)):
            if sync == "bsp" and layer is None:
                continue  # R7: a computing learner never nulls, and is waited for
            script = paced.options(
                values=VALUES,
                sample_s=fast_step_s / BATCH,
                batch=BATCH,
                slowness=(1.0,) * MEMBERS,
                count=45,
                stop={"step": 20, "layer": layer},
            )
            with paced.Waking(daemons[2], STOP_S):
                done = run(daemons, folder, script, sync=sync, shares="equal")
            deadline_s = _deadline_s(done.steps[2][:19])
            stood_s = max(paced.standstill_s(steps[5:]) for steps in done.steps[:2])
            metrics = done.summary.ranks[2].metrics
            aim, reached = f"<= deadline + {GRACE_S} s", stood_s <= deadline_s + GRACE_S
            if sync == "bsp":
                aim, reached = "its round is void, the next one waits for it (R7)", metrics.void_rounds == 1
            met.append(reached)
            print(
                f"| {sync} | {where} | {deadline_s:.2f} s | {stood_s:.2f} s | {metrics.nulls} | {metrics.void_rounds} "
                f"| {metrics.steps_lost} | {aim}: {'PASS' if reached else 'FAIL'} |",
                flush=True,
            )
    return met


def _deadline_s(steps: list[paced.Step]) -> float:
    """As this learner's daemon has it after these steps (V2)."""
    times = StepTimes()
    for step in steps:
        times.add(step.ended_s - step.began_s)
    deadline_s = times.deadline_s
    assert deadline_s is not None
    return deadline_s


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.stragglers", description=__doc__)
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of every station, each way")
    parser.add_argument("--exchange", type=float, default=0.55, help="of a fast step: 0.5 to 0.8")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name holds this")
    parser.add_argument("--skip-stops", action="store_true", help="only the slow learner")
    options = parser.parse_args()
    if (reason := lab_unavailable()) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    try:
        with ExitStack() as stack:
            lab = stack.enter_context(Lab(MEMBERS, options.rate))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
            daemons = [StationDaemon(lab, station, name, folder / name) for station, name in enumerate(NAMES)]
            for daemon in daemons:
                daemon.wait()
            for first, second in combinations(daemons, 2):
                paired(first, second)
            fast_step_s = step_s(options.rate, options.exchange)
            met = measure_slow(daemons, folder, fast_step_s, options.only)
            if not options.skip_stops:
                met += measure_stops(daemons, folder, fast_step_s)
    except (LabError, LocalMeshError, OverlapError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
