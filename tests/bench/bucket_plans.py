"""`python -m tests.bench.bucket_plans`: how near the plan's buckets come to the best ones there are.

MG-WFBP (Shi, Chu, Li 2019) merges layers into buckets by what one all-reduce costs before its first byte, for there one
bucket waits until the one before it is over. Here several are in flight at once. Each way to cut a model's tensors into
buckets is played over the same network, with the program that daemons run: all ways there are for these few tensors,
the best of which is the optimum, MG-WFBP's, one bucket for each tensor, one for all, and the plan's.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import VALUE_BYTES, plan_buckets
from meshwire.planning.network import MESSAGE_S, cables
from meshwire.planning.playback import BucketLoad, Playback

MEMBERS = (2, 4)
RATES_MBIT = (20, 100, 1000)
ROUND_TRIPS_S = (0.002, 0.01, 0.03)
BACKWARDS = (0.3, 1.0, 3.0)  # a backward pass, in times of its exchange
BACKWARD_S_MIN = 0.005

Cut = tuple[int, ...]
"""Behind which tensors a bucket ends."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as a backward pass goes through it.

    Attributes:
        values: of each tensor, in the order in which their gradients come.
        costs: what each takes of the pass, in parts that only count beside each other.
    """

    values: tuple[int, ...]
    costs: tuple[float, ...]


MODELS = {
    "equal layers": Shape((100_000,) * 10, (1,) * 10),
    "convolutions": Shape(
        (500_000, 2_000_000, 600_000, 500_000, 150_000, 150_000, 40_000, 40_000, 10_000, 2_000),
        (1, 2, 2, 2, 3, 3, 4, 4, 5, 5),
    ),
    "transformer": Shape((*(600_000,) * 8, 1_000_000, 100_000), (*(2,) * 8, 0.2, 0.1)),
    "wide input": Shape((10_000, 250_000, 250_000, 800_000), (0.1, 1, 1, 2)),
    "dense head": Shape(
        (4_000_000, 16_000_000, 2_000_000, 2_000_000, 1_000_000, 500_000, 200_000, 100_000, 30_000, 2_000),
        (1, 2, 3, 3, 3, 4, 4, 5, 5, 5),
    ),
    "tiny": Shape((10, 640, 64, 4096, 64, 4096, 64, 2048, 64, 100), (1,) * 10),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and beside what an exchange is played."""

    members: int
    rate_mbit: int
    rtt_s: float
    backward: float

    @property
    def bytes_s(self) -> float:
        """What a link carries each way."""
        return self.rate_mbit * 1e6 / 8

    def exchange_s(self, values: float) -> float:
        """The least that an all-reduce of so many values can take."""
        return 2 * (self.members - 1) / self.members * values * VALUE_BYTES / self.bytes_s


def settings() -> Iterator[Setting]:
    """All that are looked at."""
    yield from (Setting(*each) for each in product(MEMBERS, RATES_MBIT, ROUND_TRIPS_S, BACKWARDS))


class Lab:
    """Plays one shape's exchange behind its backward pass, cut in whatever way."""

    def __init__(self, shape: Shape, setting: Setting) -> None:
        self._shape, self._setting = shape, setting
        collective = collective_for(parse_codec("fp32"))
        programs = collective.topology.programs(tuple(range(setting.members)))
        self._playback = Playback(programs, collective.reduction)
        self._network = cables(setting.members, setting.bytes_s, setting.rtt_s)
        backward_s = max(setting.backward * setting.exchange_s(sum(shape.values)), BACKWARD_S_MIN)
        self.ready_s = [backward_s * done / sum(shape.costs) for done in accumulate(shape.costs)]

    def ends_s(self, cut: Cut) -> float:
        """From the backward pass' beginning until everybody has all means."""
        members, values = self._setting.members, self._shape.values
        loads = []
        for first, end in pairwise((0, *cut)):
            shard_bytes = sum(values[first:end]) * VALUE_BYTES / members
            frames = max(1, round(shard_bytes / limits.CHUNK_BYTES))
            free = (0.0,) * members
            loads.append(BucketLoad((shard_bytes,) * members, (frames,) * members, free, free))
        ready_s = [self.ready_s[end - 1] for end in cut]
        return max(self._playback.play(loads, [ready_s] * members, self._network).finished_s)


def every_cut(tensors: int) -> Iterator[Cut]:
    """All ways to cut so many tensors into buckets."""
    for ends in product((False, True), repeat=tensors - 1):
        yield (*(at + 1 for at, end in enumerate(ends) if end), tensors)


def planned(shape: Shape) -> Cut:
    """The plan's."""
    names = [f"{at:03}" for at in range(len(shape.values))]
    tensors = [
        TensorSpec(name=name, shape=(values,), dtype="float32", kind="parameter")
        for name, values in zip(names, shape.values, strict=True)
    ]
    plan = plan_buckets(ModelManifest(tensors=tuple(reversed(tensors)), optimizer="SGD"))
    return tuple(bucket.spans.stop for bucket in plan.buckets)


def merged(shape: Shape, setting: Setting, ready_s: Sequence[float]) -> Cut:
    """MG-WFBP's (Shi, Chu, Li 2019, algorithm 1): a tensor waits for the next one where that one's gradient is there
    before the tensor's own exchange, begun at once, were over its latency `a`."""
    hops = 2 * (setting.members - 1)
    before_s = hops * (setting.rtt_s / 2 + 2 * MESSAGE_S)
    cut, values, free_s = [], 0, 0.0
    for at, count in enumerate(shape.values):
        values += count
        last = at == len(shape.values) - 1
        begins_s = max(free_s, ready_s[at])
        if last or ready_s[at + 1] >= begins_s + before_s:
            cut.append(at + 1)
            free_s = begins_s + before_s + setting.exchange_s(values)
            values = 0
    return tuple(cut)


def against_best(shape: Shape, setting: Setting) -> tuple[float, float, float, float]:
    """When all is over with the plan's buckets, one for each tensor, MG-WFBP's, one for all: in times of the best."""
    lab, tensors = Lab(shape, setting), len(shape.values)
    best_s = min(map(lab.ends_s, every_cut(tensors)))
    cuts = planned(shape), tuple(range(1, tensors + 1)), merged(shape, setting, lab.ready_s), (tensors,)
    plan, each, mg, one = (lab.ends_s(cut) / best_s for cut in cuts)
    return plan, each, mg, one


def main() -> int:
    """Prints the table."""
    if len(sys.argv) > 1:
        print(__doc__)
        return 0 if sys.argv[1] in ("-h", "--help") else 2
    print("| model | tensors | the plan | one for each tensor | MG-WFBP | one for all |")
    print("|---|---|---|---|---|---|")
    for name, shape in MODELS.items():
        print(f"{name} ...", file=sys.stderr)
        columns = zip(*(against_best(shape, setting) for setting in settings()), strict=True)
        cells = [f"{sorted(column)[len(column) // 2]:.3f} (to {max(column):.3f})" for column in columns]
        print(f"| {name} | {len(shape.values)} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
