"""Executors through generations: members are killed, left out, and come, at any moment and with chunks half received.

What surrounds an executor is played by the rules, as in `executorring`: G2 says when a member stops and goes on, G4
what it is served, G6 what it contributes again. Links outlive generations: they deliver what was queued before a fence.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from meshtraind.transport.connection import Connection
from meshwire.collectives.exchange import Part
from meshwire.frames.header import Header
from tests.daemon.executorring import PLAN, FakeLink, Member, Offer, Opening, Ring, Values, ring_mean

HALF = 0.5  # how often a chunk comes in two pieces, with anything in between


class CopyingLink(FakeLink):
    """Remembers what payloads were when they were queued."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: deque[bytes | None] = deque()

    def send_chunk(self, header: Header, payload: memoryview | None) -> None:
        super().send_chunk(header, payload)
        self.copies.append(None if payload is None else bytes(payload))

    def left(self) -> None:
        self.copies.popleft()
        super().left()


class ChurnRing(Ring):
    """A ring whose generations change.

    Attributes:
        alive: its members, and those that were left out and do not know it.
        wires: the way from one member to another.
        landing: where chunks are half received, by way.
        completed_in: by round, the ring that completed it.
        entered_at: the cut at which a member's executor began.
    """

    link_type = CopyingLink

    def __init__(
        self, members: int, codec: str, staleness: int, seed: int, rounds: Mapping[int, Sequence[Offer]]
    ) -> None:
        self.wires: dict[tuple[int, int], FakeLink] = {}
        super().__init__(members, codec, staleness, seed)
        self.rounds = rounds
        self.opening: Opening = "any"
        self.alive = set(self.ranks)
        self.fenced: set[int] = set()
        self.generations = dict.fromkeys(self.ranks, self.generation)
        self.landing: dict[tuple[int, int], memoryview] = {}
        self.completed_in: dict[int, tuple[int, ...]] = {}
        self.entered_at = dict.fromkeys(self.ranks, 0)
        self.slow = self.random.choice(self.ranks)
        self.slow_holds = 0.05  # how often its binds and seals arrive: it lags behind the others (G4)

    def receivers(self, rank: int) -> tuple[int, ...]:
        """To whom a rank sends."""
        return tuple({self.successor(rank)} - {rank})

    def links(self, rank: int, link: FakeLink) -> dict[int, Connection]:
        made: dict[int, FakeLink] = {}
        for other in self.receivers(rank):
            new = link if other == self.successor(rank) else self.link_type()
            made[other] = self.wires.setdefault((rank, other), new)
        return made  # type: ignore[return-value]

    async def some(self, most: int) -> None:
        """A random number of things happen, perhaps none."""
        for _ in range(self.random.randint(0, most)):
            await self.act()

    async def act(self) -> None:
        possible = [action for rank in self.alive for action in self._possible(rank)]
        if possible:
            self.random.choice(possible)()
        assert not self.broken
        await asyncio.sleep(0)

    async def churn(self, most: int) -> None:
        """Two changes of generation: some members are lost, killed or just left out, then one comes. Up to `most`
        things happen before the first one."""
        newcomer = len(self.members)
        async with asyncio.timeout(60):
            await self.some(most)
            lost = self.random.sample(self.ranks, self.random.choice([1, 1, newcomer - 1]))
            for rank in lost:
                if self.random.random() < 0.5:
                    self.kill(rank)
            await self.some(100)
            await self.change(tuple(rank for rank in self.ranks if rank not in lost))
            await self.some(300)
            await self.change(tuple(sorted({*self.ranks, self.random.choice([lost[0], newcomer])})))
            await self.finish()
        self.close()

    async def finish(self) -> None:
        """Until all members have applied and forgotten everything."""
        await self.play(self.rounds)
        self.check()

    def kill(self, rank: int) -> None:
        """As kill -9 does: what it had queued is lost, and what others had half received of it."""
        self.alive.discard(rank)
        self.members[rank].close()
        for sender, receiver in list(self.wires):
            if rank in (sender, receiver):
                del self.wires[sender, receiver]
                self.landing.pop((sender, receiver), None)

    # A change of generation

    async def change(self, ranks: tuple[int, ...], disorder: int = 30) -> int:
        """The ring becomes `ranks`, while `disorder` lets things happen between any two steps of that.

        Ranks that are no members yet, or were killed or left out, enter anew at the cut. Returns the cut.
        """
        stay = [rank for rank in ranks if rank in self.ranks]
        for rank in self._shuffled(stay):
            self.fence(rank)
            await self.some(disorder)
        cut = max(self.members[rank].complete for rank in stay)
        source = next(rank for rank in stay if self.members[rank].complete == cut)
        for rank in self._shuffled(stay):
            while self.members[rank].complete < cut:
                self.serve(source, rank)
                await self.some(disorder)
        for number in [number for number in self.completed_in if number > cut]:
            del self.completed_in[number]
        self.ranks = ranks
        self.generation += 1
        for rank in ranks:
            if rank not in stay:
                self.newcomer(rank, cut)
        for rank in self._shuffled(ranks):
            self.enter(rank, cut)
            await self.some(disorder)
        for rank in self._shuffled(ranks):
            self.members[rank].executor.resume()
            await self.some(disorder)
        return cut

    def fence(self, rank: int) -> None:
        """It promises: what it has not complete is void."""
        member = self.members[rank]
        member.executor.fence()
        self.fenced.add(rank)
        member.done = {key: done for key, done in member.done.items() if key[0] <= member.complete}
        member.decoded = [number for number in member.decoded if number <= member.complete]

    def serve(self, source: int, rank: int) -> None:
        """The next round that it lacks."""
        member, number = self.members[rank], self.members[rank].complete + 1
        held = self.members[source].executor.encoded(number)
        made = self.rounds[number]
        contributing = [rank for rank in self.completed_in[number] if made[rank].values is not None]
        contributors = sum(1 << rank for rank in contributing)
        member.executor.place_for(number, held.size_bytes, contributors)[:] = held.read(0, held.size_bytes)
        weights = [made[rank].weight for rank in contributing]
        member.executor.take_served(number, held.poisoned, contributors, weights)
        member.complete += 1
        self._settle(member)

    def newcomer(self, rank: int, cut: int) -> None:
        """It has loaded the state of the cut."""
        if rank < len(self.members):
            self.kill(rank)
            self.members[rank] = self._member(rank)
        else:
            assert rank == len(self.members)
            self.members.append(self._member(rank))
        member = self.members[rank]
        member.complete = member.applied = member.opened = member.forgotten = cut
        member.round = cut + 1
        self.entered_at[rank] = cut
        member.executor.fence()
        self.alive.add(rank)
        self.fenced.add(rank)

    def enter(self, rank: int, cut: int) -> None:
        """G6: it contributes again what it had to rounds after the cut."""
        member = self.members[rank]
        if (following := self.successor(rank)) != rank:
            member.link = self.wires.setdefault((rank, following), CopyingLink())
        member.executor.enter(self.generation, self.ranks, self.links(rank, member.link), cut, learning=self.ranks)
        self.fenced.remove(rank)
        self.generations[rank] = self.generation
        begun, buckets = member.round, member.bucket  # who is alone completes rounds, and begins others, meanwhile
        for number in range(cut + 1, begun + 1):
            offer = self.rounds[number][rank] if number in self.rounds else Offer(None, 0.0)
            if offer.values is None:
                if number < begun:
                    member.executor.contribute_nothing(number)
                continue
            for bucket in PLAN.buckets[: len(PLAN.buckets) if number < begun else buckets]:
                if bucket.index in offer.poisoned:
                    member.executor.contribute(number, bucket.index, Part.POISON, offer.weight, None)
                else:
                    slot = member.slots[number % len(member.slots)]  # with s>0 other values are in it by now
                    member.executor.contribute(number, bucket.index, Part.DATA, offer.weight, slot)

    def _shuffled(self, ranks: Sequence[int]) -> list[int]:
        return self.random.sample(list(ranks), len(ranks))

    # What can happen

    def _possible(self, rank: int) -> Iterator[Callable[[], None]]:
        member = self.members[rank]
        if (offer := self._next_offer(member)) is not None:
            yield partial(self.contribute, rank, offer)
        for sender, receiver in self.wires:
            if receiver == rank and self.wires[sender, receiver].queue:
                yield partial(self.receive, sender, receiver)
        often = self.slow_holds if rank == self.slow else 0.5
        if rank not in self.fenced and member.received > member.complete and self.random.random() < often:
            yield partial(self._hold, member)
        early = self.opening != "late" or member.complete > member.applied
        if member.opened == member.applied < max(self.rounds) and early:
            yield partial(self.open, rank)
        if member.opened in member.decoded and member.applied < member.opened <= member.complete:
            yield partial(self._apply, member)
        # One that was left out hears of nobody's progress.
        known = [self.members[other].complete for other in self.ranks] if rank in self.ranks else [0]
        if member.forgotten < min(member.applied, *known):
            yield partial(self._forget, member)

    def receive(self, sender: int, receiver: int) -> None:
        """The oldest chunk of a link arrives, or half of it, or the rest."""
        link, member = self.wires[sender, receiver], self.members[receiver]
        assert isinstance(link, CopyingLink)
        header, payload = link.queue[0]
        if payload is not None and id(payload.obj) not in map(id, self.members[sender].slots):
            assert bytes(payload) == link.copies[0], "an area is used again that a link still sends from"
        current = receiver not in self.fenced and header.generation == self.generations[receiver]
        place = self.landing.pop((sender, receiver), None)
        if place is None:
            answer = member.executor.chunk_announced(sender, header)
            assert not isinstance(answer, str), answer
            assert (answer is not None) == current
            if answer is None:
                link.left()
                return
            if payload is not None and self.random.random() < HALF:
                answer[: len(payload) // 2] = payload[: len(payload) // 2]
                self.landing[sender, receiver] = answer
                return
            place = answer
        if payload is not None and current:
            place[:] = payload
        elif payload is not None:
            place[:] = b"\x7e" * len(payload)  # G8: wherever it falls, it must not matter
        member.executor.chunk_received(header)
        link.left()

    def _hold(self, member: Member) -> None:
        super()._hold(member)
        if self.members.index(member) in self.ranks:
            self.completed_in.setdefault(member.complete, self.ranks)

    # What must be true

    def mean(self, made: Sequence[Offer], ranks: tuple[int, ...]) -> Values:
        """Of a round that these have completed, to the bit."""
        return ring_mean(made, self.codec, self.staleness, ranks)

    def check(self) -> None:
        """The means are those of the generation in which a round was completed, to the bit, on all members."""
        for number, ranks in self.completed_in.items():
            made = self.rounds[number]
            contributors = [rank for rank in ranks if made[rank].values is not None]
            bitmap = sum(1 << rank for rank in contributors)
            poisoned = frozenset[int]().union(*(made[rank].poisoned for rank in contributors))
            sound = bool(contributors) and not poisoned
            expected = self.mean(made, ranks) if sound else None
            told: dict[int, object] = {}
            for rank in self.ranks:
                member = self.members[rank]
                if expected is not None and number in member.means:
                    assert member.means[number].tobytes() == expected.tobytes(), (number, rank)
                for bucket in PLAN.buckets:
                    if (done := member.done.get((number, bucket.index))) is not None:
                        assert (done.contributors, done.poisoned) == (bitmap, bucket.index in poisoned)
                        assert told.setdefault(bucket.index, done) == done
        for rank in self.ranks:
            member = self.members[rank]
            assert sorted(member.means) == list(range(self.entered_at[rank] + 1, max(self.rounds) + 1))
            assert len(member.decoded) == len(set(member.decoded))

    def check_alike(self) -> None:
        """All members have the same means, to the bit, of exactly those that contributed."""
        for number, ranks in self.completed_in.items():
            made = self.rounds[number]
            contributors = [rank for rank in ranks if made[rank].values is not None]
            bitmap = sum(1 << rank for rank in contributors)
            poisoned = frozenset[int]().union(*(made[rank].poisoned for rank in contributors))
            told: dict[int, object] = {}
            for rank in self.ranks:
                for bucket in PLAN.buckets:
                    if (done := self.members[rank].done.get((number, bucket.index))) is not None:
                        assert (done.contributors, done.poisoned) == (bitmap, bucket.index in poisoned)
                        assert told.setdefault(bucket.index, done) == done
            if contributors and not poisoned:
                assert len({member.means[number].tobytes() for member in self.current() if number in member.means}) == 1
        for rank in self.ranks:
            member = self.members[rank]
            assert sorted(member.means) == list(range(self.entered_at[rank] + 1, max(self.rounds) + 1))

    def current(self) -> list[Member]:
        """The members."""
        return [self.members[rank] for rank in self.ranks]


def offers_of(members: int, last: int, seed: int) -> dict[int, list[Offer]]:
    """Rounds 1 to `last`: most members contribute to most, and some buckets are poison."""
    numbers = np.random.default_rng(seed)
    rounds: dict[int, list[Offer]] = {}
    for number in range(1, last + 1):
        made: list[Offer] = []
        for _ in range(members):
            weight = float(numbers.integers(1, 9))
            values = (numbers.standard_normal(PLAN.total_values) * weight).astype(np.float32)
            poisoned = frozenset(int(bucket) for bucket in numbers.integers(0, len(PLAN.buckets), 1))
            absent, poisons = numbers.random() < 0.2, numbers.random() < 0.1
            made.append(Offer(None, 0.0) if absent else Offer(values, weight, poisoned if poisons else frozenset()))
        rounds[number] = made
    return rounds
