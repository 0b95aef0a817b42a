"""Error feedback loses nothing (P1), and what a round did to it can be taken back (C1, V1).

All numbers are small integers or few halvings of them, so every sum here is exact.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Values
from meshtraind.contributions.error_feedback import Feedback, Residual, Run
from meshtraind.contributions.segments import Segment

Wide = NDArray[np.float64]

COUNT = 12
CODEC = codec_named("onebit")
RUNS = ((0, 5), (5, 3), (8, 4))
WEIGHTS = st.sampled_from([1.0, 2.0, 64.0])


def integers(seed: int, count: int = COUNT) -> Values:
    return np.random.default_rng(seed).integers(-64, 65, count).astype(np.float32)


def half(values: Values) -> Values:
    """What an encoding keeps: every value towards zero to a multiple of 16, which is left in `values` as the rest."""
    kept: Values = np.trunc(values / 16) * 16
    values -= kept
    return kept


def encode(residual: Residual, number: int, gradient: Values, weight: float = 1.0, runs: Sequence[Run] = RUNS) -> Wide:
    """What a round sends of w*g, in units of g."""
    sent = np.zeros(COUNT)
    for start, count in runs:
        values = residual.begin(number, start, count, weight)
        values += np.float32(weight) * gradient[start : start + count]
        sent[start : start + count] = half(values) / np.float64(weight)
    return sent


def left(residual: Residual) -> Wide:
    """In units of g."""
    values = residual.values.astype(np.float64)
    for start, count in RUNS:
        values[start : start + count] /= residual.weights.get(start, 1.0)
    return values


@given(
    st.lists(st.tuples(st.booleans(), WEIGHTS), min_size=1, max_size=12),
    st.integers(0, 3),
    st.integers(0, 2**16),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_what_is_sent_and_what_is_left_are_the_gradients_but_of_void_rounds(
    rounds: list[tuple[bool, float]], staleness: int, seed: int, decay: float
) -> None:
    """P1, V1: also when later rounds have been encoded before one turns out to be void. With a decay the geometric
    one, in which a void round is not counted either. In units of g, however few samples a round has."""
    residual = Residual(COUNT, decay)
    total, sent = np.zeros(COUNT), np.zeros(COUNT)
    voids = [void for void, _ in rounds]
    gradients = [integers(seed + number) for number in range(len(rounds))]
    encoded: list[Wide] = []
    for number, (gradient, (_, weight)) in enumerate(zip(gradients, rounds, strict=True)):
        encoded.append(encode(residual, number, gradient, weight))
        if number >= staleness:
            residual.settle(number - staleness, void=voids[number - staleness])
    for number in range(max(0, len(voids) - staleness), len(voids)):
        residual.settle(number, void=voids[number])
    for void, gradient, part in zip(voids, gradients, encoded, strict=True):
        if not void:
            total = total * decay + gradient
            sent = sent * decay + part
    assert (sent + left(residual) == total).all()


class Books:
    """The same by definition: what each round that may still be undone has done to a run, in order, in units of g.

    Attributes:
        changes: by run: (round, or 0 for what was added; its gradient less what it sent, or what was added).
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.changes: dict[int, list[tuple[int, Wide]]] = {start: [] for start, _ in RUNS}

    def add(self, run: int, underway: Sequence[int], values: Wide) -> None:
        """Before the rounds that are underway."""
        changes = self.changes[run]
        at = next((at for at, (number, _) in enumerate(changes) if number in underway), len(changes))
        changes.insert(at, (0, values))

    def drop(self, rounds: Sequence[int]) -> None:
        """They have never been."""
        for run, changes in self.changes.items():
            self.changes[run] = [change for change in changes if change[0] not in rounds]

    @property
    def left(self) -> Wide:
        values = np.zeros(COUNT)
        for start, count in RUNS:
            run = values[start : start + count]
            for number, change in self.changes[start]:
                run *= self.decay if number else 1.0
                run += change
        return values


@given(
    st.lists(st.tuples(st.sampled_from(["round", "part", "count", "void", "rewind", "add"]), WEIGHTS), max_size=16),
    st.integers(0, 2**16),
    st.sampled_from([0.5, 1.0]),
)
def test_whatever_is_undone_or_added_what_is_left_is_that_of_the_rounds_that_count(
    acts: list[tuple[str, float]], seed: int, decay: float
) -> None:
    """P1, V1, C1 in units of g: rounds of any weights, in which not every bucket travels; void ones, also where others
    have built on them; rewinds; and what an owner owed, which is from before all rounds underway."""
    residual, books, numbers = Residual(COUNT, decay), Books(decay), np.random.default_rng(seed)
    underway: list[int] = []
    newest = 0
    for index, (act, weight) in enumerate(acts):
        if act in ("round", "part"):
            newest += 1
            gradient = integers(seed + index)
            runs = RUNS if act == "round" else [RUNS[numbers.integers(len(RUNS))]]
            sent = encode(residual, newest, gradient, weight, runs)
            underway.append(newest)
            for start, count in runs:
                run = slice(start, start + count)
                books.changes[start].append((newest, gradient[run] - sent[run]))
        elif act == "add":
            start, count = RUNS[numbers.integers(len(RUNS))]
            more = integers(seed + index, count)
            more[0] = 0.0
            residual.add(start, start + 1, more[1:] * np.float32(weight), weight)
            books.add(start, underway, more.astype(np.float64))
        elif underway and act == "rewind":
            after = underway[numbers.integers(len(underway))]
            residual.rewind(after)
            books.drop([number for number in underway if number > after])
            underway = [number for number in underway if number <= after]
            newest = after
        elif underway:
            number = underway.pop(0)
            residual.settle(number, void=act == "void")
            if act == "void":
                books.drop([number])
        assert (left(residual) == books.left).all()


@pytest.mark.parametrize(("before", "after"), [(1.0, 1e39), (1e-300, 1e300), (5e-324, 1.0), (1e300, 1e-300)])
def test_weights_without_measure_warn_of_nothing(before: float, after: float) -> None:
    """V1: what is not finite is found when it is encoded, and given back as it was."""
    residual = Residual(COUNT, 0.5)
    residual.begin(1, 0, 5, before)[:] = 3.0
    residual.begin(2, 0, 5, after)
    residual.cancel(2, 0)
    assert (residual.values[:5] == 3.0).all()
    assert residual.weights == {0: before}
    residual.begin(2, 0, 5, after)
    residual.add(0, 1, np.ones(2, np.float32), after)
    residual.settle(1, void=True)


@pytest.mark.parametrize("weight", [3.0, 7.0])
def test_with_equal_weights_nothing_is_computed(weight: float) -> None:
    """To the bit, whatever the weight is."""
    once, other = Residual(COUNT, 0.95), Residual(COUNT, 0.95)
    for number in range(1, 5):
        values = np.random.default_rng(number).standard_normal(COUNT).astype(np.float32)
        for residual, each in ((once, 1.0), (other, weight)):
            left = residual.begin(number, 0, COUNT, each)
            left += values
            residual.add(0, 0, values, each)
        if number > 1:
            once.settle(number - 1, void=number == 3)
            other.settle(number - 1, void=number == 3)
        assert once.values.tobytes() == other.values.tobytes()


def test_a_void_round_in_lockstep_has_never_been() -> None:
    """V1, to the bit, whatever the values: with s=0 nothing has built on it."""
    residual = Residual(COUNT, 0.95)
    residual.values[:] = np.random.default_rng(1).standard_normal(COUNT)
    before = residual.values.copy()
    encode(residual, 1, np.full(COUNT, 1e-3, np.float32))
    residual.settle(1, void=True)
    assert residual.values.tobytes() == before.tobytes()


def test_a_run_whose_encoding_fails_is_as_it_was() -> None:
    residual = Residual(COUNT, 0.95)
    encode(residual, 1, integers(1))
    before = residual.values.copy()
    values = residual.begin(2, 5, 3, 64.0)
    values[:] = np.inf
    residual.cancel(2, 5)
    assert residual.values.tobytes() == before.tobytes()
    residual.begin(2, 0, 5, 64.0)[:] = 7  # another run of the same round stays taken back alone
    residual.settle(2, void=True)
    assert residual.values.tobytes() == before.tobytes()


def test_rounds_that_run_again_are_rewound() -> None:
    """C1: the owner's, to the bit; those that stand below the cut stay."""
    residual = Residual(COUNT, 0.95)
    encode(residual, 1, integers(1))
    before = residual.values.copy()
    for number in (2, 3, 4):
        encode(residual, number, integers(number))
    residual.rewind(1)
    assert residual.values.tobytes() == before.tobytes()
    residual.settle(1, void=False)
    assert residual.values.tobytes() == before.tobytes()


BUCKET = (0, COUNT)
WHOLE = (BUCKET,)


def left_of_bucket(feedback: Feedback) -> Wide:
    """The worker's, of rounds in which the bucket is one run; in units of g."""
    return feedback.worker.values / np.float64(feedback.worker.weights.get(0, 1.0))


def segments(*starts: int) -> list[tuple[Run, Segment]]:
    return [(BUCKET, Segment(CODEC, 4 * start, 4, start, 1, measured=True)) for start in starts]


@given(
    st.integers(0, 2**16),
    st.sampled_from(["none", "counts", "void"]),
    WEIGHTS,
    WEIGHTS,
    st.booleans(),
    st.sampled_from([0.5, 1.0]),
)
def test_a_shard_that_moves_is_paid_by_the_worker(
    seed: int, in_flight: str, weight: float, weight_in_flight: float, finished: bool, decay: float
) -> None:
    """Nothing that was owed is lost when another member becomes the owner: the sum over both is as before, in units of
    g, in which a mean is worth four parts here; also where the worker's round on its way turns out to be void, and
    whatever its weight is. A decay takes its part of it as it would have of the owner's, in rounds that begin after the
    cut."""
    feedback, others = Feedback(COUNT, decay), 4.0
    encode(feedback.worker, 1, integers(seed + 1), weight, WHOLE)
    owed = feedback.finish(1, BUCKET, 0, COUNT, others * weight, weight)
    owed += integers(seed)
    half(owed)
    owed = owed.copy()
    feedback.settle(1, void=False, contributed=True)
    before = left_of_bucket(feedback)
    sent, gradient = np.zeros(COUNT), np.zeros(COUNT, np.float32)
    if in_flight != "none":
        gradient = integers(seed + 2)
        sent = encode(feedback.worker, 2, gradient, weight_in_flight, WHOLE)
        if finished:
            feedback.finish(2, BUCKET, 0, COUNT, others * weight_in_flight, weight_in_flight)[:] = 5.0
    feedback.enter(1, segments(*range(5, COUNT)))
    assert (feedback.owner.values[5:] == 0).all()
    assert (feedback.owner.values[:5] == owed[:5]).all()
    feedback.settle(2, void=in_flight == "void", contributed=True)
    moved = np.where(np.arange(COUNT) >= 5, others * owed, 0)
    counts = in_flight == "counts"
    expected = decay * (before + moved) + gradient - sent if counts else before + moved
    assert (left_of_bucket(feedback) == expected).all()


@given(st.integers(0, 2**16), WEIGHTS, WEIGHTS)
def test_who_has_only_owned_pays_as_much_of_a_later_mean(seed: int, weight: float, later: float) -> None:
    """However much smaller that is: as one of the four whose mean it was."""
    feedback = Feedback(COUNT)
    feedback.finish(1, BUCKET, 0, COUNT, 4 * weight, weight)[:] = owed = integers(seed)
    feedback.settle(1, void=False, contributed=False)
    feedback.enter(1, segments(*range(COUNT)))
    assert (feedback.worker.begin(2, 0, COUNT, later) == 4 * later * owed).all()


def test_an_owner_that_runs_again_forgets_what_it_finished() -> None:
    """C1: its residual goes back to the cut before anything of it is handed over."""
    feedback = Feedback(COUNT)
    feedback.finish(1, BUCKET, 0, COUNT, 2.0, 1.0)[:] = 1
    feedback.settle(1, void=False, contributed=True)
    feedback.finish(2, BUCKET, 0, COUNT, 2.0, 1.0)[:] = 100
    feedback.enter(1, segments(3))
    assert feedback.owner.values.tolist() == [1, 1, 1, 0] + [1] * 8
    assert feedback.worker.values.tolist() == [0, 0, 0, 2] + [0] * 8


def test_who_is_not_in_a_round_that_runs_again_owes_what_it_owed_before() -> None:
    """X3: a learner that rests when its round runs again has sent nothing; as an owner its member has."""
    feedback = Feedback(COUNT)
    encode(feedback.worker, 1, integers(1))
    feedback.settle(1, void=False, contributed=True)
    before = feedback.worker.values.copy()
    encode(feedback.worker, 2, integers(2))
    feedback.finish(2, BUCKET, 0, COUNT, 2.0, 1.0)[:] = 3
    feedback.settle(2, void=False, contributed=False)
    assert feedback.worker.values.tobytes() == before.tobytes()
    assert (feedback.owner.values == 3).all()


def test_memory_of_settled_rounds_is_used_again() -> None:
    """M1: no more snapshots than rounds on their way."""
    residual = Residual(COUNT)
    seen: list[Values] = []
    for number in range(1, 20):
        encode(residual, number, integers(number))
        for before in residual._before.values():
            if not any(before.values is values for values in seen):
                seen.append(before.values)
        if number > 2:
            residual.settle(number - 2, void=False)
    assert len(seen) == 3
