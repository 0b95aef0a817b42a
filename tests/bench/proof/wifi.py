"""Training time against WiFi bandwidth: the missing results of the paper that this project began with.

Models are paced: parameters have the shapes of the real model, gradients are noise, and a step is stated to take so
long on a laptop, for two cores cannot compute four of them. What the planner says of every rate stands beside what
jobs, and DDP with its hooks, take at some of them in the lab.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshtrain.cli.planning.codec_prices import ProcessorPrices, processor_prices
from meshtrain.cli.ui.progress import Stages
from meshtrain.demo.localmesh import LocalDaemon
from meshtrain.train.model.tensors import build
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.model.manifest import ModelManifest
from meshwire.planning.choose import DEFAULT, chosen, job_settings, legal_settings, priced
from meshwire.planning.mesh_plan import PAYS_FROM
from meshwire.planning.network import NO_WORK, Network, cables, cell
from meshwire.planning.price import CodecPrice, Price, Pricing
from meshwire.planning.quality import EVIDENCE, Quality
from meshwire.planning.step_trace import StepTrace
from tests.bench.goals.learnerturns import Paced, made
from tests.bench.goals.sides import Place, Side, Work, place
from tests.bench.journal import Case, Figures, Section
from tests.bench.proof.places import LocalPlace
from tests.lab.lab import lab_unavailable

RATES_MBIT = (5.0, 10.0, 20.0, 50.0, 100.0, 150.0, 300.0, 1000.0)
MEMBERS = (1, 2, 4)
SAMPLES = 16  # of a member's step
THREADS = 4  # of a laptop, whose daemon takes one of them now and then
CELL_RTT_S, LAB_RTT_S = 0.003, 0.0005
HOOK_RANK = 4
DDP_STEPS, WHOLE_STEPS = 2, 3  # of a turn; before PowerSGD's hook compresses, and one behind
OURS_STEPS = 8  # of a turn, so that one of a period holds a round
HOOKS: dict[str, str | int | None] = {"DDP, fp16 hook": "fp16", "DDP, PowerSGD hook": HOOK_RANK}
# What of DDP is planned: the same bytes over the same ring, by processors that take no time for it.
DDP_PLANNED = {
    "DDP, fp32": "fp32",
    "DDP, fp16 hook": "fp16",
    "DDP, PowerSGD hook": str(parse_codec(f"powersgd:{HOOK_RANK}")),
}
QUALITIES = (Quality.SAFE, Quality.FAST)


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


MODELS = (
    Model("mlp", "a perceptron for MNIST, 0.2 M parameters", 0.02),
    Model("resnet", "ResNet-18, 11.7 M", 0.5),
    Model("gpt", "a GPT of 10.9 M", 0.5),
)


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

    def __str__(self) -> str:
        return f"{'a cell of' if self.shared else 'cables of'} {self.mbit:g} Mbit/s"


# (model, network, members, about how many seconds it takes)
MEASURED = (
    ("resnet", Net(50.0, False), 4, 110),
    ("gpt", Net(50.0, False), 4, 110),
    ("resnet", Net(150.0, False), 4, 75),
    ("gpt", Net(150.0, False), 4, 75),
    ("mlp", Net(20.0, True), 4, 45),
    ("mlp", Net(150.0, True), 4, 30),
    ("gpt", Net(150.0, True), 2, 90),
    ("resnet", Net(150.0, True), 4, 190),
)
EXPECTED = (
    "In one cell a ring of four crosses the air 12 times: ResNet-18 and the GPT in fp32 need 86 s a step at 50 Mbit/s, "
    "and are slower than one laptop alone below 1000 Mbit/s. `safe` is limited to an eighth of the bytes: at most 4 "
    "times DDP's fp16 hook where the network binds, not 10, and one laptop alone is better up to 150 Mbit/s. `fast` "
    "sends a hundredth with sparseloco: at least 10 times the fp16 hook, faster than one laptop from 10 or 20 Mbit/s "
    "on, and 1.3 times the PowerSGD hook. The small perceptron is bound by latency as much as by bytes."
)


def model_of(name: str) -> Model:
    """By its name."""
    return next(model for model in MODELS if model.name == name)


def planned_name(model: Model) -> str:
    """The name under which the file keeps what is predicted at every rate."""
    return f"{model.name}, planned"


def measured_name(name: str, net: Net, members: int) -> str:
    """The name under which the file keeps what the lab has shown at one rate."""
    return f"{name}, {members} in {net}" if net.shared else f"{name}, {members} on {net}"


def sections(shared: LocalPlace) -> tuple[Section, ...]:
    """What is planned for every rate, and what is measured at some."""
    planned = tuple(Case(planned_name(model), 60, _planned(shared, model)) for model in MODELS)
    measured = tuple(
        Case(
            measured_name(name, net, members),
            seconds,
            _measured(shared, name, net, members),
            lambda: lab_unavailable("nft"),
        )
        for name, net, members, seconds in MEASURED
    )
    return (
        Section("wifi-planned", "training time by WiFi bandwidth, as planned", planned, repeats=1, expected=EXPECTED),
        Section("wifi", "the same in the lab, beside DDP with its hooks", measured, repeats=1, expected=EXPECTED),
    )


def manifest_of(model: Model) -> ModelManifest:
    """Of the paced model, as `mt.prepare` makes it."""
    return build(_paced(model), "SGD").manifest


def _paced(model: Model) -> Paced:
    paced = made(f"paced:{model.name}:{model.step_s}", 0, None).model
    assert isinstance(paced, Paced)
    return paced


def step_of(model: Model) -> StepTrace:
    """As it is stated: a third of a step forwards, then gradients from the last tensor to the first, by their size."""
    sizes = [tensor.count for tensor in manifest_of(model).tensors]
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


class Planner:
    """Prices a paced model on any network.

    Args:
        prices: of this processor.
    """

    def __init__(self, model: Model, prices: ProcessorPrices) -> None:
        self.model = model
        self._work = prices.work
        self._step = step_of(model)
        self._pricing = Pricing(manifest_of(model), prices.codecs)
        free = {name: CodecPrice(0.0, 0.0, price.filled) for name, price in prices.codecs.items()}
        self._of_ddp = Pricing(self._pricing.manifest, free)
        self._settings = list(legal_settings(self._pricing.manifest))

    @classmethod
    def here(cls, model: Model, folder: Path) -> "Planner":
        """Measures what codecs cost here, once for a folder. Raises CliError."""
        codecs = dict.fromkeys([*DDP_PLANNED.values(), *(tried.codec for tried in EVIDENCE)])
        with Stages() as stages:
            return cls(model, processor_prices(list(codecs), folder, stages))

    def ours(self, network: Network, members: int, quality: Quality) -> Price:
        """The best settings of a quality."""
        worked = replace(network, work=self._work)
        return chosen(priced(self._pricing, self._settings, (self._step,) * members, worked), quality)

    def default(self, network: Network, members: int) -> Price:
        """bsp with fp32."""
        worked = replace(network, work=self._work)
        return self._pricing.price(job_settings(*DEFAULT), (self._step,) * members, worked)

    def ddp(self, codec: str, network: Network, members: int) -> Price:
        """The bytes of a codec over a ring, by processors that take no time for it: no DDP over a ring is faster."""
        without = replace(network, work=NO_WORK)
        return self._of_ddp.price(job_settings(codec, "bsp"), (self._step,) * members, without)


def text_of(price: Price) -> str:
    """The settings, as they are typed."""
    return f"{price.settings.sync.text()} {price.settings.codec}"


def _planned(shared: LocalPlace, model: Model) -> Callable[[int, bool], Figures]:
    def measured(_repeat: int, short: bool) -> Figures:
        planner = Planner.here(model, shared.scratch() / "prices")
        return dict(_curves(planner, RATES_MBIT[::4] if short else RATES_MBIT))

    return measured


def _curves(planner: Planner, rates: Sequence[float]) -> Iterator[tuple[str, list[float]]]:
    """Samples a second in those of one laptop alone, by rate; and what was chosen."""
    yield "mbit", list(rates)
    alone_s = planner.model.step_s
    for members in MEMBERS[1:]:
        networks = [cell(members, mbit * 1e6 / 8, CELL_RTT_S) for mbit in rates]
        for name, codec in DDP_PLANNED.items():
            yield f"{name}, m={members}", [planner.ddp(codec, one, members).against_one for one in networks]
        yield f"the defaults, m={members}", [planner.default(one, members).against_one for one in networks]
        for quality in QUALITIES:
            best = [planner.ours(one, members, quality) for one in networks]
            yield f"{quality}, m={members}", [max(1.0, price.against_one) for price in best]
            for mbit, price in zip(rates, best, strict=True):
                choice = text_of(price) if price.against_one >= PAYS_FROM else "train alone"
                yield f"{quality}, m={members} at {mbit:g}: {choice}", [price.step_s]
    yield "alone_s", [alone_s]


def _measured(shared: LocalPlace, name: str, net: Net, members: int) -> Callable[[int, bool], Figures]:
    def measured(_repeat: int, short: bool) -> Figures:
        planner = Planner.here(model_of(name), shared.scratch() / "prices")
        return in_the_lab(planner, net, members, short)

    return measured


def in_the_lab(planner: Planner, net: Net, members: int, short: bool) -> Figures:
    """Seconds a step of DDP with its hooks, and of jobs with what is chosen at either quality; and as planned."""
    found: Figures = {}
    work = Work(f"paced:{planner.model.name}:{planner.model.step_s}", members)
    network = net.network(members)
    ours = {quality: planner.ours(network, members, quality) for quality in QUALITIES}
    with place(members, net.mbit, shared=net.shared) as here:
        for hook_name, hook in HOOKS.items():
            warm_up = 1 if hook == "fp16" else WHOLE_STEPS
            with here.torch(work, hook) as side:
                found[hook_name] = _steps(side, warm_up, DDP_STEPS, 1 if short else 2)
                found["alone"] = [side.turn(DDP_STEPS, alone=True)["s"]]
            found[f"{hook_name}, planned"] = [planner.ddp(DDP_PLANNED[hook_name], network, members).step_s]
        with here.daemons(members) as daemons:
            for quality, price in ours.items():
                found[f"{quality}: {text_of(price)}"] = _job(here, daemons, work, price, 1 if short else 3)
                found[f"{quality}, planned"] = [price.step_s]
    return found


def _job(here: Place, daemons: Sequence[LocalDaemon], work: Work, price: Price, turns: int) -> list[float]:
    settings = price.settings
    way = f"{settings.codec}@{settings.sync.text()}"
    usual = settings.collective == collective_for(settings.codec)
    with here.job(daemons, work, way, None if usual else str(settings.collective.topology)) as side:
        return _steps(side, OURS_STEPS, OURS_STEPS, turns)


def _steps(side: Side, warm_up: int, steps: int, turns: int) -> list[float]:
    """Seconds a step, of each turn behind the first one."""
    side.turn(warm_up)
    return [side.turn(steps)["s"] for _ in range(turns)]
