"""What is kept of rounds: vectors on their way, complete ones until every member holds them (G5), own parts.

A fence (G2) voids what is on its way. A link that was in the middle of a chunk then goes on writing where it was told
to, and what it was given to send may leave still: so no area from before a fence is used again after it (G8). Own parts
and complete rounds stay as they are.
"""

from collections.abc import Mapping, Sequence

from meshtraind.codecs.base import CodecError
from meshtraind.contributions.contribution import OwnContribution
from meshtraind.contributions.results import EncodedRound, Final, RoundResults
from meshtraind.contributions.segments import Areas, RoundForm, RoundForms, Segment, new_area
from meshtraind.executor.projections import Projections
from meshtraind.executor.reducers import Reducer
from meshwire.collectives.exchange import Strategy
from meshwire.model.plan import Shard


class RoundMemory:
    """One job's.

    Args:
        rounds: what becomes `rounds`; empty.
        projections: which may read rounds that nobody else needs.
        reducer: makes own parts.

    Attributes:
        rounds: by number.
        own: what this member adds, by round.
    """

    def __init__(
        self,
        forms: RoundForms,
        rounds: dict[int, RoundResults],
        projections: Projections,
        reducer: Reducer,
    ) -> None:
        self._forms = forms
        self._projections = projections
        self._reducer = reducer
        self._members = 1
        self._strategies: Mapping[RoundForm, Strategy] = {}
        self._areas = {form: Areas(form.layout.total_bytes) for form in forms}
        self._own_areas = {form: Areas(form.layout.total_bytes) for form in forms}
        self.rounds = rounds
        self.own: dict[int, OwnContribution] = {}

    def form(self, strategies: Mapping[RoundForm, Strategy], members: int) -> None:
        """From now on there are so many members, and rounds go these ways."""
        self._members = members
        self._strategies = strategies
        for form, strategy in strategies.items():
            if strategy.area_bytes != self._areas[form].size_bytes:
                self._areas[form] = Areas(strategy.area_bytes)

    def round(self, number: int, form: RoundForm) -> RoundResults:
        """A round of this form that is exchanged here, from the first word of it on."""
        round_ = self.rounds.get(number)
        if round_ is None:
            round_, strategy = self.add(number, form), self._strategies[form]
            round_.exchanges = [strategy.exchange(bucket.index) for bucket in form.layout.plan.buckets]
        return round_

    def add(self, number: int, form: RoundForm) -> RoundResults:
        """Memory for a round of this form that has none, without exchanges."""
        round_ = self.rounds[number] = RoundResults(number, form, self._areas[form].take())
        return round_

    def own_part(self, number: int, form: RoundForm, weight: float) -> OwnContribution:
        """For what is to be kept of this member's part in a round of this form, in which it has this weight."""
        own = self.own.get(number)
        if own is None:
            areas = self._own_areas[form]
            own = self.own[number] = self._reducer.contribution(form, areas, number, weight, self._members)
        return own

    def fence(self, complete: int) -> None:
        """What there is of rounds after `complete` is void but for own parts."""
        for areas in (*self._areas.values(), *self._own_areas.values()):
            areas.retire()
        for number in [number for number in self.rounds if number > complete]:
            del self.rounds[number]

    def encoded(self, number: int) -> EncodedRound:
        """A complete round as it is served. Raises KeyError when it is not held."""
        round_ = self.rounds[number]
        bitmap = 0
        for final in round_.finals:
            bitmap |= final.void << final.bucket
        return EncodedRound(self._payloads(round_), bitmap.to_bytes(-(-len(round_.form.segments) // 8), "little"))

    def _payloads(self, round_: RoundResults) -> tuple[memoryview, ...]:
        layout = round_.form.layout
        if layout.served_in_place:
            return (round_.area[: layout.total_bytes],)
        finals = sorted(round_.finals, key=lambda final: (final.bucket, final.first_segment))
        return tuple(payload for final in finals for payload in final.payloads)

    def place_for(self, number: int, size_bytes: int, contributors: int) -> memoryview:
        """Where a round's bytes belong that others hold completely. Raises CodecError when they cannot be so many.

        Args:
            contributors: bitmap by rank.
        """
        form = self._forms.of(number)
        layout = form.layout
        most = layout.total_bytes * (contributors.bit_count() if layout.gathered else 1)
        if size_bytes > most or (layout.served_in_place and size_bytes != most):
            raise CodecError(f"round {number} has {size_bytes} bytes at the source and {most} here")
        if not layout.served_in_place:
            self.rounds[number] = RoundResults(number, form, new_area(size_bytes))
        elif number not in self.rounds:
            self.add(number, form)
        return self.rounds[number].area[:size_bytes]

    def served(self, number: int, poisoned: bytes | None, contributors: int, weights: Sequence[float]) -> RoundResults:
        """All of a round without exchanges has come from a member that holds it.

        Args:
            poisoned: as in EncodedRound; None for a void round, which has no bytes.
            contributors: of the round, as a bitmap by rank.
            weights: theirs, in the order of ranks.

        Raises CodecError when the bytes are not such a round's.
        """
        form = self._forms.of(number)
        layout = form.layout
        if poisoned is None:
            self.place_for(number, layout.total_bytes if layout.served_in_place else 0, contributors)
        round_ = self.rounds[number]
        assert not round_.exchanges
        bitmap = int.from_bytes(poisoned, "little") if poisoned is not None else (1 << len(form.segments)) - 1
        round_.finals = []
        at = 0
        whole = sum(weights)
        for bucket, segments in enumerate(form.segments):
            void = bool(bitmap >> bucket & 1)
            for first, count in layout.chunks(bucket, Shard(0, len(segments))):
                payloads: list[memoryview] = []
                for _ in range(0 if void else contributors.bit_count() if layout.gathered else 1):
                    offset, length = layout.span(bucket, first, count)
                    if not layout.served_in_place:
                        offset, length = at, self._length(segments[first : first + count], round_.area[at:])
                        at += length
                    payloads.append(round_.area[offset : offset + length])
                round_.finals.append(Final(bucket, first, count, tuple(payloads), contributors, whole, tuple(weights)))
        if not layout.served_in_place and at != len(round_.area):
            raise CodecError(f"round {number} has {len(round_.area)} bytes, and its segments take {at}")
        return round_

    def _length(self, segments: Sequence[Segment], run: memoryview) -> int:
        at = 0
        for segment in segments:
            at += segment.codec.length_of(run[at:], segment.count)
        return at

    def settle(self, number: int, *, void: bool, contributed: bool) -> None:
        """A round is complete, and counts or is void. `contributed`: this member is in it."""
        round_ = self.rounds[number]
        round_.void = void
        self._projections.of[round_.form].settled(round_, contributed=contributed)

    def forget(self, number: int) -> None:
        """All of a round is needed no more, but for what may be made of it for later ones."""
        form = self._forms.of(number)
        projection = self._projections.of[form]
        self._release(number - projection.reaches_back)
        projection.forget(number)
        if (own := self.own.pop(number, None)) is not None and own.area is not None:
            self._own_areas[form].give(own.area)
        if self._forms.ends_with(number):  # rounds are forgotten in order
            self._areas[form].close()
            self._own_areas[form].close()

    def _release(self, number: int) -> None:
        if (round_ := self.rounds.pop(number, None)) is not None:
            self._areas[round_.form].give(round_.area)

    def close(self) -> None:
        """Lets go of everything."""
        self.rounds.clear()
        self.own.clear()
        for areas in (*self._areas.values(), *self._own_areas.values()):
            areas.close()
