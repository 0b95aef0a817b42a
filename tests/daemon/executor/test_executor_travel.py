"""The executor in rounds of which the vectors differ in length (T1): all hold the same, and nothing goes astray."""

import asyncio
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from meshtraind.codecs.base import Values
from meshtraind.executor.executor import Executor
from meshtraind.executor.host import ExchangeMembers, ExchangeMemory, ExchangeSettings
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.exchange import Part
from meshwire.model.plan import plan_buckets
from meshwire.model.plans_by_round import RoundPlans
from meshwire.model.schedule import Stretch, Travel
from tests.daemon.executorring import MANIFEST, FakeLink
from tests.daemon.roundhost import Told

WHOLE_EVERY = 4
COUNTS = (10_000, 0, 30_000, 1_000, 129, 1_500)  # of the first tensor a part, of the second nothing
TRAVEL = Travel(stretches=(Stretch(first=1, counts=COUNTS, whole_every=WHOLE_EVERY),))
PLAN = plan_buckets(MANIFEST.model_copy(update={"travel": TRAVEL}), 1 << 17)
PLANS = RoundPlans(PLAN)
WEIGHTS = (1.0, 1.0, 2.0)
SIZES = (1.0, 1 / 32, 2.0)  # by which all are multiplied, round by round: what is left out follows them
LAST = 2 * WHOLE_EVERY + 2
CODECS = ("fp16", "int8:block=256", "topk:0.01,budget=200kB", "topk:0.01,gather", "onebit:warmup=5", "homomorphic:0.02")


class Members:
    """One executor for each weight, each joined to all others, in lockstep."""

    def __init__(self, codec: str) -> None:
        ranks = tuple(range(len(WEIGHTS)))
        self.complete = 0
        self.links = {(one, other): FakeLink() for one in ranks for other in ranks if one != other}
        self.results = [np.full(PLAN.total_values, np.nan, np.float32) for _ in ranks]
        self.done: set[tuple[int, int]] = set()
        self.executors = [self._executor(rank, ranks, codec) for rank in ranks]

    def _executor(self, rank: int, ranks: tuple[int, ...], codec: str) -> Executor:
        return Executor(
            ExchangeSettings(plan=PLAN, codec=codec, job=1, seed=7, staleness=0),
            rank,
            ExchangeMembers(
                generation=2,
                ranks=ranks,
                links={other: self.links[rank, other] for other in ranks if other != rank},  # type: ignore[misc]
                learning=ranks,
            ),
            first=1,
            memory=ExchangeMemory(self.results[rank]),
            host=Told(
                on_bucket=lambda *_: None,
                on_result=partial(self._decoded, rank),
                on_broken=lambda rank, text: pytest.fail(f"{rank}: {text}"),
                newest=lambda: self.complete,
            ),
        )

    def _decoded(self, rank: int, number: int) -> None:
        self.done.add((rank, number))

    async def play(self, number: int, gradients: list[Values]) -> list[Values]:
        """One round of w*g with WEIGHTS, which are multiplied by the round's size. Returns every member's means."""
        for executor, result in zip(self.executors, self.results, strict=True):
            result.fill(np.nan)
            executor.open_result(number)
        for executor, weight, raw in zip(self.executors, WEIGHTS, gradients, strict=True):
            size = SIZES[number % len(SIZES)]
            for bucket in PLANS.of(number).buckets:
                executor.contribute(number, bucket.index, Part.DATA, size * weight, np.float32(size) * raw)
        async with asyncio.timeout(20):
            while {rank for rank, round_ in self.done if round_ == number} != set(range(len(WEIGHTS))):
                await asyncio.sleep(0)
                for (sender, receiver), link in self.links.items():
                    if link.queue:
                        self._deliver(sender, receiver, link)
        self.complete = number
        for executor in self.executors:
            executor.settle(number, void=False, contributed=True)
            executor.forget(number)
        return self.results

    def _deliver(self, sender: int, receiver: int, link: FakeLink) -> None:
        header, payload = link.queue[0]
        place = self.executors[receiver].chunk_announced(sender, header)
        assert isinstance(place, memoryview), place
        if payload is not None:
            place[:] = payload
        self.executors[receiver].chunk_received(header)
        link.left()

    def owed(self, run: slice) -> NDArray[np.float64]:
        """What all residuals hold, in units of w*g with WEIGHTS."""
        total = np.zeros(run.stop - run.start)
        for executor, weight in zip(self.executors, WEIGHTS, strict=True):
            if executor._feedback is not None:
                worker = executor._feedback.worker
                total += worker.values[run] * (weight / worker.weights.get(run.start, weight))
                total += sum(WEIGHTS) * executor._feedback.owner.values[run].astype(np.float64)
        return total


def travelling(number: int) -> Iterator[slice]:
    for bucket in PLANS.of(number).buckets:
        yield slice(bucket.start, bucket.start + bucket.count)


def gradients_of(number: int) -> list[Values]:
    """Dyadic, so that their sums are exact."""
    numbers = np.random.default_rng(number)
    made = [np.zeros(PLAN.total_values, np.float32) for _ in WEIGHTS]
    for span in PLANS.of(number).spans:
        for raw, weight in zip(made, WEIGHTS, strict=True):
            values = np.round(numbers.laplace(0, 0.05, span.count).clip(-1, 1) * 2**10) / 2**10
            raw[span.start : span.start + span.count] = values * weight
    return made


@pytest.mark.asyncio
@pytest.mark.parametrize("text", CODECS)
async def test_what_is_left_out_is_never_sent_in_anothers_place(text: str) -> None:
    """P1 and O9 for each run of rounds in which as many values of a bucket travel: what is sent and what is owed at its
    end are what came, for what was owed before has been dropped where places have another meaning."""
    codec, members = parse_codec(text), Members(text)
    coded_end = PLAN.buckets[PLAN.coded_buckets].start
    counts: dict[int, int] = {}
    balance: dict[int, NDArray[np.float64]] = {}  # what came and was not sent, by where a bucket begins
    for number in range(1, LAST + 1):
        gradients = gradients_of(number)
        means = await members.play(number, gradients)
        for run in travelling(number):
            assert len({each[run].tobytes() for each in means}) == 1
            if counts.get(run.start) != run.stop - run.start:
                counts[run.start], balance[run.start] = run.stop - run.start, np.zeros(run.stop - run.start)
            balance[run.start] += sum(each[run].astype(np.float64) for each in gradients)
            balance[run.start] -= sum(WEIGHTS) * means[0][run].astype(np.float64)
            if codec.error_feedback and number > codec.warmup and run.start < coded_end:
                assert np.allclose(members.owed(run), balance[run.start], atol=2e-3), f"round {number}, {run}"
    for executor in members.executors:
        executor.close()
