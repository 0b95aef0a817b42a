"""Error feedback: what an encoding leaves out is added to what is encoded next (P1: nothing is lost).

A worker's residual has the units of w*g, an owner's those of the mean. Both follow the rounds: what a round did to one
can be taken back as long as the round is not complete, for it may run again (C1) or be void (V1).

Where the number of values changes that travel of a bucket (T1), its places mean other values than before, and what was
left out of it is dropped; while none of them travel it stays.

With a decay b each round of a member begins with b times what its last one left out, at workers and at owners. Then
residual_T + sum b^(T-t) sent_t is sum b^(T-t) came_t over the rounds that count: it is a momentum (DeMo), or
is forgotten in time (SparseLoCo).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.segments import Segment
from meshwire.codecspec import CodecSpec
from meshwire.manifest import Momentum

Run = tuple[int, int]
"""(start, count) of values."""


@dataclass(slots=True)
class _Before:
    """What a residual was before a round changed it."""

    values: Values  # of interest where `runs` say so
    runs: dict[int, int] = field(default_factory=dict)  # start: count

    def covers(self, start: int) -> bool:
        """Whether the round has changed the value at `start`."""
        return any(first <= start < first + count for first, count in self.runs.items())


class Residual:
    """One vector of what was left out. Rounds change it run by run, always in the same runs and in order.

    Args:
        count: of values.
        decay: what a round leaves of them before it adds anything, from 0 to 1.

    Attributes:
        values: as they are now.
        dropped: how many of them were given up that were not 0, because their places have another meaning now.
    """

    def __init__(self, count: int, decay: float = 1.0) -> None:
        self.values: Values = np.zeros(count, np.float32)
        self.dropped = 0
        self._laid_out: dict[int, int] = {}  # by start: how many values of a bucket travel
        self._decay = np.float32(decay)
        self._before: dict[int, _Before] = {}
        self._spare: list[Values] = []

    def lay_out(self, bucket: Run) -> None:
        """So many values of a bucket travel from now on."""
        start, count = bucket
        before = self._laid_out.get(start, count)
        self._laid_out[start] = count
        if before == count:
            return
        most = max(before, count)
        place = self.values[start : start + most]
        self.dropped += int(np.count_nonzero(place))
        place.fill(0)
        for state in self._before.values():
            state.runs = {at: size for at, size in state.runs.items() if not start <= at < start + most}

    def is_laid_out(self, bucket: Run) -> bool:
        """Whether what is left out of a bucket, if anything, is of so many values."""
        start, count = bucket
        return self._laid_out.get(start, count) == count

    def begin(self, number: int, start: int, count: int) -> Values:
        """The values of a run, decayed, which round `number` is going to change in place."""
        before = self._before.get(number)
        if before is None:
            spare = self._spare.pop() if self._spare else np.empty_like(self.values)
            before = self._before[number] = _Before(spare)
        assert start not in before.runs
        before.runs[start] = count
        now = self.values[start : start + count]
        before.values[start : start + count] = now
        if self._decay != 1:
            np.multiply(now, self._decay, out=now)
        return now

    def cancel(self, number: int, start: int) -> None:
        """The round changes this run not after all."""
        before = self._before[number]
        count = before.runs.pop(start)
        self.values[start : start + count] = before.values[start : start + count]

    def settle(self, number: int, *, void: bool) -> None:
        """A round is complete: it is not taken back any more. A void one has never been (V1), but for rounding where
        later rounds have built on it."""
        before = self._before.pop(number, None)
        if before is None:
            return
        if void:
            for start, count in before.runs.items():
                self._take_back(number, before.values[start : start + count], start)
        self._spare.append(before.values)

    def rewind(self, after: int) -> None:
        """The rounds after `after` have not been: they run again."""
        for number in sorted((number for number in self._before if number > after), reverse=True):
            before = self._before.pop(number)
            for start, count in before.runs.items():
                self.values[start : start + count] = before.values[start : start + count]
            self._spare.append(before.values)

    def add(self, start: int, values: Values) -> None:
        """Something more was left out, before all rounds that are not settled. It lies within one run of theirs."""
        self._shift(sorted(self._before), start, values)

    def _take_back(self, number: int, before: Values, start: int) -> None:
        end = start + len(before)
        later = [other for other in sorted(self._before) if other > number and start in self._before[other].runs]
        if not later:
            self.values[start:end] = before
            return
        self._shift(later, start, before - self._before[later[0]].values[start:end])

    def _shift(self, rounds: Sequence[int], start: int, change: Values) -> None:
        """Adds a change to what was before these rounds, and what has become of it to everything since."""
        end = start + len(change)
        ran = [before for before in map(self._before.__getitem__, rounds) if before.covers(start)]
        for index, state in enumerate([*(before.values for before in ran), self.values]):
            if index:
                change = self._carried(change, state[start:end])
            state[start:end] += change

    def _carried(self, change: Values, after: Values) -> Values:
        """What a round has made of a change of what was before it; `after` is what it has left, without the change."""
        return change * self._decay if self._decay != 1 else change


class Velocity(Residual):
    """A worker's momentum, which becomes 0 where a round sends (DGC): nothing from before it is in it there.

    That a sum of fp32 is 0 by chance is too rare to be told apart from that.
    """

    def _carried(self, change: Values, after: Values) -> Values:
        return np.where(after == 0, np.float32(0), super()._carried(change, after))


class Feedback:
    """One member's, of one job.

    Args:
        count: of values.
        decay: of both residuals.
        momentum: that the codec takes over from the optimizer; None: it does not.

    Attributes:
        worker: in units of w*g.
        owner: of the segments that this member finishes, in units of the mean.
        velocity: the worker's momentum, in units of w*g, where the codec keeps it. It follows the rounds as residuals
            do: what a void round has added is taken out of it, also what later ones have multiplied. What those
            have put of it into their residual is not: a part of one step's momentum is then in the model.
    """

    def __init__(self, count: int, decay: float = 1.0, momentum: Momentum | None = None) -> None:
        self.worker = Residual(count, decay)
        self.owner = Residual(count, decay)
        self.velocity = Velocity(count, momentum.factor) if momentum is not None else None
        self._weights: dict[Run, float] = {}  # by bucket: of the newest round in which something of it was finished

    def finish(self, number: int, bucket: Run, start: int, count: int, weight: float) -> Values:
        """The owner's residual of a run of a bucket that round `number` finishes, to be changed in place."""
        self.owner.lay_out(bucket)
        self._weights[bucket] = weight
        return self.owner.begin(number, start, count)

    def settle(self, number: int, *, void: bool, contributed: bool) -> None:
        """A round is complete. Whoever has encoded a part and is not in it after all (X3) has lost that step's gradient
        as every void one's, and nothing of what it owed before."""
        self.worker.settle(number, void=void or not contributed)
        if self.velocity is not None:
            self.velocity.settle(number, void=void or not contributed)
        self.owner.settle(number, void=void)

    def enter(self, cut: int, lost: Iterable[tuple[Run, Segment]]) -> None:
        """A generation begins after round `cut`, in which this member finishes `lost` (bucket, segment) no more.

        What it still owed there it sends as a worker: times the weight, for it was part of a mean. So nothing is lost,
        and nothing but the usual parts travels. Workers' residuals never roll back, for their parts are sent again as
        they are (C1); the owner's do, for its runs are finished anew.
        """
        self.owner.rewind(cut)
        for bucket, segment in lost:
            if bucket not in self._weights or not self.owner.is_laid_out(bucket):
                continue
            owed = self.owner.values[segment.start : segment.start + segment.count]
            if self.worker.is_laid_out(bucket):
                self.worker.add(segment.start, owed * np.float32(self._weights[bucket]))
            else:
                self.owner.dropped += int(np.count_nonzero(owed))
            owed[:] = 0


def feedback_of(codec: CodecSpec, count: int, momentum: Momentum | None) -> Feedback | None:
    """None for a codec without."""
    return Feedback(count, codec.decay, momentum) if codec.error_feedback else None
