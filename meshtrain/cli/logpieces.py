"""A rank's log as lines: read piece by piece, from the start, the end, or as it grows."""

import codecs
from collections.abc import Iterable, Iterator

from meshtrain.cli.connection import ask
from meshtrain.client import Client
from meshwire import limits
from meshwire.messages.job import Fetch, Fetched
from meshwire.scriptlog import ERROR_BEGINS, ERROR_ENDS

PIECE_TIMEOUT_S = 60.0  # as long as the daemons themselves wait for a piece from each other
LINE_CHARS_MAX = 64 * limits.KIB  # a longer line is shown in parts


class Lines:
    """Turns pieces of a file into whole lines. A progress bar's "\\r" keeps what a terminal would show last."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that these bytes complete, without their ends."""
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        if len(self._rest) > LINE_CHARS_MAX:
            lines.append(self._rest)
            self._rest = ""
        return [_as_shown(line) for line in lines]

    def flush(self) -> list[str]:
        """What follows the last line end."""
        rest, self._rest = self._rest + self._decoder.decode(b"", final=True), ""
        return [_as_shown(rest)] if rest else []


class ScriptErrors:
    """Tells the errors that end scripts from what a log holds besides."""

    def __init__(self) -> None:
        self._inside = False

    def left_out(self, lines: Iterable[str]) -> list[str]:
        """The lines without those errors; these may begin and end in other calls."""
        shown = []
        for line in lines:
            if not self._inside and line.endswith(ERROR_BEGINS):
                self._inside = True
                line = line.removesuffix(ERROR_BEGINS)  # what the script had written of its last line
                if not line:
                    continue
            elif self._inside:
                self._inside = line != ERROR_ENDS
                continue
            shown.append(line)
        return shown


def _as_shown(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def fetch_log(client: Client, job: str, rank: int, offset_bytes: int, max_bytes: int, wait_s: float) -> Fetched:
    """One piece of a rank's log, wherever that rank runs."""
    body = Fetch(job=job, what="log", rank=rank, offset_bytes=offset_bytes, max_bytes=max_bytes, wait_s=wait_s)
    return ask(client, body, Fetched, name=f"log of rank {rank}", timeout_s=PIECE_TIMEOUT_S + wait_s)


def log_end(client: Client, job: str, rank: int) -> int:
    """How many bytes the log holds now."""
    return fetch_log(client, job, rank, 0, 1, 0.0).total_bytes


def tail_offset(client: Client, job: str, rank: int, lines: int, end_bytes: int) -> int:
    """Where the last `lines` lines of the first `end_bytes` bytes begin; reads backwards from there."""
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


def read_log(client: Client, job: str, rank: int, start_bytes: int, end_bytes: int) -> Iterator[str]:
    """The lines between two offsets."""
    lines = Lines()
    while start_bytes < end_bytes:
        wanted_bytes = min(limits.FETCH_BYTES_MAX, end_bytes - start_bytes)
        piece = fetch_log(client, job, rank, start_bytes, wanted_bytes, 0.0)
        if not piece.data:
            break
        start_bytes += len(piece.data)
        yield from lines.feed(piece.data)
    yield from lines.flush()
