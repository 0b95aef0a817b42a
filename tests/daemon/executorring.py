"""m executors in one process: real codecs and memory, links replaced by queues, everything in an order a seed decides.

What surrounds an executor in a daemon is played by the rules: R1 and R5 say how far ahead a member may contribute, G5
when a round is forgotten, M1 when the learner writes a raw slot again.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs import codec_named
from meshtraind.executor.executor import Executor
from meshtraind.executor.host import ExchangeMembers, ExchangeMemory, ExchangeSettings
from meshtraind.transport.connection import Connection
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.exchange import Part
from meshwire.collectives.topology import bucket_shards
from meshwire.frames.header import Header
from meshwire.model.manifest import ModelManifest, Momentum, TensorSpec
from meshwire.model.plan import plan_buckets
from tests.daemon.roundhost import Told
from tests.unpacedlink import UnpacedLink

Values = NDArray[np.float32]
Opening = Literal["early", "late", "any"]

MANIFEST = ModelManifest(
    tensors=(
        *(
            TensorSpec(name=f"layer{index}", shape=shape, dtype="float32", kind="parameter")
            for index, shape in enumerate(((350, 20, 10), (5,), (150, 200), (1_000,), (129, 1)))
        ),
        TensorSpec(name="running_mean", shape=(1_500,), dtype="float32", kind="buffer"),
    ),
    optimizer="SGD",
)
MOMENTUM = Momentum(factor=0.5, nesterov=True)
PLAN = plan_buckets(MANIFEST, 1 << 17)
NORM_BUCKETS = len(PLAN.buckets) - 1  # the last one is the buffers'
SEGMENTS = sum(bucket.segment_count for bucket in PLAN.buckets)


@dataclass(frozen=True)
class Offer:
    """One member's part in a round: `values` is w*g, None of a member that only forwards."""

    values: Values | None
    weight: float
    poisoned: frozenset[int] = frozenset()  # buckets that its daemon poisons (V1, V2)

    def __post_init__(self) -> None:
        assert (self.weight > 0) == (self.values is not None)


@dataclass(frozen=True)
class Result:
    """What an executor says of a bucket."""

    poisoned: bool
    contributors: int
    weight: float
    squared_norm: float


def offers(members: int, seed: int, absent: Sequence[int] = ()) -> list[Offer]:
    """Random ones, with weight rank + 1, but nothing from the ranks that are `absent`."""
    numbers = np.random.default_rng(seed)
    made: list[Offer] = []
    for rank in range(members):
        weight = rank + 1.0
        values = (numbers.standard_normal(PLAN.total_values) * weight).astype(np.float32)
        made.append(Offer(None, 0.0) if rank in absent else Offer(values, weight))
    return made


def ring_mean(made: Sequence[Offer], codec: str, staleness: int, ranks: tuple[int, ...] | None = None) -> Values:
    """The mean of a round, to the bit: W3 in ring order, one rounding at each hop and one more of own parts if s>0.

    `made` goes by rank; of them, `ranks` form the ring, all if None. One of them contributes.
    """
    ring = [made[rank] for rank in ranks] if ranks is not None else made
    members, coder = len(ring), codec_named(codec)
    weight = np.float32(sum(offer.weight for offer in ring))
    mean = np.full(PLAN.total_values, np.nan, np.float32)

    def rounded(values: Values) -> Values:
        area = memoryview(bytearray(coder.spec.segment_bytes_max(len(values))))
        coder.encode_into(values, area)
        out = np.empty_like(values)
        coder.decode_into(area, out)
        return out

    for bucket in PLAN.buckets:
        for index, shard in enumerate(bucket_shards(bucket.segment_count, members, bucket.index)):
            for segment in range(shard.first_segment, shard.first_segment + shard.segment_count):
                start, count = bucket.segment_bounds(segment)
                total: Values | None = None
                for hop in range(members):
                    own = ring[(index + hop) % members].values
                    if own is not None:
                        part = own[start : start + count]
                        part = rounded(part) if staleness else part
                        total = part if total is None else part + total
                        total = rounded(total) if hop < members - 1 else total
                assert total is not None
                mean[start : start + count] = rounded(total / weight)
    return mean


def whole(executor: Executor, number: int) -> bytes:
    """A complete round's bytes, as a member that lacks it reads them: piece by piece."""
    held = executor.encoded(number)
    pieces = [held.read(at, 1000) for at in range(0, held.size_bytes, 1000)]
    assert not held.read(held.size_bytes, 1000)
    return b"".join(pieces)


class FakeLink(UnpacedLink):
    """One direction of a link: chunks wait here, with the memory they were sent from, until they are delivered.

    Like a socket it holds back its sender, and stays when a generation ends.
    """

    def __init__(self) -> None:
        self.queue: deque[tuple[Header, memoryview | None]] = deque()
        self.writable = True
        self.resume: Callable[[], None] | None = None

    def on_writable(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.resume = callback
        return partial(setattr, self, "resume", None)

    def send_chunk(self, header: Header, payload: memoryview | None) -> None:
        assert self.writable
        self.queue.append((header, payload))
        self.writable = len(self.queue) < 3

    def left(self) -> None:
        """The oldest chunk has arrived."""
        self.queue.popleft()
        if not self.writable:
            self.writable = True
            if self.resume is not None:
                self.resume()


@dataclass
class Member:
    """One rank: its executor, and what a daemon and a learner would know."""

    executor: Executor
    link: FakeLink  # to its successor
    slots: list[Values]
    result: Values
    done: dict[tuple[int, int], Result] = field(default_factory=dict)
    means: dict[int, Values] = field(default_factory=dict)
    decoded: list[int] = field(default_factory=list)  # as on_result told
    complete: int = 0  # G5; binds and seals may come later than results
    opened: int = 0
    applied: int = 0
    forgotten: int = 0
    round: int = 1  # the next part is this round's
    bucket: int = 0
    memory: dict[int, object] = field(default_factory=dict)  # every area of this daemon's that was ever seen

    def close(self) -> None:
        """Its executor; what encodings left out is kept, for tests do their books after the end."""
        feedback, self.executor._feedback = self.executor._feedback, None
        self.executor.close()
        self.executor._feedback = feedback

    @property
    def received(self) -> int:
        """The newest round of which all results are here, as of all before it."""
        round_ = self.complete
        while all((round_ + 1, bucket.index) in self.done for bucket in PLAN.buckets):
            round_ += 1
        return round_


class Ring:
    """m members, each with one link to its successor. `members` goes by rank, `ranks` are those that take part."""

    link_type = FakeLink
    topology: str | None = None  # the codec's usual one

    def __init__(self, members: int, codec: str = "fp32", staleness: int = 0, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.codec = codec
        self.staleness = staleness
        self.broken: list[str] = []
        self.rounds: Mapping[int, Sequence[Offer]] = {}
        self.opening: Opening = "early"
        self.ranks = tuple(range(members))
        self.generation = 2
        self.slow = 0  # its binds and seals take long
        self.members = [self._member(rank) for rank in self.ranks]

    def successor(self, rank: int) -> int:
        """On the ring."""
        return self.ranks[(self.ranks.index(rank) + 1) % len(self.ranks)]

    def links(self, rank: int, link: FakeLink) -> dict[int, Connection]:
        """What an executor is given whose way to its successor is `link`."""
        following = self.successor(rank)
        return {following: link} if following != rank else {}  # type: ignore[dict-item]

    def _member(self, rank: int) -> Member:
        link = self.link_type()
        slots = [np.full(PLAN.total_values, np.nan, np.float32) for _ in range(2 if self.staleness else 1)]
        result = np.full(PLAN.total_values, np.nan, np.float32)
        return Member(self._executor(rank, link, result), link, slots, result)

    def first(self, rank: int) -> int | None:
        """The first round, for those that are there from the start."""
        return 1

    def _executor(self, rank: int, link: FakeLink, result: Values) -> Executor:
        return Executor(
            ExchangeSettings(
                plan=PLAN,
                codec=self.codec,
                topology=self.topology,
                momentum=MOMENTUM if parse_codec(self.codec).momentum else None,
                job=1,
                seed=7,
                staleness=self.staleness,
            ),
            rank,
            ExchangeMembers(
                generation=self.generation, ranks=self.ranks, links=self.links(rank, link), learning=self.ranks
            ),
            first=self.first(rank),
            memory=ExchangeMemory(result),
            host=Told(
                on_bucket=partial(self._bucket_done, rank),
                on_result=lambda round_: self.members[rank].decoded.append(round_),
                on_broken=lambda broken_by, text: self.broken.append(f"{broken_by}: {text}"),
                newest=lambda: self.members[rank].complete,
            ),
        )

    async def play(self, rounds: Mapping[int, Sequence[Offer]], opening: Opening = "any") -> None:
        """Plays the next `rounds` until every learner has applied them and every daemon has forgotten them."""
        self.rounds, self.opening = rounds, opening
        last = max(rounds)
        async with asyncio.timeout(20):
            while any(self.members[rank].forgotten < last for rank in self.ranks):
                await self.act()

    async def act(self) -> None:
        """One thing that can happen now does, if there is any."""
        possible = [action for rank in self.ranks for action in self._possible(rank)]
        if possible:
            self.random.choice(possible)()
        assert not self.broken
        await asyncio.sleep(0)  # slices end with the loop's turn

    def close(self) -> None:
        """All executors."""
        for member in self.members:
            member.close()

    # What can happen to one rank now

    def _possible(self, rank: int) -> Iterator[Callable[[], None]]:
        member = self.members[rank]
        offer = self._next_offer(member)
        if offer is not None:
            yield partial(self.contribute, rank, offer)
        if member.link.queue:
            yield partial(self.deliver, rank)
        # The slow member is asked for rounds as far ahead as the rules allow.
        if member.received > member.complete and (rank != self.slow or self.random.random() < 0.01):
            yield partial(self._hold, member)
        if member.opened == member.applied < min(max(self.rounds), member.complete + 1) and (
            self.opening != "late" or member.complete > member.applied
        ):
            yield partial(self.open, rank)
        if member.opened in member.decoded and member.applied < member.opened <= member.complete:
            yield partial(self._apply, member)
        if member.forgotten < min(member.applied, *(self.members[other].complete for other in self.ranks)):
            yield partial(self._forget, member)

    def _next_offer(self, member: Member) -> Offer | None:
        """R1 with base = rounds applied, R5 for what is null: its daemon goes s+1 rounds past those it holds."""
        if member.round not in self.rounds:
            return None
        offer = self.rounds[member.round][self.members.index(member)]
        reached = member.complete if offer.values is None else member.applied
        return offer if member.round - 1 - reached <= self.staleness else None

    def contribute(self, rank: int, offer: Offer) -> None:
        """The next bucket, or the null of a whole round."""
        member = self.members[rank]
        number, bucket = member.round, PLAN.buckets[member.bucket]
        if offer.values is None:
            member.round += 1
            member.executor.contribute_nothing(number)
            return
        member.bucket = (member.bucket + 1) % len(PLAN.buckets)
        member.round += not member.bucket
        run = slice(bucket.start, bucket.start + bucket.count)
        if bucket.index in offer.poisoned:
            member.executor.contribute(number, bucket.index, Part.POISON, offer.weight, None)
            return
        slot = member.slots[number % len(member.slots)]
        slot[run] = offer.values[run]
        member.executor.contribute(number, bucket.index, Part.DATA, offer.weight, slot)
        if self.staleness:
            slot[run] = np.nan  # M1: raw slots are free once encoded

    def deliver(self, sender: int) -> None:
        """The oldest chunk on the way from `sender`."""
        receiver = self.members[self.successor(sender)]
        header, payload = self.members[sender].link.queue[0]
        place = receiver.executor.chunk_announced(sender, header)
        assert isinstance(place, memoryview), place
        if payload is not None:
            place[:] = payload
            self._seen(receiver, place)
            self._seen(self.members[sender], payload)
        receiver.executor.chunk_received(header)
        self.members[sender].link.left()

    def open(self, rank: int) -> None:
        """The learner has applied a round and may have the next one."""
        member = self.members[rank]
        member.opened += 1
        member.executor.open_result(member.opened)
        assert member.opened not in member.decoded

    def _bucket_done(
        self, rank: int, round_: int, bucket: int, poisoned: bool, contributors: int, weight: float, squared_norm: float
    ) -> None:
        member = self.members[rank]
        assert (round_, bucket) not in member.done
        member.done[round_, bucket] = Result(poisoned, contributors, weight, squared_norm)
        if rank != self.slow and member.received > member.complete and self.random.random() < 0.5:
            self._hold(member)
            offer = self._next_offer(member)
            if offer is not None and offer.values is None and not member.bucket:
                self.contribute(rank, offer)  # as a round machine does in the same breath

    def _hold(self, member: Member) -> None:
        member.complete += 1
        self._settle(member)

    def _settle(self, member: Member) -> None:
        """As the round machine says of every complete round: poison in one bucket makes all of it void (V1)."""
        void = any(member.executor.encoded(member.complete).poisoned)
        offers_ = self.rounds.get(member.complete)
        contributed = offers_ is not None and offers_[self.members.index(member)].values is not None
        member.executor.settle(member.complete, void=void, contributed=contributed)

    def _apply(self, member: Member) -> None:
        member.applied += 1
        member.means[member.applied] = member.result.copy()
        member.result[:] = np.nan  # so that the next round has to write everything

    def _forget(self, member: Member) -> None:
        member.forgotten += 1
        member.executor.forget(member.forgotten)

    def _seen(self, member: Member, memory: memoryview) -> None:
        if id(memory.obj) not in map(id, member.slots):
            member.memory[id(memory.obj)] = memory.obj
