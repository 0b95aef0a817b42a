"""A rank's log as the page shows it: piece by piece, in whole lines."""

from typing import Any

from meshtraind.dashboard.answers import Answers
from meshtraind.dashboard.page_values import shown_line
from meshwire import limits
from meshwire.messages.job import Fetch, Fetched

TAIL_BYTES = 32 * limits.KIB  # where a reader begins
PIECE_BYTES = 64 * limits.KIB
WAIT_S = 5.0  # for new lines
LINE_CHARS_MAX = 2000


async def read_log(answers: Answers, job: str, rank: int, offset_bytes: int | None) -> dict[str, Any]:
    """Lines from there on, or the last ones, and where the next ones begin. Raises RequestFailed."""
    from_tail = offset_bytes is None
    if offset_bytes is None:
        about = await _fetch(answers, job, rank, 0, 1, 0.0)
        offset_bytes = max(0, about.total_bytes - TAIL_BYTES)
    piece = await _fetch(answers, job, rank, offset_bytes, PIECE_BYTES, 0.0 if from_tail else WAIT_S)
    data = piece.data
    skipped = 0
    if from_tail and offset_bytes:  # in the middle of a line
        skipped = data.find(b"\n") + 1
        data = data[skipped:]
    if not piece.end and len(piece.data) < PIECE_BYTES:  # the last line may go on
        data = data[: data.rfind(b"\n") + 1]
    lines = data.decode(errors="replace").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return {
        "lines": [shown_line(line[: -LINE_CHARS_MAX - 1 : -1][::-1]) for line in lines],
        "offset_bytes": offset_bytes + skipped + len(data),
        "end": piece.end,
    }


async def _fetch(answers: Answers, job: str, rank: int, offset_bytes: int, max_bytes: int, wait_s: float) -> Fetched:
    body = Fetch(job=job, what="log", rank=rank, offset_bytes=offset_bytes, max_bytes=max_bytes, wait_s=wait_s)
    reply = await answers.answer(body, lambda _event: None)
    assert isinstance(reply, Fetched)
    return reply
