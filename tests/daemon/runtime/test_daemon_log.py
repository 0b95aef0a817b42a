"""The daemon's log stays bounded, whatever others provoke, and says what was left out."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtraind.runtime.log_limit import (
    INTERVAL_MAX_S,
    INTERVAL_S,
    LINES_MAX,
    LINES_PER_SOURCE_MAX,
    SOURCES_MAX,
    LimitedHandler,
    LogLimit,
    caused_by,
)


class Written(logging.Handler):
    """Keeps what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Log:
    """A logger whose lines go through the limit, in virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.written = Written()
        self.handler = LimitedHandler(self.written, clock=lambda: self.now_s)
        self.logger = logging.Logger("test")
        self.logger.addHandler(self.handler)

    def refused(self, host: str, why: str = "no hello") -> None:
        self.logger.info("%s was not let in: %s", host, why, extra=caused_by(host))

    def job(self, what: str) -> None:
        self.logger.warning("job: %s", what)

    def later(self, seconds: float) -> list[str]:
        """What is told when the time has passed."""
        before = len(self.written.lines)
        self.now_s += seconds
        self.handler.tell()
        return self.written.lines[before:]


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.handler.close()


def test_a_flood_from_one_host_is_written_a_few_times_and_then_counted(log: Log) -> None:
    for i in range(1000):
        log.refused("10.0.0.66", f"reason {i}")
    assert log.written.lines == [f"10.0.0.66 was not let in: reason {i}" for i in range(LINES_PER_SOURCE_MAX)], (
        "with address and reason"
    )
    assert log.later(INTERVAL_S) == [
        "... and 995 more from 1 address in the last 60 s, such as: 10.0.0.66 was not let in: reason 5"
    ]


def test_a_flood_from_one_host_hides_neither_another_host_nor_another_kind(log: Log) -> None:
    for _ in range(1000):
        log.refused("10.0.0.66")
    log.refused("10.0.0.1", "wire version 3")
    log.job("no checkpoint")
    assert log.written.lines[-2:] == ["10.0.0.1 was not let in: wire version 3", "job: no checkpoint"]


def test_many_hosts_together_are_bounded_and_counted(log: Log) -> None:
    for i in range(1000):
        log.refused(f"10.0.{i // 250}.{i % 250}")
    assert len(log.written.lines) == LINES_MAX
    (told,) = log.later(INTERVAL_S)
    assert told.startswith(f"... and {1000 - LINES_MAX} more from at least {SOURCES_MAX} addresses in the last 60 s")
    (kind,) = log.handler._limit._kinds.values()
    for i in range(1000):
        log.refused(f"10.1.{i // 250}.{i % 250}")
    assert len(kind.left_out_sources) <= SOURCES_MAX + 1
    assert len(kind.written_by_source) <= LINES_MAX


def test_a_flood_of_days_takes_ever_fewer_lines(log: Log) -> None:
    """Or the file would be full of it, and what was before it gone."""
    lines = 0
    for _ in range(24 * 60):
        for _ in range(10):
            log.refused("10.0.0.66")
        log.later(60.0)
        lines, log.written.lines = lines + len(log.written.lines), []
    assert lines < 2 * 24 * (LINES_PER_SOURCE_MAX + 1)
    assert log.handler._limit._kinds
    log.later(INTERVAL_MAX_S)
    log.later(INTERVAL_MAX_S)
    assert not log.handler._limit._kinds, "nothing is kept of what is over"
    log.refused("10.0.0.66")
    assert log.written.lines[-1] == "10.0.0.66 was not let in: no hello"


def test_what_nobody_is_known_to_have_caused_is_limited_too(log: Log) -> None:
    for i in range(LINES_MAX + 3):
        log.job(f"round {i}")
    assert len(log.written.lines) == LINES_MAX
    assert log.later(INTERVAL_S) == [f"... and 3 more in the last 60 s, such as: job: round {LINES_MAX}"]
    assert log.later(3 * INTERVAL_S) == []


def test_what_is_below_info_is_what_somebody_asked_for(log: Log) -> None:
    for _ in range(3 * LINES_MAX):
        log.logger.debug("dialling")
    assert len(log.written.lines) == 3 * LINES_MAX


def test_the_end_tells_what_was_left_out(log: Log) -> None:
    for _ in range(LINES_PER_SOURCE_MAX + 1):
        log.refused("10.0.0.66")
    log.handler.close()
    assert log.written.lines[-1].startswith("... and 1 more from 1 address")


def test_a_line_that_cannot_be_formatted_is_no_error_of_who_logs(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    for _ in range(LINES_MAX + 1):
        log.logger.info("%d", "no number")
    log.job("goes on")
    assert log.written.lines[-1] == "job: goes on"


def test_no_kind_is_forgotten_before_its_interval_is_over() -> None:
    """A limit that a pause of a second resets would be none."""
    limit = LogLimit()
    record = logging.LogRecord("test", logging.INFO, "file.py", 1, "x", (), None)
    admitted = 0
    for second in range(int(INTERVAL_S)):
        admitted += sum(limit.admits(record, float(second)) for _ in range(5))
        assert limit.over(float(second)) == []
    assert admitted == LINES_MAX


FLOODED = """
import logging, os, sys
from meshtraind.runtime import log_limit
from meshtraind.runtime.log_file import open_log
from meshwire import limits
from pathlib import Path
limits.LOG_FILE_BYTES_MAX = 20_000
log_limit.LINES_MAX = 10**9
path = Path(sys.argv[1])
open_log(path, "info")
for i in range(1000):
    logging.getLogger("x").info("line %d %s", i, "x" * 80)
    assert path.stat().st_size <= 20_000, path.stat().st_size
print("a crash past logging", file=sys.stderr, flush=True)
os.abort()
"""


def test_the_file_is_begun_anew_when_it_is_full_and_stderr_follows(tmp_path: Path) -> None:
    """As `meshtrain up` has it: stderr leads into the log from the start."""
    path = tmp_path / "daemon.log"
    with path.open("ab") as file:
        file.write(b"ModuleNotFoundError, say\n" * 1000)
        file.flush()
        ended = subprocess.run([sys.executable, "-c", FLOODED, path], stdout=file, stderr=file)
    assert ended.returncode < 0
    assert sorted(os.listdir(tmp_path)) == ["daemon.log", "daemon.log.1"]
    assert "a crash past logging" in path.read_text()
    assert path.stat().st_size <= 20_000
    assert (tmp_path / "daemon.log.1").stat().st_size <= 20_000
    assert path.stat().st_mode & 0o777 == 0o600


def test_stderr_stays_where_it_leads_if_that_is_elsewhere(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", FLOODED, tmp_path / "daemon.log"], capture_output=True, text=True)
    assert "a crash past logging" in ended.stderr
    assert "line" not in ended.stderr
    assert "a crash past logging" not in (tmp_path / "daemon.log").read_text()
