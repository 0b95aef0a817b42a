"""What `meshtrain whatif` predicts, beside what real daemons do in the lab: jobs that nothing was fitted to.

The learners are paced: a step is stated to take so long, as on cores that this machine does not have. Their script is
timed as `whatif` times one, its price is computed for each network, and then real daemons train it there.
"""

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from meshtrain.cli.planning.codec_prices import processor_prices
from meshtrain.cli.ui.progress import Stages
from meshwire.collectives.strategy import collective_for
from meshwire.messages.local import Watch, Watched
from meshwire.planning.choose import job_settings, legal_settings, preferred, priced, wished
from meshwire.planning.price import JobSettings, Pricing
from meshwire.planning.quality import EVIDENCE
from meshwire.sync_modes.codec_for_mode import codec_of
from tests.bench import paced
from tests.bench.journal import Case, Figures, Section
from tests.bench.overlap_lab import OverlapError, StationDaemon, linked_stations
from tests.bench.proof.networks.paced_models import QUALITIES, Net, traced
from tests.bench.proof.places import NAMES, LocalPlace
from tests.daemon import realjobs as jobs
from tests.lab.lab import Lab, lab_unavailable
from tests.lab.links import Cell

VALUES = 1_000_000
STEP_S = 0.4
BATCH = 16
WARM_UP_ROUNDS = 3
JOB_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Job:
    """As it is typed; None: the mode's own."""

    codec: str | None
    sync: str
    rounds: int
    topology: str | None = None

    @property
    def settings(self) -> JobSettings:
        """As they are priced."""
        return job_settings(self.codec, self.sync, self.topology)

    def __str__(self) -> str:
        return " ".join((self.sync, self.codec or "", self.topology or "")).strip()


@dataclass(frozen=True)
class Mesh:
    """Laptops on a network of the lab, and what they train one after the other.

    Attributes:
        seconds: that all jobs take, about.
        values: of the model.
        step_s: that a learner computes.
    """

    members: int
    net: Net
    jobs: tuple[Job, ...]
    seconds: int
    values: int = VALUES
    step_s: float = STEP_S

    def lab(self) -> Lab:
        """Made of namespaces."""
        mbit = self.net.mbit
        return Lab(self.members, cell=Cell(mbit)) if self.net.shared else Lab(self.members, mbit)

    @property
    def about(self) -> str:
        """For people: all of it."""
        return f"{self.values / 1e6:g} M values in {1000 * self.step_s:g} ms, {self}"

    def __str__(self) -> str:
        return self.net.holds(self.members)


MESHES = (
    Mesh(
        2,
        Net(20.0, shared=False),
        (
            Job("fp32", "bsp", 10),
            Job("int8", "bsp", 16),
            Job("fp16", "ssp:2", 16),
            Job("int8", "local:8", 6),
            Job("int8", "local:8,ssp:1", 10),
            Job("fp32", "local:8,ssp:1", 10),
            Job(None, "sparseloco:8", 6),
            Job("topk:0.1", "bsp", 16),
        ),
        200,
    ),
    Mesh(
        3,
        Net(50.0, shared=True),
        (
            Job("fp32", "bsp", 9),
            Job("int8", "bsp", 12),
            Job("topk:0.1,gather", "bsp", 12),
            Job("fp16", "local:8", 5),
        ),
        135,
    ),
    Mesh(
        4,
        Net(100.0, shared=False),
        (
            Job("fp32", "bsp", 12),
            Job("fp32", "bsp", 12, "tree"),
            Job("fp16", "bsp", 12, "butterfly"),
            Job("int4:sr", "bsp", 12),
        ),
        75,
    ),
)
EXPECTED = (
    "Where the link decides, predictions are within 5 %: bytes are counted, and rates are the lab's. Where daemons' "
    "processors decide (sparse codecs; four daemons on two cores) they are too fast, by a tenth or more. What is "
    "predicted to be slower than one laptop is."
)

BY_HAND = (
    Job("fp32", "bsp", 7),
    Job("int4", "bsp", 7),
    Job("nf4", "local:2", 6),
    Job("int8", "local:8", 5),
    Job("int8", "local:8,ssp:1", 5),
)
"""What a person who has read the guides might type, whose first three are safe."""
AUTO_ROUNDS = 8
RANDOM_MESHES = 12
SEED = 18
EXPECTED_RANDOM = (
    "What is chosen is within a tenth of the best that is typed in ten of twelve cells. Where the link is slow `safe` "
    "is one laptop alone, and that is right."
)


def random_meshes() -> tuple[Mesh, ...]:
    """Laptops, models, steps and networks as they fall: rates of a home, models and steps that two cores can pace."""
    draw = random.Random(SEED)
    meshes = []
    for _ in range(RANDOM_MESHES):
        values = round(math.exp(draw.uniform(math.log(3e5), math.log(3e6))), -5)
        net = Net(round(math.exp(draw.uniform(math.log(10), math.log(200)))), shared=draw.random() < 0.5)
        step_s = round(draw.uniform(0.2, 0.8), 1)
        meshes.append(Mesh(draw.choice((2, 3, 4)), net, BY_HAND, 145, int(values), step_s))
    return tuple(meshes)


# Gradients of noise that move the weights: equal ones are packed by LZ4 on slow links (W5), and real ones hardly are.
SCRIPT = paced.SCRIPT.replace(
    "self.backward_s, self.asleep_s",
    "self.noise = [torch.randn(count) for _ in range(LAYERS)]\n        self.backward_s, self.asleep_s",
    1,
).replace("x * weight.mean()", "x + 1e4 * (weight * self.noise[layer]).mean()", 1)


def case_name(mesh: Mesh) -> str:
    """The name under which the file keeps what was predicted and measured of a mesh."""
    return f"predicted, {mesh}"


def random_name(mesh: Mesh) -> str:
    """As `case_name`, of one that was drawn."""
    return f"random, {mesh.about}"


def sections(shared: LocalPlace) -> tuple[Section, ...]:
    """All meshes."""
    drawn = tuple(
        Case(random_name(mesh), mesh.seconds, _measured(shared, mesh, chosen=True), lambda: lab_unavailable("nft"))
        for mesh in random_meshes()
    )
    cases = tuple(
        Case(case_name(mesh), mesh.seconds, _measured(shared, mesh), lambda: lab_unavailable("nft")) for mesh in MESHES
    )
    about = f"what `whatif` predicts of {VALUES / 1e6:g} M values and steps of {STEP_S:g} s, beside what jobs take"
    chosen = f"what is chosen, beside what a person might type, in {RANDOM_MESHES} cells that were drawn"
    return (
        Section("predicted", about, cases, repeats=1, expected=EXPECTED),
        Section("random", chosen, drawn, repeats=1, expected=EXPECTED_RANDOM),
    )


def script_options(mesh: Mesh, members: int, count: int) -> str:
    """The paced script's argument."""
    return paced.options(
        values=mesh.values, sample_s=mesh.step_s / BATCH, batch=BATCH, slowness=(1.0,) * members, count=count
    )


def measured_s(job: Job, mesh: Mesh, daemons: Sequence[StationDaemon], folder: Path) -> float:
    """Seconds a step of a job, in the mean over whole periods behind the first rounds. Raises OverlapError."""
    submitted = jobs.submit(
        daemons[0],
        folder,
        SCRIPT,
        args=(script_options(mesh, len(daemons), job.rounds * job.settings.sync.round_steps),),
        hash_every=0,
        sync=job.sync,
        codec=job.codec,
        topology=job.topology,
    )
    reply = daemons[0].request(Watch(job=submitted.job), JOB_TIMEOUT_S, "end of the job")
    assert isinstance(reply, Watched)
    if reply.summary.state != "succeeded":
        raise OverlapError(f"{job}: the job {reply.summary.state}: {reply.summary.error}")
    period = max(1, job.settings.sync.period)
    each = []
    for rank in range(len(daemons)):
        begun_s = [step.began_s for step in paced.steps(daemons[0], submitted.job, rank)][WARM_UP_ROUNDS * period :]
        steps = (len(begun_s) - 1) // period * period
        each.append((begun_s[steps] - begun_s[0]) / steps)
    return fmean(each)


def _measured(shared: LocalPlace, mesh: Mesh, *, chosen: bool = False) -> Callable[[int, bool], Figures]:
    """`chosen`: what is chosen at each quality, too, of all whose loss is known."""

    def measured(_repeat: int, short: bool) -> Figures:
        codecs = [str(job.settings.codec) for each in MESHES for job in each.jobs]
        codecs = [tried.codec for tried in EVIDENCE] if chosen else [*codecs, "fp32"]
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
            script = traced(folder, SCRIPT, script_options(mesh, 1, 1000))
            prices = processor_prices(codecs, shared.scratch() / "prices", stack.enter_context(Stages()))
            pricing, steps = Pricing(script.measurement.manifest, prices.codecs), (script.step,) * mesh.members
            network = replace(mesh.net.network(mesh.members), work=prices.work)
            lab = stack.enter_context(mesh.lab())
            daemons = linked_stations(lab, NAMES[: mesh.members], folder)
            found = {"alone": [script.step.alone_s]}
            ways = {str(job): job for job in (mesh.jobs[:1] if short else mesh.jobs)}
            settings = list(legal_settings(script.measurement.manifest))
            for quality in QUALITIES if chosen else ():
                best = _job_of(preferred(priced(pricing, wished(settings, quality), steps, network)).settings)
                ways.setdefault(str(best), best)
                found[f"{quality}: {best}"] = [1.0]
            for name, job in ways.items():
                found[name] = [measured_s(job, mesh, daemons, folder)]
                found[f"{name}, planned"] = [pricing.price(job.settings, steps, network).step_s]
        return found

    return measured


def _job_of(settings: JobSettings) -> Job:
    usual = settings.collective == collective_for(settings.codec)
    codec = None if codec_of(settings.sync, None) == settings.codec else str(settings.codec)
    topology = None if usual else str(settings.collective.topology)
    return Job(codec, settings.sync.text(), AUTO_ROUNDS, topology)
