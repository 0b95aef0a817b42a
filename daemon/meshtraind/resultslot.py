"""The one slot in which the learner finds a round's means (M1): whose it is, and what of them lies there already."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshtraind.codecs.base import CodecError, Values
from meshtraind.segments import Forms, Segment, each_payload
from meshtraind.slices import Slices


class Final(NamedTuple):
    """A run of segments whose result is known."""

    bucket: int
    first_segment: int
    segment_count: int
    void: bool  # no values: poison (V1), or nobody's
    offset: int  # of its bytes in the area
    length_bytes: int


class ResultSlot:
    """Belongs to one round at a time.

    What arrives while its round has it is decoded where it arrives, still in the processor's cache; what lay encoded
    in the round's area before is decoded from there in slices. Each final segment takes one of the two ways.

    Args:
        values: the slot, as long as the plan's vector.
        on_result: called with the round when all of it lies here; never from within `open`.
        on_broken: called with what is wrong with a payload that was received.
    """

    def __init__(
        self,
        values: Values,
        forms: Forms,
        on_result: Callable[[int], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._values: Values | None = values
        self._forms = forms
        self._on_result = on_result
        self._on_broken = on_broken
        self._left = 0  # segments
        self._area: memoryview | None = None
        self._arrived: deque[Final] = deque()  # before the slot was opened, not decoded yet
        self._slices = Slices(self._decode_one)
        self.round = 0  # 0: nobody's

    def open(self, number: int, area: memoryview | None, arrived: Sequence[Final]) -> None:
        """From now on the slot is this round's. What of it has `arrived` lies in `area`.

        The same round again: for a learner that has been started anew.
        """
        assert number >= self.round, f"round {number} after round {self.round}"
        self.round = number
        self.restart(area, arrived)

    def restart(self, area: memoryview | None, arrived: Sequence[Final]) -> None:
        """What lies here of the open round is void (G6): this has arrived of it, in `area`."""
        self._left = sum(map(len, self._forms.of(self.round).segments))
        self._area = area
        self._arrived = deque(arrived)
        if arrived:
            self._slices.run_later()

    def place(self, segment: Segment) -> Values:
        """Where a segment of the open round is to be decoded."""
        assert self._values is not None
        return self._values[segment.start : segment.start + segment.count]

    def took(self, segment_count: int) -> bool:
        """Final segments of the open round lie in their places, or are void. Returns whether these were the last."""
        self._left -= segment_count
        return not self._left

    def forget(self, number: int) -> None:
        """The round's area is somebody else's from now on."""
        if number == self.round:
            self._arrived.clear()
            self._area = None

    def close(self) -> None:
        """Lets go of the slot: a view of the shared memory would keep all of it mapped."""
        self._slices.stop()
        self._arrived.clear()
        self._area = self._values = None

    def _decode_one(self) -> bool:
        if not self._arrived:
            return False
        final = self._arrived.popleft()
        if not final.void:
            assert self._area is not None
            end = final.first_segment + final.segment_count
            try:
                segments = self._forms.of(self.round).segments[final.bucket][final.first_segment : end]
                run = self._area[final.offset : final.offset + final.length_bytes]
                for segment, payload in each_payload(segments, run):
                    segment.codec.decode_into(payload, self.place(segment))
            except CodecError as error:
                self._on_broken(f"round {self.round}, bucket {final.bucket}: {error}")
                return True  # its segments never come to lie here
        if self.took(final.segment_count):
            self._on_result(self.round)
        return True
