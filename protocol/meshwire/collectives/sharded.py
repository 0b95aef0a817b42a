"""One bucket's way through the sharded exchange: encoded to its shard's owner, and once more from it (C2).

The owner keeps the parts of all members apart, behind the vector in its area, until all of a run are there. A final
shard is cut into frames as a part is.
"""

from collections.abc import Iterator

from meshwire.collectives.direct import PartsExchange
from meshwire.collectives.exchange import Work
from meshwire.collectives.topology import Op
from meshwire.frames.header import Flags, Header


class ShardedExchange(PartsExchange):
    """The state of one bucket in one round."""

    def landed(self, header: Header) -> Work | None:
        copied = self._program.steps[header.step].op is Op.COPY
        return self._copied(header) if copied else self._part_landed(header)

    def _contributed(self) -> Iterator[Work]:
        for index, step in enumerate(self._program.steps):
            if step.op is Op.REDUCE:
                assert step.send_shard is not None
                for first, count in self._layout.chunks(self._bucket, self._shards[step.send_shard]):
                    yield self._sent((index,), first, count)
        for first, count in self._layout.chunks(self._bucket, self._shards[self._owned]):
            if self._all_there(self._received[first]):
                yield self._summed(first, count)

    def _copied(self, header: Header) -> Work:
        """A run is final."""
        return Work(
            first_segment=header.first_segment,
            segment_count=header.segment_count,
            incoming=header.contributors != 0,
            add_own=False,
            finish=False,
            deliver=True,
            at_once=True,
            send_steps=(),
            contributors=header.contributors,
            weight=header.weight,
            poison=bool(header.flags & Flags.POISON),
            length_bytes=header.payload_bytes,
            squared_norm=header.squared_norm,
        )
