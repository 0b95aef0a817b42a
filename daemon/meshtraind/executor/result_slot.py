"""The one slot in which the learner finds a round's means (M1): whose it is, and what of them lies there already."""

from collections import deque
from collections.abc import Callable, Sequence

from meshtraind.codecs.base import CodecError, Values
from meshtraind.contributions.results import Final
from meshtraind.contributions.segments import RoundForms, Segment
from meshtraind.executor.host import RoundHost
from meshtraind.executor.projections import Projections
from meshtraind.projection.expansion import Expansion
from meshtraind.runtime.timeslice import Slices


class ResultSlot:
    """Belongs to one round at a time.

    What arrives while its round has it is decoded where it arrives, still in the processor's cache; what lay encoded
    in the round's area before is decoded from there in slices. Each final segment takes one of the two ways.

    Args:
        values: the slot, as long as the plan's vector.
        projections: what becomes of the vector that is sent.
        decode: puts the values of what is final, and not void, into this slot. May raise CodecError.
        host: hears when all of the round lies here, never from within `open`; and of what was checked when it came, and
            is found to be wrong late.
    """

    def __init__(
        self,
        values: Values,
        forms: RoundForms,
        projections: Projections,
        decode: Callable[[Final, "ResultSlot"], None],
        host: RoundHost,
    ) -> None:
        self._values: Values | None = values
        self._forms = forms
        self._decode = decode
        self._projections = projections
        self._expansion: Expansion | None = None  # of the open round
        self._host = host
        self._left = 0  # segments
        self._arrived: deque[Final] = deque()  # before the slot was opened, not decoded yet
        self._slices = Slices(self._next)
        self.round = 0  # 0: nobody's

    def open(self, number: int, arrived: Sequence[Final]) -> None:
        """From now on the slot is this round's. This has arrived of it.

        The same round again: for a learner that has been started anew.
        """
        assert number >= self.round, f"round {number} after round {self.round}"
        self.round = number
        self.restart(arrived)

    def restart(self, arrived: Sequence[Final]) -> None:
        """What lies here of the open round is void (G6): this has arrived of it."""
        form = self._forms.of(self.round)
        self._left = sum(map(len, form.segments))
        if self._values is None:
            return  # closed
        self._expansion = self._projections.of[form].expansion(form, self.round, self._values)
        self._arrived = deque(arrived)
        if arrived:
            self._slices.run_later()

    def place(self, segment: Segment) -> Values:
        """Where a segment of the open round is to be decoded."""
        assert self._expansion is not None
        return self._expansion.place(segment)

    def took(self, final: Final) -> bool:
        """Final segments of the open round lie in their places, or are void. Returns whether these were the last, and
        the means are there. A shorter vector is expanded in slices, and `on_result` follows."""
        self._left -= final.segment_count
        if self._expansion is None:
            return False  # closed
        self._expansion.took(final.bucket, final.segment_count, void=final.void)
        if not self._expansion.finished:
            self._slices.run_later()
            return False
        return not self._left

    def forget(self, number: int) -> None:
        """The round's area is somebody else's from now on."""
        if number == self.round:
            self._arrived.clear()

    def release(self) -> None:
        """The slot is somebody else's: nothing is put there any more."""
        self.round = 0
        self._arrived.clear()
        self._expansion = None

    def close(self) -> None:
        """Lets go of the slot: a view of the shared memory would keep all of it mapped."""
        self._slices.stop()
        self._arrived.clear()
        self._values = self._expansion = None

    def _next(self) -> bool:
        if not self._arrived:
            return self._expand_one()
        final = self._arrived.popleft()
        if not final.void:
            try:
                self._decode(final, self)
            except CodecError as error:
                self._host.chunk_broken(None, f"round {self.round}, bucket {final.bucket}: {error}")
                return True  # its segments never come to lie here
        if self.took(final):
            self._host.result_decoded(self.round)
        return True

    def _expand_one(self) -> bool:
        if self._expansion is None or not self._expansion.expand_one():
            return False
        if self._expansion.finished and not self._left:
            self._host.result_decoded(self.round)
        return True
