"""Every way to keep in step, on a text and on images: four daemons, three seeds; and what a step of each takes.

Losses and bytes are of real jobs on loopback, and depend on no clock but where a bound lets members be late. Seconds
are the planner's for a WiFi cell, from the script's own steps on one core of this machine: `predicted` measures how
good these predictions are.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from meshtrain.cli.planning.codec_prices import processor_prices
from meshtrain.cli.submission.measuring import trace
from meshtrain.cli.ui.progress import Stages
from meshwire.planning.choose import job_settings
from meshwire.planning.network import cell
from meshwire.planning.price import Pricing
from tests.bench import codecjob
from tests.bench.codecruns import Run, train
from tests.bench.journal import Case, Figures, Section
from tests.bench.proof.places import NAMES, LocalPlace, ProofError

MEMBERS = len(NAMES)
AFTER = 40  # steps in step before post-local SGD begins its periods
# Add a mode here, or below: all else follows. The codec is the mode's own, fp32 where it has none.
MODES = (
    *("bsp", "ssp:1", "ssp:2", "local:8", f"local:8,after={AFTER}", "local:8,ssp:1"),
    *("local:8,gossip=2", "local:8,stream=8,random"),
    *("diloco:8", "diloco:8,stream=4,tau=2", "sma:8", "sparseloco:8", "muloco:8", "demo"),
)
# The others of the engine, and combinations; in a section of their own, for each takes half an hour at most.
MORE_MODES = (
    *("bsp,accumulate=2", "local:8,stream=8", "local:8,stream=1,tau=4", "local:8,gossip=2,over=ring"),
    *("diloco:8,ssp:1", "sparseloco:8,ssp:1"),
)
EVERY_MODE = (*MODES, *MORE_MODES)
BASE = "bsp"
MBIT = (20.0, 50.0, 150.0)
RTT_S = 0.003  # of a home's WiFi without load


class Set:
    """What is trained.

    Attributes:
        model: a name of `codecjob.MODELS`.
        steps: of each member.
        every: steps between two points of the curve.
        seconds: that a job takes, about.
    """

    def __init__(self, model: str, about: str, steps: int, every: int, seconds: int) -> None:
        self.model, self.about, self.steps, self.every, self.seconds = model, about, steps, every, seconds

    @property
    def batch(self) -> int:
        """Samples of a step, all members together."""
        return codecjob.MODELS[self.model].batch


SETS = (
    Set("gpt", "text: the demo's GPT on Python's standard library, character by character, AdamW at 2e-3", 120, 24, 25),
    Set("cnn", "images: a CNN with BatchNorm on MNIST's digits, SGD at 0.02 with momentum 0.9", 160, 16, 15),
)
EXPECTED = (
    "At equal samples bsp is best; ssp:2 and post-local SGD are within its noise, local:8 is a little behind, and "
    "diloco and sparseloco further, for 15 and 20 outer steps are few for their momentum. demo, which takes other "
    "steps, is behind on so short a training. In seconds at 20 Mbit/s what sends least wins all the same; at 150 "
    "Mbit/s the models are so small that local:8,ssp:1, which hides the exchange, is enough. Gossip within periods "
    "takes local:8 half of the way to bsp, for three times the bytes; an eighth of all weights, drawn behind each "
    "step, and sma:8 are as good as local:8 is; parts of diloco:8 in turns with a delay are a little behind diloco:8. "
    "ssp:1, tried when ssp:2 was found 0.05 behind bsp on the text, is behind by half of that."
)


def case_name(model: str, mode: str) -> str:
    """The name under which the file keeps how a mode trains this model."""
    return f"{model}, {mode}"


def steps_name(model: str) -> str:
    """The name under which the file keeps the planned seconds a step of all modes."""
    return f"{model}, step times"


EXPECTED_MORE = (
    "A round of two backward passes is a batch twice as large in half as many steps, at the same rate: behind. Parts "
    "of local:8 in turns, whole tensors, are between local:8 and drawn parts; with one part that is taken in four "
    "steps later (delayed gradient averaging with K=8, D=4) half of what each has learned alone stays its own, so it "
    "is behind local:8. A ring of neighbours is as good as pairs. With a bound what has outer momentum is much further "
    "behind."
)


def sections(place: LocalPlace) -> tuple[Section, ...]:
    """Losses and bytes; and the time of a step."""
    losses, more = (
        tuple(
            Case(case_name(one.model, mode), one.seconds, _losses(place, one, mode)) for one in SETS for mode in modes
        )
        for modes in (MODES, MORE_MODES)
    )
    times = tuple(Case(steps_name(one.model), 60, _step_times(place, one)) for one in SETS)
    about = f"held-out loss by samples, and bytes, of {MEMBERS} daemons on loopback"
    return (
        Section("modes", about, losses, quiet=False, expected=EXPECTED),
        Section(
            "more-modes", "the same of other modes, and of combinations", more, quiet=False, expected=EXPECTED_MORE
        ),
        Section("steps", "what a step of each mode takes in a WiFi cell, as planned", times, repeats=1),
    )


def _losses(place: LocalPlace, one: Set, mode: str) -> Callable[[int, bool], Figures]:
    def measured(seed: int, short: bool) -> Figures:
        steps, every = (16 + AFTER, 8) if short else (one.steps, one.every)
        trained = train(place.daemons(), place.folder(), Run(one.model, MEMBERS, f"@{mode}", seed, steps), every)
        outcome = trained.outcome
        if outcome.error is not None or outcome.replicas_equal is not True:
            place.end_mesh()
            raise ProofError(outcome.error or "the replicas differ")
        return {
            "step": [float(step) for step, _ in trained.curve],
            "loss": [loss for _, loss in trained.curve],
            "accuracy": [outcome.accuracy],
            "sent_bytes": [outcome.sent_bytes],
            "payload_bytes": [outcome.payload_bytes],
            "parameters": [float(outcome.parameters)],
        }

    return measured


def _step_times(place: LocalPlace, one: Set) -> Callable[[int, bool], Figures]:
    def measured(_repeat: int, _short: bool) -> Figures:
        with Stages() as stages:
            return dict(_priced(place.folder(), one, stages))

    return measured


def _priced(folder: Path, one: Set, stages: Stages) -> Iterator[tuple[str, list[float]]]:
    """Raises NotMeasured, CliError."""
    root = folder / f"{one.model}-alone"
    root.mkdir(exist_ok=True)
    (root / "train.py").write_text(codecjob.SCRIPT)
    arguments = (one.model, BASE, str(one.steps), str(one.batch // MEMBERS), "0")
    data = folder / "data" / codecjob.MODELS[one.model].data
    traced = trace(root, "train.py", arguments, {"OMP_NUM_THREADS": "1"}, data, stages)
    step = traced.step
    yield "alone_s", [step.alone_s]
    yield "alone_all_s", [step.of_samples(one.batch).alone_s]
    settings = {mode: job_settings(None, mode) for mode in EVERY_MODE}
    prices = processor_prices([str(each.codec) for each in settings.values()], folder / "prices", stages)
    pricing = Pricing(traced.measurement.manifest, prices.codecs)
    for mbit in MBIT:
        network = cell(MEMBERS, mbit * 1e6 / 8, RTT_S)
        for mode, each in settings.items():
            yield f"{mode} at {mbit:g}", [pricing.price(each, (step,) * MEMBERS, network).step_s]
