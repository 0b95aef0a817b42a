"""What the straggler measurements train: a model whose compute is a stated time a sample, and what ranks write of it.

The sleeps stand for compute on cores that this machine does not have; the real compute of a step is measured beside
them, and printed.
"""

import contextlib
import json
import signal
import threading
import time
from dataclasses import dataclass

import psutil

from meshtrain.demo.localmesh import LocalDaemon
from tests.daemon import realjobs as jobs

SCRIPT = """
import json, os, signal, sys, time
import torch
import meshtrain as mt

options = json.loads(sys.argv[1])
LAYERS, FORWARD = 8, 1 / 3  # of a step


class Pace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model, layer):
        ctx.model, ctx.layer = model, layer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.model.backward_pace(ctx.layer)
        return gradient, None, None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        count = options["values"] // LAYERS
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.full((count,), 0.1)) for _ in range(LAYERS))
        self.backward_s, self.asleep_s, self.stop_at = 0.0, 0.0, None

    def sleep(self, seconds):
        began_s = time.monotonic()
        time.sleep(seconds)
        self.asleep_s += time.monotonic() - began_s

    def backward_pace(self, layer):
        self.sleep(self.backward_s / LAYERS)
        if self.stop_at == layer:
            os.kill(os.getpid(), signal.SIGSTOP)

    def forward(self, x):
        for layer, weight in enumerate(self.weights):
            x = Pace.apply(x * weight.mean(), self, layer)
        return x


torch.manual_seed(0)
pace_s = options["sample_s"] * options["slowness"][mt.rank()]
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.ones(30_000, 1))
loader = torch.utils.data.DataLoader(data, batch_size=options["batch"], shuffle=False)
model, optimizer, loader = mt.prepare(model, optimizer, loader)
torch.set_num_threads(1)  # the stations share this machine's cores
steps = []
batches = iter(loader)
for step in mt.steps(options["count"]):
    began_s, began_cpu_s, model.asleep_s = time.monotonic(), time.process_time(), 0.0
    (x,) = next(batches)
    step_s = len(x) * pace_s
    stops = options["stop"] is not None and mt.rank() == 2 and step == options["stop"]["step"]
    model.stop_at = options["stop"]["layer"] if stops else None
    if stops and options["stop"]["layer"] is None:
        os.kill(os.getpid(), signal.SIGSTOP)
    model.backward_s = step_s * (1 - FORWARD)
    model.sleep(step_s * FORWARD)
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    steps.append([began_s, time.monotonic(), len(x), step_s, time.process_time() - began_cpu_s])
mt.finish()
(mt.output_dir() / "steps.json").write_text(json.dumps(steps))
"""


@dataclass(frozen=True)
class Step:
    """One step of one rank.

    Attributes:
        began_s, ended_s: on the machine's monotonic clock, which all ranks share.
        stated_s: how long it was to take without waiting.
        cpu_s: the real compute of the process in it.
    """

    began_s: float
    ended_s: float
    samples: int
    stated_s: float
    cpu_s: float


def options(
    *,
    values: int,
    sample_s: float,
    batch: int,
    slowness: tuple[float, ...],
    count: int,
    stop: dict[str, int | None] | None = None,
) -> str:
    """The script's argument. `count`: of steps. `stop`: rank 2 stops itself in this step, in front of this layer's
    bucket or, with None, before its forward pass."""
    return json.dumps(
        {
            "values": values,
            "sample_s": sample_s,
            "batch": batch,
            "slowness": slowness,
            "count": count,
            "stop": stop,
        }
    )


def steps(daemon: LocalDaemon, job: str, rank: int) -> list[Step]:
    """What a rank has written of its steps."""
    return [Step(*entry) for entry in json.loads(jobs.read(daemon, job, "output", rank, "steps.json"))]


def speed(steps: list[Step], first_s: float, last_s: float) -> float:
    """Samples a second of the steps that lie whole between two moments; 0 without any."""
    inside = [step for step in steps if step.began_s >= first_s and step.ended_s <= last_s]
    if not inside:
        return 0.0
    return sum(step.samples for step in inside) / (inside[-1].ended_s - inside[0].began_s)


def standstill_s(steps: list[Step]) -> float:
    """The longest that any step took beyond what it was stated to take."""
    return max(step.ended_s - step.began_s - step.stated_s for step in steps)


class Waking:
    """While it holds, a learner of the daemon that has stopped itself goes on after `for_s`."""

    def __init__(self, daemon: LocalDaemon, for_s: float) -> None:
        self._daemon = psutil.Process(daemon.process.pid)
        self._for_s = for_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="waking")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            for child in self._daemon.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
                    if child.status() == psutil.STATUS_STOPPED:
                        time.sleep(self._for_s)
                        child.send_signal(signal.SIGCONT)
