"""The bytes of one job's rounds on this daemon: performs on memory what `meshwire.exchange` says has become possible.

Every piece of arithmetic is one chunk long, well under a millisecond, so it runs on the event loop between two reads:
handing it to a thread would cost more than it takes. Own parts are encoded only when the link can take them; where
encoding changes nothing they leave the learner's slot as they lie there, for the learner has looked for NaN (V1) and
writes into the slot again only after the round is complete, and so after its successor has received them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import CodecError, Values
from meshtraind.connection import Connection
from meshwire import limits
from meshwire.codec import CODECS
from meshwire.exchange import BucketExchange, EncodedLayout, Part, Work
from meshwire.header import Flags, Header, Kind
from meshwire.plan import VALUE_BYTES, Plan
from meshwire.topology import ring_program, ring_shards

SLICE_S = 0.001  # longest stretch of arithmetic before the loop gets a turn


@dataclass(slots=True)
class _Round:
    """One round in flight."""

    number: int
    area: memoryview  # the encoded vector
    exchanges: list[BucketExchange]
    raw: Values | None = None  # the learner's slot, once it has contributed


@dataclass(slots=True)
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
        staleness: the bound s; s + 2 rounds can be on the wire at once.
        result: slot for the means, `plan.total_values` long.
        on_bucket: called with (round, bucket, poisoned, contributors, weight) when a bucket's result is complete.
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
        result: Values,
        on_bucket: Callable[[int, int, bool, int, float], None],
        on_broken: Callable[[str], None],
        complete: Callable[[], int],
    ) -> None:
        self._plan = plan
        self._codec = codec_named(codec)
        self._layout = EncodedLayout(plan, CODECS[codec])
        self._program = ring_program(members, rank)
        self._shards = [ring_shards(bucket.segment_count, members, bucket.index) for bucket in plan.buckets]
        # (offset, length) in the area and (start, count) in the vector of every segment, by bucket
        self._segments = [
            [
                (*self._layout.span(bucket.index, segment, 1), *bucket.segment_bounds(segment))
                for segment in range(bucket.segment_count)
            ]
            for bucket in plan.buckets
        ]
        self._chunk_segments = self._layout.segments_per_chunk(limits.CHUNK_BYTES)
        self._links = links
        self._job = job
        self._generation = generation
        self._rounds_in_flight_max = staleness + 2
        self._result = result
        self._on_bucket = on_bucket
        self._on_broken = on_broken
        self._complete = complete
        self._rounds: dict[int, _Round] = {}
        self._free_areas: list[memoryview] = []
        self._sum: Values = np.empty(plan.segment_values, np.float32)
        self._queues: dict[int, deque[_Item]] = {peer: deque() for peer in links}
        self._local: deque[_Item] = deque()  # a world of one has nobody to send to
        self._pump_scheduled = False
        self._closed = False
        self._unsubscribe = [link.on_writable(self._pump) for link in links.values()]
        self.on_chunk_sent: Callable[[Header], None] | None = None

    # What this member adds

    def contribute(self, number: int, bucket: int, part: Part, weight: float, raw: Values | None) -> None:
        """Fixes this member's part of a bucket (`raw` for DATA: the slot that holds w*g)."""
        round_ = self._round(number)
        if raw is not None:
            round_.raw = raw
        exchange = round_.exchanges[bucket]
        for work in exchange.contribute(part, weight):
            if work.incoming:
                self._perform(round_, bucket, work)
            else:
                self._enqueue_own(round_, bucket, work)
        self._pump()

    def contribute_nothing(self, number: int) -> None:
        """R4, R5: this member forwards every bucket of the round."""
        for bucket in self._plan.buckets:
            self.contribute(number, bucket.index, Part.NOTHING, 0.0, None)

    # What arrives

    def chunk_announced(self, sender: int, header: Header) -> memoryview | str:
        """The place of an incoming chunk, or what is wrong with it."""
        complete = self._complete()
        if not complete < header.round <= complete + self._rounds_in_flight_max:
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
            self._pump()

    def forget(self, number: int) -> None:
        """Frees a round that nobody needs any more."""
        round_ = self._rounds.pop(number, None)
        if round_ is not None:
            self._free_areas.append(round_.area)

    def close(self) -> None:
        """Lets go of links and memory."""
        self._closed = True
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        for queue in self._queues.values():
            queue.clear()
        self._local.clear()
        self._rounds.clear()
        self._free_areas.clear()
        self._result = np.empty(0, np.float32)  # a view of the shared memory, which would keep all of it mapped

    # Computing

    def _round(self, number: int) -> _Round:
        round_ = self._rounds.get(number)
        if round_ is None:
            # Whoever works on this round holds all up to s+1 before it, and so all others hold those s+1 before that.
            for old in [old for old in self._rounds if old <= number - 2 * (self._rounds_in_flight_max - 1)]:
                self.forget(old)
            area = self._free_areas.pop() if self._free_areas else np.empty(self._layout.total_bytes, np.uint8).data
            exchanges = [
                BucketExchange(bucket.index, self._program, self._shards[bucket.index], self._layout)
                for bucket in self._plan.buckets
            ]
            round_ = self._rounds[number] = _Round(number, area, exchanges)
        return round_

    def _enqueue_own(self, round_: _Round, bucket: int, work: Work) -> None:
        """Splits an own part into chunks that are computed when the link can take them."""
        end = work.first_segment + work.segment_count
        for first in range(work.first_segment, end, self._chunk_segments):
            count = min(self._chunk_segments, end - first)
            piece = replace(work, first_segment=first, segment_count=count)
            self._queue_for(piece).append(_Item(round_, bucket, piece, computed=False))

    def _perform(self, round_: _Round, bucket: int, work: Work) -> None:
        """Computes what has landed at once; its sending waits for the link."""
        try:
            work = self._compute(round_, bucket, work)
        except CodecError as error:
            self._on_broken(f"round {round_.number}, bucket {bucket}: {error}")
            return
        if work.send_step is not None:
            self._queue_for(work).append(_Item(round_, bucket, work, computed=True))
        self._report(round_, bucket, work)

    def _report(self, round_: _Round, bucket: int, work: Work) -> None:
        exchange = round_.exchanges[bucket]
        if work.deliver and exchange.delivered(work):
            self._on_bucket(round_.number, bucket, exchange.poisoned, exchange.contributors, exchange.weight)

    def _compute(self, round_: _Round, bucket: int, work: Work) -> Work:
        """Arithmetic on one run. Returns the work, poisoned if a sum turned out not to be finite (V1)."""
        if work.poison or not (work.add_own or work.incoming):
            return work
        codec, raw = self._codec, round_.raw
        segments = self._segments[bucket]
        for segment in range(work.first_segment, work.first_segment + work.segment_count):
            offset, length, start, count = segments[segment]
            encoded = round_.area[offset : offset + length]
            if work.add_own or work.finish:
                total = self._sum[:count]
                if not work.incoming:
                    assert raw is not None
                    total = raw[start : start + count]
                elif work.add_own:
                    assert raw is not None
                    codec.sum_into(encoded, raw[start : start + count], total)
                else:
                    codec.decode_into(encoded, total)
                if work.finish:
                    with np.errstate(over="ignore", invalid="ignore"):  # found when it is encoded
                        total = np.divide(total, np.float32(work.weight), out=self._sum[:count])
                try:
                    codec.encode_into(total, encoded)
                except CodecError:
                    if work.incoming:
                        codec.decode_into(encoded, self._sum[:count])  # raises if the payload was broken
                    return replace(work, poison=True)  # finite parts can have a sum that is not
            if work.deliver:
                codec.decode_into(encoded, self._result[start : start + count])
        return work

    # Sending

    def _queue_for(self, work: Work) -> deque[_Item]:
        if work.send_step is None:
            return self._local
        send_to = self._program.steps[work.send_step].send_to
        assert send_to is not None
        return self._queues[send_to]

    def _pump(self) -> None:
        """Computes and sends while links can take it, a slice at a time."""
        if self._closed:
            return
        end_s = time.monotonic() + SLICE_S
        while self._local:
            item = self._local.popleft()
            self._report(item.round, item.bucket, self._compute(item.round, item.bucket, item.work))
            if time.monotonic() > end_s:
                self._pump_later()
                return
        for peer, queue in self._queues.items():
            link = self._links[peer]
            while queue and link.writable:
                self._send(link, queue.popleft())
                if time.monotonic() > end_s:
                    self._pump_later()
                    return

    def _pump_later(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._pump_scheduled = False
        self._pump()

    def _send(self, link: Connection, item: _Item) -> None:
        work = item.work
        from_slot = not item.computed and self._codec.identity
        if not item.computed and not from_slot:
            work = self._compute(item.round, item.bucket, work)
            self._report(item.round, item.bucket, work)
        assert work.send_step is not None
        payload: memoryview | None = None
        if not work.poison and work.contributors:
            offset, length = self._layout.span(item.bucket, work.first_segment, work.segment_count)
            if from_slot:
                assert item.round.raw is not None
                start = self._segments[item.bucket][work.first_segment][2]
                payload = item.round.raw.data.cast("B")[start * VALUE_BYTES : start * VALUE_BYTES + length]
            else:
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
        )
        link.send_chunk(header, payload)
        if self.on_chunk_sent is not None:
            self.on_chunk_sent(header)
