"""Error feedback loses nothing (P1), and what a round did to it can be taken back (C1, V1).

All numbers are small integers or few halvings of them, so every sum here is exact.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Values
from meshtraind.feedback import Feedback, Residual, Run
from meshtraind.segments import Segment

COUNT = 12
CODEC = codec_named("onebit")
RUNS = ((0, 5), (5, 3), (8, 4))


def integers(seed: int, count: int = COUNT) -> Values:
    return np.random.default_rng(seed).integers(-64, 65, count).astype(np.float32)


def half(values: Values) -> Values:
    """What an encoding keeps: every value towards zero to a multiple of 16, which is left in `values` as the rest."""
    kept: Values = np.trunc(values / 16) * 16
    values -= kept
    return kept


def encode(residual: Residual, number: int, gradient: Values) -> Values:
    sent = np.zeros_like(gradient)
    for start, count in RUNS:
        values = residual.begin(number, start, count)
        values += gradient[start : start + count]
        sent[start : start + count] = half(values)
    return sent


@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.integers(0, 3),
    st.integers(0, 2**16),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_what_is_sent_and_what_is_left_are_the_gradients_but_of_void_rounds(
    voids: list[bool], staleness: int, seed: int, decay: float
) -> None:
    """P1, V1: also when later rounds have been encoded before one turns out to be void. With a decay the geometric
    one, in which a void round is not counted either."""
    residual = Residual(COUNT, decay)
    total, sent = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
    gradients = [integers(seed + number) for number in range(len(voids))]
    encoded: list[Values] = []
    for number, gradient in enumerate(gradients):
        encoded.append(encode(residual, number, gradient))
        if number >= staleness:
            residual.settle(number - staleness, void=voids[number - staleness])
    for number in range(max(0, len(voids) - staleness), len(voids)):
        residual.settle(number, void=voids[number])
    for void, gradient, part in zip(voids, gradients, encoded, strict=True):
        if not void:
            total = total * np.float32(decay) + gradient
            sent = sent * np.float32(decay) + part
    assert (sent + residual.values == total).all()


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
    values = residual.begin(2, 5, 3)
    values[:] = np.inf
    residual.cancel(2, 5)
    assert residual.values.tobytes() == before.tobytes()
    residual.begin(2, 0, 5)[:] = 7  # another run of the same round stays taken back alone
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


def segments(*starts: int) -> list[tuple[Run, Segment]]:
    return [(BUCKET, Segment(CODEC, 4 * start, 4, start, 1, measured=True)) for start in starts]


@given(st.integers(0, 2**16), st.booleans(), st.booleans(), st.sampled_from([0.5, 1.0]))
def test_a_shard_that_moves_is_paid_by_the_worker(seed: int, in_flight: bool, void: bool, decay: float) -> None:
    """Nothing that was owed is lost when another member becomes the owner: the sum over both is as before, times the
    weight; also where the worker's round on its way turns out to be void. A decay takes its part of it as it would have
    of the owner's, in rounds that begin after the cut."""
    feedback, weight = Feedback(COUNT, decay), 4.0
    finished = feedback.finish(1, BUCKET, 0, COUNT, weight)
    finished += integers(seed)
    half(finished)
    encode(feedback.worker, 1, integers(seed + 1))
    feedback.settle(1, void=False, contributed=True)
    before = feedback.worker.values.copy()
    owed = feedback.owner.values.copy()
    sent = encode(feedback.worker, 2, integers(seed + 2)) if in_flight else np.zeros(COUNT, np.float32)
    gradient = integers(seed + 2) if in_flight else np.zeros(COUNT, np.float32)
    feedback.enter(1, segments(*range(5, COUNT)))
    assert (feedback.owner.values[5:] == 0).all()
    assert (feedback.owner.values[:5] == owed[:5]).all()
    feedback.settle(2, void=void, contributed=True)
    moved = np.where(np.arange(COUNT) >= 5, owed * np.float32(weight), 0)
    counts = in_flight and not void
    expected = np.float32(decay) * (before + moved) + gradient - sent if counts else before + moved
    assert (feedback.worker.values == expected).all()


def test_an_owner_that_runs_again_forgets_what_it_finished() -> None:
    """C1: its residual goes back to the cut before anything of it is handed over."""
    feedback = Feedback(COUNT)
    feedback.finish(1, BUCKET, 0, COUNT, 2.0)[:] = 1
    feedback.settle(1, void=False, contributed=True)
    feedback.finish(2, BUCKET, 0, COUNT, 2.0)[:] = 100
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
    feedback.finish(2, BUCKET, 0, COUNT, 2.0)[:] = 3
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
