"""The bytes of one job's rounds on this daemon: performs on memory what has become possible.

What that is says `meshwire.collectives.exchange`.

Every piece of arithmetic is one chunk long, well under a millisecond, so it runs on the event loop between two reads:
handing it to a thread would cost more than it takes. On the ring with s=0 own parts are encoded only when the link can
take them; where encoding changes nothing they leave the learner's slot as they lie there. Otherwise they are encoded as
soon as they are ready, and leave from there (`../contributions/contribution.py`).

Every member decodes a round's result from the same final bytes, early or late (`result_slot.py`), and its squared norm
(O4) is computed once, by the owner of each shard, and travels with them: so both are bit-equal everywhere.

A change of generation (G2, G6) is `fence`, `enter`, `resume`: what had been exchanged of a round that was not complete
is void, and the round runs again with the very same parts (`round_buffers.py`).
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshtraind.contributions.contribution import compensation_of
from meshtraind.contributions.error_feedback import Run, feedback_of
from meshtraind.contributions.received import BrokenPartError
from meshtraind.contributions.results import EncodedRound, RoundResults
from meshtraind.contributions.seeds import member_seed
from meshtraind.contributions.segments import RoundForm, RoundForms, Segment
from meshtraind.executor.compute import Calculation
from meshtraind.executor.host import (
    BindsOfRounds,
    ChunkTrace,
    ExchangeMembers,
    ExchangeMemory,
    ExchangeSettings,
    RoundHost,
)
from meshtraind.executor.projections import Projections
from meshtraind.executor.reducers import Materials, reducer_for
from meshtraind.executor.round_buffers import RoundMemory
from meshtraind.executor.second_phase import SecondPhases
from meshtraind.executor.send_queue import Sending
from meshtraind.projection.base import LearnerHelp
from meshtraind.runtime.timeslice import Slices
from meshtraind.transport.round_link import RoundLink
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.exchange import Part, Strategy, Work
from meshwire.collectives.load import all_to_all
from meshwire.collectives.strategy import collective_for
from meshwire.encoded_layout.budget import budget_of
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import Header
from meshwire.memory_layout.shared_slots import round_bytes

Owned = tuple[Run, Segment]
"""A bucket, and a segment of it that a member finishes."""


class Executor:
    """Moves, adds and encodes the chunks of every round. Sending begins at once, among its first members.

    Args:
        members: of the generation in which it begins.
        first: the job's first round; None where this member comes in later.
        memory: the result slot, and what is shared with executors of other rounds.
        host: hears what becomes of rounds.
        binds: what chunks are compared with (R2); without it nothing was bound, as in a benchmark.
        trace: None: nobody notes chunks.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        rank: int,
        members: ExchangeMembers,
        *,
        first: int | None,
        memory: ExchangeMemory,
        host: RoundHost,
        binds: BindsOfRounds | None = None,
        trace: ChunkTrace | None = None,
    ) -> None:
        self._rank = rank
        codec = parse_codec(settings.codec)
        plan, momentum, staleness = settings.plan, settings.momentum, settings.staleness
        self._collective = collective_for(codec, settings.topology)
        self._forms = RoundForms(plan, codec)
        self._feedback = feedback_of(codec, plan.total_values, momentum, memory.owed)
        self._job = settings.job
        self._staleness = staleness
        self._host = host
        self._binds = binds
        self._waiting: list[Header] = []  # chunks that are here before all is known that they are to be compared with
        self._trace = trace
        budget = budget_of(plan, EncodedLayout(plan, codec))
        shared = self._forms.shared_draws
        own_seed, owner_seed = (member_seed(settings.seed, rank, owner=owner, shared=shared) for owner in (False, True))
        compensation = compensation_of(own_seed, codec, plan, budget, self._feedback, momentum)
        rounds: dict[int, RoundResults] = {}
        self._projections = Projections(self._forms, rounds, settings.seed, staleness, first, compensation.residual)
        reducer = reducer_for(
            self._collective,
            Materials(self._forms, self._projections, compensation, owner_seed, self._feedback, budget),
        )
        self._memory = RoundMemory(self._forms, rounds, self._projections, reducer)
        self._second_phases = SecondPhases(self._memory.own, self)
        self._calculation = Calculation(
            self._forms, self._memory, memory.result, self._projections, reducer, host, self._second_phases
        )
        self._slot = self._calculation.slot
        self._settling = Slices(self._projections.projected.settle_one)
        self._fenced: bool
        self._generation: int
        self._strategies: dict[RoundForm, Strategy]
        self._sending: Sending
        self._form(members)
        self._sending.start()

    def round_bytes(self, members: int) -> int:
        """Memory that a round takes here until it is forgotten, in a job of so many members."""
        return round_bytes(self._forms.bytes_max, self._staleness, self._collective, members)

    # Generations

    def fence(self) -> None:
        """From now on nothing of the generation is sent, lands or completes (G2). Own parts are kept, also those that
        are contributed in the fence."""
        self._fenced = True
        self._waiting.clear()
        self._second_phases.fence()
        self._sending.close()
        complete = self._host.complete
        self._memory.fence(complete)
        if self._slot.round > complete:
            self._slot.restart(())

    def enter(
        self,
        generation: int,
        ranks: tuple[int, ...],
        links: Mapping[int, RoundLink],
        cut: int,
        *,
        learning: tuple[int, ...],
    ) -> None:
        """Takes what the members of a generation send from now on; nothing is sent before `resume`.

        All members hold the rounds up to `cut`, and contribute again to those after it (G6).

        Args:
            generation: its hash, for the frame headers.
            ranks: of its members, sorted.
            links: the way to each other member, by rank.
            learning: those whose learners compute.
        """
        assert self._fenced
        assert self._host.complete == cut, f"{self._host.complete} rounds are complete, the cut is {cut}"
        assert max(self._memory.rounds, default=0) <= cut, "a round was served that is not complete"
        before = self._strategies
        self._form(ExchangeMembers(generation=generation, ranks=ranks, links=links, learning=learning))
        if self._feedback is not None and self._collective.reduction.owner_feedback:
            self._feedback.enter(cut, self._given_up(before, self._strategies))

    def resume(self) -> None:
        """All members have entered: sending begins."""
        self._sending.start()

    def _form(self, members: ExchangeMembers) -> None:
        self._generation = members.generation
        ranks, learning = members.ranks, members.learning
        self._strategies = {
            form: self._collective.topology.strategy(form.layout, ranks, self._rank) for form in self._forms
        }
        self._memory.form(self._strategies, len(ranks))
        place = learning.index(self._rank) if self._rank in learning else None
        self._projections.projected.enter(place, len(learning))
        self._sending = Sending(
            members,
            self._job,
            self._strategies,
            self._memory,
            self._calculation,
            self._host,
            self._trace,
            all_to_all=all_to_all(self._collective.topology.programs(ranks)),
        )
        self._fenced = False

    def _given_up(self, before: Mapping[RoundForm, Strategy], now: Mapping[RoundForm, Strategy]) -> Iterator[Owned]:
        """What this member finished before and does not finish now, of each form."""
        for form, strategy in before.items():
            for bucket, segments in zip(form.layout.plan.buckets, form.segments, strict=True):
                owned = now[form].owned(bucket.index) if form in now else ()
                for index in strategy.owned(bucket.index):
                    if index not in owned:
                        yield (bucket.start, bucket.count), segments[index]

    # Rounds that members hold and others lack

    def encoded(self, number: int) -> EncodedRound:
        """A complete round, to serve it; valid until it is forgotten. Raises KeyError when it is not held."""
        if number > self._host.complete:
            raise KeyError(number)
        return self._memory.encoded(number)

    def place_for(self, number: int, size_bytes: int, contributors: int) -> memoryview:
        """In a fence: where the bytes of a round belong that others hold completely; `take_served` follows.

        Raises CodecError when they cannot be so many.
        """
        assert self._fenced
        assert number > self._host.complete
        return self._memory.place_for(number, size_bytes, contributors)

    def take_served(self, number: int, poisoned: bytes | None, contributors: int, weights: Sequence[float]) -> None:
        """The bytes lie in `place_for(number)`, and now the round is as if it had been exchanged here.

        The round machine is told by the caller; only `on_result` follows, when the slot is the round's.

        Args:
            poisoned: as in EncodedRound; None for a void round, whose bytes nobody needs.
            contributors: bitmap by rank.
            weights: theirs, in the order of ranks.

        Raises CodecError when the bytes are not such a round's.
        """
        round_ = self._memory.served(number, poisoned, contributors, weights)
        self._calculation.served(round_)
        if self._slot.round == number:
            self._slot.restart(round_.finals)

    # What this member adds

    def contribute(self, number: int, bucket: int, part: Part, weight: float, raw: memoryview | Values | None) -> None:
        """Fixes this member's part of a bucket, once in each generation. `raw`, for DATA: the slot with w*g in fp32.

        With s>0 the slot's values of this bucket are no longer needed when this returns (M1); with s=0 they must stay
        until the round is complete. What was kept once is what is contributed: later, `raw` is not looked at.
        """
        form = self._forms.of(number)
        if part is Part.DATA:
            if isinstance(raw, memoryview):
                raw = np.frombuffer(raw, np.float32)
            part = self._memory.own_part(number, form, weight).keep(bucket, raw)
        if self._fenced:
            return
        round_ = self._memory.round(number, form)
        precursor = form.layout.precursors.get(bucket)
        if precursor is not None:
            self._second_phases.begin(number, bucket, part, weight)
        self.add(round_, bucket if precursor is None else precursor, part, weight)

    def add(self, round_: RoundResults, bucket: int, part: Part, weight: float) -> None:
        """Gives a bucket's exchange what this member adds (`SecondPhases`)."""
        for work in round_.exchanges[bucket].contribute(part, weight):
            if work.at_once:
                self._perform(round_, bucket, work, work.senders[0] if len(work.senders) == 1 else None)
            else:
                self._sending.put(round_, bucket, work, computed=False)
        self._sending.pump()

    def contribute_nothing(self, number: int) -> None:
        """R4, R5: this member forwards every bucket of the round."""
        for bucket in self._forms.of(number).layout.model_buckets:
            self.contribute(number, bucket, Part.NOTHING, 0.0, None)

    def settle(self, number: int, *, void: bool, contributed: bool) -> None:
        """V1, C1: a round is complete, and counts or is void: it will not run again. `contributed`: this member is in
        it, which may have rested when it ran again (X3)."""
        self._memory.settle(number, void=void, contributed=contributed)
        if self._feedback is not None:
            self._feedback.settle(number, void=void, contributed=contributed)
        own = self._memory.own.get(number)
        if own is not None and contributed and not void:
            own.counted()
        self._settling.run_later()

    @property
    def encoder(self) -> LearnerHelp | None:
        """What the learner learns for the codec; None for one without an autoencoder."""
        return self._projections.projected.encoder

    # What arrives

    def chunk_announced(self, sender: int, header: Header) -> memoryview | str | None:
        """The place of an incoming chunk, or what is wrong with it; None if it is of another generation, or fenced.

        This daemon decides at most s+1 rounds past those it holds completely, so all others hold no more than these,
        and decide at most s+1 further (R1, R5).
        """
        if self._fenced or header.generation != self._generation:
            return None
        complete = self._host.complete
        if not complete < header.round <= complete + 2 * (self._staleness + 1):
            return f"chunk of round {header.round} while {complete} are complete"
        form = self._forms.of(header.round)
        buckets = len(form.layout.plan.buckets)
        if header.bucket >= buckets:
            return f"chunk of bucket {header.bucket} of {buckets} in round {header.round}"
        round_ = self._memory.round(header.round, form)
        place = round_.exchanges[header.bucket].announce(sender, header)
        if isinstance(place, str):
            return f"round {header.round}: {place}"
        offset, length = place
        return round_.area[offset : offset + length]

    def chunk_received(self, header: Header) -> None:
        """An announced chunk is in its place; if a fence fell in the meantime, that place is of no interest (G8)."""
        if self._fenced or header.generation != self._generation:
            return
        round_ = self._memory.rounds.get(header.round)
        if round_ is None:
            return
        round_.exchanges[header.bucket].arrived(header)
        if not self._take(round_, header):
            self._waiting.append(header)

    def decided(self) -> None:
        """A member has bound a round, or nulled it: chunks that waited for that are taken."""
        if self._waiting and not self._fenced:
            waiting, self._waiting = self._waiting, []
            for header in waiting:
                round_ = self._memory.rounds.get(header.round)
                if round_ is not None and not self._take(round_, header):
                    self._waiting.append(header)

    def lacks(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Of whom this member has still to receive something of a round: (rank, bucket, how many steps' receipts that
        rank needs before it can send it), for each step that is not over."""
        round_ = self._memory.rounds.get(number)
        program = self._strategies[self._forms.of(number)].program
        for bucket, exchange in enumerate(round_.exchanges if round_ is not None else ()):
            for index in exchange.lacks():
                step = program.steps[index]
                assert step.recv_from is not None
                yield step.recv_from, bucket, self._steps_before(number, bucket) + step.after

    def receipts(self, number: int) -> int:
        """How many steps of a round are over here, in their order: all of every bucket was received. Those of buckets
        that follow precursors come after all others'."""
        round_ = self._memory.rounds.get(number)
        if round_ is None:
            return 0
        next_steps = (
            self._steps_before(number, bucket) + lacks[0]
            for bucket, exchange in enumerate(round_.exchanges)
            if (lacks := exchange.lacks())
        )
        steps = len(self._strategies[round_.form].program.steps)
        return min(next_steps, default=steps * (2 if round_.form.layout.precursors else 1))

    def _steps_before(self, number: int, bucket: int) -> int:
        form = self._forms.of(number)
        return len(self._strategies[form].program.steps) if bucket in form.layout.precursors else 0

    # What the learner gets, and what is kept

    def open_result(self, number: int) -> None:
        """Gives the result slot to a later round than before, or again to the same: what has arrived of it is decoded
        in slices, the rest at arrival. `on_result` follows, never from within this call."""
        round_ = self._memory.rounds.get(number)
        self._slot.open(number, () if round_ is None else round_.finals)

    def release_result(self) -> None:
        """The result slot is another executor's from now on."""
        self._slot.release()

    @property
    def feeds_back(self) -> bool:
        """What its encodings leave out is sent later."""
        return self._feedback is not None

    @property
    def idle(self) -> bool:
        """It keeps nothing of any round."""
        return not self._memory.rounds and not self._memory.own

    def hand_over(self) -> None:
        """Its last round is complete: what this member still owes as the owner of shards it sends as a worker, like
        that of a shard whose owner changes."""
        if self._feedback is not None and self._collective.reduction.owner_feedback:
            self._feedback.enter(self._host.complete, self._given_up(self._strategies, {}))

    def forget(self, number: int) -> None:
        """Frees a round that every member holds (G5) and this learner needs no more."""
        self._slot.forget(number)
        self._memory.forget(number)

    def close(self) -> None:
        """Lets go of links and memory, and of what encodings left out."""
        self._sending.close()
        self._slot.close()
        self._settling.stop()
        self._second_phases.close()
        self._memory.close()
        if self._feedback is not None:
            self._feedback.close()

    # Computing

    def _take(self, round_: RoundResults, header: Header) -> bool:
        """A chunk is here. Returns False if it has to wait until more is known of its round."""
        exchange = round_.exchanges[header.bucket]
        step = exchange.step(header)
        if self._binds is not None:
            bound = self._binds.bound(header.round, step.parts)
            if bound is None:
                return False
            if wrong := exchange.unlike(header, bound):
                self._host.chunk_broken(step.recv_from, f"round {header.round}, bucket {header.bucket}: {wrong}")
                return True
        work = exchange.landed(header)
        if work is not None:
            self._perform(round_, header.bucket, work, step.recv_from)
            self._sending.pump()
        return True

    def _perform(self, round_: RoundResults, bucket: int, work: Work, sender: int | None) -> None:
        """Computes what has landed at once; its sending waits for the link. `sender`: of what has come last."""
        try:
            work = self._calculation.compute(round_, bucket, work)
        except CodecError as error:
            culprit = error.rank if isinstance(error, BrokenPartError) else sender
            self._host.chunk_broken(culprit, f"round {round_.number}, bucket {bucket}: {error}")
            return
        if work.send_steps:
            self._sending.put(round_, bucket, work, computed=True)
        self._calculation.report(round_, bucket, work)
