"""What a trace tells a person: rounds, who was in them and how old, nulls, calls, lost steps, and whom the learner
waited for."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from meshwire.messages.rounds import Call
from meshwire.rounds.effects import Broadcast, Effect, LearnerCutOff, ProtocolError, RoundComplete, StepDropped
from meshwire.rounds.inputs import GenerationEntered, Input, MessageReceived, StartStep
from meshwire.rounds.learner_state import Phase, RoundSettings
from meshwire.rounds.machine import RoundMachine
from meshwire.text import printable

REASONS_SHOWN_MAX = 5
REASON_CHARS_MAX = 160


@dataclass(frozen=True, slots=True)
class Wait:
    """The learner stood in front of a step that R1 did not allow yet.

    Attributes:
        step: the last one that it had begun.
        reason: what it waited for most of the time.
    """

    begin_s: float
    end_s: float
    step: int
    reason: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Waits:
    """Follows a machine from input to input."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self._begin_s: float | None = None
        self._last_s = 0.0
        self._reason = ""
        self._seconds: dict[str, float] = {}  # of the present wait, by reason

    def take(self, now_s: float, step: int, machine: RoundMachine) -> None:
        """`machine` right after an input at `now_s`."""
        if self._begin_s is not None:
            self._seconds[self._reason] = self._seconds.get(self._reason, 0.0) + now_s - self._last_s
        blocked = machine.phase is Phase.BOUNDARY and machine.decided - machine.complete > machine.settings.staleness
        if blocked:
            self._begin_s = now_s if self._begin_s is None else self._begin_s
            self._reason = machine.waiting()
        elif self._begin_s is not None:
            self.waits.append(Wait(self._begin_s, now_s, step, max(self._seconds, key=self._seconds.__getitem__)))
            self._begin_s = None
            self._seconds.clear()
        self._last_s = now_s


class Summary:
    """Fed with every input and its effects."""

    def __init__(self, settings: RoundSettings) -> None:
        self._settings = settings
        self._begin_s: float | None = None
        self._end_s = 0.0
        self._step = 0
        self._steps = 0
        self._rounds = 0
        self._committed = 0
        self._contributors: Counter[int] = Counter()
        self._ranks = settings.ranks
        self._ages: dict[int, Counter[int]] = {rank: Counter() for rank in settings.ranks}  # of all ranks there were
        self._nulls: Counter[int] = Counter()
        self._entered: list[str] = []
        self._calls_sent = 0
        self._calls_received = 0
        self._void: list[str] = []
        self._cut_offs: list[str] = []
        self._dropped: list[str] = []
        self._errors: list[str] = []
        self._waits = Waits()

    def take(self, input_: Input, now_s: float, effects: list[Effect], machine: RoundMachine) -> None:
        """An input at `now_s`, what followed from it, and the machine right after it."""
        self._begin_s = now_s if self._begin_s is None else self._begin_s
        self._end_s = now_s
        match input_:
            case StartStep(step) if machine.phase is Phase.COMPUTING:
                self._steps += step != self._step  # one that was told to start and went idle starts again
                self._step = step
            case GenerationEntered(ranks=ranks) if machine.settings.ranks == ranks:
                self._ranks = ranks
                self._ages |= {rank: Counter() for rank in self._ranks if rank not in self._ages}
                self._entered.append(f"after round {machine.complete}: ranks {', '.join(map(str, self._ranks))}")
            case MessageReceived(message=Call()):
                self._calls_received += 1
            case _:
                pass
        for effect in effects:
            if isinstance(effect, StepDropped) and machine.phase is Phase.ABSENT:
                continue  # it went idle by itself, with nothing in hand
            self._take(effect)
        self._committed = machine.committed
        self._waits.take(now_s, self._step, machine)

    def _take(self, effect: Effect) -> None:
        match effect:
            case Broadcast(message=Call()):
                self._calls_sent += 1
            case RoundComplete(round=round_, void=void, reason=reason, binds=binds):
                self._rounds += 1
                self._contributors[len(binds)] += 1
                for rank in self._ranks:
                    if (bind := binds.get(rank)) is None:
                        self._nulls[rank] += 1
                    else:
                        self._ages[rank][round_ - 1 - bind.base] += 1
                if void:
                    self._void.append(f"round {round_}: {reason}")
            case LearnerCutOff(reason=reason):
                self._cut_offs.append(reason)
            case StepDropped(step=step, reason=reason):
                self._dropped.append(f"step {step}: {reason}")
            case ProtocolError(rank=rank, text=text):
                self._errors.append(f"rank {rank}: {text}")
            case _:
                pass

    def values(self) -> dict[str, Any]:
        """The story as plain values, for `--json`. Rounds are those that were complete; a rank's nulls and ages are
        counted in these."""
        longest = self._longest()
        return {
            "rank": self._settings.rank,
            "members": len(self._ranks),
            "staleness": self._settings.staleness,
            "straggler": self._settings.straggler,
            "seconds": self._seconds(),
            "steps": self._steps,
            "rounds": self._rounds,
            "committed": self._committed,
            "entered": self._entered,
            "contributors": {str(count): rounds for count, rounds in sorted(self._contributors.items())},
            "ranks": [
                {"rank": rank, "contributed": ages.total(), "nulled": self._nulls[rank], "ages": self._histogram(ages)}
                for rank, ages in sorted(self._ages.items())
            ],
            "calls_sent": self._calls_sent,
            "calls_received": self._calls_received,
            "void": self._void,
            "cut_offs": self._cut_offs,
            "steps_dropped": self._dropped,
            "protocol_errors": self._errors,
            "waited_s": self._waited_s(),
            "longest_wait": asdict(longest) if longest is not None else None,
        }

    def text(self) -> str:
        """The story in some lines, for a terminal."""
        return "".join(f"{printable(line)}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        settings = self._settings
        yield (
            f"rank {settings.rank} of {len(settings.ranks)}, bound s = {settings.staleness}, {settings.straggler}: "
            f"{self._steps} steps in {self._seconds():.1f} s"
        )
        yield f"rounds        {self._rounds} complete, {self._committed} of them on all members"
        by_count = [f"{rounds} with {count}" for count, rounds in sorted(self._contributors.items(), reverse=True)]
        yield f"contributors  {', '.join(by_count) or 'none'}"
        yield from self._rank_lines()
        yield f"calls         {self._calls_sent} sent, {self._calls_received} received"
        for name, found in (
            ("generations", self._entered),
            ("void rounds", self._void),
            ("cut off", self._cut_offs),
            ("lost steps", self._dropped),
            ("broken rules", self._errors),
        ):
            yield f"{name:14}{len(found) or 'none'}"
            yield from (f"  {text[:REASON_CHARS_MAX]}" for text in found[:REASONS_SHOWN_MAX])
            if len(found) > REASONS_SHOWN_MAX:
                yield f"  and {len(found) - REASONS_SHOWN_MAX} more"
        longest = self._longest()
        if longest is None:
            yield "learner       never waited for a peer"
        else:
            yield (
                f"learner       waited {self._waited_s():.1f} s in all; longest {longest.seconds:.2f} s, "
                f"after step {longest.step}: {longest.reason}"
            )

    def _rank_lines(self) -> Iterator[str]:
        heads = "".join(f"{f'age {age}':>8}" for age in self._seen_ages())
        yield f"{'rank':>6}{'contributed':>13}{'nulled':>8}  {heads}"
        for rank, counts in sorted(self._ages.items()):
            columns = "".join(f"{count:>8}" for count in self._histogram(counts))
            yield f"{rank:>6}{counts.total():>13}{self._nulls[rank]:>8}  {columns}"

    def _seen_ages(self) -> range:
        return range(max((max(ages, default=0) for ages in self._ages.values()), default=0) + 1)

    def _histogram(self, ages: Counter[int]) -> list[int]:
        return [ages[age] for age in self._seen_ages()]

    def _seconds(self) -> float:
        return self._end_s - self._begin_s if self._begin_s is not None else 0.0

    def _waited_s(self) -> float:
        return sum(wait.seconds for wait in self._waits.waits)

    def _longest(self) -> Wait | None:
        return max(self._waits.waits, key=lambda wait: wait.seconds, default=None)
