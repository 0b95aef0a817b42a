"""The grid that others have measured (diloco-measured, 2026): a language model of 30.8 M parameters on four machines,
linked at 50, 200, 1000 and 5000 Mbit/s; and the loss that each way ends at, on a smaller model.

Step times are of paced learners in the lab (`paced_models`). Losses are of real training on loopback: they do not
depend on the network, and the large model would take days here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from meshwire.planning.choose import job_settings
from meshwire.planning.mesh_plan import PAYS_FROM
from meshwire.planning.network import Network
from meshwire.planning.price import JobSettings, Price
from meshwire.planning.quality import Quality
from meshwire.sync_modes.mode import SyncSettings
from tests.bench.codecruns import Run, train
from tests.bench.goals.sides import Work, place
from tests.bench.journal import Case, Figures, Section
from tests.bench.proof.networks.paced_models import DDP_PLANNED, QUALITIES, Model, Net, Planner, job_of, text_of
from tests.bench.proof.places import LocalPlace, ProofError
from tests.lab.lab import Lab, lab_unavailable
from tests.lab.probes import Flows

MEMBERS = 4
MBIT = (50.0, 200.0, 1000.0, 5000.0)
STEP_S = 0.5
# Their DDP and DiLoCo with H from 1 to 128 at 50 Mbit/s follow from steps of 20 to 30 ms: bytes / rate / utilisation.
THEIR_STEP_S = 0.025
ABOUT = "a language model of 30.8 M parameters"
PACED, AS_FAST_AS_THEIRS = Model("lm", ABOUT, STEP_S), Model("lm", ABOUT, THEIR_STEP_S)
# (what, Mbit/s): utilisation of compute, as they have published it
THEIRS = {("DDP", 50.0): 0.0004, ("DiLoCo H=128", 50.0): 0.116, ("DiLoCo H=128", 200.0): 0.36}
SOCKETS_S = 3.0

# The loss
TRAINED_ON, STEPS, EVERY = "gpt", 512, 64  # whole periods of 128 steps
BASE = "bsp fp32"
LOSS_PART = 0.005  # of synchronous AdamW's loss
UTILISED = 0.9


@dataclass(frozen=True)
class Way:
    """How a job trains.

    Attributes:
        name: on the page.
        codec: as typed; None: the mode's own.
        quality: of what the planner chooses; None: `codec` and `sync` are taken.
    """

    name: str
    sync: str = "bsp"
    codec: str | None = None
    quality: Quality | None = None

    @property
    def settings(self) -> JobSettings:
        """As `submit` takes them, where nothing is chosen."""
        return job_settings(self.codec, self.sync)

    def price(self, planner: Planner, network: Network) -> Price:
        """As planned, of what is chosen where something is."""
        if self.quality is not None:
            return planner.ours(network, MEMBERS, self.quality)
        return planner.priced(self.settings, network, MEMBERS)


WAYS = (
    Way("bsp", codec="fp32"),
    Way("bsp int8", codec="int8"),
    Way("diloco:128", "diloco:128"),
    Way("diloco:128,stream=4,tau=20", "diloco:128,stream=4,tau=20"),
    Way("sparseloco:32", "sparseloco:32"),
)
AUTO = tuple(Way(f"auto, {quality}", quality=quality) for quality in QUALITIES)
# What auto is likely to choose is trained, too: the page looks for the very settings.
TRAINED = (
    *WAYS,
    *(Way(f"bsp {codec}", codec=codec) for codec in ("int4", "int4:sr")),
)
# What `fast` may choose, or has chosen, is trained as long.
TRAINED_FAST = (
    *(Way(f"{sync} nf4", sync, "nf4") for sync in ("local:2", "local:4", "local:4,ssp:1")),
    *(Way(f"{sync} int8", sync, "int8") for sync in ("local:4", "local:8", "local:8,ssp:1")),
    *(Way(sync, sync) for sync in ("local:4", "sparseloco:8", "sparseloco:8,ssp:1")),
    Way("bsp powersgd", codec="powersgd"),
)
# In step, in fewer steps whose rate falls to 0 as well: what a sample is worth is read off these.
FEWER = (128, 192, 256, 384)
EVERY_TRAINED = (*TRAINED, *TRAINED_FAST)
# About how many seconds a case takes at each rate, daemons and learners started anew
SECONDS = {
    "bsp": (130, 65, 40, 40),
    "bsp int8": (65, 45, 40, 40),
    "diloco:128": (130, 105, 100, 100),
    "diloco:128,stream=4,tau=20": (90, 85, 85, 85),
    "sparseloco:32": (80, 75, 75, 75),
    "auto, safe": (55, 45, 40, 40),
    "auto, fast": (60, 60, 60, 60),
}
EXPECTED = (
    "At 50 Mbit/s fp32 in step takes 30 s and uses 0.017 of the compute, int8 0.06, diloco:128 0.68; with parts in "
    "turns and 20 steps of delay, and with sparseloco:32, the exchange hides or is short: above 0.9. The four "
    "learners' own work, encryption and codecs share two cores: at 5000 Mbit/s these are the limit, not the link, and "
    "fp32 in step stays below 0.6. `auto` at safe rather trains alone at 50 Mbit/s."
)
EXPECTED_PLAN = (
    "With steps of 25 ms bsp is where their DDP was, below 0.1 %, and diloco:128 near their 11.6 %; parts in turns "
    "cannot hide 7 s behind 0.5 s, and sparseloco:32 comes to about a half."
)
EXPECTED_LOSS = (
    "512 steps are 4 rounds of diloco:128 and 16 of sparseloco:32: too few for their outer momentum, so both end more "
    "than 0.5 % behind bsp, in parts too. Four bits are within it, and local:8,ssp:1 is nearly: the rate falls to 0."
)


EXPECTED_FAST = (
    "Periods without overlap lose less than those with one. At the script's rate, where this ran first, local:4 was a "
    "tenth behind and local:8 an eighth. With local steps that are twice as long for four laptops (O13) they are 3 and "
    "5 % behind, as in one process; with overlap, and with outer momentum, further."
)


def measured_name(mbit: float, way: Way) -> str:
    """The name under which the file keeps a way's steps at a rate."""
    return f"grid, {mbit:g} Mbit/s, {way.name}"


def loss_name(way: Way) -> str:
    """The name under which the file keeps how a way trains."""
    return f"grid loss, {text_of(way.settings)}"


def fewer_name(steps: int) -> str:
    """The name under which the file keeps where bsp ends after fewer steps."""
    return f"grid loss, bsp fp32, {steps} steps"


ALONE, SOCKETS, PLANNED = "grid, no exchange", "grid, plain sockets", "grid, planned"


def sections(shared: LocalPlace) -> tuple[Section, ...]:
    """Steps in the lab, as planned, and losses."""

    def measured(ways: Sequence[Way]) -> tuple[Case, ...]:
        return tuple(
            Case(measured_name(mbit, way), SECONDS[way.name][at], _measured(shared, mbit, way), lab_unavailable)
            for at, mbit in enumerate(MBIT)
            for way in ways
        )

    beside = (Case(ALONE, 25, _alone), Case(SOCKETS, 25, _sockets, lab_unavailable))
    in_step = measured([way for way in (*WAYS, *AUTO) if not way.settings.sync.period])
    periods = measured([way for way in WAYS if way.settings.sync.period])

    def trained(ways: Sequence[Way]) -> tuple[Case, ...]:
        return tuple(Case(loss_name(way), 75 if way.sync == "bsp" else 55, _losses(shared, way)) for way in ways)

    fewer = tuple(Case(fewer_name(steps), 75 * steps // STEPS, _losses(shared, TRAINED[0], steps)) for steps in FEWER)
    planned = Case(PLANNED, 120, _planned(shared))
    return (
        Section("grid-planned", f"{ABOUT} on four links, as planned", (planned,), repeats=1, expected=EXPECTED_PLAN),
        Section("grid", "the same in the lab, in step and as chosen", beside + in_step, repeats=1, expected=EXPECTED),
        Section("grid-periods", "the same in the lab, in periods", periods, repeats=1, expected=EXPECTED),
        Section(
            *("grid-loss", f"held-out loss of {MEMBERS} real learners, and synchronous AdamW's", trained(TRAINED)),
            quiet=False,
            expected=EXPECTED_LOSS,
        ),
        Section(
            *("fast-loss", "the same of what `fast` may choose", trained(TRAINED_FAST)),
            quiet=False,
            expected=EXPECTED_FAST,
        ),
        Section(
            *("fewer-loss", "where synchronous AdamW ends in fewer steps, for what a sample is worth", fewer),
            quiet=False,
            repeats=2,
            expected="The fewer, the higher: 128 steps end a third above 512.",
        ),
    )


def turns_of(sync: SyncSettings, *, short: bool) -> tuple[int, int, int]:
    """Steps before any is timed, steps of a turn, turns. A turn is a period, so that there is one round in it."""
    if not sync.period:
        warm_up, steps, turns = (3, 4, 3) if sync.staleness else (1, 2, 3)
    else:
        steps = sync.round_steps
        hides = sync.staleness > 0
        warm_up, turns = steps + sync.delay if hides else 1, min(4, max(1, 64 // steps))
    return (min(warm_up, 8), min(steps, 8), 1) if short else (warm_up, steps, turns)


def _measured(shared: LocalPlace, mbit: float, way: Way) -> Callable[[int, bool], Figures]:
    def measured(_repeat: int, short: bool) -> Figures:
        planner = Planner.here(PACED, shared.scratch() / "prices", timed=True)
        price = way.price(planner, Net(mbit, shared=False).network(MEMBERS))
        warm_up, steps, turns = turns_of(price.settings.sync, short=short)
        with ExitStack() as stack:
            here = stack.enter_context(place(MEMBERS, mbit))
            daemons = stack.enter_context(here.daemons(MEMBERS))
            side = stack.enter_context(job_of(here, daemons, Work(PACED.paced, MEMBERS), price.settings))
            side.turn(warm_up)
            took = [side.turn(steps) for _ in range(turns)]
        return {
            text_of(price.settings): [one["s"] for one in took],
            "daemons_cpu_s": [(one["cpu_s"] - one["own_cpu_s"]) / MEMBERS for one in took],
            "sent_bytes": [max(price.sent_bytes)],
            "planned_s": [price.step_s],
            "of_one": [price.against_one],
        }

    return measured


def _alone(_repeat: int, short: bool) -> Figures:
    """The same learners under DDP, which exchange nothing: the stated time, and what this machine really does."""
    with place(MEMBERS) as here, here.torch(Work(PACED.paced, MEMBERS)) as side:
        side.turn(2)
        took = [side.turn(4, alone=True) for _ in range(1 if short else 3)]
    return {"step_s": [one["s"] for one in took], "cpu_s": [one["cpu_s"] / MEMBERS for one in took]}


def _sockets(_repeat: int, _short: bool) -> Figures:
    """What plain TCP gets around the ring at each rate, without encryption: more than that nobody can."""
    found = {}
    for mbit in MBIT:
        with Lab(MEMBERS, mbit) as lab, Flows(lab, [(at, (at + 1) % MEMBERS) for at in range(MEMBERS)]) as flows:
            flows.goodput_mbit(SOCKETS_S / 3)
            found[f"{mbit:g}"] = flows.goodput_mbit(SOCKETS_S)
    return found


def _planned(shared: LocalPlace) -> Callable[[int, bool], Figures]:
    def planned(_repeat: int, _short: bool) -> Figures:
        planners = [Planner.here(model, shared.scratch() / "prices") for model in (PACED, AS_FAST_AS_THEIRS)]
        return {"parameters": [float(planners[0].parameters)], **dict(_utilisations(planners))}

    return planned


def planned_figure(name: str, mbit: float, step_s: float) -> str:
    """The figure that holds the planned utilisation of a way."""
    return f"{name} at {mbit:g}, {1000 * step_s:g} ms"


def _utilisations(planners: Sequence[Planner]) -> Iterator[tuple[str, list[float]]]:
    for planner in planners:
        step_s = planner.model.step_s
        for mbit in MBIT:
            network = Net(mbit, shared=False).network(MEMBERS)
            ddp = planner.ddp(DDP_PLANNED["DDP, fp32"], network, MEMBERS)
            yield planned_figure("DDP", mbit, step_s), [step_s / ddp.step_s]
            for way in (*WAYS, *AUTO):
                price = way.price(planner, network)
                figure = planned_figure(way.name, mbit, step_s)
                yield figure, [step_s / price.step_s]
                if way.quality is not None:
                    chosen = text_of(price.settings) if price.against_one >= PAYS_FROM else "train alone"
                    yield f"{figure}: {chosen}", [price.against_one]


def _losses(shared: LocalPlace, way: Way, steps: int = STEPS) -> Callable[[int, bool], Figures]:
    def measured(seed: int, short: bool) -> Figures:
        codec = "" if way.codec is None else way.codec
        run = Run(TRAINED_ON, MEMBERS, f"{codec}@{way.sync}", seed, 32 if short else steps, cosine=True)
        trained = train(shared.daemons(), shared.folder(), run, 16 if short else EVERY)
        outcome = trained.outcome
        if outcome.error is not None or outcome.replicas_equal is not True:
            shared.end_mesh()
            raise ProofError(outcome.error or "the replicas differ")
        return {
            "step": [float(step) for step, _ in trained.curve],
            "loss": [loss for _, loss in trained.curve],
            "parameters": [float(outcome.parameters)],
        }

    return measured
