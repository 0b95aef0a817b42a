"""A round machine with a witness, and the witness that writes inputs, effects and decisions to the job's trace.

The machine is pure: the same inputs at the same `now_s` have the same effects. An input is one line with the number of
lines that belong to it; these follow at once: its effects, then R1's and R4's decisions where they read otherwise than
before. So each line of a trace can be checked, and a trace that breaks off shows where.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from meshtraind.rounds.trace import Trace
from meshwire.rounds.effects import Effect
from meshwire.rounds.inputs import CompleteAnnounced, GenerationEntered, Input
from meshwire.rounds.learner_state import Decision, RoundSettings
from meshwire.rounds.machine import RoundMachine

FORMAT = 5  # of the lines; to be counted up when an old trace cannot be read any more

Line = tuple[str, dict[str, Any]]
"""What happened, and its values."""


class RoundWitness(Protocol):
    """Whoever sees all that one round machine is told and decides, in order."""

    def began(self, machine: RoundMachine, complete: int) -> None:
        """With its settings, after this round."""

    def took(self, input_: Input, now_s: float, effects: Sequence[Effect]) -> None:
        """It was told something, and answered; nothing of that has been done yet. No effects: perhaps the input has
        broken the machine."""


def round_machine(settings: RoundSettings, witness: RoundWitness | None, *, complete: int = 0) -> RoundMachine:
    """A round machine, with a witness if there is one."""
    if witness is None:
        return RoundMachine(settings, complete=complete)
    return WitnessedMachine(settings, witness, complete=complete)


class WitnessedMachine(RoundMachine):
    """A round machine of which somebody sees every input, with all that followed from it."""

    def __init__(self, settings: RoundSettings, witness: RoundWitness, *, complete: int = 0) -> None:
        super().__init__(settings, complete=complete)
        self._witness = witness
        witness.began(self, complete)

    def handle(self, input_: Input, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        try:
            effects = super().handle(input_, now_s)
        finally:  # an input that breaks the machine is the one to look at
            self._witness.took(input_, now_s, effects)
        return effects


class RoundRecorder:
    """A witness that writes it all to `trace`. It is of one machine."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._decisions: Decisions
        self._announced: dict[int, int] = {}  # by rank, the newest `complete` that was written

    def began(self, machine: RoundMachine, complete: int) -> None:
        """The first line."""
        self._decisions = Decisions(machine)
        self._trace.write("trace", format=FORMAT, settings=dataclasses.asdict(machine.settings), complete=complete)

    def took(self, input_: Input, now_s: float, effects: Sequence[Effect]) -> None:
        """An input with the lines that belong to it."""
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
