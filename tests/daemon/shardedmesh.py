"""Executors of a codec that is not linear, each joined to all others, while members are lost and come.

As in `churnring`; what is exchanged cannot be computed here in another way, so what must be true of it is said instead.
But for a gather: its means follow from the parts.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshtraind.contributions.error_feedback import Residual
from meshtraind.contributions.segments import RoundForms
from meshwire.codecs.registry import Reduction, parse_codec
from meshwire.encoded_layout.by_round import RoundLayouts
from meshwire.frames.header import Header
from tests.daemon.churnring import ChurnRing
from tests.daemon.executorring import PLAN, Offer, Values

Wide = NDArray[np.float64]


class ShardedMesh(ChurnRing):
    """A mesh whose generations change.

    Attributes:
        layouts, forms: as the members have them.
        parts: the bytes of each segment of a member's part, by (rank, round, bucket, segment).
        told: the means of the rounds, as the first member has applied them.
    """

    def __init__(
        self,
        members: int,
        codec: str,
        staleness: int,
        seed: int,
        rounds: Mapping[int, Sequence[Offer]],
        topology: str | None = None,
    ) -> None:
        self.topology = topology
        super().__init__(members, codec, staleness, seed, rounds)
        self.gathers = parse_codec(codec).reduction is Reduction.GATHER
        self.layouts = RoundLayouts(PLAN, parse_codec(codec))
        self.forms = RoundForms(PLAN, parse_codec(codec))
        self.parts: dict[tuple[int, int, int, int], bytes] = {}

    def receivers(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in self.ranks if other != rank)

    def receive(self, sender: int, receiver: int) -> None:
        header, payload = self.wires[sender, receiver].queue[0]
        if payload is not None and header.generation == self.generation and header.step < len(self.ranks) - 1:
            self._same_as_before(sender, header, payload)
        super().receive(sender, receiver)

    def newcomer(self, rank: int, cut: int) -> None:
        super().newcomer(rank, cut)
        self.parts = {key: part for key, part in self.parts.items() if key[0] != rank or key[1] <= cut}

    def _same_as_before(self, sender: int, header: Header, payload: memoryview) -> None:
        """C1: a round that runs again is sent the bytes of before, whoever receives which of them now."""
        segments = self.forms.of(header.round).segments[header.bucket]
        at = 0
        for segment in range(header.first_segment, header.first_segment + header.segment_count):
            length = segments[segment].codec.length_of(payload[at:], segments[segment].count)
            part = bytes(payload[at : at + length])
            assert self.parts.setdefault((sender, header.round, header.bucket, segment), part) == part
            at += length
        assert at == len(payload)

    def check(self) -> None:
        """All members have the same means, to the bit, of exactly those that contributed."""
        self.check_alike()
        for number, ranks in self.completed_in.items():
            made = [self.rounds[number][rank] for rank in ranks]
            contributors = [rank for rank, offer in zip(ranks, made, strict=True) if offer.values is not None]
            sound = contributors and not any(offer.poisoned for offer in made if offer.values is not None)
            if self.gathers and sound and self._arrived_whole(number, contributors):
                means = {member.means[number].tobytes() for member in self.current() if number in member.means}
                assert means == {self.gathered(number, contributors).tobytes()}

    def _arrived_whole(self, number: int, ranks: Sequence[int]) -> bool:
        """All that these have sent was received by somebody; of who was killed in the middle it need not be."""
        segments = [(bucket.index, segment) for bucket in PLAN.buckets for segment in range(bucket.segment_count)]
        return all((rank, number, *segment) in self.parts for rank in ranks for segment in segments)

    def gathered(self, number: int, contributors: Sequence[int]) -> Values:
        """W3: the mean of what these have sent, added in the order of ranks, divided once; where the codec says so, by
        the weight of those that sent a value, and none with more than the lower median of their norms."""
        mean = np.zeros(PLAN.total_values, np.float32)
        weights = [self.rounds[number][rank].weight for rank in contributors]
        by_value: Values = np.full(PLAN.total_values, sum(weights), np.float32)
        for bucket in PLAN.buckets:
            for segment, each in enumerate(self.forms.of(number).segments[bucket.index]):
                coder, start, count = each.codec, each.start, each.count
                values = np.empty((len(contributors), count), np.float32)
                for rank, of_rank in zip(contributors, values, strict=True):
                    coder.decode_into(memoryview(self.parts[rank, number, bucket.index, segment]), of_rank)
                if coder.spec.of_senders:
                    norms = [
                        math.sqrt(math.fsum(float(value) ** 2 for value in of_rank[of_rank != 0])) / weight
                        for of_rank, weight in zip(values, weights, strict=True)
                    ]
                    median = sorted(norms)[(len(norms) - 1) // 2]
                    values *= np.array([min(1.0, median / norm) if norm else 1 for norm in norms], np.float32)[:, None]
                    by_value[start : start + count] = ((values != 0) * np.array(weights)[:, None]).sum(0)
                for of_rank in values:
                    mean[start : start + count] += of_rank
        by_value[by_value == 0] = 1
        return mean / by_value

    def owed(self, weight: float) -> Wide:
        """What all residuals hold that will be sent, in units of w*g with w = rank + 1: the owners' of the shards that
        are theirs now."""
        total = np.zeros(PLAN.total_values)
        for rank, member in zip(self.ranks, self.current(), strict=True):
            feedback, (*_, strategy) = member.executor._feedback, member.executor._strategies.values()
            assert feedback is not None
            total += in_units(feedback.worker, rank + 1.0)
            for bucket in PLAN.buckets:
                for start, count in map(bucket.segment_bounds, strategy.owned(bucket.index)):
                    run = slice(start, start + count)
                    total[run] += weight * feedback.owner.values[run].astype(np.float64)
        return total


def in_units(residual: Residual, weight: float) -> Wide:
    """Its values in units of w*g with this weight, whatever that of the round is that has left them."""
    values = residual.values.astype(np.float64)
    for bucket in PLAN.buckets:
        values[bucket.start : bucket.start + bucket.count] *= weight / residual.weights.get(bucket.start, weight)
    return values


def constant_offers(
    contributors: int, others: int, last: int, seed: int, poison: float = 0.15, sizes: Sequence[float] = (1.0,)
) -> Mapping[int, list[Offer]]:
    """Rounds to which the first members contribute with weight rank + 1, the others nothing; some have poison.

    Args:
        sizes: of the rounds, in turn: by what the weights of all are multiplied.
    """
    numbers = np.random.default_rng(seed)
    rounds: dict[int, list[Offer]] = {}
    for number in range(1, last + 1):
        made: list[Offer] = []
        for rank in range(contributors):
            weight = (rank + 1.0) * sizes[number % len(sizes)]
            values = (numbers.standard_t(3, PLAN.total_values) * weight).astype(np.float32)
            void = (
                frozenset({int(numbers.integers(0, len(PLAN.buckets)))}) if numbers.random() < poison else frozenset()
            )
            made.append(Offer(values, weight, void))
        rounds[number] = made + [Offer(None, 0.0)] * others
    return rounds


def without_padding(rounds: Mapping[int, Sequence[Offer]]) -> dict[int, list[Offer]]:
    """As learners make them."""
    for values in (offer.values for made in rounds.values() for offer in made if offer.values is not None):
        for span in PLAN.spans:
            end = span.start + span.count
            values[end : end + -span.count % 16] = 0.0
    return {number: list(made) for number, made in rounds.items()}
