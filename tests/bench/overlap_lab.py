"""`python -m tests.bench.overlap_lab`: how much of the exchange stays exposed behind a backward pass, on real daemons.

Two daemons in rate-limited stations train a model whose backward pass is paced: every layer sleeps before its gradient
is ready, together `--backward` times as long as the exchange takes at the stations' rate. Ends with exit code 1 when a
case exposes more than the last bucket's exchange + 10 %.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from meshtrain.client import Client, ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalDaemon, LocalMeshError, wait_linked
from meshwire import limits
from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.message_base import Wire
from meshwire.messages.job import JobSummary
from meshwire.messages.local import GetPeers, PairCode, PairHost, PairJoin, Peers, Watch, Watched
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import BUCKET_BYTES, VALUE_BYTES, Plan, plan_buckets
from tests.daemon import realjobs as jobs
from tests.lab.lab import Lab, LabError, lab_unavailable

NAMES = ("anna", "bert")
MEMBERS = len(NAMES)
WARM_UP = 3  # rounds before the connection has reached its rate
ALLOWANCE = 1.1  # of the last bucket's exchange
LONE_PACE_S = 0.02  # short, so that the connection does not begin slowly again after an idle time
TIMEOUT_S = 60.0
JOB_TIMEOUT_S = 500.0

# A layer's gradient costs next to nothing to compute: the sleep is the layer's backward pass.
SCRIPT = """
import json, sys, time
import torch
import meshtrain as mt

layer_values, pace_s, steps = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])


class Pace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.full((n,), 0.1)) for n in layer_values)

    def forward(self, x):
        for weight, seconds in zip(self.weights, pace_s):
            x = Pace.apply(x * weight.mean(), seconds)
        return x


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rounds = []
model.weights[0].register_post_accumulate_grad_hook(lambda _: rounds[-1].append(time.monotonic()))
model, optimizer = mt.prepare(model, optimizer)
torch.set_num_threads(1)  # the stations share this machine's cores
for _ in range(steps):
    optimizer.zero_grad()
    loss = model(torch.ones(1)).sum()
    rounds.append([time.monotonic()])
    loss.backward()
    rounds[-1].append(time.monotonic())
    optimizer.step()
(mt.output_dir() / "rounds.json").write_text(json.dumps(rounds))  # begin, last gradient, end of backward(), by step
mt.finish()
"""


class OverlapError(Exception):
    """The measurement could not be made; says why."""


@dataclass(frozen=True)
class Case:
    """A model, its pacing, and how it is cut.

    Attributes:
        layers_kib: sizes of the layers' fp32 gradients in the order of the model; the backward pass goes from the end.
        pace_s: sleep before each of these gradients.
        bucket_bytes: of the plan.
    """

    name: str
    layers_kib: tuple[int, ...]
    pace_s: tuple[float, ...]
    bucket_bytes: int

    def plan(self) -> Plan:
        """As both learners compute it."""
        tensors = tuple(
            TensorSpec(name=f"weights.{index}", shape=(_values(kib),), dtype="float32", kind="parameter")
            for index, kib in enumerate(self.layers_kib)
        )
        return plan_buckets(ModelManifest(tensors=tensors, optimizer=""), self.bucket_bytes)


@dataclass(frozen=True)
class Measured:
    """One case. Times in ms; those of rounds are medians over all but the first WARM_UP.

    A round's exchange cannot end before the last rank has its last gradient: until then an early rank waits for the
    other's computing, not for the network. So exposed and returned count from the last rank's last gradient, to the
    last rank's end.

    Attributes:
        exchange_ms: 2(m-1)/m * encoded bytes / rate of all buckets, last_bucket_ms: of the last one.
        backward_ms: from the start of backward() to the last gradient.
        schedule_ms: what this plan and pacing leave exposed when every bucket takes just its 2(m-1)/m * bytes / rate.
        exposed_ms: until the daemon holds the round (the trace's RoundComplete).
        returned_ms: until backward() has returned: also waking the learner up, and its copy of the means into p.grad.
        waited_ms: the job's own metric of its worse rank, mean over all rounds; holds the skew, too.
        skew_ms: between the last gradients of the two ranks.
        overlap: 1 - exposed / exchange.
    """

    case: str
    codec: str
    rate_mbit: float
    rounds: int
    buckets_kib: tuple[int, ...]
    exchange_ms: float
    backward_ms: float
    last_bucket_ms: float
    schedule_ms: float
    exposed_ms: float
    exposed_min_ms: float
    exposed_max_ms: float
    returned_ms: float
    waited_ms: float
    skew_ms: float
    overlap: float
    within_target: bool


class StationDaemon(LocalDaemon):
    """One `meshtraind run` in a station of the lab, which is found and found by others over mDNS on its cable."""

    def __init__(self, lab: Lab, station: int, name: str, data_dir: Path) -> None:
        self.name = name
        self.data_dir = data_dir
        data_dir.mkdir(parents=True)
        self.log_path = data_dir / "daemon.log"
        self.client: Client | None = None
        self.host = lab.host(station)
        run = ["python", "-m", "meshtraind", "run", "--listen", f"{self.host}:0", "--interface", "eth0"]
        with self.log_path.open("ab") as log:
            command = [*run, "--name", name, "--data-dir", str(data_dir)]
            self.process = lab.run(station, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def paired(first: StationDaemon, second: StationDaemon) -> None:
    """Pairs two daemons and returns when they are linked. Raises OverlapError."""

    def on_code(event: Wire) -> None:
        if isinstance(event, PairCode):
            second.request(PairJoin(code=event.code, at=f"{first.host}:{event.port}"), TIMEOUT_S, "pairing")

    first.request(PairHost(), TIMEOUT_S, "pairing", on_code)
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        reply = first.request(GetPeers(), TIMEOUT_S, "list of peers")
        assert isinstance(reply, Peers)
        if any(peer.state == "linked" for peer in reply.peers):
            return
        if time.monotonic() > deadline_s:
            raise OverlapError(f"{second.name} was not linked in {TIMEOUT_S:.0f} s:\n{second.log_tail()}")
        time.sleep(0.05)


def linked_stations(lab: Lab, names: Sequence[str], folder: Path) -> list[StationDaemon]:
    """A daemon in each of the first stations of a lab, all linked. Raises OverlapError, LocalMeshError."""
    daemons = [StationDaemon(lab, station, name, folder / name) for station, name in enumerate(names)]
    link(daemons)
    return daemons


def link(daemons: Sequence[StationDaemon]) -> None:
    """Pairs daemons that were started, each with the next one, until all are linked. Raises OverlapError,
    LocalMeshError."""
    for daemon in daemons:
        daemon.wait()
    for first, second in itertools.pairwise(daemons):
        paired(first, second)
    wait_linked(list(daemons))


def measure(
    case: Case, daemons: list[StationDaemon], folder: Path, codec: str, rate_mbit: float, steps: int
) -> Measured:
    """Runs one job. Raises OverlapError."""
    arguments = (json.dumps([_values(kib) for kib in case.layers_kib]), json.dumps(case.pace_s), str(steps))
    options = {"args": arguments, "codec": codec, "bucket_bytes": case.bucket_bytes, "trace": True, "hash_every": 0}
    submitted = jobs.submit(daemons[0], folder, SCRIPT, **options)
    reply = daemons[0].request(Watch(job=submitted.job), JOB_TIMEOUT_S, "end of the job")
    assert isinstance(reply, Watched)
    summary = reply.summary
    if summary.state != "succeeded" or len(submitted.members) != MEMBERS:
        raise OverlapError(f"{case.name}: the job on {len(submitted.members)} peers {summary.state}: {summary.error}")
    ranks = [
        json.loads(jobs.read(daemons[0], submitted.job, "output", rank, "rounds.json"))[WARM_UP:]
        for rank in range(MEMBERS)
    ]
    completed = [completed_s(daemon, submitted.job, steps)[WARM_UP:] for daemon in daemons]
    return _judged(case, codec, rate_mbit, ranks, completed, summary)


def completed_s(daemon: StationDaemon, job: str, rounds: int) -> list[float]:
    """When this daemon held each round, from its trace. Raises OverlapError."""
    path = daemon.data_dir / "jobs" / job / "trace.jsonl"
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        lines = path.read_text().splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        times_s = [entry["t_s"] for entry in entries if entry["what"] == "RoundComplete"]
        if len(times_s) == rounds:
            return times_s
        if time.monotonic() > deadline_s:
            raise OverlapError(f"{path} shows {len(times_s)} of {rounds} rounds")
        time.sleep(0.05)


def _judged(
    case: Case,
    codec: str,
    rate_mbit: float,
    ranks: list[list[tuple[float, float, float]]],
    completed: list[list[float]],
    summary: JobSummary,
) -> Measured:
    plan = case.plan()
    seconds = [exchange_s(plan, bucket, codec, rate_mbit) for bucket in range(len(plan.buckets))]
    last_gradients_s = [max(last for _, last, _ in ranks_round) for ranks_round in zip(*ranks, strict=True)]
    exposed_s = [max(held) - last for held, last in zip(zip(*completed, strict=True), last_gradients_s, strict=True)]
    ends_s = [max(end for _, _, end in ranks_round) for ranks_round in zip(*ranks, strict=True)]
    return Measured(
        case=case.name,
        codec=codec,
        rate_mbit=rate_mbit,
        rounds=len(exposed_s),
        buckets_kib=tuple(bucket.count * VALUE_BYTES // limits.KIB for bucket in plan.buckets),
        exchange_ms=_ms(sum(seconds)),
        backward_ms=_ms(min(median(last - begin for begin, last, _ in rounds) for rounds in ranks)),
        last_bucket_ms=_ms(seconds[-1]),
        schedule_ms=_ms(scheduled_s(case, plan, seconds)),
        exposed_ms=_ms(median(exposed_s)),
        exposed_min_ms=_ms(min(exposed_s)),
        exposed_max_ms=_ms(max(exposed_s)),
        returned_ms=_ms(median(end - last for end, last in zip(ends_s, last_gradients_s, strict=True))),
        waited_ms=_ms(max(report.metrics.exposed_s / max(1, report.metrics.round) for report in summary.ranks)),
        skew_ms=_ms(median(abs(a[1] - b[1]) for a, b in zip(*ranks, strict=True))),
        overlap=round(1 - median(exposed_s) / sum(seconds), 3),
        within_target=median(exposed_s) <= ALLOWANCE * seconds[-1],
    )


def exchange_s(plan: Plan, bucket: int, codec: str, rate_mbit: float) -> float:
    """The least that a bucket takes at the stations' rate."""
    bounds = (plan.buckets[bucket].segment_bounds(index) for index in range(plan.buckets[bucket].segment_count))
    encoded_bytes = sum(parse_codec(codec).segment_bytes_max(count) for _, count in bounds)
    return 2 * (MEMBERS - 1) / MEMBERS * encoded_bytes * 8e-6 / rate_mbit


def scheduled_s(case: Case, plan: Plan, bucket_s: list[float]) -> float:
    """What stays exposed when buckets leave as soon as they are full and the link does one after the other (WFBP)."""
    ready_s = [sum(case.pace_s[index:]) for index in range(len(case.pace_s))]
    done_s = 0.0
    for bucket, seconds in zip(plan.buckets, bucket_s, strict=True):
        full_s = max(ready_s[plan.spans[span].tensor] for span in bucket.spans)
        done_s = max(done_s, full_s) + seconds
    return done_s - ready_s[0]


def cases(backward: float, rate_mbit: float) -> list[Case]:
    """The plans that are compared; pacing in proportion to bytes, as in a model of equal layers.

    Args:
        backward: length of the backward pass against the exchange of all of it.
    """
    layer_kib, layers = 1024, 16
    layer_pace_s = backward * 2 * (MEMBERS - 1) / MEMBERS * layer_kib * limits.KIB * 8e-6 / rate_mbit
    layers_kib, pace_s = (layer_kib,) * layers, (layer_pace_s,) * layers
    return [
        Case("equal buckets of 1 MiB", layers_kib, pace_s, limits.MIB),
        Case("the default plan", layers_kib, pace_s, BUCKET_BYTES),
        Case("one bucket: no overlap", (layers * layer_kib,), (layers * layer_pace_s,), BUCKET_BYTES),
        Case("a last bucket alone", (layer_kib,), (LONE_PACE_S,), BUCKET_BYTES),
    ]


COLUMNS = (
    "case",
    "backward",
    "exchange",
    "buckets KiB",
    "last bucket",
    "schedule",
    "exposed (range)",
    "returned",
    "waited",
    "skew",
    "overlap",
    "target",
)


def row(result: Measured) -> str:
    """A line of a Markdown table; times in ms."""
    verdict = "PASS" if result.within_target else "FAIL"
    return (
        f"| {result.case} | {result.backward_ms:.0f} | {result.exchange_ms:.0f} | {_runs(result.buckets_kib)} "
        f"| {result.last_bucket_ms:.0f} | {result.schedule_ms:.0f} "
        f"| {result.exposed_ms:.0f} ({result.exposed_min_ms:.0f} to {result.exposed_max_ms:.0f}) "
        f"| {result.returned_ms:.0f} | {result.waited_ms:.0f} | {result.skew_ms:.1f} | {result.overlap:.0%} "
        f"| {ALLOWANCE * result.last_bucket_ms:.0f}: {verdict} |"
    )


def _runs(sizes: tuple[int, ...]) -> str:
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    return " ".join(map(str, sizes))


def _values(kib: int) -> int:
    return kib * limits.KIB // VALUE_BYTES


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overlap_lab", description=__doc__)
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of every station, each way")
    parser.add_argument("--backward", type=float, nargs="+", default=[1.1], help="against the exchange of all buckets")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--codec", choices=sorted(FAMILIES), default="fp32")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name holds this")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for the daemons' data, with the traces")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for every case")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}, which are not counted")
    if (reason := lab_unavailable()) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    try:
        results = run(options)
    except (LabError, LocalMeshError, OverlapError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(not all(result.within_target for result in results))


def run(options: argparse.Namespace) -> list[Measured]:
    """All cases on one pair of daemons, printed as they end. Raises LabError, OverlapError, and what clients raise."""
    results = []
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(MEMBERS, options.rate))
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
        daemons = linked_stations(lab, NAMES, folder)
        if not options.json:
            print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        for backward in options.backward:
            for case in cases(backward, options.rate):
                if options.only in case.name:
                    result = measure(case, daemons, folder, options.codec, options.rate, options.steps)
                    results.append(result)
                    print(json.dumps(asdict(result)) if options.json else row(result), flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
