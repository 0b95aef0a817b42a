"""One bucket's way through a topology in which sums grow from hop to hop (C2: for linear codecs, which are encoded anew
at each, and for sketches, which are added as they are).

Where the program leads is data: round the ring, up and down a tree, or over a grid. Of the sums that come to a
shard the first one lands in the area where the shard lies, is added to, and leaves from the same place; there the shard
lands once more, final. That is safe without a second area: a shard's final bytes come back to a rank only after all
that it sent of it was received. Sums that come beside the first have places of their own behind the vector, for they
may come at the same time; all are added in the order of the program's steps, whenever they come.
"""

from collections.abc import Sequence

from meshwire.collectives.exchange import BucketExchange, Part, Strategy, Work
from meshwire.collectives.topology import Op, Program, Step
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import Flags, Header


class HopStrategy(Strategy):
    """Sums land where their shard lies; those of which another one has that place, in one block behind the vector for
    each such step."""

    def __init__(self, layout: EncodedLayout, program: Program) -> None:
        super().__init__(layout, program)
        self._lay_out(step for route in program.routes for step in route.sums[1:])

    @classmethod
    def area_vectors(cls, program: Program) -> float:
        return 1 + sum(len(route.sums[1:]) for route in program.routes) / program.shard_count

    def exchange(self, bucket: int) -> "HopExchange":
        return HopExchange(bucket, self)


class HopExchange(BucketExchange):
    """The state of one bucket in one round."""

    def __init__(self, bucket: int, strategy: HopStrategy) -> None:
        super().__init__(bucket, strategy)
        self._routes = strategy.program.routes
        # By first segment of a run, and step: sums that wait for the own part, or for others of the same run.
        self._waiting: dict[int, dict[int, Header]] = {}

    def landed(self, header: Header) -> Work | None:
        step = self._program.steps[header.step]
        assert step.recv_shard is not None
        if step.op is Op.COPY:
            _, length = self._layout.span(self._bucket, header.first_segment, header.segment_count)
            return self._final(header, length, self._routes[step.recv_shard].spread)
        sums = self._routes[step.recv_shard].sums
        if len(sums) == 1 and self._part is not None:
            return self._summed(step.recv_shard, header.first_segment, header.segment_count, (header,))
        waiting = self._waiting.setdefault(header.first_segment, {})
        waiting[header.step] = header
        if self._part is None or len(waiting) < len(sums):
            return None
        del self._waiting[header.first_segment]
        return self._of_waiting(waiting)

    def _contributed(self) -> list[Work]:
        works = [
            self._summed(shard, first, count, ())
            for shard, route in enumerate(self._routes)
            if not route.sums
            for first, count in self._chunks[shard]
        ]
        there = [
            (max(waiting), first)
            for first, waiting in self._waiting.items()
            if len(waiting) == len(self._routes[self._shard(waiting)].sums)
        ]
        return works + [self._of_waiting(self._waiting.pop(first)) for _, first in sorted(there)]

    def _shard(self, waiting: dict[int, Header]) -> int:
        shard = self._program.steps[next(iter(waiting))].recv_shard
        assert shard is not None
        return shard

    def _of_waiting(self, waiting: dict[int, Header]) -> Work:
        headers = [waiting[step] for step in sorted(waiting)]
        return self._summed(self._shard(waiting), headers[0].first_segment, headers[0].segment_count, headers)

    def _wrong(self, step: Step, header: Header, left: int) -> str | None:
        if step.op is not Op.REDUCE:
            return None
        if header.contributors & self._rank_bit:
            return "a sum that already holds this rank's part came back to be reduced"
        assert step.recv_shard is not None
        if len(self._routes[step.recv_shard].sums) == 1:
            return None
        # Sums that meet are of different members, and runs of them match.
        if header.contributors & ~step.parts:
            return f"contributors {header.contributors:#x} in a sum of no others than {step.parts:#x}"
        cut = min(left, self._layout.chunk_segments(self._bucket))
        if header.segment_count != cut:
            return f"{header.segment_count} segments in a chunk that all cut at {cut}"
        return None

    def _summed(self, shard: int, first_segment: int, segment_count: int, headers: Sequence[Header]) -> Work:
        """The own part of a run, and all sums that come to it, in the order of steps."""
        route = self._routes[shard]
        adds = self._part is not Part.NOTHING
        contributors, weight = (self._rank_bit if adds else 0), self._own_weight
        poison = self._part is Part.POISON
        for header in headers:
            contributors |= header.contributors
            weight += header.weight
            poison |= bool(header.flags & Flags.POISON)
        _, length = self._layout.span(self._bucket, first_segment, segment_count)
        incoming = bool(headers) and headers[0].contributors != 0
        others = [header for header in headers[1:] if header.contributors] if len(headers) > 1 else ()
        send_steps = route.spread if route.finishes else route.onward
        return Work(
            first_segment=first_segment,
            segment_count=segment_count,
            incoming=incoming,
            add_own=adds,
            finish=route.finishes,
            deliver=route.finishes,
            # What leaves on several links is computed once.
            at_once=incoming or bool(others) or len(send_steps) > 1,
            send_steps=send_steps,
            contributors=contributors,
            weight=weight,
            poison=poison,
            length_bytes=length,
            parts=tuple([self._place(header) for header in others]),
            senders=tuple([self._sender(header) for header in (*headers[:incoming], *others)]),
        )

    def _sender(self, header: Header) -> int:
        sender = self._program.steps[header.step].recv_from
        assert sender is not None
        return sender
