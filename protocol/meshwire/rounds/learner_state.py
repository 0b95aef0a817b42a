"""What a daemon knows of its learner, and what follows: may it start, may it be passed over, is it overdue;
by its own step times."""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from meshwire import limits
from meshwire.model.schedule import turn
from meshwire.sync_modes.mode import Straggler, Visibility

DEADLINE_FACTOR = 3.0  # V2: times the 95th percentile
DEADLINE_S_MIN = 2.0  # V2
DEADLINE_STEPS_MIN = 5  # fewer predict nothing
HANGS_AFTER_S = 1800.0  # a first step may compile and fill caches; as long as members wait for each other to prepare
HANGS_AFTER_S_A_STEP = 60.0  # for each further step of a period, of which nothing is heard before its end (R9)
LATE_AFTER_RTTS_MIN = 2.0  # R3: a call sooner than this crosses the bind that it asks for

Decision = tuple[bool, str]
"""What was decided, and why."""


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """What the members of a job agreed on, and this member's place in it."""

    ranks: tuple[int, ...]
    """The members of the generation, sorted. A device keeps its rank for the job's life, so some may be missing."""
    rank: int
    buckets: int
    """Of a round in which all travel."""
    used_bytes: int
    """Length of the bitmap of used parameters (O5)."""
    integers: int
    """Number of integer buffers (O5)."""
    staleness: int
    """The bound s. More of it hides longer stalls of single learners, and makes gradients older."""
    straggler: Straggler
    """What happens to a late learner: its rounds go on without it (`carry`), or wait for it (R8)."""
    rtt_s: float
    """Round-trip time to the farthest member: no call is sent sooner than twice that after a bind (R3)."""
    visibility: Visibility = "eager"
    """When a complete round may be applied: at once (`eager`), or exactly at step k+s+1 (`fixed`, R8)."""
    ends_early: bool = False
    """A step is a period, and who has ended its own calls all others to end theirs (R9)."""
    unapplied_max: int = 1 << 30
    """Results that this daemon can keep for its learner. More of it lets the others go on longer without a learner
    that neither computes nor applies, and costs the memory of as many encoded rounds."""
    fewer: tuple[tuple[int, int, int], ...] = ()
    """T1: stretches of rounds in which fewer buckets travel. Of each the first round, the number in whose multiples all
    do (0: in none), and how many do else."""
    fewer_every: int = 0
    """T1: after so many rounds these stretches begin again; 0: never."""
    overlaps: bool = False
    """With s=1: a learner applies the round of its period within the next one (R9). So it begins that one without, even
    where the round is complete by then."""

    def __post_init__(self) -> None:
        assert list(self.ranks) == sorted(set(self.ranks)), "each rank once, in order"
        assert all(0 <= rank < limits.MEMBERS_MAX for rank in self.ranks)
        assert self.rank in self.ranks
        assert 1 <= self.buckets <= limits.BUCKETS_MAX
        assert 0 <= self.staleness <= limits.STALENESS_MAX
        assert self.visibility == "eager" or self.lockstep, "R8: fixed needs wait"
        assert not (self.ends_early and self.lockstep), "R9: in lockstep nobody calls"
        assert not self.overlaps or (self.staleness == 1 and self.lockstep), "R9: one round, with all in it"
        assert self.unapplied_max > self.staleness, "a learner may run so far ahead of what it has applied (R1)"

    @property
    def lockstep(self) -> bool:
        """A computing learner never nulls (R7, R8)."""
        return self.staleness == 0 or self.straggler == "wait"

    def buckets_of(self, round_: int) -> int:
        """How many travel in a round: they are numbered from 0."""
        at = turn(round_, self.fewer_every)
        for first, whole_every, buckets in reversed(self.fewer):
            if first <= at:
                return self.buckets if whole_every and round_ % whole_every == 0 else buckets
        return self.buckets


class Phase(Enum):
    """Where the learner is. It moves by its own inputs, and to GIVEN_UP also by a deadline."""

    BOUNDARY = "between two steps"
    COMPUTING = "computing, no bucket ready"
    BOUND = "computing, its step bound to a round"
    GIVEN_UP = "computing a step that will not be contributed"
    ABSENT = "absent"


def percentile_95(times_s: list[float]) -> float:
    """The smallest time that at least 95 % do not exceed (nearest rank). `times_s` is not empty."""
    return sorted(times_s)[math.ceil(0.95 * len(times_s)) - 1]


def hangs_after_s(local_steps: int) -> float:
    """How long a learner may make no move in its first steps, or in one that was given up, before it is ended. Other
    steps are measured by those before them. `local_steps`: of the period (R9)."""
    return HANGS_AFTER_S + HANGS_AFTER_S_A_STEP * (local_steps - 1)


class StepTimes:
    """The last steps of one learner. Its first one stands apart: what it allocates and compiles predicts nothing. Of a
    period what counts is the time of each local step, for the next period may have another number of them (R9, C3).

    Attributes:
        local_steps: of the step at hand.
    """

    def __init__(self) -> None:
        self.local_steps = 1
        self._first_s: float | None = None  # each of a local step
        self._steps_s: deque[float] = deque(maxlen=limits.STEP_HISTORY_MAX)
        self._percentile_s: float | None = None  # None while there is too little history

    @property
    def deadline_s(self) -> float | None:
        """V2: the larger of 3 x the 95th percentile and 2 s; None while there is too little history."""
        if self._percentile_s is None:
            return None
        return max(DEADLINE_FACTOR * self._percentile_s * self.local_steps, DEADLINE_S_MIN)

    def add(self, step_s: float) -> None:
        """A step has ended. It counts as its deadline at most: one stop of a minute must not allow the next one three,
        while a machine that has become slower for good still moves its deadline by and by."""
        if self._first_s is None:
            self._first_s = step_s / self.local_steps
            return
        counts_s = step_s if self.deadline_s is None else min(step_s, self.deadline_s)
        self._steps_s.append(counts_s / self.local_steps)
        if 1 + len(self._steps_s) >= DEADLINE_STEPS_MIN:
            self._percentile_s = percentile_95(list(self._steps_s))

    def late_after_s(self, rtt_s: float, elapsed_s: float) -> float:
        """R3: one median step, at least 2 RTT. Before the second has ended, what is known of the first stands in."""
        first_s = elapsed_s if self._first_s is None else self._first_s * self.local_steps
        median_s = statistics.median(self._steps_s) * self.local_steps if self._steps_s else first_s
        return max(median_s, LATE_AFTER_RTTS_MIN * rtt_s)


@dataclass(slots=True)
class Learner:
    """One learner as its daemon sees it. It begins present, at the boundary before its first step."""

    settings: RoundSettings
    phase: Phase = Phase.BOUNDARY
    applied: int = 0
    """Rounds applied (R0: a)."""
    step: int = 0
    base: int = 0
    """`applied` when the step began (R0)."""
    started_s: float = 0.0
    called_step: int | None = None
    """The period of this step is to end early (R9)."""
    given_up_step: int | None = None
    """What still arrives of this step is ignored (V2, R5)."""
    moved_s: float | None = None
    """Since when the next move is the learner's; None while it waits for peers."""
    overdue: bool = False
    """Not bound, and past its deadline (R5)."""
    absence: str = ""
    gone: bool = False
    """Absent for good: it applies nothing more, and nothing is kept for it."""
    loading: bool = False
    """Absent until it holds a base, and no learner of the generation: what follows `applied` is kept for it (J1)."""
    based: bool = False
    """Absent, and holds the base: it waits to be taken in (J1)."""
    begins: bool = False
    """It is taken in with the generation that is entered, as soon as all have entered that (G9)."""
    times: StepTimes = field(default_factory=StepTimes)

    def visible(self, decided: int, complete: int) -> int:
        """R8, R9: the last round that it may apply now. An absent learner is brought up to date whatever the mode."""
        settings, phase = self.settings, self.phase
        later = settings.visibility == "fixed" or (settings.overlaps and phase is not Phase.COMPUTING)
        if not later or phase is Phase.ABSENT:
            return complete
        return min(complete, max(decided - self.settings.staleness, 0))

    def may_start(self, decided: int, complete: int, waiting: Callable[[], str]) -> Decision:
        """R1: may it begin a step. `waiting` says what the oldest incomplete round waits for."""
        ahead = decided - self.applied
        allowed = f"{ahead} rounds ahead, {self.settings.staleness} allowed"
        if self.phase is Phase.ABSENT:
            return False, f"absent: {self.absence}"
        if self.phase is not Phase.BOUNDARY:
            return False, f"step {self.step} has not ended"
        if self.applied < (visible := self.visible(decided, complete)):
            return False, f"it has applied {self.applied} of the {visible} rounds that are to be applied first"
        if ahead > self.settings.staleness:
            return False, f"{allowed}: {waiting()}"
        return True, allowed

    def may_null(self, decided: int, complete: int) -> Decision:
        """R1, R4, R5, R7, R8: may its daemon null the round after `decided`, provided that it is called."""
        if self.phase is Phase.BOUND:
            return False, f"its step is still in round {decided}"
        hopeless = self.phase is Phase.GIVEN_UP and not self.settings.lockstep
        if self.overdue or hopeless or self.phase is Phase.ABSENT:
            return self._may_null_absent(decided, complete)
        if self.phase is Phase.BOUNDARY:
            return False, "its learner is between two steps (R1)"
        if self.settings.lockstep:
            return False, "its learner is computing, and every round waits for it (R7, R8)"
        if self.settings.ends_early:
            return False, "its learner is asked to end its period (R9)"
        bound = self.base + self.settings.staleness
        return decided < bound, f"its learner computes on base {self.base}: rounds up to {bound} can do without it (R4)"

    def _may_null_absent(self, decided: int, complete: int) -> Decision:
        """R5, as far as this daemon can follow."""
        bound = complete + self.settings.staleness + 1
        if self.begins:
            return False, "its learner begins when all have entered the generation (G9)"
        if self.gone:
            return decided < bound, f"its learner is gone; rounds up to {bound} are in reach (R5)"
        if self.settings.visibility == "fixed" and not self.loading:
            return False, "its learner is absent, and every round waits for it (R8)"
        kept = self.applied + self.settings.unapplied_max
        if kept < bound:
            return decided < kept, f"its learner has applied {self.applied}: rounds up to {kept} can be kept for it"
        return decided < bound, f"no gradient is due; rounds up to {bound} are in reach (R5)"

    def late_after_s(self, now_s: float) -> float:
        """R3: how long after its bind its daemon calls the round. At once where a call costs nobody anything (R9)."""
        rtt_s = self.settings.rtt_s
        if self.settings.ends_early:
            return LATE_AFTER_RTTS_MIN * rtt_s
        return self.times.late_after_s(rtt_s, now_s - self.started_s)

    def moved(self, now_s: float) -> None:
        """It did something: the time to its next move begins."""
        self.moved_s = now_s
        self.overdue = False

    def wait_for_peers(self, waits: bool, now_s: float) -> None:
        """At a boundary: while R1 holds it up, time does not run against it."""
        if self.phase is Phase.BOUNDARY and waits:
            self.moved_s = None
        elif self.moved_s is None:
            self.moved_s = now_s

    def hangs_since_s(self) -> float | None:
        """Since when it makes no move, where no deadline lets the others go on without it: in its first steps, and in
        one that was given up (V2). None: it computes in time, or what it waits for is not its own."""
        if self.step == 0 or self.phase is Phase.ABSENT:
            return None
        unmeasured = self.times.deadline_s is None
        return self.moved_s if unmeasured or self.phase is Phase.GIVEN_UP else None

    def cut_off_at_s(self) -> float | None:
        """When its next move is overdue (V2, R5); None if it may take any time."""
        deadline_s = self.times.deadline_s
        if deadline_s is None or self.moved_s is None or self.overdue:
            return None
        if self.phase is Phase.BOUND:
            return self.moved_s + deadline_s
        if self.phase in (Phase.BOUNDARY, Phase.COMPUTING) and not self.settings.lockstep:
            return self.moved_s + deadline_s
        return None
