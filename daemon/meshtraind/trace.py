"""DATA/jobs/ID/trace.jsonl: what happened in every round, one JSON object a line, on demand (`submit --trace`)."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from meshwire.roundevents import Effect


class Trace:
    """Appends lines with the monotonic time, which all processes of one machine share. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1 << 16)

    def write(self, what: str, **values: Any) -> None:
        """One line."""
        self._file.write(json.dumps({"t_s": time.monotonic(), "what": what, **values}, default=_plain) + "\n")

    def effect(self, effect: Effect) -> None:
        """One line for an effect of the round machine."""
        values = {field.name: getattr(effect, field.name) for field in dataclasses.fields(effect)}
        self.write(type(effect).__name__, **values)

    def close(self) -> None:
        """Writes what is left."""
        self._file.close()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "model_dump"):
        return {"message": type(value).__name__, **value.model_dump()}
    return str(value)
