"""The samples that nobody holds: those that came back first, then the endless row of epochs (X1, X3).

Units are samples, or whole batches where a script's own sampler makes these.
"""

from collections.abc import Iterable, Sequence

from meshwire.messages.rounds import SampleBlock

Batch = tuple[SampleBlock, ...]  # of one epoch; one block, unless it was put together from what came back


class SamplePool:
    """Hands units out in order, oldest epoch first, each once.

    Args:
        total: units of an epoch.
        epoch, position: the pointer: nobody has had what lies from here on.
        returned: blocks before the pointer whose holder has given them back.
    """

    def __init__(self, total: int, epoch: int = 0, position: int = 0, returned: Iterable[SampleBlock] = ()) -> None:
        self._total = total
        self._pointer = epoch, position
        self._returned: list[SampleBlock] = []
        self.put_back(returned)

    @property
    def pointer(self) -> tuple[int, int]:
        """Epoch and position of the next unit that nobody has had; never an epoch's end."""
        return self._pointer

    @property
    def returned(self) -> tuple[SampleBlock, ...]:
        """What came back and has not been handed out again, in order."""
        return tuple(self._returned)

    @property
    def epoch(self) -> int:
        """Of the next unit."""
        return self._returned[0].epoch if self._returned else self._pointer[0]

    def left(self) -> int:
        """Units of that epoch."""
        epoch, position = self._pointer
        ahead = self._total - position if epoch == self.epoch else 0
        return ahead + sum(block.end - block.first for block in self._returned if block.epoch == self.epoch)

    def take(self, count: int) -> Batch:
        """The next units, all of one epoch: 1 <= `count` <= `left()`."""
        assert 1 <= count <= self.left()
        taken: list[SampleBlock] = []
        while count:
            part = self._next(self.epoch, count)
            count -= part.end - part.first
            taken.append(part)
        return tuple(_joined(taken))

    def skip(self) -> None:
        """Leaves out what is left of the epoch."""
        skipped = self.epoch
        self._returned = [block for block in self._returned if block.epoch != skipped]
        if self._pointer[0] == skipped:
            self._pointer = skipped + 1, 0

    def put_back(self, blocks: Iterable[SampleBlock]) -> None:
        """These come before everything that nobody has had."""
        self._returned = _joined(sorted([*self._returned, *blocks], key=place))

    def _next(self, epoch: int, count: int) -> SampleBlock:
        """At most `count` units, in one piece."""
        if self._returned:
            block = self._returned.pop(0)
            end = min(block.end, block.first + count)
            if end < block.end:
                self._returned.insert(0, SampleBlock(epoch=epoch, first=end, end=block.end))
            return SampleBlock(epoch=epoch, first=block.first, end=end)
        _, position = self._pointer
        end = min(self._total, position + count)
        self._pointer = (epoch, end) if end < self._total else (epoch + 1, 0)
        return SampleBlock(epoch=epoch, first=position, end=end)


def place(block: SampleBlock) -> tuple[int, int, int]:
    """By which blocks are sorted."""
    return block.epoch, block.first, block.end


def _joined(blocks: Sequence[SampleBlock]) -> list[SampleBlock]:
    """Neighbours in one piece."""
    joined: list[SampleBlock] = []
    for block in blocks:
        if joined and (joined[-1].epoch, joined[-1].end) == (block.epoch, block.first):
            joined[-1] = SampleBlock(epoch=block.epoch, first=joined[-1].first, end=block.end)
        else:
            joined.append(block)
    return joined
