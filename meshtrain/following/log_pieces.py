"""A rank's log as lines that are safe to show: read piece by piece, from the start, the end, or as it grows."""

import codecs
import re
from collections import deque
from collections.abc import Iterable, Iterator

from meshtrain.client import Client, ask
from meshtrain.errors import MeshtrainError
from meshtrain.following.shown_text import NO_COLOUR, cut_at, script_text
from meshwire import limits
from meshwire.jobs.script_log import ERROR_BEGINS, ERROR_ENDS
from meshwire.messages.job import Fetch, Fetched

PIECE_TIMEOUT_S = 60.0  # as long as the daemons themselves wait for a piece from each other
ERROR_LINES_MAX = 200  # of an error that is kept
TORCHS_PREFIX = re.compile(r"\[rank\d+\]: ")  # of each line of an error, in a process with a process group
LINE_CHARS_MAX = 64 * limits.KIB  # a longer line is shown in parts


class NoTimes(MeshtrainError):
    """Lines were asked for by their time, and nobody has noted it."""


class Lines:
    """Turns pieces of a log into whole lines that are safe to show (`script_text`).

    Of a line that is drawn anew with "\\r", as progress bars are, only what a terminal would show last is kept: one
    rank's bar cannot overwrite another's line, and does not pile up.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._is_bar = False  # the line that is not complete was drawn anew
        self._bar_told = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that these bytes complete, without their ends; of one that is too long, its parts."""
        *lines, rest = (self._rest + self._decoder.decode(data)).split("\n")
        ended = [_drawn_last(line) for line in lines]
        if ended and self._bar_told:
            ended = ended[1:] if ended[0] == self._bar_told else ended  # it has not moved since it was told
            self._bar_told = ""
        shown = [part for line in ended for part in _parts(line)]
        drawn = _drawn_last(rest)
        self._is_bar = "\r" in rest or (self._is_bar and not lines)
        *parts, last = _parts(drawn)
        self._rest = last + ("\r" if rest.endswith("\r") else "")  # of a line's end, or the next drawing's begin
        return [script_text(part) for part in (*shown, *parts)]

    def bar(self) -> list[str]:
        """The progress bar that is being drawn, if it was and has changed since this was asked last."""
        bar = _drawn_last(self._rest) if self._is_bar else ""
        if not bar.strip() or bar == self._bar_told:
            return []
        self._bar_told = bar
        return [script_text(bar)]

    def flush(self) -> list[str]:
        """What follows the last line end."""
        rest, self._rest = _drawn_last(self._rest + self._decoder.decode(b"", final=True)), ""
        return [script_text(part) for part in _parts(rest)] if rest and rest != self._bar_told else []


class RawLines:
    """The interface of `Lines` for bytes that are to be written as they are. They come as text, in lines with their
    ends; `raw_bytes` makes the same bytes of it again."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that these bytes complete; of one that is too long, what there is."""
        *lines, rest = (self._rest + self._decoder.decode(data)).split("\n")
        too_long = len(rest) > LINE_CHARS_MAX
        self._rest = "" if too_long else rest
        return [*(line + "\n" for line in lines), *([rest] if too_long else [])]

    def bar(self) -> list[str]:
        """Never a progress bar: it is what comes last of its line."""
        return []

    def flush(self) -> list[str]:
        """What follows the last line end."""
        rest, self._rest = self._rest + self._decoder.decode(b"", final=True), ""
        return [rest] if rest else []


def raw_bytes(text: str) -> bytes:
    """The bytes that `RawLines` was fed."""
    return text.encode("utf-8", "surrogateescape")


class ScriptErrors:
    """Tells the errors that end scripts from what a log holds besides.

    Attributes:
        newest: the last lines of the newest exception; not of what the daemon itself has ended a script with.
    """

    def __init__(self) -> None:
        self._inside = False
        self.newest: tuple[str, ...] = ()
        self._lines: deque[str] = deque(maxlen=ERROR_LINES_MAX)
        self._is_exception = False

    def left_out(self, lines: Iterable[str]) -> list[str]:
        """The lines without those errors; these may begin and end in other calls."""
        shown = []
        for line in lines:
            plain = line.removesuffix(NO_COLOUR)
            if not self._inside and plain.endswith(ERROR_BEGINS):
                self._inside = True
                self._lines.clear()
                self._is_exception = False
                last = plain.removesuffix(ERROR_BEGINS)  # what the script had written of its last line
                if not last or TORCHS_PREFIX.fullmatch(last):
                    continue
                line = last + line.removeprefix(plain)
            elif self._inside:
                self._inside = not line.removesuffix(NO_COLOUR).endswith(ERROR_ENDS)
                if self._inside:
                    line = TORCHS_PREFIX.sub("", line, count=1)
                    self._is_exception = self._is_exception if self._lines else line.startswith("Traceback ")
                    self._lines.append(line)
                elif self._is_exception:
                    self.newest = tuple(self._lines)
                continue
            shown.append(line)
        return shown


def _drawn_last(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _parts(line: str) -> list[str]:
    """A line as one part; or as many as it is too long for, of which the last may be shorter."""
    parts, at = [], 0
    while len(line) - at > LINE_CHARS_MAX:
        end = at + cut_at(line[at : at + LINE_CHARS_MAX + 1], LINE_CHARS_MAX)
        parts.append(line[at:end])
        at = end
    return [*parts, line[at:]]


def fetch_log(
    client: Client, job: str, rank: int, offset_bytes: int, max_bytes: int, wait_s: float, *, times: bool = False
) -> Fetched:
    """One piece of a rank's log, wherever that rank runs. `times`: and when its bytes came."""
    body = Fetch(
        job=job, what="log", rank=rank, offset_bytes=offset_bytes, max_bytes=max_bytes, wait_s=wait_s, times=times
    )
    return ask(client, body, Fetched, name=f"log of rank {rank}", timeout_s=PIECE_TIMEOUT_S + wait_s)


def log_end(client: Client, job: str, rank: int) -> int:
    """How many bytes the log holds now."""
    return fetch_log(client, job, rank, 0, 1, 0.0).total_bytes


def tail_offset(client: Client, job: str, rank: int, lines: int, end_bytes: int) -> int:
    """The offset at which the last `lines` lines of the first `end_bytes` bytes begin; reads backwards from there."""
    if lines == 0:
        return end_bytes
    wanted = lines + 1  # line ends: the one before the first wanted line counts, the last line's own may be missing
    block_end = end_bytes
    while block_end > 0:
        start = max(0, block_end - limits.FETCH_BYTES_MAX)
        data = fetch_log(client, job, rank, start, block_end - start, 0.0).data
        if block_end == end_bytes and not data.endswith(b"\n"):
            wanted -= 1
        at = len(data)
        while (at := data.rfind(b"\n", 0, at)) >= 0:
            wanted -= 1
            if wanted == 0:
                return start + at + 1
        block_end = start
    return 0


def since_offset(client: Client, job: str, rank: int, since_s: float, end_bytes: int) -> int:
    """The offset at which the line begins that is the first of those that came then or later, among the first
    `end_bytes` bytes; of a line that came in parts the last part counts. Raises NoTimes."""
    if end_bytes and _came_s(client, job, rank, end_bytes - 1) is None:
        raise NoTimes(f"when the lines of rank {rank} came was not noted: an earlier version has written them")
    low, high = 0, end_bytes  # bisected: a log grows at its end, by a clock that hardly goes back
    while low < high:
        middle = (low + high) // 2
        came_s = _came_s(client, job, rank, middle)
        if came_s is None or came_s < since_s:
            low = middle + 1
        else:
            high = middle
    if low == end_bytes:
        return low
    start = max(0, low - limits.FETCH_BYTES_MAX)
    before = fetch_log(client, job, rank, start, low - start, 0.0).data if low > start else b""
    return start + before.rfind(b"\n") + 1


def _came_s(client: Client, job: str, rank: int, offset_bytes: int) -> float | None:
    times = fetch_log(client, job, rank, offset_bytes, 1, 0.0, times=True).times
    return (times[0][1] or None) if times else None


def by_time(piece: Fetched, offset_bytes: int) -> Iterator[tuple[bytes, float | None]]:
    """A piece cut where its time changes: bytes, and when they came; None where that is not known."""
    times = piece.times or ((offset_bytes, 0.0),)
    cuts = [*(at for at, _ in times[1:]), offset_bytes + len(piece.data)]
    at_bytes = offset_bytes
    for (_, came_s), cut_bytes in zip(times, cuts, strict=True):
        yield piece.data[at_bytes - offset_bytes : max(0, cut_bytes - offset_bytes)], came_s or None
        at_bytes = max(at_bytes, cut_bytes)


def read_log(
    client: Client, job: str, rank: int, start_bytes: int, end_bytes: int, *, raw: bool, times: bool = False
) -> Iterator[tuple[str, float | None]]:
    """The lines between two offsets, and when each came, where `times` are asked for. `raw`: with their ends, as
    `RawLines` has them."""
    lines = RawLines() if raw else Lines()
    came_s: float | None = None
    while start_bytes < end_bytes:
        wanted_bytes = min(limits.FETCH_BYTES_MAX, end_bytes - start_bytes)
        piece = fetch_log(client, job, rank, start_bytes, wanted_bytes, 0.0, times=times)
        if not piece.data:
            break
        for data, came_s in by_time(piece, start_bytes):
            for line in lines.feed(data):
                yield line, came_s
        start_bytes += len(piece.data)
    for line in lines.flush():
        yield line, came_s
