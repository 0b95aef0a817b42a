"""The bytes of one job's rounds on this daemon: performs on memory what `meshwire.exchange` says has become possible.

Every piece of arithmetic is one chunk long, well under a millisecond, so it runs on the event loop between two reads:
handing it to a thread would cost more than it takes. With s=0 own parts are encoded only when the link can take them;
where encoding changes nothing they leave the learner's slot as they lie there. With s>0 they are encoded as soon as
they are ready, and leave from there (`ownpart.py`).

Every member decodes a round's result from the same final bytes, early or late (`resultslot.py`), and its squared norm
(O4) is computed once, by the owner of each shard, and travels with them: so both are bit-equal everywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import CodecError, Values
from meshtraind.connection import Connection
from meshtraind.outbox import Frame, Outbox
from meshtraind.ownpart import InSlot, OwnPart, Retained
from meshtraind.resultslot import Final, ResultSlot
from meshtraind.segments import Areas, segments_by_bucket
from meshwire import limits
from meshwire.codec import CODECS
from meshwire.exchange import BucketExchange, EncodedLayout, Part, Work
from meshwire.header import Flags, Header, Kind
from meshwire.local import round_bytes
from meshwire.plan import Plan
from meshwire.topology import ring_program, ring_shards


@dataclass(slots=True)
class _Round:
    """One round in memory."""

    number: int
    area: memoryview  # the encoded vector
    exchanges: list[BucketExchange]
    own: OwnPart | None = None  # once this member has contributed
    arrived: list[Final] = field(default_factory=list)  # while the result slot is another round's


@dataclass(frozen=True, slots=True)
class _Item:
    """A run of segments to be computed, if it still is to be, and sent."""

    round: _Round
    bucket: int
    work: Work
    computed: bool


class Executor:
    """Moves, adds and encodes the chunks of every round.

    Args:
        links: the connection to each other member, by rank.
        job, generation: numbers for the frame headers.
        staleness: the bound s.
        norm_buckets: buckets before this one hold parameters' gradients and count in squared norms (O4).
        result: slot for the means, `plan.total_values` long.
        on_bucket: called with (round, bucket, poisoned, contributors, weight, squared norm) when a bucket's result is
            complete here, decoded or not.
        on_result: called with the round when all of it lies in the result slot; poison changes nothing there.
        on_broken: called with what is wrong with a payload that was received.
        complete: the newest round that this daemon holds completely (G5).
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        members: int,
        codec: str,
        links: Mapping[int, Connection],
        job: int,
        generation: int,
        staleness: int,
        norm_buckets: int,
        result: Values,
        on_bucket: Callable[[int, int, bool, int, float, float], None],
        on_result: Callable[[int], None],
        on_broken: Callable[[str], None],
        complete: Callable[[], int],
    ) -> None:
        self._plan = plan
        self._codec = codec_named(codec)
        self._layout = EncodedLayout(plan, CODECS[codec])
        self._program = ring_program(members, rank)
        self._shards = [ring_shards(bucket.segment_count, members, bucket.index) for bucket in plan.buckets]
        self._segments = segments_by_bucket(plan, self._layout)
        self._chunk_segments = self._layout.segments_per_chunk(limits.CHUNK_BYTES)
        self._job = job
        self._generation = generation
        self._staleness = staleness
        self._norm_buckets = norm_buckets
        self._on_bucket = on_bucket
        self._on_result = on_result
        self._on_broken = on_broken
        self._complete = complete
        self._rounds: dict[int, _Round] = {}
        self._areas = Areas(self._layout.total_bytes)
        self._sum: Values = np.empty(plan.segment_values, np.float32)
        self._own_values: Values = np.empty(plan.segment_values, np.float32)
        self._wide = np.empty(plan.segment_values, np.float64)
        self._slot = ResultSlot(result, self._codec, self._segments, on_result, on_broken)
        self._outbox: Outbox[_Item] = Outbox(links, self._prepare)
        self.on_chunk_sent: Callable[[Header], None] | None = None

    @property
    def round_bytes(self) -> int:
        """Memory that a round takes here until it is forgotten."""
        return round_bytes(self._layout.total_bytes, self._staleness)

    # What this member adds

    def contribute(self, number: int, bucket: int, part: Part, weight: float, raw: Values | None) -> None:
        """Fixes this member's part of a bucket (`raw` for DATA: the slot that holds w*g).

        With s>0 the slot's values of this bucket are no longer needed when this returns (M1); with s=0 they must stay
        until the round is complete.
        """
        round_ = self._round(number)
        if part is Part.DATA:
            assert raw is not None
            part = self._keep(round_, bucket, raw)
        exchange = round_.exchanges[bucket]
        for work in exchange.contribute(part, weight):
            if work.incoming:
                self._perform(round_, bucket, work)
            else:
                self._enqueue_own(round_, bucket, work)
        self._outbox.pump()

    def contribute_nothing(self, number: int) -> None:
        """R4, R5: this member forwards every bucket of the round."""
        for bucket in self._plan.buckets:
            self.contribute(number, bucket.index, Part.NOTHING, 0.0, None)

    # What arrives

    def chunk_announced(self, sender: int, header: Header) -> memoryview | str:
        """The place of an incoming chunk, or what is wrong with it.

        This daemon decides at most s+1 rounds past those it holds completely, so all others hold no more than these,
        and decide at most s+1 further (R1, R5).
        """
        complete = self._complete()
        if not complete < header.round <= complete + 2 * (self._staleness + 1):
            return f"chunk of round {header.round} while {complete} are complete"
        if header.bucket >= len(self._plan.buckets):
            return f"chunk of bucket {header.bucket} of {len(self._plan.buckets)}"
        round_ = self._round(header.round)
        place = round_.exchanges[header.bucket].announce(sender, header)
        if isinstance(place, str):
            return f"round {header.round}: {place}"
        offset, length = place
        return round_.area[offset : offset + length]

    def chunk_received(self, header: Header) -> None:
        """An announced chunk is in its place."""
        round_ = self._rounds.get(header.round)
        if round_ is None:
            return
        work = round_.exchanges[header.bucket].landed(header)
        if work is not None:
            self._perform(round_, header.bucket, work)
            self._outbox.pump()

    # What the learner gets, and what is kept

    def open_result(self, number: int) -> None:
        """Gives the result slot to a later round than before: what has arrived of it is decoded in slices, the rest
        at arrival. `on_result` follows, never from within this call."""
        round_ = self._rounds.get(number)
        if round_ is None:
            self._slot.open(number, None, ())
        else:
            self._slot.open(number, round_.area, round_.arrived)
            round_.arrived = []

    def forget(self, number: int) -> None:
        """Frees a round that every member holds (G5) and this learner needs no more."""
        round_ = self._rounds.pop(number, None)
        if round_ is None:
            return
        self._slot.forget(number)
        self._areas.give(round_.area)
        if round_.own is not None and round_.own.area is not None:
            self._areas.give(round_.own.area)

    def close(self) -> None:
        """Lets go of links and memory."""
        self._outbox.close()
        self._slot.close()
        self._rounds.clear()
        self._areas.close()

    # Computing

    def _round(self, number: int) -> _Round:
        round_ = self._rounds.get(number)
        if round_ is None:
            exchanges = [
                BucketExchange(bucket.index, self._program, self._shards[bucket.index], self._layout)
                for bucket in self._plan.buckets
            ]
            round_ = self._rounds[number] = _Round(number, self._areas.take(), exchanges)
        return round_

    def _keep(self, round_: _Round, bucket: int, raw: Values) -> Part:
        if round_.own is None:
            if self._staleness:
                round_.own = Retained(self._codec, self._areas.take(), self._own_values)
            else:
                round_.own = InSlot(self._codec)
        try:
            round_.own.take(self._segments[bucket], raw)
        except CodecError:
            return Part.POISON  # V1: a value is not finite
        return Part.DATA

    def _enqueue_own(self, round_: _Round, bucket: int, work: Work) -> None:
        """Splits an own part into chunks that are computed when the link can take them."""
        end = work.first_segment + work.segment_count
        for first in range(work.first_segment, end, self._chunk_segments):
            count = min(self._chunk_segments, end - first)
            self._queue(round_, bucket, replace(work, first_segment=first, segment_count=count), computed=False)

    def _perform(self, round_: _Round, bucket: int, work: Work) -> None:
        """Computes what has landed at once; its sending waits for the link."""
        try:
            work = self._compute(round_, bucket, work)
        except CodecError as error:
            self._on_broken(f"round {round_.number}, bucket {bucket}: {error}")
            return
        if work.send_step is not None:
            self._queue(round_, bucket, work, computed=True)
        self._report(round_, bucket, work)

    def _queue(self, round_: _Round, bucket: int, work: Work, *, computed: bool) -> None:
        to = None if work.send_step is None else self._program.steps[work.send_step].send_to
        self._outbox.put(to, _Item(round_, bucket, work, computed))

    def _compute(self, round_: _Round, bucket: int, work: Work) -> Work:
        """Arithmetic on one run. Returns the work with its squared norm, if it is finished here, or poisoned, if a sum
        turned out not to be finite (V1)."""
        if work.poison or not (work.add_own or work.incoming):
            return work
        codec, own = self._codec, round_.own
        opened = work.deliver and self._slot.round == round_.number
        measured = work.finish and bucket < self._norm_buckets
        squared_norm = 0.0
        end = work.first_segment + work.segment_count
        for segment in self._segments[bucket][work.first_segment : end]:
            encoded = round_.area[segment.offset : segment.offset + segment.length]
            total = self._sum[: segment.count]
            if work.add_own or work.finish:
                if work.add_own:
                    assert own is not None
                    if work.incoming:
                        codec.sum_into(encoded, own.values(segment), total)
                    else:
                        total = own.values(segment)
                else:
                    codec.decode_into(encoded, total)
                if work.finish:
                    with np.errstate(over="ignore", invalid="ignore"):  # found when it is encoded
                        total = np.divide(total, np.float32(work.weight), out=self._sum[: segment.count])
                try:
                    codec.encode_into(total, encoded)
                except CodecError:
                    if work.incoming:
                        codec.decode_into(encoded, self._sum[: segment.count])  # raises if the payload was broken
                    return replace(work, poison=True)  # finite parts can have a sum that is not
            if opened or measured:
                values = self._slot.place(segment) if opened else self._sum[: segment.count]
                codec.decode_into(encoded, values)
                if measured:
                    squared_norm += self._squared_norm(values)
        return replace(work, squared_norm=squared_norm) if measured else work

    def _squared_norm(self, values: Values) -> float:
        """In float64: fp32 would lose digits over so many, and overflow."""
        wide = self._wide[: len(values)]
        np.copyto(wide, values)
        return float(np.dot(wide, wide))

    def _report(self, round_: _Round, bucket: int, work: Work) -> None:
        """Final segments are in the area, and in the result slot if that is the round's."""
        if not work.deliver:
            return
        lies_in_slot = False
        if self._slot.round == round_.number:
            lies_in_slot = self._slot.took(work.segment_count)
        else:
            round_.arrived.append((bucket, work))
        exchange = round_.exchanges[bucket]
        if exchange.delivered(work):
            self._on_bucket(
                round_.number, bucket, exchange.poisoned, exchange.contributors, exchange.weight, exchange.squared_norm
            )
        if lies_in_slot and round_.number in self._rounds:  # it has not been forgotten, nor everything closed, by that
            self._on_result(round_.number)

    # Sending

    def _prepare(self, item: _Item) -> Frame | None:
        """The frame of an item whose turn has come; None if nobody but this member is concerned."""
        work, payload = item.work, None
        offset, length = self._layout.span(item.bucket, work.first_segment, work.segment_count)
        if not item.computed:
            if work.add_own and not work.finish and not work.poison:
                assert item.round.own is not None
                payload = item.round.own.encoded(offset, length)
            if payload is None:
                work = self._compute(item.round, item.bucket, work)
                self._report(item.round, item.bucket, work)
        if work.send_step is None:
            return None
        if work.poison or not work.contributors:
            payload = None
        elif payload is None:
            payload = item.round.area[offset : offset + length]
        header = Header(
            kind=Kind.CHUNK,
            payload_bytes=len(payload) if payload is not None else 0,
            flags=Flags.POISON if work.poison else Flags.NONE,
            job=self._job,
            generation=self._generation,
            round=item.round.number,
            step=work.send_step,
            bucket=item.bucket,
            first_segment=work.first_segment,
            segment_count=work.segment_count,
            contributors=work.contributors,
            weight=work.weight,
            complete=self._complete(),
            squared_norm=work.squared_norm,
        )
        if self.on_chunk_sent is not None:
            self.on_chunk_sent(header)
        return header, payload
