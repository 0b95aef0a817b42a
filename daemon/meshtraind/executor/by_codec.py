"""The bytes of a history whose codec changes while it runs (C3): an executor for each codec, and each its own rounds.

Nothing of a round concerns another one but what its encodings leave out. What a member has left out as a worker is kept
by value, whatever its codec, so all executors share that; what it owes as the owner of shards an executor hands over to
it behind its last round. A codec that feeds nothing back is given the sum of the gradients and of what is owed, once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.contributions.error_feedback import Residual
from meshtraind.contributions.results import EncodedRound
from meshtraind.executor.executor import Executor
from meshtraind.executor.host import (
    BindsOfRounds,
    ChunkTrace,
    ExchangeMembers,
    ExchangeMemory,
    ExchangeSettings,
    RoundHost,
)
from meshtraind.projection.base import LearnerHelp
from meshtraind.transport.round_link import RoundLink
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.exchange import Part
from meshwire.collectives.strategy import topology_after
from meshwire.frames.header import Header
from meshwire.model.plan import plan_for
from meshwire.sync_modes.settings_changes import SettingsChange, codecs_by_round


@dataclass(slots=True)
class _Turn:
    """The rounds from `first` on, until the next turn."""

    first: int
    codec: str
    executor: Executor


@dataclass(slots=True)
class _PaidBack:
    """What this member adds to a round of a codec that feeds nothing back, with all that it owed.

    Attributes:
        buckets: of which the values are there.
        poisoned: those of them whose values are not finite.
    """

    values: Values
    buckets: set[int] = field(default_factory=set)
    poisoned: set[int] = field(default_factory=set)


class ExecutorsByCodec:
    """The exchange of all rounds of one history: a `DataPlane`.

    Args:
        settings: with the codec that the job began with.
        members: of the generation in which it begins.
        first: the job's first round; None where this member comes in later.
        result: slot for the means, `plan.total_values` long.
        host: hears what becomes of rounds.
        binds, trace: as of `Executor`.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        rank: int,
        members: ExchangeMembers,
        *,
        first: int | None,
        result: Values,
        host: RoundHost,
        binds: BindsOfRounds | None = None,
        trace: ChunkTrace | None = None,
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._members = members
        self._result = result
        self._host = host
        self._binds = binds
        self._trace = trace
        self._owed: Residual | None = None
        self._paid_back: dict[int, _PaidBack] = {}  # by round
        self._fenced = False
        self._turns = [_Turn(0, settings.codec, self._executor(settings, first))]

    def _executor(self, settings: ExchangeSettings, first: int | None) -> Executor:
        codec = parse_codec(settings.codec)
        if codec.error_feedback and self._owed is None:
            self._owed = Residual(settings.plan.total_values, codec.decay)
        return Executor(
            settings,
            self._rank,
            self._members,
            first=first,
            memory=ExchangeMemory(self._result, self._owed),
            host=self._host,
            binds=self._binds,
            trace=self._trace,
        )

    def _turn(self, number: int) -> _Turn:
        return next(turn for turn in reversed(self._turns) if turn.first <= number)

    def _of(self, number: int) -> Executor:
        return self._turns[0].executor if len(self._turns) == 1 else self._turn(number).executor

    @property
    def _executors(self) -> list[Executor]:
        return [turn.executor for turn in self._turns]

    def round_bytes(self, members: int) -> int:
        """Memory that a round takes here until it is forgotten, in a job of so many members."""
        return max(executor.round_bytes(members) for executor in self._executors)

    @property
    def encoder(self) -> LearnerHelp | None:
        """What the learner learns for the codec; None for one that learns nothing."""
        return self._turns[0].executor.encoder

    # Generations

    def take_changes(self, changes: Sequence[SettingsChange]) -> None:
        """In a fence: what the history has changed, that this member enters or catches up with.

        A change of before that has not begun, and is not among them, was replaced before anybody entered it.
        """
        assert self._fenced
        turns = codecs_by_round(self._settings.codec, changes)[1:]
        known = {*turns}
        for turn in [turn for turn in self._turns[1:] if (turn.first, turn.codec) not in known]:
            if turn.first > self._host.complete + 1:
                self._turns.remove(turn)
                turn.executor.close()
        for first, codec in turns:
            if self._turn(first).codec != codec:
                executor = self._executor(self._settings_with(codec), None)
                executor.fence()
                self._turns.append(_Turn(first, codec, executor))
                self._turns.sort(key=lambda turn: turn.first)
        self._retire()

    def _settings_with(self, codec: str) -> ExchangeSettings:
        before, after = parse_codec(self._settings.codec), parse_codec(codec)
        topology = topology_after(self._settings.topology, before, after)
        plan = plan_for(self._settings.plan, after)
        return replace(self._settings, codec=codec, topology=topology, plan=plan, momentum=None)

    def fence(self) -> None:
        """From now on nothing of the generation is sent, lands or completes (G2)."""
        self._fenced = True
        for executor in self._executors:
            executor.fence()

    def enter(
        self,
        generation: int,
        ranks: tuple[int, ...],
        links: Mapping[int, RoundLink],
        cut: int,
        *,
        learning: tuple[int, ...],
    ) -> None:
        """Takes what the members of a generation send from now on; nothing is sent before `resume`."""
        self._fenced = False
        self._members = ExchangeMembers(generation=generation, ranks=ranks, links=links, learning=learning)
        for executor in self._executors:
            executor.enter(generation, ranks, links, cut, learning=learning)

    def resume(self) -> None:
        """All members have entered: sending begins."""
        for executor in self._executors:
            executor.resume()

    # Rounds that members hold and others lack

    def encoded(self, number: int) -> EncodedRound:
        """A complete round, to serve it. Raises KeyError when it is not held."""
        return self._of(number).encoded(number)

    def place_for(self, number: int, size_bytes: int, contributors: int) -> memoryview:
        """In a fence: where the bytes of a round belong that others hold completely. Raises CodecError."""
        return self._of(number).place_for(number, size_bytes, contributors)

    def take_served(self, number: int, poisoned: bytes | None, contributors: int, weights: Sequence[float]) -> None:
        """The bytes lie in `place_for(number)`. Raises CodecError when they are not such a round's."""
        self._of(number).take_served(number, poisoned, contributors, weights)

    # What this member adds

    def contribute(self, number: int, bucket: int, part: Part, weight: float, raw: memoryview | Values | None) -> None:
        """Fixes this member's part of a bucket, once in each generation. `raw`, for DATA: the slot with w*g in fp32."""
        executor = self._of(number)
        if part is Part.DATA and self._owed is not None and not executor.feeds_back:
            part, raw = self._with_what_is_owed(number, bucket, weight, raw)
        executor.contribute(number, bucket, part, weight, raw)

    def _with_what_is_owed(
        self, number: int, bucket: int, weight: float, raw: memoryview | Values | None
    ) -> tuple[Part, memoryview | Values | None]:
        """The values of a bucket with all that was ever left out of them, in a vector that stays until the round is
        forgotten. Not finite ones are poison, and still owed (V1)."""
        assert self._owed is not None
        place = self._settings.plan.buckets[bucket]
        paid = self._paid_back.get(number)
        if paid is None:
            paid = self._paid_back[number] = _PaidBack(np.empty(self._settings.plan.total_values, np.float32))
        if bucket not in paid.buckets:
            paid.buckets.add(bucket)
            gradient = np.frombuffer(raw, np.float32) if isinstance(raw, memoryview) else raw
            assert gradient is not None
            run = slice(place.start, place.start + place.count)
            if not self._owed.owes(place.start):
                paid.values[run] = gradient[run]
                return Part.DATA, paid.values
            self._owed.lay_out((place.start, place.count))
            owed = self._owed.begin(number, place.start, place.count, weight)
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(owed, gradient[run], out=paid.values[run])
            if np.isfinite(paid.values[run]).all():
                owed.fill(0)
            else:
                self._owed.cancel(number, place.start)
                paid.poisoned.add(bucket)
        return Part.POISON if bucket in paid.poisoned else Part.DATA, paid.values

    def contribute_nothing(self, number: int) -> None:
        """R4, R5: this member forwards every bucket of the round."""
        self._of(number).contribute_nothing(number)

    # What arrives

    def chunk_announced(self, sender: int, header: Header) -> memoryview | str | None:
        """The place of an incoming chunk, or what is wrong with it; None if it is of another generation, or fenced."""
        return self._of(header.round).chunk_announced(sender, header)

    def chunk_received(self, header: Header) -> None:
        """An announced chunk is in its place."""
        self._of(header.round).chunk_received(header)

    def decided(self) -> None:
        """A member has bound a round, or nulled it: chunks that waited for that are taken."""
        for executor in self._executors:
            executor.decided()

    def lacks(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Of whom this member has still to receive something of a round."""
        return self._of(number).lacks(number)

    def receipts(self, number: int) -> int:
        """How many steps of a round are over here."""
        return self._of(number).receipts(number)

    # What becomes of rounds

    def settle(self, number: int, *, void: bool, contributed: bool) -> None:
        """V1, C1: a round is complete, and counts or is void: it will not run again."""
        turn = self._turn(number)
        turn.executor.settle(number, void=void, contributed=contributed)
        if self._owed is not None and number in self._paid_back:
            self._owed.settle(number, void=void or not contributed)
        if any(number + 1 == later.first for later in self._turns):
            turn.executor.hand_over()

    def open_result(self, number: int) -> None:
        """Gives the result slot to this round."""
        opens = self._of(number)
        for executor in self._executors:
            if executor is not opens:
                executor.release_result()
        opens.open_result(number)

    def forget(self, number: int) -> None:
        """Frees a round that every member holds (G5) and this learner needs no more."""
        self._of(number).forget(number)
        self._paid_back.pop(number, None)
        self._retire()

    def _retire(self) -> None:
        """Executors go of which no round is kept, or will come; and what was owed, once it is paid back."""
        while len(self._turns) > 1 and self._turns[1].first <= self._host.complete + 1 and self._turns[0].executor.idle:
            self._turns.pop(0).executor.close()
        feeds_back = any(executor.feeds_back for executor in self._executors)
        if self._owed is not None and not feeds_back and self._owed.empty:
            self._owed.close()
            self._owed = None

    def close(self) -> None:
        """Lets go of links and memory, and of what encodings left out."""
        for executor in self._executors:
            executor.close()
        self._result = np.empty(0, np.float32)  # a view would keep all of the shared memory mapped
        self._paid_back.clear()
        if self._owed is not None:
            self._owed.close()
