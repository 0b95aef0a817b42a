"""Error feedback: what an encoding leaves out is added to what is encoded next (P1: nothing is lost).

A worker's residual has the units of w*g, with the weight w of the round that has left it: it is multiplied by w_k/w
when round k of another weight begins, so that what is left out is as large in a later mean as it would have been in its
own, however few samples stand behind either. An owner's has the units of the mean. Thus, in units of g,
residual/w + sum sent_t/w_t is sum g_t. Both follow the rounds: what a round did to one can be taken back as long as the
round is not complete, for it may run again (C1) or be void (V1).

Where the number of values changes that travel of a bucket (T1), its places mean other values than before, and what was
left out of it is dropped; while none of them travel it stays.

With a decay b each round of a member begins with b times what its last one left out, at workers and at owners. Then
residual_T/w_T + sum b^(T-t) sent_t/w_t is sum b^(T-t) g_t over the rounds that count: it is a momentum (DeMo), or
is forgotten in time (SparseLoCo).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.contributions.segments import Segment
from meshwire.codecs.spec import CodecSpec
from meshwire.model.manifest import Momentum

Run = tuple[int, int]
"""(start, count) of values."""


@dataclass(slots=True)
class _Changed:
    """A run of values that a round has changed."""

    count: int
    left_by: float | None  # weight of the round before; None: nothing had been left
    weight: float  # of the round


@dataclass(slots=True)
class _Before:
    """What a residual was before a round changed it."""

    values: Values  # of interest where `runs` say so
    runs: dict[int, _Changed] = field(default_factory=dict)  # by start


class Residual:
    """A vector of what was left out. Rounds change it run by run, always in the same runs and in order.

    Args:
        count: of values.
        decay: what a round leaves of them before it adds anything, from 0 to 1.

    Attributes:
        values: as they are now.
        weights: by the start of a run: of the round that has left its values; none where nothing has been left.
        dropped: how many of them were given up that were not 0, because their places have another meaning now.
    """

    def __init__(self, count: int, decay: float = 1.0) -> None:
        self.values: Values = np.zeros(count, np.float32)
        self.weights: dict[int, float] = {}
        self.dropped = 0
        self._laid_out: dict[int, int] = {}  # by start: how many values of a bucket travel
        self._decay = np.float32(decay)
        self._before: dict[int, _Before] = {}
        self._spare: list[Values] = []

    def lay_out(self, bucket: Run) -> None:
        """Makes room for so many values of a bucket: as many travel from now on."""
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
            state.runs = {at: run for at, run in state.runs.items() if not start <= at < start + most}
        self.weights = {at: weight for at, weight in self.weights.items() if not start <= at < start + most}

    def is_laid_out(self, bucket: Run) -> bool:
        """Whether what is left out of a bucket, if anything, is of so many values."""
        start, count = bucket
        return self._laid_out.get(start, count) == count

    def begin(self, number: int, start: int, count: int, weight: float) -> Values:
        """The values of a run, decayed and in units of a round of this weight, which is above 0 (W3), for round
        `number` to change in place. They may be infinite or NaN where weights differ too much."""
        before = self._before.get(number)
        if before is None:
            spare = self._spare.pop() if self._spare else np.empty_like(self.values)
            before = self._before[number] = _Before(spare)
        assert start not in before.runs
        left_by = self.weights.get(start)
        before.runs[start] = _Changed(count, left_by, weight)
        self.weights[start] = weight
        now = self.values[start : start + count]
        before.values[start : start + count] = now
        if (factor := self._factor(left_by, weight)) != 1:
            with np.errstate(over="ignore", invalid="ignore"):  # found when it is encoded
                np.multiply(now, factor, out=now)
        return now

    def cancel(self, number: int, start: int) -> None:
        """Takes back what a round has begun to change in this run."""
        before = self._before[number]
        self._restore(before.values, start, before.runs.pop(start))

    def settle(self, number: int, *, void: bool) -> None:
        """Keeps what a complete round has changed: it is not taken back any more. What a void one has changed is undone
        (V1), but for rounding where later rounds have built on it."""
        before = self._before.pop(number, None)
        if before is None:
            return
        if void:
            for start, run in before.runs.items():
                self._take_back(number, before.values, start, run)
        self._spare.append(before.values)

    def rewind(self, after: int) -> None:
        """Undoes the rounds after `after`: they run again."""
        for number in sorted((number for number in self._before if number > after), reverse=True):
            before = self._before.pop(number)
            for start, run in before.runs.items():
                self._restore(before.values, start, run)
            self._spare.append(before.values)

    def add(self, run: int, start: int, values: Values, weight: float) -> None:
        """Adds what else was left out, before all rounds that are not settled.

        Args:
            run: where the run begins in which the values lie from `start` on.
            weight: of the round in whose units they are.
        """
        ran = self._that_changed(run, sorted(self._before))
        left_by = ran[0].runs[run].left_by if ran else self.weights.get(run)
        if left_by is None:
            left_by = weight
            if ran:
                ran[0].runs[run].left_by = weight
            else:
                self.weights[run] = weight
        with np.errstate(over="ignore", invalid="ignore"):  # found when it is encoded
            self._shift(ran, run, start, _in_units(values, weight, left_by))

    def owes(self, run: int) -> bool:
        """Whether anything was ever left out of a run, or may come back to it from a round that is not settled."""
        return run in self.weights or any(run in before.runs for before in self._before.values())

    @property
    def empty(self) -> bool:
        """Nothing is left out, and nothing will come back."""
        return not self._before and not self.values.any()

    def close(self) -> None:
        """Lets go of its vector, also where somebody still refers to this: nothing is owed any more."""
        self.values = np.empty(0, np.float32)
        self._before.clear()
        self._spare.clear()

    def _restore(self, before: Values, start: int, run: _Changed) -> None:
        self.values[start : start + run.count] = before[start : start + run.count]
        if run.left_by is None:
            self.weights.pop(start, None)
        else:
            self.weights[start] = run.left_by

    def _take_back(self, number: int, before: Values, start: int, run: _Changed) -> None:
        later = self._that_changed(start, sorted(other for other in self._before if other > number))
        if not later:
            self._restore(before, start, run)
            return
        end = start + run.count
        with np.errstate(over="ignore", invalid="ignore"):
            change = _in_units(before[start:end], run.left_by, run.weight) - later[0].values[start:end]
            self._shift(later, start, start, change)

    def _that_changed(self, run: int, rounds: Sequence[int]) -> list[_Before]:
        return [before for before in map(self._before.__getitem__, rounds) if run in before.runs]

    def _shift(self, ran: Sequence[_Before], run: int, start: int, change: Values) -> None:
        """Adds a change to what was before these rounds, in its units, and to everything since what they made of it."""
        end = start + len(change)
        for index, state in enumerate([*(before.values for before in ran), self.values]):
            if index:
                changed = ran[index - 1].runs[run]
                change = self._carried(change, state[start:end], self._factor(changed.left_by, changed.weight))
            state[start:end] += change

    def _factor(self, left_by: float | None, weight: float) -> np.float32:
        """The factor by which a round multiplies what was left before it."""
        if left_by is None or left_by == weight:
            return self._decay
        with np.errstate(over="ignore"):
            return np.float32(float(self._decay) * (weight / left_by))

    def _carried(self, change: Values, after: Values, factor: np.float32) -> Values:
        """What a round has made of a change of what was before it; `after` is what it has left, without the change."""
        return change * factor if factor != 1 else change


def _in_units(values: Values, of: float | None, weight: float) -> Values:
    """Values of w*g with one weight, in units of another."""
    return values if of is None or of == weight else values * np.float32(weight / of)


class Velocity(Residual):
    """A worker's momentum, which becomes 0 where a round sends (DGC): nothing from before it is in it there.

    That a sum of fp32 is 0 by chance is too rare to be told apart from that.
    """

    def _carried(self, change: Values, after: Values, factor: np.float32) -> Values:
        return np.where(after == 0, np.float32(0), super()._carried(change, after, factor))


class Feedback:
    """All that one member's encodings have left out in a job: as worker, and as owner of shards.

    Args:
        count: of values.
        decay: of both residuals.
        momentum: that the codec takes over from the optimizer; None: it does not.
        worker: whose residual as a worker it is; None: its own.

    Attributes:
        worker: in units of w*g.
        owner: of the segments that this member finishes, in units of the mean.
        velocity: the worker's momentum, in units of w*g as the residual, where the codec keeps it. It follows the
            rounds as residuals do: what a void round has added is taken out of it, also what later ones have
            multiplied. What those have put of it into their residual is not: a part of one step's momentum is then in
            the model.
    """

    def __init__(
        self, count: int, decay: float = 1.0, momentum: Momentum | None = None, worker: Residual | None = None
    ) -> None:
        self._shares_worker = worker is not None
        self.worker = Residual(count, decay) if worker is None else worker
        self.owner = Residual(count, decay)
        self.velocity = Velocity(count, momentum.factor) if momentum is not None else None
        self._weights: dict[Run, tuple[float, float]] = {}  # by bucket: of all and this one, when it finished the last

    def finish(self, number: int, bucket: Run, start: int, count: int, weight: float, own_weight: float) -> Values:
        """The owner's residual of a run of a bucket that round `number` finishes, to be changed in place.

        Args:
            weight: of all contributors.
            own_weight: this member's, or the mean one if it is not among them.
        """
        self.owner.lay_out(bucket)
        self._weights[bucket] = weight, own_weight
        return self.owner.begin(number, start, count, 1.0)  # means have no weight

    def settle(self, number: int, *, void: bool, contributed: bool) -> None:
        """Keeps or undoes what a complete round has changed. Whoever has encoded a part and is not in it after all (X3,
        what others held is dealt again) has lost that step's gradient as every void one's, and nothing of what it owed
        before."""
        self.worker.settle(number, void=void or not contributed)
        if self.velocity is not None:
            self.velocity.settle(number, void=void or not contributed)
        self.owner.settle(number, void=void)

    def enter(self, cut: int, lost: Iterable[tuple[Run, Segment]]) -> None:
        """Begins a generation after round `cut`, in which this member finishes `lost` (bucket, segment) no more.

        What it still owed there it sends as a worker: times the weight of all, for it was part of a mean, in units of
        its own weight in the same round. So it is as much of a later mean, as long as this member's share of all
        samples stays what it was: nothing is lost, and nothing but the usual parts travels. Workers' residuals never
        roll back, for their parts are sent again as they are (C1); the owner's do, for its runs are finished anew.
        """
        self.owner.rewind(cut)
        for bucket, segment in lost:
            if bucket not in self._weights or not self.owner.is_laid_out(bucket):
                continue
            owed = self.owner.values[segment.start : segment.start + segment.count]
            if self.worker.is_laid_out(bucket):
                weight, own_weight = self._weights[bucket]
                self.worker.add(bucket[0], segment.start, owed * np.float32(weight), own_weight)
            else:
                self.owner.dropped += int(np.count_nonzero(owed))
            owed[:] = 0

    def close(self) -> None:
        """Lets go of its vectors."""
        for residual in (None if self._shares_worker else self.worker, self.owner, self.velocity):
            if residual is not None:
                residual.close()


def feedback_of(
    codec: CodecSpec, count: int, momentum: Momentum | None, worker: Residual | None = None
) -> Feedback | None:
    """What a job's codec needs of error feedback; None for a codec without. `worker` as in `Feedback`."""
    return Feedback(count, codec.decay, momentum, worker) if codec.error_feedback else None
