"""Models whose computing is a stated time, on networks of the lab: what the planner says of them, and what sides take.

Parameters have the shapes of the real model, gradients are noise, and a step is stated to take so long on a laptop, for
two cores cannot compute four of them.
"""

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from meshtrain.cli.planning.codec_prices import ProcessorPrices, processor_prices
from meshtrain.cli.submission.measuring import trace
from meshtrain.cli.ui.progress import Stages
from meshtrain.demo.localmesh import LocalDaemon
from meshtrain.train.model.tensors import build
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.model.manifest import ModelManifest
from meshwire.planning.choose import DEFAULT, chosen, job_settings, legal_settings, priced
from meshwire.planning.network import NO_WORK, Network, cables, cell
from meshwire.planning.price import CodecPrice, JobSettings, Price, Pricing
from meshwire.planning.quality import EVIDENCE, Quality
from meshwire.planning.step_trace import StepTrace, TracedScript
from tests.bench.goals import learnerturns
from tests.bench.goals.learnerturns import Paced, made
from tests.bench.goals.sides import Place, Side, Work

SAMPLES = 16  # of a member's step
THREADS = 4  # of a laptop, whose daemon takes one of them now and then
LAB_RTT_S = 0.0005
HOOK_RANK = 4
HOOKS: dict[str, str | int | None] = {"DDP, fp16 hook": "fp16", "DDP, PowerSGD hook": HOOK_RANK}
# What of DDP is planned: the same bytes over the same ring, by processors that take no time for it.
DDP_PLANNED = {
    "DDP, fp32": "fp32",
    "DDP, fp16 hook": "fp16",
    "DDP, PowerSGD hook": str(parse_codec(f"powersgd:{HOOK_RANK}")),
}
QUALITIES = (Quality.SAFE, Quality.FAST)

# What `submit` would time: a learner's steps, as `learnerturns` takes them.
SCRIPT = """
import sys
import torch
import meshtrain as mt
from learnerturns import loss_of, made

task = made(sys.argv[1], 0, None)
model, optimizer = mt.prepare(task.model, task.optimizer)
torch.set_num_threads(1)
batch = task.dealt(0, 0, 1)
for step in mt.steps(1000):
    optimizer.zero_grad()
    loss_of(model, batch(step)).backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        name: of `learnerturns.made`.
        step_s: that a step is stated to take on a laptop.
    """

    name: str
    about: str
    step_s: float

    @property
    def paced(self) -> str:
        """The name of the paced one."""
        return f"paced:{self.name}:{self.step_s}"


@dataclass(frozen=True)
class Net:
    """A network of the lab.

    Attributes:
        shared: all are in one cell, whose air carries `mbit`; else each has a cable of that rate, both ways at once.
    """

    mbit: float
    shared: bool

    def network(self, members: int) -> Network:
        """As the planner has it."""
        return (cell if self.shared else cables)(members, self.mbit * 1e6 / 8, LAB_RTT_S)

    def holds(self, members: int) -> str:
        """So many laptops on it, for people and in the file."""
        return f"{members} {'in' if self.shared else 'on'} {self}"

    def __str__(self) -> str:
        return f"{'a cell of' if self.shared else 'cables of'} {self.mbit:g} Mbit/s"


def manifest_of(model: Model) -> ModelManifest:
    """Of the paced model, as `mt.prepare` makes it."""
    paced = made(model.paced, 0, None).model
    assert isinstance(paced, Paced)
    return build(paced, "SGD").manifest


def step_of(model: Model, manifest: ModelManifest) -> StepTrace:
    """As it is stated: a third of a step forwards, then gradients from the last tensor to the first, by their size."""
    sizes = [tensor.count for tensor in manifest.tensors]
    ready = [sum(sizes[at:]) / sum(sizes) for at in range(len(sizes))]
    return StepTrace(
        samples=SAMPLES,
        steps=1,
        threads=THREADS,
        before_s=model.step_s / 3,
        backward_s=model.step_s * 2 / 3,
        after_s=0.0,
        copy_s=0.0,
        ready=tuple(ready),
    )


def traced(folder: Path, text: str, option: str) -> TracedScript:
    """How a script of one argument steps, as `submit` times it; it is written into this folder. Raises NotMeasured,
    CliError."""
    (folder / "train.py").write_text(text)
    with Stages() as stages:
        return trace(folder, "train.py", (option,), {"OMP_NUM_THREADS": "1"}, None, stages)


@cache
def timed_step(model: Model) -> StepTrace:
    """As `submit` times it: what a learner computes on this machine behind its passes is on top of what is stated.
    Raises NotMeasured, CliError."""
    with tempfile.TemporaryDirectory(prefix="meshtrain-") as name:
        shutil.copy(learnerturns.__file__, Path(name) / "learnerturns.py")
        step = traced(Path(name), SCRIPT, model.paced).step
    return step.model_copy(update={"samples": SAMPLES, "threads": THREADS})


class Planner:
    """Prices a paced model on any network.

    Args:
        prices: of this processor.
        step: how it steps; None: as it is stated.
    """

    def __init__(self, model: Model, prices: ProcessorPrices, step: StepTrace | None = None) -> None:
        manifest = manifest_of(model)
        self.model = model
        self._work = prices.work
        self._step = step if step is not None else step_of(model, manifest)
        self._pricing = Pricing(manifest, prices.codecs)
        free = {name: CodecPrice(0.0, 0.0, price.filled) for name, price in prices.codecs.items()}
        self._of_ddp = Pricing(manifest, free)
        self._settings = list(legal_settings(manifest))

    @classmethod
    def here(cls, model: Model, folder: Path, *, timed: bool = False) -> "Planner":
        """Measures what codecs cost here, once for a folder, and how the model steps if it is to be `timed`. Raises
        NotMeasured, CliError."""
        codecs = dict.fromkeys([*DDP_PLANNED.values(), *(tried.codec for tried in EVIDENCE)])
        with Stages() as stages:
            prices = processor_prices(list(codecs), folder, stages)
        return cls(model, prices, timed_step(model) if timed else None)

    @property
    def parameters(self) -> int:
        """How many values the model has."""
        return sum(tensor.count for tensor in self._pricing.manifest.tensors)

    def ours(self, network: Network, members: int, quality: Quality) -> Price:
        """The best settings of a quality."""
        worked = replace(network, work=self._work)
        return chosen(priced(self._pricing, self._settings, (self._step,) * members, worked), quality)

    def priced(self, settings: JobSettings, network: Network, members: int) -> Price:
        """These settings."""
        return self._pricing.price(settings, (self._step,) * members, replace(network, work=self._work))

    def default(self, network: Network, members: int) -> Price:
        """bsp with fp32."""
        return self.priced(job_settings(*DEFAULT), network, members)

    def ddp(self, codec: str, network: Network, members: int) -> Price:
        """The bytes of a codec over a ring, by processors that take no time for it: no DDP over a ring is faster."""
        without = replace(network, work=NO_WORK)
        return self._of_ddp.price(job_settings(codec, "bsp"), (self._step,) * members, without)


def text_of(settings: JobSettings) -> str:
    """As they are typed."""
    return f"{settings.sync.text()} {settings.codec}"


def job_of(
    here: Place, daemons: Sequence[LocalDaemon], work: Work, settings: JobSettings
) -> AbstractContextManager[Side]:
    """The learners of a job with these settings."""
    usual = settings.collective == collective_for(settings.codec)
    topology = None if usual else str(settings.collective.topology)
    return here.job(daemons, work, f"{settings.codec}@{settings.sync.text()}", topology)


def steps_s(side: Side, warm_up: int, steps: int, turns: int) -> list[float]:
    """Seconds a step, of each turn behind the first one."""
    side.turn(warm_up)
    return [side.turn(steps)["s"] for _ in range(turns)]
