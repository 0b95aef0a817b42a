"""C3: a history that goes over to other codecs while it runs: nothing is lost, all find the same, to the bit."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshtraind.executor.by_codec import ExecutorsByCodec
from meshtraind.executor.executor import Executor
from meshtraind.executor.host import ExchangeMembers, ExchangeSettings
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.exchange import Part
from meshwire.model.plan import plan_buckets, plan_for
from meshwire.sync_modes.settings_changes import SettingsChange, SettingsWish, changed
from tests.daemon.churnring import ChurnRing, CopyingLink
from tests.daemon.executorring import MANIFEST, PLAN, FakeLink, Offer, Values
from tests.daemon.roundhost import Told
from tests.daemon.shardedmesh import constant_offers, in_units

CODECS = ("fp32", "fp16", "int8", "int8:sr", "int4", "topk:0.2", "qsgd", "onebit", "homomorphic:0.2")
FED_BACK = ("fp32", "int8", "int4", "topk:0.2", "onebit")
ROUNDS = 8


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Several chunks to a shard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwire.limits.CHUNK_BYTES", 16 * 1024)
        yield


class SharedLink(CopyingLink):
    """Several executors wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, Callable[[], None]] = {}
        self.resume = self._resume_all

    def on_writable(self, callback: Callable[[], None]) -> Callable[[], None]:
        number = len(self.waiting)
        self.waiting[number] = callback
        return lambda: self.waiting.update({number: lambda: None})

    def _resume_all(self) -> None:
        for callback in [*self.waiting.values()]:
            callback()


class ChangingMesh(ChurnRing):
    """Members that go over to another codec with each change of generation.

    Attributes:
        changes: that the history has gone through.
        void: rounds that were poisoned.
    """

    link_type = SharedLink

    def __init__(self, members: int, codecs: Sequence[str], staleness: int, seed: int, rounds: Any) -> None:
        self.changes: tuple[SettingsChange, ...] = ()
        self.codecs = [*codecs[1:]]
        super().__init__(members, codecs[0], staleness, seed, rounds)

    def receivers(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in self.ranks if other != rank)

    def links(self, rank: int, link: FakeLink) -> dict[int, Any]:
        return super().links(rank, link)

    def _executor(self, rank: int, link: FakeLink, result: Values) -> Executor:
        exchange = ExchangeSettings(plan=PLAN, codec=self.codec, job=1, seed=7, staleness=self.staleness)
        host = Told(
            on_bucket=partial(self._bucket_done, rank),
            on_result=lambda round_: self.members[rank].decoded.append(round_),
            on_broken=lambda broken_by, text: self.broken.append(f"{broken_by}: {text}"),
            newest=lambda: self.members[rank].complete,
        )
        members = ExchangeMembers(
            generation=self.generation, ranks=self.ranks, links=self.links(rank, link), learning=self.ranks
        )
        made = ExecutorsByCodec(exchange, rank, members, first=self.first(rank), result=result, host=host)
        cast(Any, made)._feedback = None
        return cast(Executor, made)

    async def change(self, ranks: tuple[int, ...], disorder: int = 30) -> int:
        cut = max(self.members[rank].complete for rank in ranks)
        for rank in ranks:  # nothing is complete any more when all have promised
            self.fence(rank)
            cut = max(cut, self.members[rank].complete)
        self.changes = changed(self.changes, cut, self.staleness + 1, SettingsWish(codec=self.codecs.pop(0)))
        for rank in ranks:
            cast(Any, self.members[rank].executor).take_changes(self.changes)
        return await super().change(ranks, disorder)

    def fence(self, rank: int) -> None:
        if rank not in self.fenced:
            super().fence(rank)

    def owed(self, total: float) -> Any:
        """What is left out and will be sent, in units of w*g; `total` is the weight of all."""
        owed = np.zeros(PLAN.total_values)
        for rank, member in enumerate(self.members):
            plane = cast(Any, member.executor)
            if plane._owed is not None:
                owed += in_units(plane._owed, rank + 1.0)
            for turn in plane._turns:
                feedback = turn.executor._feedback
                if feedback is not None:
                    owed += total * feedback.owner.values.astype(np.float64)
        return owed


def lost(mesh: ChangingMesh, rounds: Mapping[int, Sequence[Offer]]) -> float:
    """The largest difference, in any value, between what was contributed, and what was applied or is owed."""
    total = float(sum(rank + 1 for rank in range(len(mesh.members))))
    given_, arrived = np.zeros(PLAN.total_values), mesh.owed(total)
    for number, made in rounds.items():
        if not any(offer.poisoned for offer in made):
            arrived += total * mesh.members[0].means[number].astype(np.float64)
            for offer in made:
                assert offer.values is not None
                given_ += offer.values
    run = slice(0, PLAN.buckets[-1].start)  # buffers are no gradients, and their rounding is not fed back
    return float(np.abs(given_ - arrived)[run].max())


async def change_codecs(
    members: int, codecs: Sequence[str], staleness: int, seed: int, poison: float = 0.15
) -> ChangingMesh:
    rounds = constant_offers(members, 0, ROUNDS, seed, poison)
    mesh = ChangingMesh(members, codecs, staleness, seed, rounds)
    async with asyncio.timeout(60):
        for _ in codecs[1:]:
            await mesh.some(120 * members)
            await mesh.change(mesh.ranks)
        await mesh.play(rounds)
    mesh.check_alike()
    assert not mesh.broken
    return mesh


def going_over(codecs: Sequence[str]) -> Any:
    """What is drawn for a mesh that goes from one of these codecs to another, once or twice."""
    return {
        "members": st.integers(2, 4),
        "codecs": st.lists(st.sampled_from(codecs), min_size=2, max_size=3),
        "staleness": st.integers(0, 2),
        "seed": st.integers(0, 2**32),
    }


@settings(max_examples=8)
@given(**going_over(CODECS))
@example(members=2, codecs=["int4", "fp32"], staleness=0, seed=1)
@example(members=3, codecs=["topk:0.2", "int8:sr", "topk:0.2"], staleness=2, seed=2)
def test_all_find_the_same_means_whatever_codec_follows(
    members: int, codecs: list[str], staleness: int, seed: int
) -> None:
    """C1, G6: rounds that were bound before the change run again as they were, and those after it in the new codec."""
    asyncio.run(change_codecs(members, codecs, staleness, seed))


@settings(max_examples=8)
@given(**going_over(FED_BACK))
@example(members=3, codecs=["onebit", "fp32", "int4"], staleness=1, seed=3)
@example(members=2, codecs=["topk:0.2", "fp32"], staleness=2, seed=4)
def test_what_one_codec_has_left_out_the_next_one_sends(
    members: int, codecs: list[str], staleness: int, seed: int
) -> None:
    """P1: all that was contributed was applied, or is owed; also through void rounds, and what owners of shards owe."""
    mesh = asyncio.run(change_codecs(members, codecs, staleness, seed))
    assert lost(mesh, mesh.rounds) < 2e-3


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("codec", ["onebit", "topk:0.01"])
def test_a_codec_that_feeds_nothing_back_pays_all_that_is_owed_once(codec: str, staleness: int) -> None:
    """Then nothing is kept of it, and nothing is copied any more."""
    mesh = asyncio.run(change_codecs(3, [codec, "fp32"], staleness, seed=5, poison=0.0))
    for member in mesh.members:
        plane = cast(Any, member.executor)
        assert (plane._owed, plane._paid_back) == (None, {})
        assert [turn.codec for turn in plane._turns] == ["fp32"]
    assert lost(mesh, mesh.rounds) < 2e-3


def test_segments_are_those_that_the_codec_wants_in_buckets_that_stay() -> None:
    """The learner's slots, and what is owed, lie as they did."""
    for codec in map(parse_codec, CODECS):
        assert plan_for(PLAN, codec) == plan_buckets(MANIFEST, 1 << 17, codec)


@pytest.mark.asyncio
async def test_what_is_left_to_decode_of_one_codecs_round_does_not_spoil_the_means_of_the_next_ones() -> None:
    """There is one result slot; a learner that is lost may leave a round in it half decoded."""
    mesh = ChangingMesh(2, ["int8", "fp32"], 0, 1, constant_offers(2, 0, ROUNDS, 1))
    await mesh.change(mesh.ranks)
    plane = cast(Any, mesh.members[0].executor)
    plane.open_result(plane._turns[-1].first - 1)
    plane.open_result(plane._turns[-1].first)
    assert [turn.executor._slot.round for turn in plane._turns] == [0, plane._turns[-1].first]
    mesh.close()


@pytest.mark.asyncio
async def test_what_becomes_infinite_with_what_is_owed_is_poison_and_still_owed() -> None:
    """V1: the round is void, and the next one that counts pays."""
    numbers = np.random.default_rng(1)
    far = np.float32(3e38)
    rounds = {
        number: [Offer(numbers.standard_normal(PLAN.total_values).astype(np.float32), 1.0)] * 2 for number in (1, 2)
    }
    mesh = ChangingMesh(2, ["onebit", "fp32"], 0, 1, rounds)
    plane = cast(Any, mesh.members[0].executor)
    await mesh.change(mesh.ranks)
    bucket = PLAN.buckets[0]
    plane._owed.add(bucket.start, bucket.start, np.full(3, far), 1.0)
    mesh.members[0].complete = plane._turns[-1].first - 1
    raw = np.full(PLAN.total_values, far, np.float32)
    part, _ = plane._with_what_is_owed(plane._turns[-1].first, 0, 1.0, raw)
    assert part is Part.POISON
    assert plane._owed.values[bucket.start] == far
    mesh.close()


def test_a_change_of_the_period_alone_is_none_for_the_bytes() -> None:
    """C3: no executor for it, and what was left out stays where it is; also where the change of the codec before it is
    forgotten meanwhile."""

    async def check() -> None:
        mesh = await change_codecs(2, ["fp32", "int8"], 0, seed=6, poison=0.0)
        plane = cast(Any, mesh.members[0].executor)
        turns, (change,) = [*plane._turns], mesh.changes
        assert [turn.codec for turn in turns][-1] == "int8"
        later = change.model_copy(update={"first": mesh.members[0].complete + 2, "period": 16})
        mesh.fence(0)
        for changes in ((change, later), (later,)):
            plane.take_changes(changes)
            assert [turn.executor for turn in plane._turns] == [turn.executor for turn in turns][-len(plane._turns) :]

    asyncio.run(check())
