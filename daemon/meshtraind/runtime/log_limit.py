"""Log lines that others can provoke without end: the first ones of each kind are written, the rest are counted.

A kind is a place in the program that logs, so every line is limited, whoever wrote it. Whoever knows on whose behalf it
logs says so with `extra=caused_by(host)`; then no host alone can use up what a kind may write.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

LINES_MAX = 20  # of one kind in an interval
LINES_PER_SOURCE_MAX = 5
SOURCES_MAX = 256  # counted one by one; of more it is said that there are more
INTERVAL_S = 60.0
INTERVAL_MAX_S = (
    3600.0  # while a kind has too many lines its interval doubles: a flood of days must not bury what was before
)
EXAMPLE_CHARS_MAX = 300

_SOURCE = "caused_by"


def caused_by(source: str | None) -> dict[str, str | None]:
    """Marks a log call, as its `extra`, with whose doing the line is: an IP address, say."""
    return {_SOURCE: source}


@dataclass(frozen=True, slots=True)
class DroppedLines:
    """Lines of one kind that were not written. `sources`: how many hosts caused them, 0 where nobody knows."""

    logger: str
    level: int
    lines: int
    sources: int
    example: str
    within_s: float

    def __str__(self) -> str:
        hosts = f"{'at least ' if self.sources > SOURCES_MAX else ''}{min(self.sources, SOURCES_MAX)}"
        caused = f" from {hosts} address{'es' if self.sources != 1 else ''}" if self.sources else ""
        within = f"{self.within_s:.0f} s" if self.within_s < 2 * INTERVAL_S else f"{self.within_s / 60:.0f} minutes"
        return f"... and {self.lines} more{caused} in the last {within}, such as: {self.example}"


@dataclass(slots=True)
class _Kind:
    began_s: float
    interval_s: float = INTERVAL_S
    written: int = 0
    written_by_source: dict[str, int] = field(default_factory=dict)
    left_out: int = 0
    left_out_sources: set[str] = field(default_factory=set)
    logger: str = ""
    level: int = 0
    example: str = ""


class LogLimit:
    """Decides which records are written. Keeps a kind only as long as its interval lasts."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def admits(self, record: logging.LogRecord, now_s: float) -> bool:
        """Whether to write it; else it is counted."""
        kind = self._kinds.setdefault((record.pathname, record.lineno), _Kind(now_s))
        source: str | None = getattr(record, _SOURCE, None)
        by_source = kind.written_by_source.get(source, 0) if source is not None else 0
        if kind.written < LINES_MAX and by_source < LINES_PER_SOURCE_MAX:
            kind.written += 1
            if source is not None:
                kind.written_by_source[source] = by_source + 1
            return True
        if not kind.left_out:
            kind.logger, kind.level = record.name, record.levelno
            kind.example = record.getMessage()[:EXAMPLE_CHARS_MAX]
        kind.left_out += 1
        if source is not None and len(kind.left_out_sources) <= SOURCES_MAX:
            kind.left_out_sources.add(source)
        return False

    def over(self, now_s: float, *, all_kinds: bool = False) -> list[DroppedLines]:
        """What was left out in the intervals that are over, or in all of them; they begin anew."""
        told = []
        for place, kind in list(self._kinds.items()):
            if not all_kinds and now_s - kind.began_s < kind.interval_s:
                continue
            if not kind.left_out:
                del self._kinds[place]
                continue
            sources = len(kind.left_out_sources)
            within_s = now_s - kind.began_s
            told.append(DroppedLines(kind.logger, kind.level, kind.left_out, sources, kind.example, within_s))
            self._kinds[place] = _Kind(now_s, min(2 * kind.interval_s, INTERVAL_MAX_S))
        return told


class LimitedHandler(logging.Handler):
    """Passes records on to `target` as `LogLimit` has it; those below INFO, which somebody has asked for, all of them.

    `keep_telling` writes the counts while an event loop runs; `close`, called by `logging` at the exit, the last ones.
    """

    def __init__(self, target: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._target = target
        self._clock = clock
        self._limit = LogLimit()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.levelno < logging.INFO or self._limit.admits(record, self._clock()):
                self._target.handle(record)
        except Exception:  # as every handler of `logging`: a line that cannot be written ends no program
            self.handleError(record)

    async def keep_telling(self) -> None:
        """Tells from time to time, for ever, how many lines were left out."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.tell()

    def tell(self, *, all_kinds: bool = False) -> None:
        """Writes what was left out in the intervals that are over, or in all."""
        with self.lock:  # type: ignore[union-attr]  # made by the base class; other threads log too
            for left_out in self._limit.over(self._clock(), all_kinds=all_kinds):
                self._target.handle(
                    logging.LogRecord(left_out.logger, left_out.level, __file__, 0, "%s", (left_out,), None)
                )

    def close(self) -> None:
        self.tell(all_kinds=True)
        self._target.close()
        super().close()
