"""One bucket's way round the ring: sums are added to at every hop (C2: for linear codecs, which are encoded anew there,
and for sketches, which are added as they are).

A shard lands in the area once in the reduce half, is added to, and leaves from the same place; it lands there once
more, final, in the copy half. That is safe without a second area: a shard's final bytes come back to a rank only after
its successor has received what that rank sent of it.
"""

from collections.abc import Iterator

from meshwire.collectives.exchange import Exchange, Part, Work
from meshwire.collectives.topology import Op, Program, Step
from meshwire.frames.header import Flags, Header
from meshwire.layout.encoded import EncodedLayout
from meshwire.model.plan import Shard


class RingExchange(Exchange):
    """The state of one bucket in one round."""

    def __init__(self, bucket: int, program: Program, shards: tuple[Shard, ...], layout: EncodedLayout) -> None:
        super().__init__(bucket, program, shards, layout)
        self._landed: list[list[Header]] = [[] for _ in program.steps]  # reduce chunks that wait for the own part

    def landed(self, header: Header) -> Work | None:
        step = self._program.steps[header.step]
        if step.op is Op.REDUCE and self._part is None:
            self._landed[header.step].append(header)
            return None
        return self._arrived(header)

    def _contributed(self) -> Iterator[Work]:
        poison = self._part is Part.POISON
        for shard in self._program.initial_shards():
            for first, count in self._layout.chunks(self._bucket, self._shards[shard]):
                yield self._work(shard, None, first, count, 0, 0.0, poison=poison)
        for headers in self._landed:
            for header in headers:
                yield self._arrived(header)
            headers.clear()

    def _wrong(self, step: Step, header: Header, left: int) -> str | None:
        if step.op is Op.REDUCE and header.contributors & self._rank_bit:
            return "a sum that already holds this rank's part came back to be reduced"
        return None

    def _arrived(self, header: Header) -> Work:
        step = self._program.steps[header.step]
        assert step.recv_shard is not None
        own_poison = step.op is Op.REDUCE and self._part is Part.POISON
        return self._work(
            step.recv_shard,
            header.step,
            header.first_segment,
            header.segment_count,
            header.contributors,
            header.weight,
            poison=own_poison or bool(header.flags & Flags.POISON),
            squared_norm=header.squared_norm,
        )

    def _work(
        self,
        shard: int,
        step_index: int | None,
        first_segment: int,
        segment_count: int,
        contributors: int,
        weight: float,
        *,
        poison: bool,
        squared_norm: float = 0.0,
    ) -> Work:
        copying = step_index is not None and self._program.steps[step_index].op is Op.COPY
        adds = not copying and self._part is not Part.NOTHING
        finish = not copying and self._program.finishes(shard)
        if adds:
            contributors |= self._rank_bit
            weight += self._own_weight
        incoming = step_index is not None and bool(contributors & ~self._rank_bit if adds else contributors)
        send_step = self._program.next_send(shard, step_index)
        return Work(
            first_segment=first_segment,
            segment_count=segment_count,
            incoming=incoming,
            add_own=adds,
            finish=finish,
            deliver=finish or copying,
            at_once=incoming,
            send_steps=() if send_step is None else (send_step,),
            contributors=contributors,
            weight=weight,
            poison=poison,
            length_bytes=self._layout.span(self._bucket, first_segment, segment_count)[1],
            squared_norm=squared_norm,
        )
