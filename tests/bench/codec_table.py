"""`python -m tests.bench.codec_table`: what every codec costs in loss, bytes and time, beside fp32 on the same seeds.

Real daemons on this machine. The result file is gone on with where it was left; ctrl-C ends in order. Two passes more
go into the same file: `--times`, over links of a home network, for a machine that does nothing else; and `--kill`:
in the middle of each job one member is killed, and comes back. `--report` prints the tables of a result file and
trains nothing. Ends with exit code 1 when a job failed or replicas differ.
"""

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, product
from pathlib import Path

from platformdirs import user_cache_path

from meshtrain.demo.localmesh import LocalDaemon, LocalMesh, LocalMeshError
from meshtrain.examples.digits import DigitsError
from meshwire.codecs.registry import FAMILIES, parse_codec
from tests.bench.codecjob import MODELS, write_data
from tests.bench.codecreport import short_table, tables
from tests.bench.codecruns import ResultFile, Run, train
from tests.bench.journal import say
from tests.bench.kept_lines import KeptLinesError
from tests.bench.soak import interruptible
from tests.lab.chaosmesh import NAMES, ChaosMesh

BASELINE = "fp32"
MORE = (  # besides every codec as it is by default
    *("int8:sr", "int4:sr", "onebit:warmup=40", "threshold:rms=1", "randomk:0.1"),
    *("topk:0.1", "topk:0.1,gather", "topk:0.25..0.01/60", "fp32@local:8", "int8@local:8", "fp32@diloco:8"),
    *("@sparseloco:8", "dct:32,decay=0.999@demo"),
    *("fp32%0.8,every=20,until=100", "fp16%0.8,every=20,until=100", "fp32@local:8%0.8,every=5,until=30"),
)
WAYS = (BASELINE, *(name for name in FAMILIES if name != BASELINE), *MORE)
MEMBERS = (2, 4)
TIMED_STEPS = 30
MBIT = 50.0  # of a home's WiFi: what a station gets
KILL_MEMBERS = 3  # whoever is left still exchanges
WITH_MOMENTUM = {"gpt": "gpt-momentum"}  # by model whose optimizer has none: the one beside it whose has


def plan(options: argparse.Namespace) -> list[Run]:
    """All jobs; those of one number of members in a row, and the first seed of all ways before the second."""
    seeds = range(1 if options.times or options.kill else options.seeds)
    members = options.members or ((KILL_MEMBERS,) if options.kill else MEMBERS)
    mbit = options.mbit if options.times else None
    ways = tuple(dict.fromkeys((BASELINE, *options.codecs)))
    return [
        Run(model, members, way, seed, _steps(options, model, members), mbit, options.kill)
        for members, seed, chosen in product(members, seeds, options.models)
        for model, way in dict.fromkeys(_trained(chosen, ways))
    ]


def _trained(model: str, ways: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(model, way): a codec that takes over momentum trains a model whose optimizer has some, beside its own fp32."""
    for way in ways:
        codec = way.partition("%")[0].partition("@")[0]
        if model in WITH_MOMENTUM and codec and parse_codec(codec).momentum:
            yield WITH_MOMENTUM[model], BASELINE
            yield WITH_MOMENTUM[model], way
        else:
            yield model, way


def _steps(options: argparse.Namespace, model: str, members: int) -> int:
    """Of more than two members half as many, which take as long on this machine."""
    if options.times:
        return TIMED_STEPS
    return int(options.steps or MODELS[model].steps // (1 if members == 2 else 2))


@contextmanager
def mesh(run: Run) -> Iterator[Sequence[LocalDaemon]]:
    """The daemons that a job is for, linked to each other. Raises LocalMeshError."""
    if run.mbit is None and not run.kill:
        with LocalMesh(NAMES[: run.members], lambda _line: None) as local:
            yield local.daemons
    else:
        rate_bytes_per_s = None if run.mbit is None else run.mbit * 1e6 / 8
        with ChaosMesh(run.members, station_bytes_per_s=rate_bytes_per_s) as chaos:
            yield [chaos.daemons[name] for name in NAMES[: run.members]]


def measure(runs: Sequence[Run], results: ResultFile) -> None:
    """Trains them all. A mesh in which a job failed is not used again. Raises LocalMeshError, DigitsError."""
    done = 0
    with tempfile.TemporaryDirectory(prefix="meshtrain-codecs-") as name:
        folder = Path(name)
        write_data(folder / "data", user_cache_path("meshtrain") / "digits")
        for _, group in groupby(runs, lambda run: (run.members, run.mbit, run.kill)):
            left = deque(group)
            while left:
                with mesh(left[0]) as daemons:
                    failed = False
                    while left and not failed:
                        run, began_s = left.popleft(), time.monotonic()
                        outcome = train(daemons, folder, run).outcome
                        results.keep(run, outcome)
                        done += 1
                        failed = outcome.error is not None
                        said = outcome.error or f"loss {outcome.loss:.4f}, accuracy {outcome.accuracy:.3f}"
                        say(f"[{done}/{len(runs)}] {run}: {said} ({time.monotonic() - began_s:.0f} s)")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.codec_table", description=__doc__)
    parser.add_argument("--codecs", nargs="+", default=WAYS, metavar="CODEC[@SYNC][%%MASKS]", help="default: all")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt", "cnn"])
    parser.add_argument("--members", nargs="+", type=int, metavar="M", help="default 2 4, with --kill 3")
    parser.add_argument("--seeds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--steps", type=int, help=f"of every job, more than {TIMED_STEPS} (default: by model)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--kill", action="store_true", help="each job loses its last member in the middle, and gets it back"
    )
    kind.add_argument("--times", action="store_true", help=f"seconds a step instead, {TIMED_STEPS} of them")
    parser.add_argument("--mbit", type=float, default=MBIT, help="of every member with --times (default %(default)g)")
    parser.add_argument("--json", type=Path, default=Path("codecs.jsonl"), metavar="FILE", help="default %(default)s")
    parser.add_argument("--report", action="store_true", help="only print what FILE holds")
    parser.add_argument("--short", action="store_true", help="with --report: as the table in protocol/CODECS.md")
    options = parser.parse_args()
    if bad := [members for members in options.members or () if not 2 <= members <= len(NAMES)]:
        parser.error(f"--members: {bad[0]}: from 2 to {len(NAMES)}")
    if options.kill and 2 in (options.members or ()):
        parser.error("--kill: with 2 members nobody is left to exchange with: use 3 or more")
    if options.short and not options.report:
        parser.error("--short: only with --report")
    if options.seeds < 1 or (options.steps is not None and options.steps <= TIMED_STEPS):
        parser.error(f"--seeds must be at least 1, and --steps more than {TIMED_STEPS}")
    try:
        results = ResultFile(options.json)
        if not options.report:
            runs = results.missing(plan(options))
            say(f"{len(runs)} jobs; what is done is in {options.json}")
            with interruptible():
                measure(runs, results)
    except (LocalMeshError, DigitsError, KeptLinesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on with {options.json}")
        return 130
    print("\n".join((short_table if options.short else tables)(results.outcomes)))
    return int(any(outcome.error or outcome.replicas_equal is not True for outcome in results.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
