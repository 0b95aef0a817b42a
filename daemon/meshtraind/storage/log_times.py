"""When a rank's log grew, kept beside it: the script's process writes the log itself, and says nothing of time.

The file is a row of records: up to this byte, what the log holds was there at this time, Unix, by the clock of the
device that ran the rank. The daemon looks once a second, so a time is late by that, never early. What was written while
nobody looked, by an earlier version or beside a daemon that was killed, has the time 0: it is not known.
"""

import logging
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from meshtraind.machine.memory_file import read_at
from meshtraind.runtime.open_below import open_below
from meshwire import limits

log = logging.getLogger(__name__)

TIMES_SUFFIX = ".times"
LOOK_S = 1.0
NOT_KNOWN = 0.0
_RECORD = struct.Struct("<Qd")
_COARSER_RECORDS = 1 << 16  # after so many, and again after as many, twice as long lies between two: 2 MiB are weeks

LogTimes = tuple[tuple[int, float], ...]


class LogClock:
    """Writes down when one log grows.

    Args:
        log: of the rank; it need not exist yet.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._unwatched_bytes = self._size()  # that an earlier process has written, all noted but for a daemon's end
        self._seen_bytes = self._unwatched_bytes
        self._noted_s = float("-inf")
        self._told = False

    def look(self, now_s: float, *, last: bool = False) -> None:
        """Notes the time if the log has grown. Blocks on the disk. `last`: nobody looks again."""
        size_bytes = self._size()
        if size_bytes <= self._seen_bytes:
            return
        try:
            file = open_below(*below_jobs(self._log.with_suffix(TIMES_SUFFIX)), os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                records = os.fstat(file).st_size // _RECORD.size
                if not last and now_s - self._noted_s < LOOK_S * 2 ** (records // _COARSER_RECORDS) * 0.5:
                    return
                if self._unwatched_bytes:
                    noted = _read(file, records - 1, 1) if records else [(0, NOT_KNOWN)]
                    if noted[0][0] < self._unwatched_bytes:
                        os.write(file, _RECORD.pack(self._unwatched_bytes, NOT_KNOWN))
                    self._unwatched_bytes = 0
                os.write(file, _RECORD.pack(size_bytes, now_s))
            finally:
                os.close(file)
        except OSError as error:
            if not self._told:
                log.warning("when %s grows is not noted: %s", self._log.name, error)
            self._told = True
            return
        self._seen_bytes, self._noted_s = size_bytes, now_s

    def _size(self) -> int:
        try:
            file = open_below(*below_jobs(self._log), os.O_RDONLY)
        except OSError:  # not there yet; or what a script has put in its place, which nobody serves either
            return 0
        try:
            return os.fstat(file).st_size
        finally:
            os.close(file)


def log_times(root: Path, parts: Sequence[str], begin_bytes: int, end_bytes: int, rest_s: float) -> LogTimes:
    """When the bytes between two offsets of a log came: (offset, time) each, the first one that of `begin_bytes`; of as
    many as fit into a message. Blocks on the disk.

    Args:
        parts: the way to the log, from `root` on.
        rest_s: the time of what is not noted yet, or `NOT_KNOWN`.
    """
    name = parts[-1].removesuffix(".log") + TIMES_SUFFIX
    try:
        file = open_below(root, (*parts[:-1], name))
    except FileNotFoundError:
        return ((begin_bytes, rest_s),)
    try:
        low, high = 0, os.fstat(file).st_size // _RECORD.size
        count = high
        while low < high:  # the first record whose end lies behind the begin
            middle = (low + high) // 2
            if _read(file, middle, 1)[0][0] <= begin_bytes:
                low = middle + 1
            else:
                high = middle
        found = _read(file, low, min(count - low, limits.LOG_TIMES_MAX))
    finally:
        os.close(file)
    times: list[tuple[int, float]] = []
    at_bytes = begin_bytes
    for noted_bytes, came_s in (*found, (end_bytes, rest_s)):
        if at_bytes >= end_bytes or noted_bytes <= at_bytes or len(times) == limits.LOG_TIMES_MAX:
            break
        # a script may have written anything there: what is no time is not known
        times.append((at_bytes, came_s if 0 <= came_s <= limits.SECONDS_MAX else NOT_KNOWN))
        at_bytes = noted_bytes
    return tuple(times)


def _read(file: int, first: int, count: int) -> list[tuple[int, float]]:
    data = read_at(file, count * _RECORD.size, first * _RECORD.size)
    return list(_RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]))


def below_jobs(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder of all jobs, and the way from there, as JOB/logs/RANK.log, of which a script may replace any part."""
    return path.parents[2], path.parts[-3:]
