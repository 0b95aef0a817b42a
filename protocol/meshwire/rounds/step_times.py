"""A learner's own step times, and the waiting times that follow from them (R3, V2); and how long it may hang."""

import math
import statistics
from collections import deque

from meshwire import limits

DEADLINE_FACTOR = 3.0  # V2: times the 95th percentile
DEADLINE_S_MIN = 2.0  # V2
DEADLINE_STEPS_MIN = 5  # fewer predict nothing
HANGS_AFTER_S = 1800.0  # a first step may compile and fill caches; as long as members wait for each other to prepare
HANGS_AFTER_S_A_STEP = 60.0  # for each further step of a period, of which nothing is heard before its end (R9)
LATE_AFTER_RTTS_MIN = 2.0  # R3: a call sooner than this crosses the bind that it asks for


def percentile_95(times_s: list[float]) -> float:
    """The smallest time that at least 95 % do not exceed (nearest rank). `times_s` is not empty."""
    return sorted(times_s)[math.ceil(0.95 * len(times_s)) - 1]


def hangs_after_s(period: int) -> float:
    """How long a learner may make no move in its first steps, or in one that was given up, before it is ended. Other
    steps are measured by those before them. `period`: local steps in a round (R9)."""
    return HANGS_AFTER_S + HANGS_AFTER_S_A_STEP * (max(period, 1) - 1)


class StepTimes:
    """The last steps of one learner. Its first one stands apart: what it allocates and compiles predicts nothing."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=limits.STEP_HISTORY_MAX)

    def add(self, step_s: float) -> None:
        """A step has ended. It counts as its deadline at most: one stop of a minute must not allow the next one three,
        while a machine that has become slower for good still moves its deadline by and by."""
        if self._first_s is None:
            self._first_s = step_s
            return
        deadline_s = self.deadline_s()
        self._steps_s.append(step_s if deadline_s is None else min(step_s, deadline_s))

    def late_after_s(self, rtt_s: float, elapsed_s: float) -> float:
        """R3: one median step, at least 2 RTT. Before the second has ended, what is known of the first stands in."""
        first_s = elapsed_s if self._first_s is None else self._first_s
        median_s = statistics.median(self._steps_s) if self._steps_s else first_s
        return max(median_s, LATE_AFTER_RTTS_MIN * rtt_s)

    def deadline_s(self) -> float | None:
        """V2: the larger of 3 x the 95th percentile and 2 s; None while there is too little history."""
        if 1 + len(self._steps_s) < DEADLINE_STEPS_MIN:
            return None
        return max(DEADLINE_FACTOR * percentile_95(list(self._steps_s)), DEADLINE_S_MIN)
