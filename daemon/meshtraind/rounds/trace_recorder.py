"""A round machine whose inputs, effects and decisions are written to the job's trace, so that they can be replayed.

The machine is pure: the same inputs at the same `now_s` have the same effects. An input is one line with the number of
lines that belong to it; these follow at once: its effects, then R1's and R4's decisions where they read otherwise than
before. So each line of a trace can be checked, and a trace that breaks off shows where.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from meshtraind.rounds.trace import Trace
from meshwire.rounds.effects import Effect, RoundComplete
from meshwire.rounds.learner import Decision, RoundSettings
from meshwire.rounds.machine import RoundMachine

FORMAT = 2  # of the lines; to be counted up when an old trace cannot be read any more

SIGNATURES = {
    name: inspect.signature(method)
    for name, method in inspect.getmembers(RoundMachine, inspect.isfunction)
    if not name.startswith("_") and method.__annotations__.get("return") == list[Effect]
}
"""The inputs: the public methods that return effects."""

Line = tuple[str, dict[str, Any]]
"""What happened, and its values."""


def round_machine(settings: RoundSettings, trace: Trace | None, *, complete: int = 0) -> RoundMachine:
    """A round machine, recorded if there is a trace."""
    if trace is None:
        return RoundMachine(settings, complete=complete)
    return RecordedMachine(settings, trace, complete=complete)


class RecordedMachine(RoundMachine):
    """A round machine that writes every input to `trace`, with all that followed from it."""

    def __init__(self, settings: RoundSettings, trace: Trace, *, complete: int = 0) -> None:
        super().__init__(settings, complete=complete)
        self._trace = trace
        self._decisions = Decisions(self)
        self._announced: dict[int, int] = {}  # by rank, the newest `complete` that was written
        trace.write("trace", format=FORMAT, settings=dataclasses.asdict(settings), complete=complete)

    def _record(self, name: str, arguments: dict[str, Any], effects: list[Effect]) -> None:
        lines = [effect_line(effect) for effect in effects]
        lines += self._decisions.changed()
        if name == "enter":
            self._announced.clear()  # the machine counts anew too
        if name == "peer_complete" and self._says_nothing_new(lines, **arguments):
            return
        plain = {key: _fields(value) if isinstance(value, RoundComplete) else value for key, value in arguments.items()}
        self._trace.write("input", name=name, arguments=plain, lines=len(lines))
        for what, values in lines:
            self._trace.write(what, **values)

    def _says_nothing_new(self, lines: list[Line], rank: int, complete: int, now_s: float) -> bool:
        """Every frame carries the counter (G5). One that repeats it changes nothing, and what time alone changes
        in the machine shows as an effect: left out, it is not missed by the replay."""
        if not lines and complete <= self._announced.get(rank, 0):
            return True
        self._announced[rank] = max(complete, self._announced.get(rank, 0))
        return False


def _recorded(name: str, signature: inspect.Signature) -> Callable[..., list[Effect]]:
    plain_method = getattr(RoundMachine, name)

    def method(self: RecordedMachine, *args: Any, **kwargs: Any) -> list[Effect]:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        effects: list[Effect] = []
        try:
            effects = plain_method(self, *args, **kwargs)
        finally:  # an input that breaks the machine is the one to look at
            arguments = dict(bound.arguments)
            del arguments["self"]
            self._record(name, arguments, effects)
        return effects

    return method


for _name, _signature in SIGNATURES.items():
    setattr(RecordedMachine, _name, _recorded(_name, _signature))


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


def effect_line(effect: Effect) -> Line:
    """An effect as a line."""
    return type(effect).__name__, _fields(effect)


def _fields(effect: Effect) -> dict[str, Any]:
    return {field.name: getattr(effect, field.name) for field in dataclasses.fields(effect)}
