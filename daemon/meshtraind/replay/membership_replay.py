"""A recorded membership, decided again: the inputs of the file through a new machine, every effect compared.

The file is one that somebody sent: every value is checked, and what is wrong is named with its line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from meshtraind.replay.membership_story import MembershipStory
from meshtraind.replay.replay import EXIT_DIFFERENT, EXIT_SAME, EXIT_UNREADABLE, NOTHING, DifferenceError
from meshtraind.replay.trace_file import LINE_CHARS_MAX, TraceError, canonical
from meshwire.membership.effects import Effect
from meshwire.membership.inputs import Input
from meshwire.membership.machine import Membership
from meshwire.membership.record import FORMAT, MembershipStart, input_of, plain, start_of
from meshwire.text import printable


@dataclass(frozen=True, slots=True)
class DecidedAgain:
    """An input that was answered as it was recorded, and the machine right after it."""

    now_s: float
    input: Input
    effects: list[Effect]
    machine: Membership


class MembershipFile:
    """Reads it line by line: `start` when it is made, `decide_again` all that follows.

    Raises:
        TraceError: a line is not one of a recorded membership.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._line = 0
        entry = self._next()
        if entry is None or entry.get("what") != "membership":
            raise TraceError(1, "not the first line of a recorded membership, as `meshtrain submit --trace` makes one")
        if entry.get("format") != FORMAT:
            raise TraceError(1, f"a record of format {entry.get('format')!r}; this meshtraind reads {FORMAT}")
        try:
            self.start: MembershipStart = start_of(entry.get("start"))
            self._machine = self.start.machine()
        except (ValueError, RecursionError) as error:
            raise TraceError(1, str(error)) from None

    def decide_again(self) -> Iterator[DecidedAgain]:
        """Decides the record again, input by input. Raises TraceError and, at the first one, DifferenceError."""
        while (entry := self._next()) is not None:
            now_s, recorded = entry.get("now_s"), entry.get("effects")
            if entry.get("what") != "input" or type(now_s) is not float or not isinstance(recorded, list):
                raise TraceError(self._line, "not an input with its time and effects")
            try:
                input_ = input_of(entry.get("input"))
                texts = [canonical(effect) for effect in recorded]
            except (ValueError, RecursionError) as error:
                raise TraceError(self._line, str(error)) from None
            effects = self._decided(input_, now_s, texts)
            yield DecidedAgain(now_s, input_, effects, self._machine)

    def _decided(self, input_: Input, now_s: float, recorded: list[str]) -> list[Effect]:
        try:
            effects = self._machine.handle(input_, now_s)
        except Exception as error:  # whatever a broken machine or a forged record leads to: it is the finding
            found = f"{type(error).__name__}: {error}"
            raise DifferenceError(self._line, self._line, f"{len(recorded)} effects", found) from error
        # Through text and back, as the recorded ones went.
        texts = [canonical(json.loads(json.dumps(plain(effect)))) for effect in effects]
        for number in range(max(len(texts), len(recorded))):
            was, now = (each[number] if number < len(each) else NOTHING for each in (recorded, texts))
            if was != now:
                raise DifferenceError(self._line, self._line, was, now)
        return effects

    def _next(self) -> dict[str, Any] | None:
        text = self._file.readline(LINE_CHARS_MAX)
        if not text:
            return None
        self._line += 1
        if not text.endswith("\n"):
            long = f"longer than {LINE_CHARS_MAX} characters"
            raise TraceError(self._line, long if len(text) == LINE_CHARS_MAX else "the record breaks off in this line")
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(self._line, f"not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise TraceError(self._line, "not a line of a recorded membership")
        return entry


def is_membership(path: Path) -> bool:
    """Does the file begin as a recorded membership does? Raises OSError."""
    with path.open(encoding="ascii", errors="surrogateescape") as file:
        try:
            entry = json.loads(file.readline(LINE_CHARS_MAX))
        except (ValueError, RecursionError):
            return False
    return isinstance(entry, dict) and entry.get("what") == "membership"


def run(path: Path, *, as_json: bool, out: TextIO, errors: TextIO) -> int:
    """Runs `meshtraind replay` for a membership. Returns its exit code: 0 same, 1 different, 2 the record cannot be
    read (to its end)."""
    story: MembershipStory | None = None
    difference: DifferenceError | None = None
    unreadable = ""
    inputs = 0
    try:
        with path.open(encoding="ascii", errors="surrogateescape") as file:
            record = MembershipFile(file)
            story = MembershipStory(record.start)
            for decided in record.decide_again():
                story.take(decided.now_s, decided.input, decided.effects, decided.machine)
                inputs += 1
    except (OSError, TraceError) as error:
        unreadable = str(error)
    except DifferenceError as error:
        difference = error
    if as_json:
        found = None
        if difference is not None:
            found = {"line": difference.line, "recorded": difference.recorded, "replayed": difference.replayed}
        told = [] if story is None else [{"at_s": at_s, "text": text} for at_s, text in story.told]
        json.dump({"inputs": inputs, "error": unreadable or None, "difference": found, "story": told}, out)
        out.write("\n")
    else:
        if story is not None:
            out.write(story.text())
        if difference is not None:
            out.write(f"\n{difference}\n")
        elif not unreadable:
            out.write(f"\n{inputs} inputs decided again: every effect is the same.\n")
    if unreadable:
        errors.write(f"meshtraind: error: {path}: {printable(unreadable)}\n")
    return EXIT_UNREADABLE if unreadable else EXIT_DIFFERENT if difference is not None else EXIT_SAME
