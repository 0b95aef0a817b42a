"""`python -m tests.bench.predicted`: what `meshtrain whatif` predicts, beside what real daemons do in the lab.

The learners are paced: a step is stated to take so long, as on cores that this machine does not have. Their script is
timed as `whatif` times one, its price is computed for each network, and then real daemons train it there. Nothing of
the model is fitted to what comes out. Prints a row for each case; ends with exit code 1 when the lab or a job fails.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path

from meshtrain.cli.planning.codec_prices import processor_prices
from meshtrain.cli.submission.measuring import NotMeasured, trace
from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMeshError
from meshwire.messages.local import Watch, Watched
from meshwire.planning.choose import job_settings
from meshwire.planning.network import Network, cables, cell
from meshwire.planning.price import Pricing
from meshwire.planning.step_trace import TracedScript
from tests.bench import paced
from tests.bench.overlap_lab import OverlapError, StationDaemon, paired
from tests.daemon import realjobs as jobs
from tests.lab.lab import Lab, LabError, lab_unavailable
from tests.lab.links import Cell

NAMES = ("anna", "bert", "cleo", "dora")
BATCH = 16
WARM_UP_ROUNDS = 3
LAB_RTT_S = 0.0005  # of idle stations without a delay
JOB_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Place:
    """A network of the lab: cables at a rate, or one cell."""

    mbit: float
    members: int
    shared: bool = False

    def lab(self) -> Lab:
        """Made of namespaces."""
        return Lab(self.members, cell=Cell(self.mbit)) if self.shared else Lab(self.members, self.mbit)

    def network(self) -> Network:
        """As it is described to the pricing."""
        made = cell if self.shared else cables
        return made(self.members, self.mbit * 1e6 / 8, LAB_RTT_S)

    def __str__(self) -> str:
        return f"{'cell' if self.shared else 'cables'} {self.mbit:g}"


@dataclass(frozen=True)
class Case:
    """A job there."""

    place: Place
    codec: str | None
    sync: str
    rounds: int
    topology: str | None = None

    def __str__(self) -> str:
        typed = (self.sync, self.codec or "-", *([self.topology] if self.topology else []))
        return f"{self.place} m={self.place.members} {' '.join(typed)}"


CABLES_20, CELL_50, CABLES_100 = Place(20.0, 2), Place(50.0, 3, shared=True), Place(100.0, 4)
CASES = (
    Case(CABLES_20, "fp32", "bsp", 10),
    Case(CABLES_20, "int8", "bsp", 16),
    Case(CABLES_20, "fp16", "ssp:2", 16),
    Case(CABLES_20, "int8", "local:8", 6),
    Case(CABLES_20, "int8", "local:8,ssp:1", 10),
    Case(CABLES_20, "fp32", "local:8,ssp:1", 10),
    Case(CABLES_20, None, "sparseloco:8", 6),
    Case(CABLES_20, "topk:0.1", "bsp", 16),
    Case(CELL_50, "fp32", "bsp", 9),
    Case(CELL_50, "int8", "bsp", 12),
    Case(CELL_50, "topk:0.1,gather", "bsp", 12),
    Case(CELL_50, "fp16", "local:8", 5),
    Case(CABLES_100, "fp32", "bsp", 12),
    Case(CABLES_100, "fp32", "bsp", 12, "tree"),
    Case(CABLES_100, "fp16", "bsp", 12, "butterfly"),
    Case(CABLES_100, "int4:sr", "bsp", 12),
)


# Gradients of noise that move the weights: equal ones are packed by LZ4 on slow links (W5), and real ones hardly are.
SCRIPT = paced.SCRIPT.replace(
    "self.backward_s, self.asleep_s",
    "self.noise = [torch.randn(count) for _ in range(LAYERS)]\n        self.backward_s, self.asleep_s",
    1,
).replace("x * weight.mean()", "x + 1e4 * (weight * self.noise[layer]).mean()", 1)


def script_options(values: int, step_s: float, members: int, rounds: int) -> str:
    """The paced script's argument."""
    return paced.options(values=values, sample_s=step_s / BATCH, batch=BATCH, slowness=(1.0,) * members, rounds=rounds)


def traced(folder: Path, values: int, step_s: float) -> TracedScript:
    """As `whatif` times it. Raises NotMeasured, CliError."""
    (folder / "train.py").write_text(SCRIPT)
    with Stages() as stages:
        return trace(
            folder, "train.py", (script_options(values, step_s, 1, 1000),), {"OMP_NUM_THREADS": "1"}, None, stages
        )


def measured_s(case: Case, daemons: Sequence[StationDaemon], folder: Path, script: str) -> float:
    """Seconds a step of a job, in the mean over whole periods behind the first rounds. Raises OverlapError."""
    submitted = jobs.submit(
        daemons[0],
        folder,
        SCRIPT,
        args=(script,),
        hash_every=0,
        sync=case.sync,
        codec=case.codec,
        topology=case.topology,
    )
    reply = daemons[0].request(Watch(job=submitted.job), JOB_TIMEOUT_S, "end of the job")
    assert isinstance(reply, Watched)
    if reply.summary.state != "succeeded":
        raise OverlapError(f"{case}: the job {reply.summary.state}: {reply.summary.error}")
    period = max(1, job_settings(case.codec, case.sync).sync.period)
    each = []
    for rank in range(case.place.members):
        begun_s = [step.began_s for step in paced.steps(daemons[0], submitted.job, rank)][WARM_UP_ROUNDS * period :]
        steps = (len(begun_s) - 1) // period * period
        each.append((begun_s[steps] - begun_s[0]) / steps)
    return statistics.fmean(each)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.predicted", description=__doc__)
    parser.add_argument("--values", type=int, default=1_000_000, help="of the model (default %(default)s)")
    parser.add_argument("--step", type=float, default=0.4, help="seconds that a step is stated to take")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name holds this")
    options = parser.parse_args()
    if (reason := lab_unavailable()) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    cases = [case for case in CASES if options.only in str(case)]
    errors = []
    try:
        with tempfile.TemporaryDirectory(prefix="meshtrain-") as name:
            script = traced(Path(name), options.values, options.step)
            codecs = [str(job_settings(case.codec, case.sync).codec) for case in cases]
            prices = processor_prices([*codecs, "fp32"], Path(name) / "prices", Stages())
            pricing = Pricing(script.measurement.manifest, prices.codecs)
        step = script.step
        print(
            f"{options.values} values; a step alone {step.alone_s * 1000:.0f} ms, stated {options.step * 1000:.0f}\n\n"
            "| case | measured | predicted | predicted / measured | against one: measured | predicted | waits for |\n"
            "|---|---|---|---|---|---|---|",
            flush=True,
        )
        for place, together in groupby(cases, lambda case: case.place):
            with ExitStack() as stack:
                lab = stack.enter_context(place.lab())
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
                daemons = [StationDaemon(lab, at, NAMES[at], folder / NAMES[at]) for at in range(place.members)]
                for daemon in daemons:
                    daemon.wait()
                for first, second in combinations(daemons, 2):
                    paired(first, second)
                for case in together:
                    settings = job_settings(case.codec, case.sync, case.topology)
                    steps = (step,) * place.members
                    network = replace(place.network(), work=prices.work)
                    price = pricing.price(settings, steps, network)
                    arguments = script_options(options.values, options.step, place.members, case.rounds)
                    found_s = measured_s(case, daemons, folder, arguments)
                    errors.append(abs(price.step_s / found_s - 1))
                    print(
                        f"| {case} | {found_s * 1000:.0f} ms | {price.step_s * 1000:.0f} ms "
                        f"| {price.step_s / found_s:.3f} | {place.members * step.alone_s / found_s:.2f} "
                        f"| {price.against_one:.2f} | {pricing.waits_for(settings, steps, network)} |",
                        flush=True,
                    )
    except (
        *(LabError, LocalMeshError, OverlapError, RequestError, ConnectionLost),
        *(NotMeasured, CliError, TimeoutError, OSError),
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if errors:
        print(f"\nerror of {len(errors)} cases: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
