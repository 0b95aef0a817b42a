"""One of four laptops is three times slower, and nobody has said so: what `submit` without a flag makes of it.

A laptop is a station of the lab with a share of a core (`quotas`), its daemon's work included; nothing sleeps. Each
speed is of the script alone on that laptop, without a job.
"""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psutil

from tests.bench import paced
from tests.bench.journal import Case, Figures, Section
from tests.bench.overlap_lab import StationDaemon, link
from tests.bench.proof.places import NAMES, ProofError, chosen_in, printed
from tests.bench.stragglers import ended
from tests.daemon import realjobs as jobs
from tests.lab.lab import Lab, lab_unavailable
from tests.lab.quotas import Quota, quotas_unavailable

MBIT = 100.0
SLOWNESS = 3.0
CORES = (0.5, 0.5, 0.5, 0.5 / SLOWNESS)
BATCH = 128
ALONE_SAMPLES = 20 * BATCH
JOB_S = 100.0  # as all speeds together would take
TIMEOUT_S = 500.0  # half a core first finds out what codecs cost it
NAME = "one of four is 3x slower"
LOOK_S = 0.5
EXPECTED = (
    "submit measures the laptops' speeds, chooses batches or local steps that follow them, and reaches 0.9 of the sum "
    "of the four speeds, over the whole job nearly as much, for batches begin with these sizes."
)

SCRIPT = """
import json, sys, time
import torch
import meshtrain as mt

samples, batch = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)


class Repeated(torch.nn.Module):  # computes much for its bytes: a daemon has a share of a core, too
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)

    def forward(self, x):
        for _ in range(576):  # a step of some 0.3 s
            x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return x


model = Repeated()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(samples, 128))
loader = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)
torch.set_num_threads(1)
steps = []
for (x,) in loader:
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    steps.append([began_s, time.monotonic(), len(x), 0.0, time.process_time() - began_cpu_s])
mt.finish()
(mt.output_dir() / "steps.json").write_text(json.dumps(steps))
"""


def sections() -> tuple[Section, ...]:
    """What `submit` without a flag makes of four laptops of which one is three times slower."""
    case = Case(NAME, 330, lambda _repeat, short: measured(JOB_S / 4 if short else JOB_S), lacks)
    return (
        Section(
            "slow",
            "submit without a flag, one of four laptops three times slower",
            (case,),
            repeats=2,
            expected=EXPECTED,
        ),
    )


def lacks() -> str | None:
    """What this machine lacks for it."""
    return lab_unavailable() or quotas_unavailable()


def measured(job_s: float) -> Figures:
    """Raises LabError, LocalMeshError, OverlapError, ProofError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
        quotas = [stack.enter_context(Quota(cores)) for cores in CORES]
        lab = stack.enter_context(Lab(len(CORES), MBIT))
        work = folder / "work"
        work.mkdir()
        (work / "train.py").write_text(SCRIPT)
        alone = [_alone_s(lab, at, quotas[at], work) for at in (0, len(CORES) - 1)]
        own = [alone[0]] * (len(CORES) - 1) + alone[1:]
        samples = round(job_s * sum(own))
        daemons = [StationDaemon(lab, at, name, folder / name) for at, name in enumerate(NAMES)]
        for daemon, quota in zip(daemons, quotas, strict=True):
            quota.hold(daemon.process.pid)  # before it is asked how fast it computes
        link(daemons)
        return {
            f"alone {NAMES[0]}": alone[:1],
            f"alone {NAMES[-1]}": alone[1:],
            **_job(lab, quotas[0], daemons, work, samples, own),
        }


def _alone_s(lab: Lab, station: int, quota: Quota, work: Path) -> float:
    """Samples a second of the script without a job."""
    printed(_there(lab, station, quota, ["train.py", str(ALONE_SAMPLES), str(BATCH)]), work, TIMEOUT_S)
    steps = [paced.Step(*each) for each in json.loads((work / "out" / "steps.json").read_text())]
    return paced.speed(steps, steps[5].began_s, steps[-1].ended_s)


def _job(lab: Lab, quota: Quota, daemons: list[StationDaemon], work: Path, samples: int, own: list[float]) -> Figures:
    """As a person would type it on the first laptop."""
    submit = ["-m", "meshtrain.cli", "submit", "--json", "--data-dir", str(daemons[0].data_dir)]
    with DaemonsWork(daemons) as work_of_daemons:
        out, said = printed(_there(lab, 0, quota, [*submit, "train.py", str(samples), str(BATCH)]), work, TIMEOUT_S)
    told = json.loads(out)
    summary = jobs.summary(daemons[0], told["job"])
    if summary.state != "succeeded":
        raise ProofError(f"the job {summary.state}: {summary.error}")
    names = [member["name"] for member in told["members"]]
    run = ended(daemons[0], summary, len(names))
    speeds = run.speeds()
    every = [step for steps in run.steps for step in steps]
    lasted_s = max(step.ended_s for step in every) - min(step.began_s for step in every)
    began_s, ended_s = run.window()
    at = [NAMES.index(name) for name in names]  # rank by rank
    has_s = [CORES[each] * (ended_s - began_s) for each in at]  # of a core
    inside = [[step for step in steps if step.began_s >= began_s and step.ended_s <= ended_s] for steps in run.steps]
    learners_s = [sum(step.cpu_s for step in steps) for steps in inside]
    daemons_s = [work_of_daemons.between(each, began_s, ended_s) for each in at]
    return {
        "of the sum": [sum(speeds) / sum(own)],
        "of the sum, whole job": [sum(step.samples for step in every) / lasted_s / sum(own)],
        "settled after steps": [float(run.settled_step())],
        **{f"samples/s {name}": [speed] for name, speed in zip(names, speeds, strict=True)},
        "useful": [speed / own[each] for speed, each in zip(speeds, at, strict=True)],
        "learners": [each_s / all_s for each_s, all_s in zip(learners_s, has_s, strict=True)],
        "daemons": [each_s / all_s for each_s, all_s in zip(daemons_s, has_s, strict=True)],
        f"on {len(names)}, {chosen_in(said)}": [lasted_s],
    }


class DaemonsWork:
    """While it holds, what each daemon takes of the processor is written down, without its learner."""

    def __init__(self, daemons: Sequence[StationDaemon]) -> None:
        self._processes = [psutil.Process(daemon.process.pid) for daemon in daemons]
        self._seen: list[tuple[float, list[float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, at: int, first_s: float, last_s: float) -> float:
        """Seconds of a core that the daemon at this place took between two moments, to within a look at each."""
        inside = [used_s[at] for when_s, used_s in self._seen if first_s <= when_s <= last_s]
        return inside[-1] - inside[0] if inside else 0.0

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            times = [process.cpu_times() for process in self._processes]
            self._seen.append((time.monotonic(), [each.user + each.system for each in times]))


def _there(lab: Lab, station: int, quota: Quota, arguments: list[str]) -> list[str]:
    """Python with these arguments, as a command in a station's share of a core."""
    return [*quota.prefix(), *lab.command(station, [sys.executable, *arguments])]
