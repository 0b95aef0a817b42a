"""`python -m tests.bench.demo_matrix`: the demo for every number of peers and codec, beside one process.

The one process trains on the same samples, in joint batches and in the same order. Ends with exit code 1 when a
promise of the demo does not hold.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshtrain.demo.run import CURVE_STEPS, TEXT_BYTES, DemoSettings
from meshtrain.examples.gpt import GPT, GPTConfig
from meshtrain.examples.text import stdlib_text
from meshtrain.train.model.tensors import build
from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.model.plan import plan_buckets

RUN_TIMEOUT_S = 600.0
LEARNT_NATS = 0.2  # below the entropy of the characters alone
LOSS_TOLERANCE = 0.03  # of the one process
FIRST_LOSS_TOLERANCE = 1e-5  # the same samples and weights: only the order of addition differs
PAYLOAD_TOLERANCE = 1.05  # of a ring's bytes: padding and headers of segments


class MatrixError(Exception):
    """A run did not come to its end; says why."""


@dataclass(frozen=True)
class OneProcess:
    """Losses in nats per character; the last is a mean over CURVE_STEPS, as the demo's is."""

    loss_first: float
    loss_last: float


@dataclass(frozen=True)
class Cell:
    """One demo run, and what is wrong with it.

    Attributes:
        loss_difference: of the last losses, relative to the one process.
        payload_share: largest payload of a peer against 2(m-1)/m * N * rounds.
        sent_mb: bytes on the sockets of all peers, framing and TLS included.
    """

    peers: int
    codec: str
    rounds: int
    loss_first: float
    loss_last: float
    one_process_first: float
    one_process_last: float
    loss_difference: float
    unigram_entropy: float
    replicas_equal: bool
    hashes_compared: int
    payload_share: float
    sent_mb: float
    counted_by: str
    overlap: float
    seconds: float
    broken: tuple[str, ...]


def encoded_bytes(codec: str) -> int:
    """Exact size of the demo's gradient vector as this codec sends it."""
    plan = plan_buckets(build(GPT(GPTConfig()), "").manifest)
    bounds = (bucket.segment_bounds(segment) for bucket in plan.buckets for segment in range(bucket.segment_count))
    return sum(parse_codec(codec).segment_bytes_max(count) for _, count in bounds)


def run_one_process(settings: DemoSettings) -> OneProcess:
    """The demo's script without daemons. Raises MatrixError."""
    with tempfile.TemporaryDirectory(prefix="meshtrain-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        (folder / "data" / "input.txt").write_text(stdlib_text(TEXT_BYTES), encoding="utf-8")
        options = {"peers": settings.peers, "batch-size": settings.batch_size, "steps": settings.steps}
        _run("tests.bench.one_process", {**options, "seed": settings.seed}, folder)
        losses = json.loads((folder / "out" / "metrics.json").read_text(encoding="utf-8"))["losses"]
    last = losses[-CURVE_STEPS:]
    return OneProcess(losses[0], sum(last) / len(last))


def run_demo(settings: DemoSettings) -> dict[str, Any]:
    """`meshtrain demo --json`. Raises MatrixError."""
    options = {"peers": settings.peers, "codec": settings.codec, "steps": settings.steps, "seed": settings.seed}
    printed = _run("meshtrain.cli", options, Path.cwd(), "demo", "--json")
    result: dict[str, Any] = json.loads(printed)
    return result


def _run(module: str, options: dict[str, object], folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", module, *words]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    roots = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, roots))}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise MatrixError(f"{' '.join(command)} ended with exit code {error.returncode}:\n{error.stderr}") from error
    except subprocess.TimeoutExpired as error:
        raise MatrixError(f"{' '.join(command)} did not end within {RUN_TIMEOUT_S:.0f} s") from error
    return done.stdout


def judged(settings: DemoSettings, demo: dict[str, Any], alone: OneProcess) -> Cell:
    """Compares a run with what is promised of it."""
    ring_bytes = 2 * (settings.peers - 1) / settings.peers * encoded_bytes(settings.codec) * demo["rounds"]
    share = demo["payload_bytes_max"] / ring_bytes
    payload_all = settings.peers * ring_bytes  # however unevenly the shards of single peers come out
    difference = demo["loss_last"] / alone.loss_last - 1
    promises = {
        "all steps were rounds": demo["rounds"] == settings.steps,
        "replicas are bit-equal": demo["replicas_equal"] is True and demo["hashes_compared"] >= settings.steps // 10,
        "the first loss is the one process's": abs(demo["loss_first"] - alone.loss_first) <= FIRST_LOSS_TOLERANCE,
        f"{LEARNT_NATS} nats were learnt": demo["loss_last"] <= demo["unigram_entropy"] - LEARNT_NATS,
        f"the last loss is within {LOSS_TOLERANCE:.0%} of the one process's": abs(difference) <= LOSS_TOLERANCE,
        f"the payload is at most {PAYLOAD_TOLERANCE} of a ring's": share <= PAYLOAD_TOLERANCE,
        "the kernel counted the bytes": demo["counted_by"] == "kernel",
        "the sockets carried the payload": demo["bytes_sent"] >= payload_all,
    }
    return Cell(
        peers=settings.peers,
        codec=settings.codec,
        rounds=demo["rounds"],
        loss_first=demo["loss_first"],
        loss_last=demo["loss_last"],
        one_process_first=alone.loss_first,
        one_process_last=alone.loss_last,
        loss_difference=difference,
        unigram_entropy=demo["unigram_entropy"],
        replicas_equal=demo["replicas_equal"],
        hashes_compared=demo["hashes_compared"],
        payload_share=share,
        sent_mb=demo["bytes_sent"] / 1e6,
        counted_by=demo["counted_by"],
        overlap=demo["overlap"],
        seconds=demo["seconds"],
        broken=tuple(promise for promise, kept in promises.items() if not kept),
    )


COLUMNS = (
    "peers",
    "codec",
    "first loss",
    "alone",
    "last loss",
    "alone",
    "difference",
    "equal (checks)",
    "payload / ring",
    "sent MB",
    "overlap",
    "seconds",
    "verdict",
)


def row(cell: Cell) -> str:
    """A line of a Markdown table."""
    fields = (
        str(cell.peers),
        cell.codec,
        f"{cell.loss_first:.6f}",
        f"{cell.one_process_first:.6f}",
        f"{cell.loss_last:.4f}",
        f"{cell.one_process_last:.4f}",
        f"{cell.loss_difference:+.1e}",
        f"{'yes' if cell.replicas_equal else 'NO'} ({cell.hashes_compared})",
        f"{cell.payload_share:.4f}",
        f"{cell.sent_mb:.1f}",
        f"{cell.overlap:.0%}",
        f"{cell.seconds:.0f}",
        "kept" if not cell.broken else "BROKEN: " + "; ".join(cell.broken),
    )
    return f"| {' | '.join(fields)} |"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.demo_matrix", description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--codec", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line for every run")
    options = parser.parse_args()
    if min(options.peers) < 2:
        parser.error("--peers must be at least 2: one peer alone sends nothing")
    cells = []
    if not options.json:
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    try:
        for peers in options.peers:
            alone = run_one_process(DemoSettings(peers=peers, steps=options.steps, seed=options.seed))
            for codec in options.codec:
                settings = DemoSettings(peers=peers, steps=options.steps, codec=codec, seed=options.seed)
                cells.append(judged(settings, run_demo(settings), alone))
                print(json.dumps(asdict(cells[-1])) if options.json else row(cells[-1]), flush=True)
    except MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(any(cell.broken for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
