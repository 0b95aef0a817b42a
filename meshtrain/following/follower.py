"""Follows a job until its end: all ranks' logs and its state, each read on a connection of its own.

Of an error that ends a script the state tells, once for all ranks; it is left out of the logs.
"""

import functools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshtrain.client import Client
from meshtrain.errors import MeshtrainError, RequestError
from meshtrain.following.log_pieces import (
    Lines,
    RawLines,
    ScriptErrors,
    by_time,
    fetch_log,
    log_end,
    since_offset,
    tail_offset,
)
from meshtrain.following.shown_text import printable_lines
from meshtrain.following.watching import watch_job
from meshwire import limits
from meshwire.messages.job import JobSummary
from meshwire.peer_news import name_of

LOG_WAIT_S = 5.0  # how long the daemon holds a request for more of a log
BAR_EVERY_S = 10.0  # so often a progress bar that is drawn anew becomes a line
RETRY_S = 1.0  # after a peer did not answer for its log
LOGS_AFTER_END_S = 15.0  # how long the rest of the logs may take when the job has ended
TICK_S = 0.5  # ctrl-C is noticed within this on every system

Connect = Callable[[], Client]


@dataclass(frozen=True, slots=True)
class LogPart:
    """What of the logs is shown.

    Attributes:
        tail: how many of the last lines there are; None: all.
        since_s: only those that came then or later, Unix time.
        times: each line with the time at which it came.
        raw: lines as `RawLines` has them.
    """

    tail: int | None = None
    since_s: float | None = None
    times: bool = False
    raw: bool = False

    def begin(self, client: Client, job: str, rank: int, end_bytes: int) -> int:
        """The offset from which on a rank's log is shown, of which there are so many bytes. Raises NoTimes."""
        begin = 0 if self.tail is None else tail_offset(client, job, rank, self.tail, end_bytes)
        if self.since_s is not None:
            begin = max(begin, since_offset(client, job, rank, self.since_s, end_bytes))
        return begin


WHOLE = LogPart()


@dataclass(frozen=True, slots=True)
class _LogLines:
    rank: int
    lines: list[str]
    came_s: float | None


@dataclass(frozen=True, slots=True)
class _LogOver:
    rank: int
    error: str | None


@dataclass(frozen=True, slots=True)
class _State:
    summary: JobSummary
    ended: bool


@dataclass(frozen=True, slots=True)
class _WatchFailed:
    error: Exception


@dataclass(frozen=True, slots=True)
class _Joined:
    line: str


_Item = _LogLines | _LogOver | _State | _WatchFailed | _Joined


class LostSight(MeshtrainError):
    """The daemon on this device went away while a job was followed; the job may well go on."""


class JobView(Protocol):
    """Where a followed job is shown. All is called in the thread that follows it."""

    def lines(self, rank: int, lines: Sequence[str], came_s: float | None) -> None:
        """Shows log lines of one rank. `came_s`: Unix time; None: not asked for, or not known."""

    def status(self, job: JobSummary) -> None:
        """Shows where the job stands now; called about once a second."""

    def joined(self, names: Sequence[str]) -> None:
        """Shows the logs of more members than before."""

    def say(self, line: str) -> None:
        """Shows a line for the person."""


class Follower:
    """Reads everything about one job into one queue. `KeyboardInterrupt` passes through `run`: the job goes on.

    Args:
        ranks: whose logs are read.
        newcomers: these are all, and those of devices that join later are read, too.
        part: of the logs.
    """

    def __init__(
        self, connect: Connect, job: str, ranks: Sequence[int], part: LogPart = WHOLE, *, newcomers: bool
    ) -> None:
        self._connect = connect
        self._job = job
        self._ranks = list(ranks)
        self._errors: defaultdict[int, ScriptErrors] = defaultdict(ScriptErrors)
        self._newcomers = newcomers
        self._part = part
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._over = threading.Event()  # the job has ended
        self._stopping = threading.Event()

    def run(self, view: "JobView") -> JobSummary:
        """Shows the job until it has ended and its logs are read. Raises LostSight when the daemon goes away."""
        self._start(self._watch, "watch")
        for rank in self._ranks:
            self._start_reading(rank)
        try:
            return self._show(view)
        finally:
            self._stopping.set()

    def error_of(self, rank: int) -> str:
        """The end of the newest error in this rank's log that has ended its script; empty where there was none."""
        return "\n".join(self._errors[rank].newest)

    def _show(self, view: "JobView") -> JobSummary:
        reading = set(self._ranks)
        ended: JobSummary | None = None
        deadline_s = float("inf")
        while ended is None or reading:
            try:
                item = self._items.get(timeout=TICK_S)
            except queue.Empty:
                if ended is not None and time.monotonic() > deadline_s:
                    names = ", ".join(name_of(ended, rank) for rank in sorted(reading))
                    later = f"meshtrain logs {ended.job}"
                    view.say(f"warning: the end of the log of {names} did not arrive. Later: {later}")
                    return ended
                continue
            match item:
                case _LogLines(rank, lines, came_s):
                    view.lines(rank, self._errors[rank].left_out(lines), came_s)
                case _LogOver(rank, error):
                    reading.discard(rank)
                    if error is not None:
                        view.say(f"warning: {printable_lines(error)}")
                case _State(summary, True):
                    reading |= self._follow_newcomers(summary, view)
                    ended, deadline_s = summary, time.monotonic() + LOGS_AFTER_END_S
                    self._over.set()
                    view.status(summary)
                case _Joined(line):
                    view.say(line)
                case _State(summary, False):
                    reading |= self._follow_newcomers(summary, view)
                    view.status(summary)
                case _WatchFailed(error):
                    raise LostSight(f"job {self._job} can no longer be followed: {error}")
        return ended

    def _follow_newcomers(self, summary: JobSummary, view: "JobView") -> set[int]:
        """Returns the ranks that were not followed before."""
        ranks = range(len(self._ranks), len(summary.members)) if self._newcomers else range(0)
        if ranks:
            view.joined([member.name for member in summary.members])
        for rank in ranks:
            self._ranks.append(rank)
            self._start_reading(rank)
        return set(ranks)

    def _start_reading(self, rank: int) -> None:
        self._start(functools.partial(self._read, rank), f"log {rank}")

    def _start(self, work: Callable[[], None], name: str) -> None:
        # Daemon threads: they wait inside the connection, and detaching must not wait for them.
        threading.Thread(target=work, name=f"follow/{name}", daemon=True).start()

    def _watch(self) -> None:
        try:
            client = self._connect()
            try:
                last = watch_job(
                    client,
                    self._job,
                    lambda seen: self._items.put(_State(seen, ended=False)),
                    lambda line: self._items.put(_Joined(line)),
                )
            finally:
                client.close()
        except (MeshtrainError, OSError) as error:
            self._items.put(_WatchFailed(error))
            return
        self._items.put(_State(last, ended=True))

    def _read(self, rank: int) -> None:
        error: str | None = None
        try:
            client = self._connect()
            try:
                error = self._read_to_end(client, rank)
            finally:
                client.close()
        except (MeshtrainError, OSError) as problem:
            error = f"the log of rank {rank}: {problem}"
        self._items.put(_LogOver(rank, error))

    def _read_to_end(self, client: Client, rank: int) -> str | None:
        part = self._part
        lines = RawLines() if part.raw else Lines()
        offset_bytes, came_s = 0, None
        bar_told_s = time.monotonic()
        if part.tail is not None or part.since_s is not None:
            offset_bytes = part.begin(client, self._job, rank, log_end(client, self._job, rank))
        refused = 0
        while not self._stopping.is_set():
            asked_s = time.monotonic()
            try:
                piece = fetch_log(
                    client, self._job, rank, offset_bytes, limits.FETCH_BYTES_MAX, LOG_WAIT_S, times=part.times
                )
            except RequestError as problem:
                refused += 1
                if refused * RETRY_S > LOGS_AFTER_END_S and self._over.is_set():  # until then a lost peer may come back
                    return f"the log of rank {rank}: {problem}"
                self._stopping.wait(RETRY_S)
                continue
            refused = 0
            for data, came_s in by_time(piece, offset_bytes):
                self._items.put(_LogLines(rank, lines.feed(data), came_s))
            offset_bytes += len(piece.data)
            if time.monotonic() - bar_told_s >= BAR_EVERY_S:
                self._items.put(_LogLines(rank, lines.bar(), came_s))
                bar_told_s = time.monotonic()
            if piece.end:
                break
            if not piece.data and time.monotonic() - asked_s < RETRY_S:
                self._stopping.wait(RETRY_S)  # answered at once with nothing
        self._items.put(_LogLines(rank, lines.flush(), came_s))
        return None
