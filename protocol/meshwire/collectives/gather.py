"""One bucket's way through the gather: every part goes whole from its member to each other one (C2).

Each member sums all parts and divides once by the weight. Nothing is encoded anew, so there is no vector of encoded
means: what is kept of a round are the parts of those that contributed, in the order of ranks.
"""

from collections.abc import Iterator

from meshwire.collectives.direct import PartsExchange
from meshwire.collectives.exchange import Work
from meshwire.frames.header import Header


class GatherExchange(PartsExchange):
    """The state of one bucket in one round."""

    def landed(self, header: Header) -> Work | None:
        return self._part_landed(header)

    def _contributed(self) -> Iterator[Work]:
        everywhere = tuple(range(len(self._program.steps)))
        for first, count in self._layout.chunks(self._bucket, self._shards[self._owned]):
            if everywhere:  # none for a member alone
                yield self._sent(everywhere, first, count)
            if self._all_there(self._received[first]):
                yield self._summed(first, count)
