"""Every case with what a repeat of it calls and takes, and every goal with what was measured before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.bench.goals import measures
from tests.bench.goals.measures import AGAIN, WAYS
from tests.bench.journal import Case, Figures, Section
from tests.lab.lab import lab_unavailable


@dataclass(frozen=True)
class Goal:
    """What a figure is to be.

    Attributes:
        what: for people.
        case, figure: whose median is judged.
        before: as it was measured before, and where that stands.
        bound: at least, or at most.
        equal: a figure of the same case, whose ratios are of two that compute the same; None: there is none. What lies
            within these, or their inverses, is not told apart from the bound.
    """

    what: str
    case: str
    figure: str
    before: str
    bound: float
    at_most: bool = False
    equal: str | None = None

    def met_by(self, value: float) -> bool:
        """Whether a median reaches it."""
        return value <= self.bound if self.at_most else value >= self.bound

    def within(self, value: float, equal: Sequence[float]) -> bool:
        """Whether a median is not told apart from the bound."""
        apart = max((max(ratio, 1 / ratio) for ratio in equal), default=1.0)
        return value <= self.bound * apart if self.at_most else value * apart >= self.bound

    @property
    def text(self) -> str:
        """As the table has it."""
        return f"{'at most' if self.at_most else 'at least'} {self.bound:g}"


def _learner(model: str, members: int, steps: int, turns: int, seconds: int) -> Case:
    def measure(_repeat: int, short: bool) -> Figures:
        return measures.learner(model, members, "fp16", steps, 1 if short else turns)

    return Case(f"{model} m={members}", seconds, measure)


def _all_reduce(peers: int, tls: bool) -> Case:
    def measure(_repeat: int, short: bool) -> Figures:
        return measures.all_reduce(peers, 46, tls, 3 if short else 20)

    return Case(f"46 MB m={peers}, {'TLS' if tls else 'no TLS'}", 8 + 5 * tls + peers, measure)


def _lossy(peers: int) -> Case:
    def measure(_repeat: int, short: bool) -> Figures:
        return measures.all_reduce_lossy(peers, 10, 2.0, 2 if short else 6)

    return Case(f"10 MB m={peers}, 2 % lost", 16 + 5 * peers, measure, measures.cubic_unavailable)


def _limited(model: str, seconds: int, turns: int) -> Case:
    def measure(_repeat: int, short: bool) -> Figures:
        return measures.limited(model, 4, 1 if short else turns)

    return Case(f"{model} m=4, 100 Mbit/s", seconds, measure, lab_unavailable)


def _loss(model: str, turns: int, seconds: int) -> Case:
    def measure(repeat: int, short: bool) -> Figures:
        return measures.loss(model, 4, 2 if short else turns, repeat)

    return Case(f"{model} m=4, loss", seconds, measure)


def _plain(name: str, seconds: int, measured: Callable[[], Figures]) -> Case:
    def measure(_repeat: int, _short: bool) -> Figures:
        return measured()

    return Case(name, seconds, measure)


SECTIONS = (
    Section(
        "learner",
        "a job of one member beside plain torch, and of two with fp16 beside DDP with fp32, on loopback",
        (
            _learner("resnet", 1, 4, 5, 20),
            _learner("gpt", 1, 4, 5, 25),
            _learner("resnet", 2, 4, 5, 30),
            _learner("gpt", 2, 4, 5, 35),
        ),
    ),
    Section(
        "tiny",
        "rounds a second of a model of 676 values beside DDP, on loopback",
        (_learner("tiny", 2, 300, 5, 15), _learner("tiny", 4, 150, 5, 25), _learner("tiny", 8, 60, 5, 45)),
    ),
    Section(
        "loopback",
        "the all-reduce between daemons beside gloo's, which has no TLS",
        tuple(_all_reduce(peers, tls) for tls in (False, True) for peers in (2, 4)),
    ),
    Section(
        "limited",
        "DDP with PowerSGD's hook beside jobs, four members at 100 Mbit/s a station: time of a step",
        (_limited("digits", 120, 1), _limited("text", 155, 1)),
    ),
    Section("lossy", "the all-reduce at 100 Mbit/s where 2 % of the frames are lost", (_lossy(2), _lossy(4))),
    Section(
        "memory",
        "what a model of 190 MiB takes beside DDP; an idle daemon",
        (
            _plain("190 MiB m=2", 22, lambda: measures.memory(2, 3)),
            _plain("idle daemon", 26, measures.idle),
            _plain("15 idle links", 55, measures.idle_links),
        ),
    ),
    Section(
        "loss",
        "held-out loss after as many samples as DDP with PowerSGD's hook, four members, on loopback",
        (_loss("digits", 8, 215), _loss("text", 6, 345)),
        quiet=False,
    ),
)

OUTSIDE = "outside, 2026-11-22"


def _goals() -> tuple[Goal, ...]:
    found = [
        Goal("ResNet-18, one member, of plain torch's speed", "resnet m=1", "speed", "0.72", 0.95),
        Goal("GPT of 10.9 M, one member, of plain torch's speed", "gpt m=1", "speed", "0.79", 0.95),
        Goal("ResNet-18, two members, of DDP's speed", "resnet m=2", "speed", "0.70", 1.0),
        Goal("GPT of 10.9 M, two members, of DDP's speed", "gpt m=2", "speed", "0.74", 1.0),
    ]
    for members, speed, cpu in ((2, "0.49", "2.8"), (4, "0.60", "2.8 to 1.7"), (8, "0.73", "1.7")):
        case = f"tiny m={members}"
        if members > 2:  # two are measured, and have no goal
            found.append(Goal(f"tiny rounds, {members} members, of DDP's rounds a second", case, "speed", speed, 1.0))
            found.append(Goal(f"tiny rounds, {members} members, CPU by DDP's", case, "cpu", cpu, 1.3, at_most=True))
    for peers, speed, cpu in ((2, "0.64", "-"), (4, "0.52", "-")):
        case = f"46 MB m={peers}, no TLS"
        found.append(Goal(f"all-reduce of 46 MB, {peers} peers, no TLS, of gloo's speed", case, "speed", speed, 1.0))
        found.append(
            Goal(f"all-reduce of 46 MB, {peers} peers, no TLS, CPU by gloo's", case, "cpu", cpu, 1.5, at_most=True)
        )
    before = {
        "digits": {"powersgd": "1.07", "topk": "0.85"},
        "text": {"powersgd": "0.82", "topk": "0.70"},
    }
    for model, name in (("digits", "ResNet-18"), ("text", "GPT of 10.9 M")):
        for way in WAYS:
            known = before[model].get(way.partition(":")[0], "-")
            case = f"{model} m=4, 100 Mbit/s"
            found.append(Goal(f"{name}, 100 Mbit/s, `{way}`, of the hook's speed", case, f"speed {way}", known, 1.3))
            found.append(
                Goal(
                    *(f"{name}, `{way}`, loss by the hook's", f"{model} m=4, loss", f"loss {way}", "-", 1.0),
                    at_most=True,
                    equal=AGAIN,
                )
            )
    for peers, speed in ((2, "0.94"), (4, "0.79")):
        found.append(
            Goal(f"2 % lost, {peers} peers, of gloo's speed", f"10 MB m={peers}, 2 % lost", "speed", speed, 1.3)
        )
    return (
        *found,
        Goal("memory for 190 MiB, by DDP's", "190 MiB m=2", "ratio", "1.54", 1.3, at_most=True),
        Goal("an idle daemon, MB", "idle daemon", "mb", "61.35 ([aims.md](aims.md))", 60, at_most=True),
        Goal("with 15 idle links, % of a core", "15 idle links", "percent", "1.5", 0.5, at_most=True),
    )


GOALS = _goals()
