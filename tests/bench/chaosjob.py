"""The job that the soak and the recovery figures break: a small model that counts, as a part of itself, every sample.

The gradient of `tally` is 1 at each sample of a batch, so the mean of a round is positive at exactly the samples that
are in it. The optimizer counts these. The tally is a parameter like any other: replicas, checkpoints and catching up
have to keep it right, and it tells of the history that has survived, whatever happened.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtrain.demo.localmesh import LocalDaemon
from meshtraind.storage.fetch import output_folder
from meshwire.messages.job import Found, JobSummary
from meshwire.messages.local import GetJobs
from tests.daemon import realjobs as jobs
from tests.lab.chaosmesh import ChaosDaemon, ChaosMesh

RECORDS = "epochs.jsonl"

SCRIPT = """
import contextlib, hashlib, itertools, json, os, sys, time
began_s = time.monotonic()
options = json.loads(sys.argv[1])
pass  # what breaks a start
import torch
import meshtrain as mt

torch.set_num_threads(1)  # all peers share this machine's cores
torch.manual_seed(0)


class Counting(torch.optim.Optimizer):
    def __init__(self, model):
        groups = [{"params": [model.tally], "counts": options["counts"]}]
        groups += [{"params": list(model.net.parameters()), "counts": False}]
        super().__init__(groups, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or not gradient.any():
                    continue
                if not group["counts"]:
                    parameter.add_(gradient, alpha=-group["lr"])
                    continue
                parameter.add_(torch.round(gradient / gradient[gradient > 0].min()))
                if options["ballast_values"]:  # state as that of a large model, with rounds as those of a small one
                    state = self.state[parameter]
                    if not state:
                        state["ballast"] = torch.zeros(options["ballast_values"])
                    state["ballast"][:1000].add_(1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tally = torch.nn.Parameter(torch.zeros(options["samples"]))
        width, deep = options["width"], []
        if options["deep"]:
            deep = [torch.nn.Linear(width, width), torch.nn.Tanh()]
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), *deep, torch.nn.Linear(width, 1))

    def forward(self, number, x):
        return self.net(x), self.tally[number].mean()


model = Model()
optimizer = Counting(model)
xs = torch.randn(options["samples"], 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(torch.arange(options["samples"]), xs, xs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=options["batch"], shuffle=True)
print("imports:", time.monotonic() - began_s, "s", flush=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)


def now_s():
    if not options["kernel_time"]:
        return time.monotonic()
    with open(os.memfd_create("clock")) as file:
        return os.fstat(file.fileno()).st_mtime


def record(epoch):
    with mt.base():
        tally = model.tally.detach().clone()
        bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    missing = (epoch - tally).clamp(min=0)
    line = {"t_s": now_s(), "rank": mt.rank(), "epoch": epoch, "most": int(tally.max()),
            "missing": int(missing.sum()), "kept": int(tally.sum()), "loss": shown_loss,
            "digest": hashlib.sha256(bits).hexdigest(), "pid": os.getpid()}
    try:
        with open(mt.output_dir() / "epochs.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")
    except OSError:  # a full disk; another rank records the epoch, too
        pass


def agree_on_last(epoch):
    # Whoever begins an epoch first after it was told to stop says after which one: nobody is so far ahead.
    if os.path.exists(options["stop"]) and not os.path.exists(last):
        with open(f"{last}.{mt.rank()}", "w") as file:
            file.write(str(epoch + 2))
        with contextlib.suppress(FileExistsError):
            os.link(file.name, last)


last = options["stop"] + ".last"
shown_loss = 0.0
for epoch in itertools.count():
    if os.path.exists(last) and epoch >= int(open(last).read()):
        break
    for index, (number, x, y) in enumerate(loader):
        if index == 0 and not loader._waits.steps.rehearsal.on:
            record(epoch)
            agree_on_last(epoch)
        pass  # what breaks a step
        time.sleep(options["step_s"])
        optimizer.zero_grad()
        shown, counted = model(number, x)
        loss = torch.nn.functional.mse_loss(shown, y)
        (loss + counted).backward()
        optimizer.step()
        shown_loss = loss.item()
        mt.log(loss=loss)
    if options["barriers"]:
        mt.barrier()
mt.finish()
record(epoch)
"""


@dataclass(frozen=True)
class Record:
    """What a rank saw at the first batch of an epoch, counted from 0.

    Attributes:
        t_s: monotonic time, or the kernel's, which all processes of this machine share.
        most: how often the sample that was seen most often is in the base.
        missing: over all samples: how often it is in the base less than once for each epoch before this one.
        loss: of the step before; 0: of none.
        digest: of the base.
        kept: samples in the base, each as often as it is there.
        pid: of the learner's process, which is another one after a return.
    """

    t_s: float
    rank: int
    epoch: int
    most: int
    missing: int
    loss: float = 0.0
    digest: str = ""
    pid: int = 0
    kept: int = 0


class ChaosJob:
    """One running job on a mesh.

    Args:
        folder: for its working directory.
        step_s: a learner sleeps so long in each step: this machine has fewer cores than there are peers.
        ballast_values: fp32 values of optimizer state that are in no gradient.
        barriers: after each epoch all wait for all.
        width, deep: of the model's hidden layer, and whether there is a square one behind it.
        kernel_time: records have that: the processes' own clocks differ.
        counts: whether samples are counted: not with a codec that sends something else than the gradient.
        broken_start, broken_step: statements at the beginning of the script and of each step.
        options: of the submission.
    """

    def __init__(
        self,
        mesh: ChaosMesh,
        folder: Path,
        *,
        samples: int = 480,
        batch: int = 8,
        step_s: float = 0.03,
        ballast_values: int = 0,
        barriers: bool = False,
        width: int = 32,
        deep: bool = False,
        counts: bool = True,
        kernel_time: bool = False,
        broken_start: str = "pass",
        broken_step: str = "pass",
        **options: object,
    ) -> None:
        self._mesh = mesh
        self.batch = batch
        self.counts = counts
        self.way = f"{options.get('codec', 'fp32')}@{options.get('sync', 'bsp')}"
        self._stop = folder / "stop"
        arguments = {
            "samples": samples,
            "batch": batch,
            "step_s": step_s,
            "ballast_values": ballast_values,
            "barriers": barriers,
            "width": width,
            "deep": deep,
            "counts": counts,
            "kernel_time": kernel_time,
            "stop": str(self._stop),
        }
        submitter: LocalDaemon = mesh.daemons[mesh.names[0]]
        script = SCRIPT.replace("pass  # what breaks a start", broken_start)
        script = script.replace("pass  # what breaks a step", broken_step)
        submitted = jobs.submit(submitter, folder, script, args=(json.dumps(arguments),), **options)
        self.id = submitted.job
        self.names = tuple(member.name for member in submitted.members)  # by rank

    def summary(self, daemon: ChaosDaemon) -> JobSummary | None:
        """What a daemon says of the job; None when it does not answer, or has not heard of it."""
        return summary_on(daemon, self.id)

    def finish(self) -> None:
        """Tells the script to end, which takes it up to three epochs."""
        self._stop.touch()

    def folder(self, name: str) -> Path:
        """DATA/jobs/ID of one member."""
        return self._mesh.folder / name / "jobs" / self.id

    def records(self) -> list[Record]:
        """All that ranks have written, in the order of time. A line that a kill cut off is left out."""
        found = []
        for rank, name in enumerate(self.names):
            path = output_folder(self.folder(name), rank) / RECORDS
            if path.exists():
                lines = path.read_text().splitlines(keepends=True)
                found += [Record(**json.loads(line)) for line in lines if line.endswith("}\n")]
        return sorted(found, key=lambda record: record.t_s)


def summary_on(daemon: ChaosDaemon, job: str) -> JobSummary | None:
    """What a daemon says of a job; None when it does not answer, or has not heard of it."""
    reply = daemon.ask(GetJobs(prefix=job), "jobs")
    return reply.jobs[0] if isinstance(reply, Found) and reply.jobs else None


def repeated(records: Sequence[Record]) -> list[str]:
    """Where a sample was counted more often than there were epochs begun: it was dealt twice.

    A sample counts for an epoch only after a rank had that epoch's first batch, so an earlier record tells of it.
    """
    found = []
    begun = 0
    for record in records:
        begun = max(begun, record.epoch + 1)
        if record.most > begun:
            found.append(f"rank {record.rank} has a sample {record.most} times in its base, {begun} epochs have begun")
    return found


def missing(records: Sequence[Record]) -> int:
    """How many samples are in no round that counts, of all epochs that are over: by X5 those of void rounds."""
    return max((record.missing for record in records), default=0)
