"""When a log grew: each byte has the time at which the daemon saw it first, and none has a time that is a guess."""

import asyncio
import math
import struct
from pathlib import Path

import pytest

from meshtraind.storage import log_times as log_times_module
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.fetch import serve
from meshtraind.storage.log_times import NOT_KNOWN, LogClock, log_times
from meshwire import limits
from meshwire.messages.job import Fetch

JOB = "1kx3m9q2v7bd"
WAY = (JOB, "logs", "0.log")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path.joinpath("jobs", *WAY)
    path.parent.mkdir(parents=True)
    return path


def append(log: Path, data: bytes) -> None:
    with log.open("ab") as file:
        file.write(data)


def noted(log: Path, begin: int = 0, end: int = 1 << 20, rest_s: float = NOT_KNOWN) -> list[tuple[int, float]]:
    size = log.stat().st_size
    return list(log_times(log.parents[2], WAY, begin, min(end, size), rest_s))


def test_each_byte_has_the_time_at_which_it_was_there_first(log: Path) -> None:
    clock = LogClock(log)
    clock.look(100.0)  # there is no log yet
    for at_s, data in ((101.0, b"one\n"), (105.0, b"two\n"), (106.0, b""), (107.0, b"three\n")):
        append(log, data)
        clock.look(at_s)
    assert noted(log) == [(0, 101.0), (4, 105.0), (8, 107.0)]
    assert noted(log, begin=4) == [(4, 105.0), (8, 107.0)]
    assert noted(log, begin=5, end=8) == [(5, 105.0)]
    assert noted(log, begin=13) == [(13, 107.0)]
    assert noted(log, begin=14) == []


def test_what_is_not_noted_yet_came_now_and_never_with_the_line_before(log: Path) -> None:
    clock = LogClock(log)
    append(log, b"old\n")
    clock.look(100.0)
    append(log, b"new\n")
    assert noted(log, rest_s=900.0) == [(0, 100.0), (4, 900.0)]
    assert noted(log, begin=5, rest_s=900.0) == [(5, 900.0)]
    assert noted(log) == [(0, 100.0), (4, NOT_KNOWN)]


def test_what_came_while_nobody_looked_has_no_time(log: Path) -> None:
    append(log, b"of an earlier version\n")
    first = LogClock(log)
    append(log, b"seen\n")
    first.look(100.0)
    append(log, b"beside a daemon that was killed\n")
    second = LogClock(log)
    append(log, b"again\n")
    second.look(200.0)
    assert noted(log) == [(0, NOT_KNOWN), (22, 100.0), (27, NOT_KNOWN), (59, 200.0)]
    third = LogClock(log)  # where nothing was missed, nothing is unknown
    append(log, b"more\n")
    third.look(300.0)
    assert noted(log)[-2:] == [(59, 200.0), (65, 300.0)]


def test_the_last_words_have_a_time_however_soon_they_come(log: Path) -> None:
    clock = LogClock(log)
    append(log, b"one\n")
    clock.look(100.0)
    append(log, b"two\n")
    clock.look(100.1)
    assert noted(log) == [(0, 100.0), (4, NOT_KNOWN)]
    clock.look(100.1, last=True)
    assert noted(log) == [(0, 100.0), (4, 100.1)]


def test_times_become_coarser_and_their_file_stays_small(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_times_module, "_COARSER_RECORDS", 16)
    clock = LogClock(log)
    for second in range(4000):
        append(log, b"x")
        clock.look(float(second))
    records = noted(log)
    assert len(records) < 16 * math.log2(4000)
    assert all(came_s >= offset for offset, came_s in records[:-1])  # never early


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 40,
        struct.pack("<Qd", 4, math.nan) + struct.pack("<Qd", 8, -5.0),
        struct.pack("<Qd", 8, 1e300) + struct.pack("<Qd", 2, 1.0),
        b"short",
    ],
)
def test_what_a_script_writes_there_is_no_time(log: Path, content: bytes) -> None:
    append(log, b"one\ntwo\n")
    log.with_suffix(".times").write_bytes(content)
    assert all(came_s == NOT_KNOWN for _, came_s in noted(log))
    offsets = [offset for offset, _ in noted(log)]
    assert offsets == sorted(set(offsets))


def test_a_link_in_its_place_is_neither_written_nor_read(log: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.write_bytes(b"untouched")
    log.with_suffix(".times").symlink_to(target)
    clock = LogClock(log)
    append(log, b"one\n")
    clock.look(100.0)
    assert target.read_bytes() == b"untouched"
    with pytest.raises(OSError, match="link"):
        noted(log)


@pytest.mark.asyncio
async def test_a_piece_ends_where_more_times_than_a_message_holds_begin(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOG_TIMES_MAX", 5)
    clock = LogClock(log)
    for second in range(1, 13):
        append(log, b"ab")
        clock.look(float(second))
    store = BlobStore(log.parents[3] / "blobs")
    seen: list[tuple[int, float]] = []
    data = b""
    while True:
        body = Fetch(job=JOB, what="log", offset_bytes=len(data), max_bytes=1000, times=True)
        piece = await asyncio.wait_for(serve(body, store, log.parents[1], ended=lambda: True), 5)
        if not piece.data:
            break
        assert len(piece.times) <= 5
        seen += piece.times
        data += piece.data
        if piece.end:
            break
    assert data == b"ab" * 12
    assert seen == [(2 * at, float(at + 1)) for at in range(12)]
    plain = await serve(Fetch(job=JOB, what="log", offset_bytes=0, max_bytes=1000), store, log.parents[1], ended=bool)
    assert (plain.times, plain.data) == ((), data)
