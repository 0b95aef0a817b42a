"""DATA/jobs/ID/trace.jsonl: what happened in every round, one JSON object a line, on demand (`submit --trace`).

The first line is the recorder's (`trace_recorder.py`), and what it writes can be replayed (`replay.py`); the chunks
lie in between, with the times at which they were given to their links. Bytes are {"hex": TEXT}, messages
{"type": NAME, ...}.
"""

import dataclasses
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from meshtraind.runtime.open_below import open_below
from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.rounds.effects import RoundComplete

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 16


class Trace:
    """Writes lines with the monotonic time, which all processes of one machine share.

    A trace is worth less than its job: at what cannot be written, it ends with a warning that names the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        try:
            descriptor = open_below(path.parents[1], path.parts[-2:], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self._file = os.fdopen(descriptor, "w", buffering=BUFFER_BYTES, encoding="ascii")
        except OSError as error:
            self._end(error)

    def write(self, what: str, **values: Any) -> None:
        """Adds one line: what happened, and its values."""
        if self._file is None:
            return
        entry = {"t_s": time.monotonic(), "what": what, **values}
        try:
            self._file.write(json.dumps(entry, default=plain, separators=(",", ":")) + "\n")
        except (OSError, TypeError) as error:
            self._end(error)

    def chunk(self, header: Header) -> None:
        """A chunk was given to its link."""
        self.write(
            "chunk", round=header.round, bucket=header.bucket, step=header.step, first_segment=header.first_segment
        )

    def close(self) -> None:
        """Writes what is left."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._end(error)
        else:
            self._file.close()
            self._file = None

    def _end(self, error: OSError | TypeError) -> None:
        log.warning("the trace %s ends here, the job goes on: %s", self._path, error)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # the same one: what is buffered is lost, the descriptor is free
                file.close()


def plain(value: Any) -> dict[str, Any]:
    """`default` of json.dumps: what JSON has no form for. Raises TypeError for what a replay could not read."""
    match value:
        case bytes():
            return {"hex": value.hex()}
        case Wire():
            return {"type": type(value).__name__, **value.model_dump()}
        case RoundComplete():
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"a trace cannot hold {value!r}")
