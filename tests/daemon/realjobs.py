"""Helpers of the tests that submit real jobs to real daemons."""

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshtrain.demo.localmesh import LocalDaemon
from meshtrain.packing.tree import scan, scan_data
from meshtraind.learner.process import INHERITED
from meshwire import limits
from meshwire.messages.job import Fetch, Fetched, Found, JobSummary
from meshwire.messages.local import GetJobs, Submit, Submitted, Watch, Watched
from tests.daemon.learnerforks import LearnerForks

TIMEOUT_S = 90.0

# torch's optimizers import its compiler, which takes as long as torch itself, and only to say that they are not to be
# compiled. A test's learners start in half the time without; the tests of the demo and the examples have all of torch.
WITHOUT_COMPILER = (
    "import sys, types; sys.modules['torch._dynamo'] = _dynamo = types.ModuleType('torch._dynamo'); "
    "_dynamo.disable = lambda function, *_, **__: function; _dynamo.graph_break = lambda: None\n"
)

# What learners import that are forked: those of mt.prepare, and those of torch.distributed.
OF_ROUNDS = WITHOUT_COMPILER + "import torch, meshtrain.train.session"
OF_GROUPS = "import torch, torch._dynamo, torch.nn.parallel, torch.distributed.algorithms.ddp_comm_hooks.default_hooks"

_forks: dict[str, LearnerForks] = {}  # by what they have imported


@contextlib.contextmanager
def forked_learners(imports: str = OF_ROUNDS) -> Iterator[None]:
    """Learners of jobs that are submitted meanwhile begin with this imported, but for those that are to be `cold`."""
    if sys.platform != "linux":
        yield
        return
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    with LearnerForks(imports, {**environment, "OMP_NUM_THREADS": "1"}) as forks:
        _forks[imports] = forks
        try:
            yield
        finally:
            del _forks[imports]


PREAMBLE = """
import os, sys, time
import torch
import meshtrain as mt

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
xs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(xs, xs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
"""

TRAIN = (
    PREAMBLE
    + """
model, optimizer, loader = mt.prepare(model, optimizer, loader)
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        mt.log(loss=loss)
print("rank", mt.rank(), "of", mt.world_size(), "ends with", round(loss.item(), 4), flush=True)
(mt.output_dir() / "sub").mkdir(exist_ok=True)
(mt.output_dir() / "sub" / "weights.txt").write_text(" ".join(str(p.sum().item()) for p in model.parameters()))
mt.finish()
"""
)

# It ends once there is a file of the name that it is given.
UNTIL_STOPPED = TRAIN.replace(
    "for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):", "while not os.path.exists(sys.argv[1]):"
)


def submission(folder: Path, text: str, /, **options: Any) -> Submit:
    """A job whose working directory holds `text` as train.py, and whatever lies in `folder` already.

    `options` are fields of `Submit`. Batches are of equal size unless they say otherwise, so that every round's samples
    are planned (X4) and the same in every run. `as_it_is`: the script is sent byte for byte. `cold`: its learners
    load torch themselves (`forked_learners`).
    """
    work = folder / "work"
    work.mkdir(exist_ok=True)
    cold = options.pop("cold", False)
    if not options.pop("as_it_is", False):
        text = textwrap.dedent(text)
        # What is measured starts as it would for a person, and torch.distributed needs the compiler.
        of_rounds = "torch.distributed" not in text
        if of_rounds and "PYTEST_CURRENT_TEST" in os.environ:
            text = WITHOUT_COMPILER + text
        forks = _forks.get(OF_ROUNDS if of_rounds else OF_GROUPS)
        if forks is not None and not cold:
            text = forks.line + text
    (work / "train.py").write_text(text)
    files = folder / "files.manifest"
    files.write_bytes(scan(work).manifest.pack())
    data = options.pop("data", None)
    data_manifest = None
    if data is not None:
        path = folder / "data.manifest"
        path.write_bytes(scan_data(data).manifest.pack())
        data_manifest = str(path)
    fields: dict[str, Any] = {
        "name": "test",
        "root": str(work),
        "manifest": str(files),
        "data_root": str(data) if data is not None else None,
        "data_manifest": data_manifest,
        "script": "train.py",
        "args": (),
        "env": (("OMP_NUM_THREADS", "1"),),  # M3: they share one machine
        "on": (),
        "peers": None,
        "sync": "bsp",
        "straggler": None,
        "visibility": None,
        "own": None,
        "shares": "equal",
        "codec": "fp32",
        "on_nan": "stop",
        "seed": 1,
        "bucket_bytes": None,
        "hash_every": 2,
        "trace": False,
        "dry_run": False,
    }
    return Submit(**{**fields, **options})


def submit(daemon: LocalDaemon, folder: Path, text: str, /, **options: Any) -> Submitted:
    """Starts a job."""
    reply = daemon.request(submission(folder, text, **options), TIMEOUT_S, "submission")
    assert isinstance(reply, Submitted)
    return reply


def ended(daemon: LocalDaemon, job: str, on_event: Callable[[Any], None] | None = None) -> JobSummary:
    """Waits for the end of a job, as this daemon sees it."""
    reply = daemon.request(Watch(job=job), TIMEOUT_S, "end of the job", on_event)
    assert isinstance(reply, Watched)
    return reply.summary


def run(daemon: LocalDaemon, folder: Path, text: str, /, **options: Any) -> JobSummary:
    """Starts a job and waits for its end."""
    return ended(daemon, submit(daemon, folder, text, **options).job)


def summary(daemon: LocalDaemon, job: str) -> JobSummary:
    """What this daemon says of a job now."""
    found = daemon.request(GetJobs(prefix=job), TIMEOUT_S, "jobs")
    assert isinstance(found, Found)
    (only,) = found.jobs
    return only


def ages(*summaries: JobSummary) -> list[int]:
    """Contributions by age, all ranks of these jobs together (R0)."""
    rows = [report.metrics.ages for summary in summaries for report in summary.ranks]
    return [sum(row[age] for row in rows if age < len(row)) for age in range(max(map(len, rows), default=0))]


def wait_for(daemon: LocalDaemon, job: str, condition: Callable[[JobSummary], bool], what: str) -> JobSummary:
    """Polls a job until `condition` holds."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        seen = summary(daemon, job)
        if condition(seen):
            return seen
        assert seen.ended_at_s is None, f"the job ended before {what}: {seen.error}"
        assert time.monotonic() < deadline_s, f"waited {TIMEOUT_S} s for {what}: {seen}"
        time.sleep(0.05)


def go_on(daemon: LocalDaemon, job: str, rounds: int, what: str) -> None:
    """Waits until a job has had more rounds than now."""
    before = summary(daemon, job).rounds
    wait_for(daemon, job, lambda seen: seen.rounds >= before + rounds, what)


def read(daemon: LocalDaemon, job: str, what: str, rank: int, path: str | None = None) -> str:
    """A whole log or output file of a rank."""
    text = b""
    while True:
        wanted = Fetch(
            job=job, what=what, rank=rank, path=path, offset_bytes=len(text), max_bytes=limits.FETCH_BYTES_MAX
        )
        piece = daemon.request(wanted, TIMEOUT_S, f"{what} of rank {rank}")
        assert isinstance(piece, Fetched)
        text += piece.data
        if piece.end or not piece.data:
            return text.decode()
