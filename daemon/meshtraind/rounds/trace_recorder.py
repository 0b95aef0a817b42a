"""A round machine whose inputs, effects and decisions are written to the job's trace, so that they can be replayed.

The machine is pure: the same inputs at the same `now_s` have the same effects. An input is one line with the number of
lines that belong to it; these follow at once: its effects, then R1's and R4's decisions where they read otherwise than
before. So each line of a trace can be checked, and a trace that breaks off shows where.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

from meshwire.rounds.effects import Effect
from meshwire.rounds.inputs import CompleteAnnounced, GenerationEntered, Input
from meshwire.rounds.learner import Decision, RoundSettings
from meshwire.rounds.machine import RoundMachine

FORMAT = 3  # of the lines; to be counted up when an old trace cannot be read any more

Line = tuple[str, dict[str, Any]]
"""What happened, and its values."""


class TraceLines(Protocol):
    """Takes the lines of a trace. `meshtraind.rounds.trace.Trace` writes them to a file."""

    def write(self, what: str, **values: Any) -> None:
        """One line: what happened, and its values, as they are."""


def round_machine(settings: RoundSettings, trace: TraceLines | None, *, complete: int = 0) -> RoundMachine:
    """A round machine, recorded if there is a trace."""
    if trace is None:
        return RoundMachine(settings, complete=complete)
    return RecordedMachine(settings, trace, complete=complete)


class RecordedMachine(RoundMachine):
    """A round machine that writes every input to `trace`, with all that followed from it."""

    def __init__(self, settings: RoundSettings, trace: TraceLines, *, complete: int = 0) -> None:
        super().__init__(settings, complete=complete)
        self._trace = trace
        self._decisions = Decisions(self)
        self._announced: dict[int, int] = {}  # by rank, the newest `complete` that was written
        trace.write("trace", format=FORMAT, settings=dataclasses.asdict(settings), complete=complete)

    def handle(self, input_: Input, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        try:
            effects = super().handle(input_, now_s)
        finally:  # an input that breaks the machine is the one to look at
            self._record(input_, now_s, effects)
        return effects

    def _record(self, input_: Input, now_s: float, effects: list[Effect]) -> None:
        lines = [named_fields(effect) for effect in effects]
        lines += self._decisions.changed()
        if isinstance(input_, GenerationEntered):
            self._announced.clear()  # the machine counts anew too
        if isinstance(input_, CompleteAnnounced) and self._says_nothing_new(input_, lines):
            return
        name, fields = named_fields(input_)
        self._trace.write("input", name=name, now_s=now_s, fields=fields, lines=len(lines))
        for what, values in lines:
            self._trace.write(what, **values)

    def _says_nothing_new(self, announced: CompleteAnnounced, lines: list[Line]) -> bool:
        """Every frame carries the counter (G5). One that repeats it changes nothing, and what time alone changes
        in the machine shows as an effect: left out, it is not missed by the replay."""
        rank, complete = announced.rank, announced.complete
        if not lines and complete <= self._announced.get(rank, 0):
            return True
        self._announced[rank] = max(complete, self._announced.get(rank, 0))
        return False


class Decisions:
    """R1 and R4 as `machine` answers them, followed from input to input."""

    def __init__(self, machine: RoundMachine) -> None:
        self._machine = machine
        self._last: dict[str, Decision] = {}

    def changed(self) -> Iterator[Line]:
        """Those that read otherwise than at the last call."""
        for what, decision in (("may_start", self._machine.may_start()), ("may_null", self._machine.may_null())):
            if self._last.get(what) != decision:
                self._last[what] = decision
                may, reason = decision
                yield what, {"may": may, "reason": reason}


def named_fields(told: Effect | Input) -> Line:
    """An effect or an input as a line: its class's name and its fields."""
    return type(told).__name__, {field.name: getattr(told, field.name) for field in dataclasses.fields(told)}
