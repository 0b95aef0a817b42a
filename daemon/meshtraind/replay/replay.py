"""`meshtraind replay TRACE`: the inputs of a trace through a new round machine, every effect and decision compared."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from meshtraind.replay.summary import Summary
from meshtraind.replay.trace_file import RecordedInput, TraceError, TraceFile, canonical
from meshtraind.rounds.trace import plain
from meshtraind.rounds.trace_recorder import Decisions, named_fields
from meshwire.rounds.effects import Effect
from meshwire.rounds.inputs import Input
from meshwire.rounds.machine import RoundMachine
from meshwire.text import printable

EXIT_SAME = 0
EXIT_DIFFERENT = 1
EXIT_UNREADABLE = 2

SHOWN_CHARS_MAX = 2000  # of one side of a difference
NOTHING = "nothing"


@dataclass
class DifferenceError(Exception):
    """The machine of today does not answer as the recorded one did.

    Attributes:
        line: where; that of the input if it has more effects now than lines.
        input_line: of the input that was answered.
        recorded: the line, or `nothing`.
        replayed: what came out instead.
    """

    line: int
    input_line: int
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"DIFFERENT at line {self.line} (the input is line {self.input_line}):\n"
            f"  recorded: {printable(self.recorded[:SHOWN_CHARS_MAX])}\n"
            f"  replayed: {printable(self.replayed[:SHOWN_CHARS_MAX])}"
        )


@dataclass(frozen=True, slots=True)
class Replayed:
    """An input that was answered as it was recorded, and the machine right after it."""

    input: Input
    now_s: float
    effects: list[Effect]
    machine: RoundMachine


def replay(trace: TraceFile) -> Iterator[Replayed]:
    """Decides a trace again, input by input. Raises TraceError and, at the first one, DifferenceError."""
    machine = RoundMachine(trace.settings, complete=trace.complete)
    decisions = Decisions(machine)
    for told in trace.inputs():
        try:
            effects = machine.handle(told.input, told.now_s)
            lines = [named_fields(effect) for effect in effects]
            lines += decisions.changed()
        except Exception as error:  # whatever a broken machine or a forged trace leads to: it is the finding
            raise DifferenceError(
                told.line, told.line, f"{len(told.recorded)} lines", f"{type(error).__name__}: {error}"
            ) from error
        _compare(told, lines)
        yield Replayed(told.input, told.now_s, effects, machine)


def _compare(told: RecordedInput, lines: list[tuple[str, dict[str, Any]]]) -> None:
    # Through text and back, as the recorded ones went: the keys of JSON are texts.
    texts = [canonical(json.loads(json.dumps({"what": what, **values}, default=plain))) for what, values in lines]
    for recorded, text in zip(told.recorded, texts, strict=False):
        if recorded.canonical != text:
            raise DifferenceError(recorded.line, told.line, recorded.canonical, text)
    if len(texts) > len(told.recorded):
        raise DifferenceError(told.line, told.line, NOTHING, texts[len(told.recorded)])
    if len(texts) < len(told.recorded):
        more = told.recorded[len(texts)]
        raise DifferenceError(more.line, told.line, more.canonical, NOTHING)


def run(path: Path, *, as_json: bool, out: TextIO, errors: TextIO) -> int:
    """Runs `meshtraind replay` for rounds. Returns its exit code: 0 same, 1 different, 2 the trace cannot be read (to
    its end)."""
    summary: Summary | None = None
    difference: DifferenceError | None = None
    unreadable = ""
    inputs = 0
    try:
        with TraceFile(path) as trace:
            summary = Summary(trace.settings)
            for replayed in replay(trace):
                summary.take(replayed.input, replayed.now_s, replayed.effects, replayed.machine)
                inputs += 1
    except (OSError, TraceError) as error:
        unreadable = str(error)
    except DifferenceError as error:
        difference = error
    if as_json:
        _write_json(out, inputs, summary, difference, unreadable)
    else:
        if summary is not None and inputs:
            out.write(summary.text())
        if difference is not None:
            out.write(f"\n{difference}\n")
        elif not unreadable:
            out.write(f"\n{inputs} inputs replayed: every decision is the same.\n")
    if unreadable:
        errors.write(f"meshtraind: error: {path}: {printable(unreadable)}\n")
    return EXIT_UNREADABLE if unreadable else EXIT_DIFFERENT if difference is not None else EXIT_SAME


def _write_json(
    out: TextIO, inputs: int, summary: Summary | None, difference: DifferenceError | None, unreadable: str
) -> None:
    found = None
    if difference is not None:
        found = {
            "line": difference.line,
            "input_line": difference.input_line,
            "recorded": difference.recorded,
            "replayed": difference.replayed,
        }
    values = summary.values() if summary is not None else None
    json.dump({"inputs": inputs, "error": unreadable or None, "difference": found, "summary": values}, out)
    out.write("\n")
