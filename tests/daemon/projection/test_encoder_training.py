"""LGC: what a daemon asks its learner to learn from, and what it makes of any answer."""

import logging

import numpy as np
import pytest

from meshtraind.codecs.base import Values
from meshtraind.projection.lgc.autoencoder import starting_weights
from meshtraind.projection.lgc.training import ROUNDS_BETWEEN, ROWS_AT_ONCE, ROWS_MAX, EncoderLearning
from meshwire import limits
from meshwire.encoded_layout.lgc_autoencoder import GROUP_VALUES, WEIGHT_MAX, Architecture
from meshwire.messages.envelope import Envelope, Role, encode
from meshwire.messages.learner import EncoderTask, LearnerEncoder

ARCHITECTURE = Architecture(4)
OTHERS = np.full(ARCHITECTURE.weight_count, 0.5, np.float32)


def groups(count: int, scale: float = 1.0) -> Values:
    return np.random.default_rng(5).standard_normal((count, GROUP_VALUES)).astype(np.float32) * np.float32(scale)


def asked(learning: EncoderLearning) -> EncoderTask:
    for _ in range(ROUNDS_BETWEEN):
        learning.begin_round()
    for _ in range(ROWS_MAX // ROWS_AT_ONCE):
        assert learning.task() is None, "the sample is not whole"
        learning.see(groups(32 * ROWS_AT_ONCE))
    task = learning.task()
    assert task is not None
    return task


def test_a_sample_of_many_rounds_fits_into_a_message_and_is_asked_about_once() -> None:
    learning = EncoderLearning(Architecture(GROUP_VALUES))
    task = asked(learning)
    assert len(encode(Envelope(Role.NOTICE, 0, task))) < limits.CONTROL_BYTES_MAX
    assert len(task.rows) == limits.ENCODER_SAMPLE_BYTES_MAX
    assert learning.task() is None


@pytest.mark.parametrize("count", [0, 1, 31, 33, 5000])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rounds_count_alike_however_long_and_large_they_are(count: int, scale: float) -> None:
    learning = EncoderLearning(ARCHITECTURE)
    learning.see(groups(count, scale))
    rows = learning._rows[: learning._seen]
    assert len(rows) <= ROWS_AT_ONCE
    assert bool(len(rows)) == bool(count)
    np.testing.assert_allclose(np.square(rows).sum(axis=1), 1.0, rtol=1e-5)


def test_zeros_are_nothing_to_learn_from() -> None:
    learning = EncoderLearning(ARCHITECTURE)
    learning.see(np.zeros((64, GROUP_VALUES), np.float32))
    assert not learning._seen


def test_learnt_weights_are_taken_and_the_next_task_begins_with_them() -> None:
    learning = EncoderLearning(ARCHITECTURE)
    learning.answered(LearnerEncoder(number=asked(learning).number, weights=OTHERS.tobytes()))
    np.testing.assert_array_equal(learning.weights, OTHERS)
    assert asked(learning).weights == OTHERS.tobytes()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"error": "no memory"}, "no memory"),
        ({"weights": b""}, "the learner sent 0 bytes for 1280 weights"),
        ({"weights": OTHERS.tobytes() + b"\0"}, "the learner sent 5121 bytes for 1280 weights"),
        ({"weights": (OTHERS * np.float32(np.nan)).tobytes()}, "a weight of the autoencoder is not a number"),
        ({"weights": (OTHERS * np.float32(4 * WEIGHT_MAX)).tobytes()}, "or beyond 1024"),
    ],
)
def test_without_weights_those_of_before_stay_and_the_log_says_why(
    answer: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    learning = EncoderLearning(ARCHITECTURE)
    with caplog.at_level(logging.WARNING):
        learning.answered(LearnerEncoder.model_validate({"number": asked(learning).number, **answer}))
    np.testing.assert_array_equal(learning.weights, starting_weights(ARCHITECTURE))
    assert said in caplog.text
    assert asked(learning).number == 2, "it is asked again"


def test_a_learner_is_not_kept_from_its_steps_all_the_time() -> None:
    learning = EncoderLearning(ARCHITECTURE)
    learning.answered(LearnerEncoder(number=asked(learning).number, weights=OTHERS.tobytes()))
    for _ in range(ROUNDS_BETWEEN - 1):
        learning.begin_round()
        learning.see(groups(32 * ROWS_AT_ONCE))
    assert learning.task() is None
    learning.begin_round()
    assert learning.task() is not None


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    """As that of a process that has ended, to which another one has been asked since."""
    learning = EncoderLearning(ARCHITECTURE)
    learning.answered(LearnerEncoder(number=0, weights=OTHERS.tobytes()))
    first = asked(learning)
    learning.learner_lost()
    again = learning.task()
    assert again is not None
    learning.answered(LearnerEncoder(number=first.number, weights=OTHERS.tobytes()))
    np.testing.assert_array_equal(learning.weights, starting_weights(ARCHITECTURE))
