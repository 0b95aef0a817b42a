"""`logs -t` and `--since`: each line with the time at which it came, and no line that came before."""

import bisect
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtrain.cli.ui.errors import BadCommandLine
from meshtrain.cli.ui.since import since_time
from meshtrain.following.shown_text import NO_TIME, clock_text
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.job import Fetch, Fetched
from meshwire.messages.local import GetJobs, Watch, Watched
from tests.daemon.fakedaemon import Answer, Endpoint, known_jobs, run, summary

pytestmark = pytest.mark.usefixtures("plain_environment")

NOON_S = 1_790_000_000.0
LINES = tuple((f"line {at}\n".encode(), NOON_S + 60.0 * at) for at in range(20))


def timed(*lines: tuple[bytes, float]) -> Answer:
    """A log whose lines came at these times."""
    data = b"".join(line for line, _ in lines)
    starts, ends = [], 0
    for line, _ in lines:
        starts.append(ends)
        ends += len(line)

    def fetch(body: Fetch, _emit: object) -> Fetched:
        begin, end = body.offset_bytes, min(body.offset_bytes + body.max_bytes, len(data))
        times = []
        if body.times and begin < end:
            first = bisect.bisect_right(starts, begin) - 1
            times = [(max(start, begin), came_s) for start, (_, came_s) in zip(starts, lines, strict=True)][first:]
        return Fetched(
            data=data[begin:end],
            total_bytes=len(data),
            end=end == len(data),
            times=[one for one in times if one[0] < end],
        )

    return fetch


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    endpoint = Endpoint(tmp_path / "data")
    endpoint.answers[GetJobs] = known_jobs(summary())
    endpoint.answers[Fetch] = timed(*LINES)
    yield endpoint
    endpoint.close()


def shown(endpoint: Endpoint, *args: str) -> list[str]:
    result = run("logs", "--rank", "anna", *args, "--data-dir", str(endpoint.data_dir))
    assert result.exit_code == 0, result.stderr
    lines: list[str] = result.stdout.splitlines()
    return lines


def test_each_line_has_its_own_time(endpoint: Endpoint) -> None:
    lines = shown(endpoint, "-t")
    assert lines == [f"{clock_text(came_s)} line {at}" for at, (_, came_s) in enumerate(LINES)]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d line", line) for line in lines)
    endpoint.asked.clear()
    assert shown(endpoint) == [f"line {at}" for at in range(20)]
    assert not any(body.times for body in endpoint.of_type(Fetch))  # nobody reads them for nothing


def test_only_what_came_since(endpoint: Endpoint) -> None:
    for at in (0, 1, 7, 19):
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(LINES[at][1]))
        assert shown(endpoint, "--since", since) == [f"line {each}" for each in range(at, 20)]
    assert shown(endpoint, "--since", "1s") == []
    assert shown(endpoint, "--since", "10000d") == [f"line {at}" for at in range(20)]
    assert shown(endpoint, "--since", "10000d", "-n", "2") == ["line 18", "line 19"]


def test_a_line_that_came_in_two_parts_is_whole(endpoint: Endpoint) -> None:
    endpoint.answers[Fetch] = timed((b"epoch 1: ", NOON_S), (b"done\n", NOON_S + 50), (b"epoch 2\n", NOON_S + 90))
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOON_S + 20))
    assert shown(endpoint, "-t", "--since", since) == [
        f"{clock_text(NOON_S + 50)} epoch 1: done",
        f"{clock_text(NOON_S + 90)} epoch 2",
    ]


def test_a_time_that_nobody_has_noted_is_not_made_up(endpoint: Endpoint) -> None:
    endpoint.answers[Fetch] = timed((b"old\n", 0.0), (b"new\n", NOON_S))
    assert shown(endpoint, "-t") == [f"{NO_TIME} old", f"{clock_text(NOON_S)} new"]
    assert shown(endpoint, "--since", "10000d") == ["new"]
    endpoint.answers[Fetch] = timed((b"old\n", 0.0))
    result = run("logs", "--rank", "anna", "--since", "1h", "--data-dir", str(endpoint.data_dir))
    assert result.exit_code == 1
    assert "not noted" in result.stderr
    assert "without --since" in result.stderr


def test_a_followed_log_has_times_too(endpoint: Endpoint) -> None:
    endpoint.answers[Watch] = Watched(summary=summary())
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING, ended_at_s=None))
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(LINES[18][1]))
    expected = [f"{clock_text(came_s)} line {at}" for at, (_, came_s) in enumerate(LINES)][18:]
    assert shown(endpoint, "-f", "-t", "--since", since) == expected


def test_how_long_ago_or_when() -> None:
    now_s = time.mktime((2026, 5, 1, 15, 0, 0, 0, 0, -1))
    assert since_time("10m", now_s) == now_s - 600
    assert since_time("1h30m", now_s) == now_s - 5400
    assert since_time("1.5d", now_s) == now_s - 129_600
    assert since_time("14:05", now_s) == now_s - 55 * 60
    assert since_time("2026-05-01 14:05", now_s) == now_s - 55 * 60
    assert since_time("1970-01-02T00:00:00+00:00", now_s) == 86_400
    assert since_time("9:05", now_s) == since_time("09:05:00", now_s) == now_s - (5 * 60 + 55) * 60
    assert since_time("23:50", now_s) == now_s - (15 * 60 + 10) * 60, "what has not come yet was yesterday"
    assert since_time("15:00", now_s) == now_s
    for typed in ("", "10", "10 minutes", "yesterday", "25:00", "-5m", "m", "1e9h"):
        with pytest.raises(BadCommandLine, match="neither a duration nor a time"):
            since_time(typed, now_s)
