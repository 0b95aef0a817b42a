"""`meshtrain demo`: three daemons on this machine, paired and found as on three laptops, training one model.

Everything is the real thing: the processes, the pairing by code, mDNS on the loopback interface, the links, the job.
Nothing is left behind, however it ends; the folder of one that was killed is removed by the next.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalDaemon, LocalMesh, LocalMeshError, Say
from meshtrain.packing.tree import scan, scan_data
from meshwire import limits
from meshwire.messages.job import Fetch, Fetched, JobSummary, Metrics
from meshwire.messages.local import Cancel, Submit, Submitted, Watch, Watched
from meshwire.sync_modes.mode import sync_settings

NAMES = ("anna", "bert", "cleo", "dora", "emil", "fred", "gina", "hugo")
TEXT_BYTES = 1_000_000
JOINT_BATCH = 48  # windows per step over all peers together
CURVE_STEPS = 10  # the last loss is a mean over so many steps: one step's is noise
STOP_TIMEOUT_S = 15.0
FETCH_TIMEOUT_S = 15.0
JOB_TIMEOUT_S = 3600.0
SUBMIT_TIMEOUT_S = 300.0


class DemoError(Exception):
    """The demo cannot go on; says why."""


@dataclass(frozen=True)
class DemoSettings:
    """What a person can choose."""

    peers: int = 3
    steps: int = 100
    sync: str = "bsp"
    codec: str = "fp32"
    seed: int = 0
    hash_every: int = 10

    @property
    def rounds(self) -> int:
        """How many rounds it takes to take `steps` steps; the last period is a whole one."""
        return sync_settings(self.sync).rounds_of(self.steps)

    @property
    def batch_size(self) -> int:
        """Windows per step and peer; at least one."""
        return max(1, JOINT_BATCH // self.peers)


@dataclass(frozen=True)
class PeerResult:
    """One peer's part of the demo.

    Attributes:
        step_s: median of its last steps.
        nulls: rounds that went on without it.
        age: how many rounds were missing in the weights that its gradients were computed with, as a mean.
    """

    name: str
    steps: int
    step_s: float
    nulls: int
    age: float


@dataclass(frozen=True)
class DemoResult:
    """What was measured. Losses in nats per character, means over all peers.

    Attributes:
        by_peer: in the order of the ranks.
        bytes_sent: on the sockets between the peers, all peers together, as counted by the kernel.
        payload_bytes_max: largest of any peer: encoded gradients alone.
        bytes_dense_fp32: what a dense fp32 ring would have sent as payload, all peers together.
        overlap: share of the exchange time that was hidden behind computation.
    """

    peers: int
    rounds: int
    loss_first: float
    loss_last: float
    unigram_entropy: float
    samples: int
    seconds: float
    bytes_sent: int
    bytes_dense_fp32: int
    overlap: float
    replicas_equal: bool
    payload_bytes_max: int
    hashes_compared: int
    parameters: int
    counted_by: str
    by_peer: tuple[PeerResult, ...]
    losses: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        """What `meshtrain demo --json` prints."""
        plain = asdict(self)
        del plain["losses"]
        return {**plain, "seconds": round(self.seconds, 3)}


def run_demo(settings: DemoSettings, say: Say, show: Callable[[JobSummary], None]) -> DemoResult:
    """Runs the demo from nothing to nothing.

    Args:
        say: gets a line for each thing that happens.
        show: gets the job's state about once a second.

    Raises:
        DemoError: with what to do.
        KeyboardInterrupt: after everything was stopped.
    """
    try:
        with LocalMesh(NAMES[: settings.peers], say) as mesh:
            try:
                return _train(settings, mesh.daemons, mesh.folder, say, show)
            except (RequestError, ConnectionLost, TimeoutError, OSError) as error:
                raise DemoError(f"{error}{mesh.log_tails()}") from error
    except LocalMeshError as error:
        raise DemoError(str(error)) from error


def _train(
    settings: DemoSettings, daemons: list[LocalDaemon], folder: Path, say: Say, show: Callable[[JobSummary], None]
) -> DemoResult:
    from meshtrain.examples import text as example_text

    work, data = folder / "work", folder / "data"
    work.mkdir()
    data.mkdir()
    text = example_text.stdlib_text(TEXT_BYTES)
    (data / "input.txt").write_text(text, encoding="utf-8")
    script = Path(example_text.__file__).with_name("train_gpt.py")
    shutil.copy(script, work / "train_gpt.py")
    first = daemons[0]
    submit = _submission(settings, folder, work, data)
    submitted = first.request(submit, SUBMIT_TIMEOUT_S, "submission")
    assert isinstance(submitted, Submitted)
    for line in submitted.notes:
        say(f"note: {line}")
    say(f"job {submitted.job}: {settings.rounds} rounds on {', '.join(member.name for member in submitted.members)}")
    started_s = time.monotonic()
    try:
        ended = first.request(
            Watch(job=submitted.job),
            JOB_TIMEOUT_S,
            "end of the job",
            lambda event: show(event.summary) if isinstance(event, Watched) else None,
        )
    except KeyboardInterrupt:
        with contextlib.suppress(RequestError, ConnectionLost, TimeoutError):
            daemons[-1].request(Cancel(job=submitted.job, now=True), STOP_TIMEOUT_S, "cancelling")
        raise
    seconds = time.monotonic() - started_s
    assert isinstance(ended, Watched)
    show(ended.summary)
    if ended.summary.state != "succeeded":
        raise DemoError(f"the job is {ended.summary.state}: {ended.summary.error}")
    return _result(settings, first, ended.summary, seconds)


def _submission(settings: DemoSettings, folder: Path, work: Path, data: Path) -> Submit:
    manifests = []
    for name, packed in (("files", scan(work)), ("data", scan_data(data))):
        path = folder / f"{name}.manifest"
        path.write_bytes(packed.manifest.pack())
        manifests.append(str(path))
    threads = max(1, (os.cpu_count() or 1) // settings.peers)  # M3: every daemon counts but its own learner
    return Submit(
        name="demo",
        root=str(work),
        manifest=manifests[0],
        data_root=str(data),
        data_manifest=manifests[1],
        script="train_gpt.py",
        args=("--steps", str(settings.steps), "--batch-size", str(settings.batch_size), "--seed", str(settings.seed)),
        env=(("OMP_NUM_THREADS", str(threads)),),
        on=(),
        peers=settings.peers,
        sync=settings.sync,
        shares="equal",  # the peers share one machine: measured speeds would say who got its cores last
        codec=settings.codec,
        on_nan="stop",
        seed=settings.seed,
        bucket_bytes=None,
        hash_every=settings.hash_every,
        trace=False,
        dry_run=False,
    )


def _result(settings: DemoSettings, first: LocalDaemon, summary: JobSummary, seconds: float) -> DemoResult:
    ranks = [_read_metrics(first, summary.job, rank) for rank in range(settings.peers)]
    losses = mean_losses([rank["losses"] for rank in ranks])
    reports = [report.metrics for report in summary.ranks]
    exchange_s = sum(metrics.exchange_s for metrics in reports)
    exposed_s = sum(metrics.exposed_s for metrics in reports)
    parameters = int(ranks[0]["parameters"])
    last = losses[-CURVE_STEPS:]
    return DemoResult(
        peers=settings.peers,
        rounds=summary.rounds,
        loss_first=losses[0],
        loss_last=sum(last) / len(last),
        unigram_entropy=float(ranks[0]["unigram_entropy"]),
        samples=sum(int(rank["samples"]) for rank in ranks),
        seconds=seconds,
        bytes_sent=sum(metrics.sent_bytes for metrics in reports),
        bytes_dense_fp32=2 * (settings.peers - 1) * 4 * parameters * summary.rounds,
        overlap=max(0.0, 1.0 - exposed_s / exchange_s) if exchange_s else 0.0,
        replicas_equal=summary.replicas_equal is True,
        payload_bytes_max=max(metrics.payload_bytes for metrics in reports),
        hashes_compared=summary.hashes_compared,
        parameters=parameters,
        counted_by="kernel" if all(metrics.counter == "kernel" for metrics in reports) else "link",
        by_peer=tuple(peer_result(summary.members[report.rank].name, report.metrics) for report in summary.ranks),
        losses=tuple(losses),
    )


def mean_losses(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The mean loss of every step, over the ranks that took so many: with s > 0 some take more than others."""
    steps = zip_longest(*ranks)
    return [fmean(loss for loss in step if loss is not None) for step in steps]


def peer_result(name: str, metrics: Metrics) -> PeerResult:
    """One peer's part, from what its daemon reported last."""
    contributions = sum(metrics.ages)
    age = sum(age * count for age, count in enumerate(metrics.ages)) / contributions if contributions else 0.0
    return PeerResult(name=name, steps=metrics.step, step_s=metrics.step_s, nulls=metrics.nulls, age=age)


def _read_metrics(daemon: LocalDaemon, job: str, rank: int) -> dict[str, Any]:
    """A rank's metrics.json, as `meshtrain get` would bring it."""
    text = b"".join(_pieces(daemon, job, rank, "metrics.json"))
    metrics: dict[str, Any] = json.loads(text)
    return metrics


def _pieces(daemon: LocalDaemon, job: str, rank: int, path: str) -> Iterator[bytes]:
    offset_bytes = 0
    while True:
        wanted = Fetch(
            job=job, what="output", rank=rank, path=path, offset_bytes=offset_bytes, max_bytes=limits.FETCH_BYTES_MAX
        )
        piece = daemon.request(wanted, FETCH_TIMEOUT_S, f"{path} of rank {rank}")
        assert isinstance(piece, Fetched)
        yield piece.data
        offset_bytes += len(piece.data)
        if piece.end:
            return
