"""What all learners of a device say, as one message to its daemon (R6).

Each of them is driven by the same messages of the daemon's, runs the same script and has a part of each batch. So all
say the same, one after the other, each at its own speed: a message is the device's once all have said it. What they
have for a round is added up; what they have seen is joined. Being idle (R5) is no such message: one that has heard of
an epoch's end in time does not wait for it, and the device is idle while all are.

What the daemon tells must reach all of them at the same place in their scripts where it decides what they do next: how
many local steps a period has, say, when the samples of a lost device are dealt again in its middle. So news of samples
waits until all learners wait.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

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
from meshwire.messages.rounds import Poison

ALIKE = "all learners of a device run the same script, and take the same steps on batches of their own"

# In what their messages must be equal
SAME: dict[type[Wire], tuple[str, ...]] = {
    LearnerApplied: ("round",),
    LearnerBarrier: ("number",),
    LearnerBucket: ("step", "bucket", "samples"),
    LearnerGoal: ("rounds",),
    LearnerHash: ("round", "sha256"),
    LearnerIdle: ("finished",),
    LearnerSealed: ("step",),
    LearnerStepped: ("step",),
}


class NotAlikeError(Exception):
    """A learner of the device does something else than the others; says which, and what."""


class WhatFollows(NamedTuple):
    """What follows from a learner's message.

    Attributes:
        device: says this now to its daemon.
        answer: to the learner, for which the daemon need not be asked.
    """

    device: Wire | None = None
    answer: Wire | None = None


class Together:
    """The messages of one device's learners, joined.

    Attributes:
        finished: learners that take no further step.
        waits: all learners wait for the daemon, at the same place in their scripts.
    """

    def __init__(self, learners: int) -> None:
        self._said: tuple[deque[Wire], ...] = tuple(deque() for _ in range(learners))
        self._idle: set[int] = set()
        self._is_idle = False  # as the daemon knows it
        self._start: Start | None = None  # the newest word to begin a step, while it holds
        self.finished: set[int] = set()
        self.waits = True  # for their first step

    def told(self, body: Wire) -> None:
        """The daemon tells all learners this."""
        if isinstance(body, Start):
            self._start, self.waits = body, False
        elif isinstance(body, RoundDone) and body.start:
            self._start = Start(step=body.start, decided=body.round, local_steps=body.local_steps)
            self.waits = False

    def hears(self, learner: int, body: Wire) -> WhatFollows:
        """A learner says this. Raises NotAlikeError."""
        if isinstance(body, LearnerBack):
            return self._back(learner, body)
        if isinstance(body, LearnerIdle):
            if not body.finished:
                return self._rests(learner, body)
            self.finished.add(learner)
        self._said[learner].append(body)
        if not all(self._said):
            return WhatFollows()
        whole = joined([said.popleft() for said in self._said])
        self.waits |= isinstance(whole, LearnerSealed)
        return WhatFollows(device=whole)

    def behind(self) -> list[int]:
        """The learners that have not said yet what others have."""
        return [learner for learner, said in enumerate(self._said) if not said] if any(self._said) else []

    def _rests(self, learner: int, body: LearnerIdle) -> WhatFollows:
        self._idle.add(learner)
        if len(self._idle) < len(self._said):
            return WhatFollows()
        self._is_idle = self.waits = True
        return WhatFollows(device=body)

    def _back(self, learner: int, body: LearnerBack) -> WhatFollows:
        self._idle.discard(learner)
        if self._is_idle:
            self._is_idle = False
            self._start = None  # the daemon says it again, behind the rounds of meanwhile
            return WhatFollows(device=body)
        return WhatFollows(answer=self._start)


def joined(said: Sequence[Wire]) -> Wire:
    """One message in place of those that all learners have said, by their places. Raises NotAlikeError."""
    first = said[0]
    for learner, other in enumerate(said[1:], start=2):
        if type(other) is not type(first) or _facts(other) != _facts(first):
            raise NotAlikeError(f"learner {learner} of this device {_does(other)}, learner 1 {_does(first)}: {ALIKE}")
    match first:
        case LearnerBucket():
            return _bucket(cast(Sequence[LearnerBucket], said))
        case LearnerSealed():
            return _sealed(cast(Sequence[LearnerSealed], said))
        case LearnerStepped():
            return _stepped(cast(Sequence[LearnerStepped], said))
    return first


def _bucket(said: Sequence[LearnerBucket]) -> LearnerBucket:
    weight, claim = sum(each.weight for each in said), max(each.claim for each in said)
    poisons = [each.poison for each in said if each.poison is not None]
    return said[0].model_copy(update={"weight": weight, "claim": claim, "poison": _worst(poisons)})


def _worst(poisons: Sequence[Poison]) -> Poison | None:
    """What is not a GradScaler's overflow, if there is any."""
    return next((poison for poison in poisons if not poison.overflow), poisons[0] if poisons else None)


def _sealed(said: Sequence[LearnerSealed]) -> LearnerSealed:
    used = bytes(_any_bit(values) for values in zip(*(each.used for each in said), strict=True))
    integers = tuple(max(values) for values in zip(*(each.integers for each in said), strict=True))
    return LearnerSealed(step=said[0].step, used=used, integers=integers)


def _any_bit(values: tuple[int, ...]) -> int:
    joint = 0
    for value in values:
        joint |= value
    return joint


def _stepped(said: Sequence[LearnerStepped]) -> LearnerStepped:
    """As long as the one that has computed longest, for which the others have waited."""
    slowest = max(said, key=lambda each: each.step_s - each.exposed_s)
    return slowest.model_copy(update={"samples": sum(each.samples for each in said)})


def _facts(body: Wire) -> tuple[object, ...]:
    return tuple(getattr(body, name) for name in SAME.get(type(body), ()))


def _does(body: Wire) -> str:
    match body:
        case LearnerBucket(step=step, samples=blocks):
            samples = ", ".join(f"{each.first}-{each.end} of epoch {each.epoch + 1}" for each in blocks)
            return f"computes step {step}" + (f" with the device's samples {samples}" if samples else "")
        case LearnerSealed(step=step):
            return f"has computed step {step}"
        case LearnerStepped(step=step):
            return f"has ended step {step}"
        case LearnerApplied(round=round_):
            return f"has applied round {round_}"
        case LearnerBarrier(number=number):
            return f"waits in barrier {number}" if number else "waits for the end of the job"
        case LearnerGoal(rounds=rounds):
            return f"trains for {rounds} rounds"
        case LearnerHash(round=round_, sha256=digest):
            return f"has {digest.hex()[:8]} as the hash of the base after round {round_}"
        case LearnerIdle():
            return "has finished"
    return f"says {type(body).__name__}"
