"""`python -m tests.bench.codec_table`: what every codec costs in loss, bytes and time, beside fp32 on the same seeds.

Real daemons on this machine. The result file is gone on with where it was left; ctrl-C ends in order. `--times` is a
pass of its own, over links of a home network, for a machine that does nothing else. `--report` prints the tables of a
result file and trains nothing. Ends with exit code 1 when a job failed or replicas differ.
"""

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, product
from pathlib import Path

from platformdirs import user_cache_path

from meshtrain.examples.digits import DigitsError
from meshtrain.localmesh import LocalDaemon, LocalMesh, LocalMeshError
from meshwire.codec import FAMILIES
from tests.bench.codecjob import MODELS, write_data
from tests.bench.codecreport import tables
from tests.bench.codecruns import ResultFile, ResultFileError, Run, train
from tests.bench.soak import interruptible
from tests.lab.chaosmesh import NAMES, ChaosMesh

BASELINE = "fp32"
MORE = (  # besides every codec as it is by default
    *("int8:sr", "int4:sr", "onebit:warmup=40", "threshold:rms=1", "randomk:0.1"),
    *("topk:0.1", "topk:0.1,gather", "topk:0.25..0.01/60", "fp32@local:8", "int8@local:8", "dct:32,decay=0.999@demo"),
)
WAYS = (BASELINE, *(name for name in FAMILIES if name != BASELINE), *MORE)
TIMED_STEPS = 30
MBIT = 50.0  # of a home's WiFi: what a station gets


def plan(options: argparse.Namespace) -> list[Run]:
    """All jobs; those of one number of members in a row, and the first seed of all ways before the second."""
    ways = list(dict.fromkeys((BASELINE, *options.codecs)))
    if options.times:
        parts = product(options.members, [0], options.models, ways)
        return [Run(model, members, way, seed, TIMED_STEPS, options.mbit) for members, seed, model, way in parts]
    parts = product(options.members, range(options.seeds), options.models, ways)
    steps = {name: options.steps or model.steps for name, model in MODELS.items()}
    return [Run(model, members, way, seed, steps[model]) for members, seed, model, way in parts]


@contextmanager
def mesh(members: int, mbit: float | None) -> Iterator[LocalDaemon]:
    """So many daemons, linked to each other; gives one. Raises LocalMeshError."""
    if mbit is None:
        with LocalMesh(NAMES[:members], lambda _line: None) as local:
            yield local.daemons[0]
    else:
        with ChaosMesh(members, station_bytes_per_s=mbit * 1e6 / 8) as limited:
            yield limited.daemons[NAMES[0]]


def measure(runs: Sequence[Run], results: ResultFile) -> None:
    """Trains them all. A mesh in which a job failed is not used again. Raises LocalMeshError, DigitsError."""
    done = 0
    with tempfile.TemporaryDirectory(prefix="meshtrain-codecs-") as name:
        folder = Path(name)
        write_data(folder / "data", user_cache_path("meshtrain") / "digits")
        for (members, mbit), group in groupby(runs, lambda run: (run.members, run.mbit)):
            left = deque(group)
            while left:
                with mesh(members, mbit) as daemon:
                    failed = False
                    while left and not failed:
                        run, began_s = left.popleft(), time.monotonic()
                        outcome = train(daemon, folder, run)
                        results.add(run, outcome)
                        done += 1
                        failed = outcome.error is not None
                        said = outcome.error or f"loss {outcome.loss:.4f}, accuracy {outcome.accuracy:.3f}"
                        say(f"[{done}/{len(runs)}] {run}: {said} ({time.monotonic() - began_s:.0f} s)")


def say(line: str) -> None:
    """Progress goes to stderr, tables to stdout."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.codec_table", description=__doc__)
    parser.add_argument("--codecs", nargs="+", default=WAYS, metavar="CODEC[@SYNC]", help="as typed (default: all)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt", "cnn"])
    parser.add_argument("--members", nargs="+", type=int, default=[2, 4], metavar="M", help="default 2 4")
    parser.add_argument("--seeds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--steps", type=int, help=f"of every job, more than {TIMED_STEPS} (default: by model)")
    parser.add_argument("--times", action="store_true", help=f"seconds a step instead, {TIMED_STEPS} of them")
    parser.add_argument("--mbit", type=float, default=MBIT, help="of every member with --times (default %(default)g)")
    parser.add_argument("--json", type=Path, default=Path("codecs.jsonl"), metavar="FILE", help="default %(default)s")
    parser.add_argument("--report", action="store_true", help="only print what FILE holds")
    options = parser.parse_args()
    if bad := [members for members in options.members if not 2 <= members <= len(NAMES)]:
        parser.error(f"--members: {bad[0]}: from 2 to {len(NAMES)}")
    if options.seeds < 1 or (options.steps is not None and options.steps <= TIMED_STEPS):
        parser.error(f"--seeds must be at least 1, and --steps more than {TIMED_STEPS}")
    try:
        results = ResultFile(options.json)
        if not options.report:
            runs = results.missing(plan(options))
            say(f"{len(runs)} jobs; what is done is in {options.json}")
            with interruptible():
                measure(runs, results)
    except (LocalMeshError, DigitsError, ResultFileError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on with {options.json}")
        return 130
    print("\n".join(tables(results.outcomes)))
    return int(any(outcome.error or outcome.replicas_equal is not True for outcome in results.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
