"""A trace as a file that somebody sent: read line by line, every value checked, errors with the number of the line."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, get_args

from pydantic import TypeAdapter, ValidationError

from meshtraind.rounds.trace_recorder import FORMAT
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages import rounds as messages
from meshwire.rounds.inputs import Input
from meshwire.rounds.learner_state import RoundSettings

LINE_CHARS_MAX = 32 * limits.CONTROL_BYTES_MAX  # a round's binds on one line, their bytes as hex: far below that


_INPUTS: dict[str, TypeAdapter[Input]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Input)}
_FIELDS = {kind.__name__: {field.name for field in dataclasses.fields(kind)} for kind in get_args(Input)}
_SETTINGS = TypeAdapter(RoundSettings)


class TraceError(Exception):
    """The file is no trace, or breaks off at `line` (from 1)."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(f"line {line}: {text}")
        self.line = line


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A line that belongs to an input: an effect or a decision.

    Attributes:
        canonical: its JSON without the time, keys sorted: equal lines have equal texts.
    """

    line: int
    canonical: str


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedInput:
    """One input of the machine, with what it had as a consequence."""

    line: int
    input: Input
    now_s: float
    recorded: tuple[Recorded, ...]


class TraceFile:
    """A trace that is open for reading; use it as a context. `settings` and `complete`, with which the machine began,
    come from the first line, `inputs` from the others, each read as it is asked for.

    Raises:
        OSError: the file cannot be opened.
        TraceError: on entry and in `inputs`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line = 0

    def __enter__(self) -> "TraceFile":
        self._file: TextIO = self._path.open(encoding="ascii", errors="surrogateescape")
        try:
            self.settings, self.complete = self._read_beginning()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def inputs(self) -> Iterator[RecordedInput]:
        """The inputs, in the order in which the machine had them. Lines of others are passed over."""
        while (entry := self._next()) is not None:
            if entry["what"] == "input":
                yield self._input(entry)

    def _input(self, entry: dict[str, Any]) -> RecordedInput:
        line, name, count = self._line, entry.get("name"), entry.get("lines")
        if not isinstance(name, str) or name not in _INPUTS:
            raise TraceError(line, f"an input {name!r}, which the round machine does not have")
        if type(count) is not int or count < 0:
            raise TraceError(line, "an input that does not say how many lines belong to it")
        now_s, fields = entry.get("now_s"), entry.get("fields")
        if type(now_s) is not float:
            raise TraceError(line, f"{name}: an input that does not say when it came")
        if not isinstance(fields, dict) or fields.keys() != _FIELDS[name]:
            raise TraceError(
                line, f"{name}: its fields are {', '.join(sorted(_FIELDS[name])) or 'none'}, and no others"
            )
        try:
            input_ = _INPUTS[name].validate_python(_revived(fields))
        except (ValueError, RecursionError) as error:
            raise TraceError(line, f"{name}: {_short(error)}") from None
        return RecordedInput(line, input_, now_s, tuple(self._recorded(name) for _ in range(count)))

    def _recorded(self, name: str) -> Recorded:
        entry = self._next()
        if entry is None:
            raise TraceError(self._line + 1, f"the trace breaks off among the lines that belong to {name}")
        del entry["t_s"]
        try:
            return Recorded(self._line, canonical(entry))
        except RecursionError as error:
            raise TraceError(self._line, str(error)) from None

    def _read_beginning(self) -> tuple[RoundSettings, int]:
        entry = self._next()
        if entry is None or entry["what"] != "trace":
            raise TraceError(1, "not the first line of a trace, as `meshtrain submit --trace` makes one")
        if entry.get("format") != FORMAT:
            raise TraceError(1, f"a trace of format {entry.get('format')!r}; this meshtraind reads {FORMAT}")
        settings, complete = entry.get("settings"), entry.get("complete")
        names = {field.name for field in dataclasses.fields(RoundSettings)}
        if not isinstance(settings, dict) or set(settings) != names:
            raise TraceError(1, f"settings other than {', '.join(sorted(names))}: of another version of meshtraind")
        try:
            checked = _SETTINGS.validate_python(settings)
        except (ValidationError, AssertionError) as error:
            raise TraceError(1, f"settings: {_short(error)}") from None
        if not 0 <= checked.used_bytes + checked.integers <= limits.CONTROL_BYTES_MAX:
            raise TraceError(1, "settings: bitmap and integers of a seal do not fit into a message")
        if type(complete) is not int or complete < 0:
            raise TraceError(1, "a beginning that does not say after which round")
        return checked, complete

    def _next(self) -> dict[str, Any] | None:
        text = self._file.readline(LINE_CHARS_MAX)
        if not text:
            return None
        self._line += 1
        if not text.endswith("\n"):
            long = f"longer than {LINE_CHARS_MAX} characters"
            raise TraceError(self._line, long if len(text) == LINE_CHARS_MAX else "the trace breaks off in this line")
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(self._line, f"not JSON: {error}") from None
        if not isinstance(entry, dict) or not {"t_s", "what"} <= set(entry):
            raise TraceError(self._line, "not a line of a trace: `t_s` or `what` is missing")
        return entry


def canonical(plain: Any) -> str:
    """JSON with sorted keys."""
    return json.dumps(plain, sort_keys=True)


def _revived(value: Any) -> Any:
    """Bytes and messages from their plain forms (`trace.plain`). Raises ValueError."""
    match value:
        case {"hex": str(text), **rest} if not rest:
            return bytes.fromhex(text)
        case {"type": str(name), **fields}:
            kind = getattr(messages, name, None)
            if not isinstance(kind, type) or not issubclass(kind, Wire):
                raise ValueError(f"there is no message {name!r}")
            return kind.load(_revived(fields))
        case dict():
            return {key: _revived(item) for key, item in value.items()}
        case list():
            return [_revived(item) for item in value]
    return value


def _short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error) or "out of range"
