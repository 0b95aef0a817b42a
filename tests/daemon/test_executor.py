"""The executor: real codecs and memory, links replaced by queues that deliver in any order a seed decides."""

import asyncio
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from meshtraind.executor import Executor
from meshwire.exchange import Part
from meshwire.header import Header
from meshwire.manifest import ModelManifest, TensorSpec
from meshwire.plan import plan_buckets

Values = NDArray[np.float32]

MANIFEST = ModelManifest(
    tensors=tuple(
        TensorSpec(name=f"layer{index}", shape=(size,), dtype="float32", kind="parameter")
        for index, size in enumerate((70_000, 5, 30_000, 1_000, 129))
    ),
    optimizer="SGD",
)
PLAN = plan_buckets(MANIFEST, 1 << 17)


class FakeLink:
    """One direction of a link: chunks wait here, with the memory they were sent from, until the test delivers them."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Header, memoryview | bytes | None]] = deque()
        self.writable = True

    def on_writable(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.resume = callback
        return lambda: None

    def send_chunk(self, header: Header, payload: memoryview | bytes | None) -> None:
        assert self.writable
        self.queue.append((header, payload))
        self.writable = len(self.queue) < 3


class Cluster:
    """m executors, all in this process."""

    def __init__(self, members: int, codec: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.members = members
        self.links = [FakeLink() for _ in range(members)]
        self.results: list[Values] = [np.full(PLAN.total_values, np.nan, np.float32) for _ in range(members)]
        self.done: list[dict[tuple[int, int], tuple[bool, int, float]]] = [{} for _ in range(members)]
        self.executors = [self._executor(rank, codec) for rank in range(members)]

    def _executor(self, rank: int, codec: str) -> Executor:
        def on_bucket(round_: int, bucket: int, poisoned: bool, contributors: int, weight: float) -> None:
            self.done[rank][round_, bucket] = (poisoned, contributors, weight)

        return Executor(
            plan=PLAN,
            rank=rank,
            members=self.members,
            codec=codec,
            links={(rank + 1) % self.members: self.links[rank]} if self.members > 1 else {},  # type: ignore[dict-item]
            job=1,
            generation=2,
            staleness=0,
            result=self.results[rank],
            on_bucket=on_bucket,
            on_broken=pytest.fail,
            complete=lambda: self.complete(rank),
        )

    def complete(self, rank: int) -> int:
        round_ = 0
        while all((round_ + 1, bucket.index) in self.done[rank] for bucket in PLAN.buckets):
            round_ += 1
        return round_

    def deliver_one(self) -> bool:
        waiting = [rank for rank, link in enumerate(self.links) if link.queue]
        if not waiting:
            return False
        sender = self.random.choice(waiting)
        link = self.links[sender]
        header, payload = link.queue.popleft()
        receiver = self.executors[(sender + 1) % self.members]
        place = receiver.chunk_announced(sender, header)
        assert isinstance(place, memoryview), place
        if payload is not None:
            place[:] = payload
        receiver.chunk_received(header)
        if not link.writable:
            link.writable = True
            link.resume()
        return True

    async def run(self, round_: int, raws: list[Values | None], weights: list[float]) -> None:
        buckets = [[bucket.index for bucket in PLAN.buckets] for _ in range(self.members)]
        while any(buckets) or any(link.queue for link in self.links):
            ranks = [rank for rank in range(self.members) if buckets[rank]]
            await asyncio.sleep(0)  # the executors' slices end with the loop's turn
            if ranks and (self.random.random() < 0.3 or not any(link.queue for link in self.links)):
                rank = self.random.choice(ranks)
                bucket = buckets[rank].pop(0)
                raw = raws[rank]
                part = Part.NOTHING if raw is None else Part.DATA
                self.executors[rank].contribute(round_, bucket, part, weights[rank], raw)
            else:
                self.deliver_one()
        async with asyncio.timeout(10):
            while any(self.complete(rank) < round_ for rank in range(self.members)):
                await asyncio.sleep(0)
                self.deliver_one()


def gradients(members: int, seed: int) -> tuple[list[Values], list[float]]:
    """w*g of each member, and its weight."""
    numbers = np.random.default_rng(seed)
    weights = [float(rank + 1) for rank in range(members)]
    raws = [(numbers.standard_normal(PLAN.total_values) * weight).astype(np.float32) for weight in weights]
    return raws, weights


TOLERANCE = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-2}


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("members", [1, 2, 3, 4])
async def test_all_ranks_hold_the_same_weighted_mean(members: int, codec: str) -> None:
    """DESIGN 5.6: the owner finishes each shard once, all decode those bytes; rounds reuse areas."""
    cluster = Cluster(members, codec, seed=members)
    for round_ in range(1, 5):
        raws, weights = gradients(members, seed=round_)
        await cluster.run(round_, list(raws), weights)
        expected = np.sum(np.stack(raws).astype(np.float64), axis=0) / sum(weights)
        for rank in range(members):
            assert cluster.complete(rank) == round_
            assert cluster.results[rank].tobytes() == cluster.results[0].tobytes()
        error = np.abs(cluster.results[0] - expected).max()
        assert error <= TOLERANCE[codec] * np.abs(expected).max()
        full = (1 << members) - 1
        assert set(cluster.done[0].values()) == {(False, full, sum(weights))}


@pytest.mark.asyncio
async def test_an_absent_member_forwards() -> None:
    """R5: it adds nothing and everybody, itself included, gets the mean of the others."""
    cluster = Cluster(3, "fp32", seed=5)
    raws, weights = gradients(3, seed=1)
    await cluster.run(1, [raws[0], None, raws[2]], [weights[0], 0.0, weights[2]])
    expected = (raws[0] + raws[2]) / (weights[0] + weights[2])
    for result in cluster.results:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.asyncio
async def test_a_sum_that_overflows_is_poison_everywhere() -> None:
    """V1: finite parts can have an infinite sum; its owner finds it and all members void the round."""
    cluster = Cluster(2, "fp32", seed=5)
    raws = [np.full(PLAN.total_values, 3e38, np.float32) for _ in range(2)]
    await cluster.run(1, list(raws), [1.0, 1.0])
    for done in cluster.done:
        assert all(poisoned for poisoned, _, _ in done.values())


@pytest.mark.asyncio
async def test_chunks_of_rounds_that_cannot_be_are_refused() -> None:
    """G3: nobody can be further than the rounds that this member's part allows."""
    cluster = Cluster(2, "fp32", seed=5)
    raws, weights = gradients(2, seed=1)
    cluster.executors[0].contribute(1, 0, Part.DATA, weights[0], raws[0])
    header, _ = cluster.links[0].queue[0]
    for round_ in (0, 3):
        strange = Header(**{**{name: getattr(header, name) for name in header.__slots__}, "round": round_})
        answer = cluster.executors[1].chunk_announced(0, strange)
        assert isinstance(answer, str)
        assert "complete" in answer
