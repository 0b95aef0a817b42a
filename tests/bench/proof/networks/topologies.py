"""What an all-reduce of fp32 takes over each topology, in WiFi cells and on cables, beside what is planned of it and
beside gloo's ring in the same run: by number of laptops, by rate, by latency."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshtrain.cli.planning.codec_prices import ProcessorPrices, processor_prices
from meshtrain.cli.ui.progress import Stages
from meshtraind.bench.settings import Settings, manifest_of
from meshwire.planning.choose import job_settings
from meshwire.planning.network import Network, cables, cell
from meshwire.planning.price import Pricing
from meshwire.planning.step_trace import StepTrace
from tests.bench import allreduce_lab
from tests.bench.journal import Case, Figures, Section
from tests.bench.proof.networks.paced_models import LAB_RTT_S
from tests.bench.proof.places import LocalPlace
from tests.lab.lab import lab_unavailable

CODEC = "fp32"
MBIT = 100.0
MEMBERS = (2, 4, 8)
TOPOLOGIES = ("ring", "star:0", "sharded", "tree", "butterfly", "gather")
NOT_GATHER = TOPOLOGIES[:-1]  # of eight in a cell, whose air it takes for 9 s
ROUNDS = 4
INSTANT_S = 1e-6  # what learners compute before their vectors are there: nothing


@dataclass(frozen=True)
class SweepPoint:
    """A network and how many laptops are on it.

    Attributes:
        network: of the lab.
        mb: of the vector, in 10^6 bytes.
        seconds: that the case takes, about.
        topologies: that are tried.
    """

    network: allreduce_lab.Network
    members: int
    mb: int
    seconds: int
    topologies: tuple[str, ...] = TOPOLOGIES

    @property
    def planned_on(self) -> Network:
        """As the planner has it."""
        bytes_s = self.network.rate_mbit * 1e6 / 8
        rtt_s = LAB_RTT_S + 4 * self.network.delay_ms / 1000
        if self.network.cell:
            return cell(self.members, bytes_s, rtt_s, len(self.network.wired))
        return cables(self.members, bytes_s, rtt_s)

    def planned_s(self, topology: str, prices: ProcessorPrices) -> float:
        """What a round takes by the planner, which plays the programs that daemons run."""
        manifest = manifest_of(Settings(self.members, self.mb).values)
        nothing = StepTrace(
            samples=1,
            steps=1,
            threads=1,
            before_s=0.0,
            backward_s=INSTANT_S,
            after_s=0.0,
            copy_s=0.0,
            ready=(1.0,) * len(manifest.tensors),
        )
        worked = replace(self.planned_on, work=replace(prices.work, round_s=0.0))  # a collective, and no job around it
        settings = job_settings(CODEC, "bsp", topology)
        return Pricing(manifest, prices.codecs).price(settings, (nothing,) * self.members, worked).step_s

    def __str__(self) -> str:
        return f"{self.members}, {self.network}"


def _cell(mbit: float, *wired: int) -> allreduce_lab.Network:
    return allreduce_lab.Network(mbit, cell=True, wired=frozenset(wired))


def _cables(mbit: float, delay_ms: float = 0.0) -> allreduce_lab.Network:
    return allreduce_lab.Network(mbit, delay_ms=delay_ms)


FEW = ("ring", "star:0", "butterfly")
BY_MEMBERS = (
    *(SweepPoint(_cell(MBIT), members, 1, s) for members, s in zip(MEMBERS[:2], (45, 95), strict=True)),
    SweepPoint(_cell(MBIT), MEMBERS[2], 1, 230, NOT_GATHER),
    *(SweepPoint(_cell(MBIT, 0), members, 1, s) for members, s in zip(MEMBERS[:2], (40, 80), strict=True)),
    SweepPoint(_cell(MBIT, 0), MEMBERS[2], 1, 200, NOT_GATHER),
    *(SweepPoint(_cables(MBIT), members, 4, s) for members, s in zip(MEMBERS, (45, 80, 150), strict=True)),
)
BY_RATE = (
    *(SweepPoint(_cell(mbit, 0), 4, mb, s, FEW) for mbit, mb, s in ((20.0, 1, 120), (50.0, 1, 60), (300.0, 4, 50))),
    *(SweepPoint(_cables(mbit), 4, mb, s, FEW) for mbit, mb, s in ((10.0, 1, 60), (30.0, 1, 35), (1000.0, 10, 35))),
)
BY_LATENCY = tuple(SweepPoint(_cables(20.0, delay_ms), 4, 1, 40, TOPOLOGIES) for delay_ms in (2.5, 10.0, 25.0))
POINTS = (*BY_MEMBERS, *BY_RATE, *BY_LATENCY)
EXPECTED = (
    "In one cell everything crosses the air: every topology but gather takes as long as the ring, 2 (m - 1) vectors "
    "twice over, and gather m / 2 times that; a star at a wired laptop is 1.5 times (four laptops) and 1.75 times "
    "(eight) as fast as the ring with it. On cables the star takes m / 2 times the ring, the butterfly as long as the "
    "ring. Latency adds up as often as steps follow each other: 2 (m - 1) times on a ring, twice on a star, 2 log2 m "
    "times on a butterfly. Measured and planned differ by less than a tenth where the link decides."
)


def case_name(point: SweepPoint) -> str:
    """The name under which the file keeps what a point takes."""
    return f"topologies, {point}, {point.mb} MB"


def sections(shared: LocalPlace) -> tuple[Section]:
    """A case for each point."""
    cases = tuple(
        Case(case_name(point), point.seconds, _measured(shared, point), lambda: lab_unavailable("nft"))
        for point in POINTS
    )
    about = "an all-reduce of fp32 over each topology, by laptops, rate and latency, beside gloo's ring"
    return (Section("topologies", about, cases, repeats=1, expected=EXPECTED),)


def _measured(shared: LocalPlace, point: SweepPoint) -> Callable[[int, bool], Figures]:
    def measured(_repeat: int, short: bool) -> Figures:
        with Stages() as stages:
            prices = processor_prices([CODEC], shared.scratch() / "prices", stages)
        found: Figures = {}
        for topology in point.topologies[:1] if short else point.topologies:
            settings = Settings(point.members, point.mb, CODEC, 1 if short else ROUNDS, topology=topology)
            report = allreduce_lab.measure(settings, point.network)
            found[topology] = list(report.meshtrain.seconds)
            found[f"{topology}, gloo's ring"] = list(report.gloo.seconds)
            found[f"{topology}, planned"] = [point.planned_s(topology, prices)]
        return found

    return measured
