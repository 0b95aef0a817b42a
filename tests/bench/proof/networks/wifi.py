"""Training time against WiFi bandwidth: the missing results of the paper that this project began with.

What the planner says of every rate stands beside what jobs, and DDP with its hooks, take at some of them in the lab.
"""

from collections.abc import Callable, Iterator, Sequence

from meshwire.planning.mesh_plan import PAYS_FROM
from meshwire.planning.network import cell
from tests.bench.goals.sides import Work, place
from tests.bench.journal import Case, Figures, Section
from tests.bench.proof.networks.paced_models import (
    DDP_PLANNED,
    HOOKS,
    QUALITIES,
    Model,
    Net,
    Planner,
    job_of,
    steps_s,
    text_of,
)
from tests.bench.proof.places import LocalPlace
from tests.lab.lab import lab_unavailable

RATES_MBIT = (5.0, 10.0, 20.0, 50.0, 100.0, 150.0, 300.0, 1000.0)
MEMBERS = (1, 2, 4)
CELL_RTT_S = 0.003
DDP_STEPS, WHOLE_STEPS = 2, 3  # of a turn; before PowerSGD's hook compresses, and one behind
OURS_STEPS = 8  # of a turn, so that one of a period holds a round

MODELS = (
    Model("mlp", "a perceptron for MNIST, 0.2 M parameters", 0.02),
    Model("resnet", "ResNet-18, 11.7 M", 0.5),
    Model("gpt", "a GPT of 10.9 M", 0.5),
)
# (model, network, members, about how many seconds it takes)
MEASURED = (
    ("resnet", Net(50.0, False), 4, 220),
    ("gpt", Net(50.0, False), 4, 200),
    ("resnet", Net(150.0, False), 4, 110),
    ("gpt", Net(150.0, False), 4, 110),
    ("mlp", Net(20.0, True), 4, 65),
    ("mlp", Net(150.0, True), 4, 30),
    ("gpt", Net(150.0, True), 2, 130),
    ("gpt", Net(150.0, True), 4, 340),
    ("resnet", Net(150.0, True), 4, 360),
)
EXPECTED = (
    "In one cell a ring of four crosses the air 12 times: ResNet-18 and the GPT in fp32 need 86 s a step at 50 Mbit/s, "
    "and are slower than one laptop alone below 1000 Mbit/s. `safe` is limited to an eighth of the bytes: at most 4 "
    "times DDP's fp16 hook where the network binds, not 10, and one laptop alone is better up to 150 Mbit/s. `fast` "
    "sends a hundredth with sparseloco: at least 10 times the fp16 hook, faster than one laptop from 10 or 20 Mbit/s "
    "on, and 1.3 times the PowerSGD hook. The small perceptron is bound by latency as much as by bytes. (When four "
    "bits in every second step were found to be safe: at most 8 times the fp16 hook.)"
)


def model_of(name: str) -> Model:
    """By its name."""
    return next(model for model in MODELS if model.name == name)


def planned_name(model: Model) -> str:
    """The name under which the file keeps what is predicted at every rate."""
    return f"{model.name}, planned"


def measured_name(name: str, net: Net, members: int) -> str:
    """The name under which the file keeps what the lab has shown at one rate."""
    return f"{name}, {net.holds(members)}"


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
                choice = text_of(price.settings) if price.against_one >= PAYS_FROM else "train alone"
                yield f"{quality}, m={members} at {mbit:g}: {choice}", [price.step_s]
    yield "alone_s", [alone_s]


def _measured(shared: LocalPlace, name: str, net: Net, members: int) -> Callable[[int, bool], Figures]:
    def measured(_repeat: int, short: bool) -> Figures:
        planner = Planner.here(model_of(name), shared.scratch() / "prices", timed=True)
        return in_the_lab(planner, net, members, short)

    return measured


def in_the_lab(planner: Planner, net: Net, members: int, short: bool) -> Figures:
    """Seconds a step of DDP with its hooks, and of jobs with what is chosen at either quality; and as planned."""
    found: Figures = {}
    work = Work(planner.model.paced, members)
    network = net.network(members)
    ours = {quality: planner.ours(network, members, quality) for quality in QUALITIES}
    with place(members, net.mbit, shared=net.shared) as here:
        for hook_name, hook in HOOKS.items():
            warm_up = 1 if hook == "fp16" else WHOLE_STEPS
            with here.torch(work, hook) as side:
                found[hook_name] = steps_s(side, warm_up, DDP_STEPS, 1 if short else 2)
                found["alone"] = [side.turn(DDP_STEPS, alone=True)["s"]]
            found[f"{hook_name}, planned"] = [planner.ddp(DDP_PLANNED[hook_name], network, members).step_s]
        with here.daemons(members) as daemons:
            for quality, price in ours.items():
                with job_of(here, daemons, work, price.settings) as side:
                    took = steps_s(side, OURS_STEPS, OURS_STEPS, 1 if short else 3)
                found[f"{quality}: {text_of(price.settings)}"] = took
                found[f"{quality}, planned"] = [price.step_s]
    return found
