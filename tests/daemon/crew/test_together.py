"""R6: what several learners say is one message, once all have said it."""

from typing import Any

import pytest

from meshtraind.crew.together import NotAlikeError, Together, WhatFollows, joined
from meshwire.message_base import Wire
from meshwire.messages.learner import (
    LearnerApplied,
    LearnerBack,
    LearnerBarrier,
    LearnerBucket,
    LearnerGoal,
    LearnerHash,
    LearnerIdle,
    LearnerSealed,
    LearnerStepped,
    RoundDone,
    Start,
)
from meshwire.messages.rounds import Poison, SampleBlock

IDLE = LearnerIdle(reason="the samples of epoch 1 are used up", finished=False)
DONE: dict[str, Any] = {
    "void": False,
    "reason": "",
    "overflow": False,
    "stop": False,
    "weight": 1.0,
    "contributors": 1,
    "used": b"",
    "integers": (),
    "hyperparameters": b"",
    "squared_norm": 0.0,
}
START = Start(step=3, decided=2, local_steps=4)


def bucket(index: int = 0, step: int = 1, **fields: Any) -> LearnerBucket:
    return LearnerBucket(**{"step": step, "bucket": index, "weight": 4.0, **fields})


def poison(*, overflow: bool) -> Poison:
    return Poison(bucket=0, parameter="weight", reason="its gradient holds NaN or infinity", overflow=overflow)


def test_a_message_is_the_devices_when_the_last_learner_has_said_it() -> None:
    """Each at its own speed, in the order in which they say them."""
    together = Together(3)
    heard = [together.hears(learner, bucket(index)) for learner in (0, 1) for index in (0, 1)]
    assert heard == [WhatFollows()] * 4
    assert together.behind() == [2]
    last = [together.hears(2, bucket(index)).device for index in (0, 1)]
    assert last == [bucket(index, weight=12.0) for index in (0, 1)]
    assert together.behind() == []


def test_what_learners_have_is_added_up_and_what_they_have_seen_is_joined() -> None:
    """W3, X1, X2, O5."""
    samples = (SampleBlock(epoch=0, first=0, end=4),)
    parts = [bucket(weight=2.0, claim=3, samples=samples), bucket(weight=3.0, claim=5, samples=samples)]
    assert joined(parts) == bucket(weight=5.0, claim=5, samples=samples)
    seals = [
        LearnerSealed(step=1, used=b"\x01\x80", integers=(1, 9)),
        LearnerSealed(step=1, used=b"\x02\x80", integers=(4, 2)),
    ]
    assert joined(seals) == LearnerSealed(step=1, used=b"\x03\x80", integers=(4, 9))


def test_a_step_takes_as_long_as_its_slowest_learner_computes() -> None:
    """Whom the other has waited for, which is no exchange."""
    steps = [
        LearnerStepped(step=1, samples=4, step_s=2.0, exposed_s=1.5),
        LearnerStepped(step=1, samples=3, step_s=1.9, exposed_s=0.2),
    ]
    assert joined(steps) == LearnerStepped(step=1, samples=7, step_s=1.9, exposed_s=0.2)


@pytest.mark.parametrize(
    ("overflows", "whole"), [((None, None), None), ((None, True), True), ((True, False), False), ((False, True), False)]
)
def test_one_learner_whose_values_are_not_finite_is_enough(
    overflows: tuple[bool | None, ...], whole: bool | None
) -> None:
    """V1: it is an overflow of a GradScaler if all that is not finite is one."""
    said = [bucket(poison=None if each is None else poison(overflow=each)) for each in overflows]
    found = joined(said)
    assert isinstance(found, LearnerBucket)
    assert (found.poison and found.poison.overflow) == whole


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (bucket(step=2), bucket(step=3), "learner 2 of this device computes step 3, learner 1 computes step 2"),
        (bucket(), LearnerSealed(step=1, used=b"", integers=()), "has computed step 1, learner 1 computes step 1"),
        (bucket(0), bucket(1), "computes step 1"),
        (
            bucket(samples=(SampleBlock(epoch=0, first=0, end=4),)),
            bucket(samples=(SampleBlock(epoch=1, first=4, end=8),)),
            "with the device's samples 4-8 of epoch 2, learner 1 .* 0-4 of epoch 1",
        ),
        (LearnerApplied(round=1), LearnerApplied(round=2), "has applied round 2"),
        (LearnerBarrier(number=1), LearnerBarrier(number=0), "waits for the end of the job"),
        (LearnerGoal(rounds=3), LearnerGoal(rounds=4), "trains for 4 rounds"),
        (LearnerHash(round=1, sha256=bytes(32)), LearnerHash(round=1, sha256=b"1" * 32), "31313131 as the hash"),
        (LearnerIdle(reason="", finished=True), LearnerBarrier(number=0), "learner 1 has finished"),
        (
            LearnerStepped(step=1, samples=1, step_s=1.0, exposed_s=0.0),
            LearnerStepped(step=2, samples=1, step_s=1.0, exposed_s=0.0),
            "has ended step 2",
        ),
    ],
)
def test_learners_that_do_different_things_are_told_apart(first: Wire, second: Wire, why: str) -> None:
    with pytest.raises(NotAlikeError, match=f"{why}.*: all learners of a device run the same script"):
        joined([first, second])


def test_the_device_is_idle_while_all_its_learners_are() -> None:
    """R5: the first that is back ends it; the others have the daemon's word to begin, as it has."""
    together = Together(2)
    together.told(START)
    assert together.hears(0, IDLE) == WhatFollows()
    assert together.hears(1, IDLE) == WhatFollows(device=IDLE)
    assert together.hears(1, LearnerBack()) == WhatFollows(device=LearnerBack())
    assert together.hears(0, LearnerBack()) == WhatFollows(), "the word of before is none: rounds may come first"
    together.told(START)
    assert together.hears(0, IDLE) == WhatFollows()
    assert together.hears(0, LearnerBack()) == WhatFollows(answer=START)


def test_a_learner_that_was_idle_by_itself_begins_its_step_by_the_word_of_before() -> None:
    """Its daemon has not heard of it; the word is that of the round that has come with a promise, too."""
    together = Together(2)
    together.told(START)
    together.told(RoundDone(round=7, step=3, start=4, local_steps=2, **DONE))
    together.hears(1, IDLE)
    assert together.hears(1, LearnerBack()) == WhatFollows(answer=Start(step=4, decided=7, local_steps=2))


def test_learners_wait_at_the_same_place_between_their_seal_and_the_word_to_start() -> None:
    """Before the first step, too, and while all are idle; not while one of them may compute."""
    together = Together(2)
    assert together.waits
    together.told(START)
    assert not together.waits
    seal = LearnerSealed(step=3, used=b"", integers=())
    together.hears(0, seal)
    assert not together.waits
    together.hears(1, seal)
    assert together.waits
    together.told(RoundDone(round=3, step=3, start=0, **DONE))
    assert together.waits
    together.told(RoundDone(round=4, step=4, start=5, **DONE))
    assert not together.waits
    together.hears(0, IDLE)
    assert not together.waits
    together.hears(1, IDLE)
    assert together.waits
    together.hears(1, LearnerBack())
    assert together.waits, "until its word to start"
    together.told(START)
    assert not together.waits


def test_a_learner_that_has_finished_waits_for_the_others() -> None:
    together = Together(2)
    done = LearnerIdle(reason="it has finished", finished=True)
    assert together.hears(0, done) == WhatFollows()
    assert together.finished == {0}
    assert together.hears(1, done) == WhatFollows(device=done)
