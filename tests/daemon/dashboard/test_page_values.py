"""What the page is told: safe to show, true, and bounded."""

import json
import math
from typing import Any

import pytest

from meshtraind.dashboard.chart import Chart
from meshtraind.dashboard.feed import Feed
from meshtraind.dashboard.page_values import loss_of, shown, shown_job, shown_text, waits_for_ranks
from meshtraind.dashboard.sessions import Sessions
from meshtraind.dashboard.shown_code import ShownCode
from meshwire import limits
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.job import Metrics
from tests.daemon.fakedaemon import JOB, summary
from tests.daemon.scripteddaemon import ScriptedDaemon, course, device, peer

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\x07\u202eevil\u2066\u200b\x00"


def test_texts_of_others_are_lines_of_text() -> None:
    """Nothing moves the cursor, turns the direction or hides any more; that nothing is markup is up to the page."""
    text = shown_text(HOSTILE + "\nsecond\r\n\x1b[31mred\x1b[0m")
    assert text.split("\n")[1:] == ["second", "red"]
    assert all(char.isprintable() or char == "\n" for char in text)
    assert len(shown_text("x" * 100_000)) < limits.DASHBOARD_TEXT_CHARS_MAX + 50


def test_what_json_does_not_have_is_null() -> None:
    value = shown({"a": math.nan, "b": (1.5, math.inf, True, None), "c": peer(1, "x\u202e")})
    assert json.loads(json.dumps(value, allow_nan=False))["b"] == [1.5, None, True, None]
    assert (value["a"], value["c"]["name"]) == (None, "x\\u202e")


def test_a_job_is_told_with_names_for_ranks() -> None:
    daemon = ScriptedDaemon()
    daemon.train(7)
    job = shown_job(daemon.jobs[JOB])
    anna, bert, carl = job["members"]
    assert (anna["waits_for"], waits_for_ranks(daemon.jobs[JOB], 0)) == ("carl", [2])
    assert (bert["waits_for"], waits_for_ranks(daemon.jobs[JOB], 1)) == (None, [])
    assert [one["part"] for one in job["members"]] == ["in", "in", "in"]
    assert (job["round"], carl["samples_per_s"], carl["sent_bytes"]) == (7, 62.0, 28_000_000)
    daemon.train(8, present=(0, 1), learning=(0, 1))
    assert shown_job(daemon.jobs[JOB])["members"][2]["part"] == "lost"


def test_why_a_job_failed_is_told_once() -> None:
    failed = summary(JobState.FAILED, error="rank 1 (bert): ValueError: no such thing\n  at train.py:3")
    assert shown_job(failed)["errors"] == ["error on bert: ValueError: no such thing\n  at train.py:3"]


def test_the_loss_is_the_mean_of_those_that_told_it() -> None:
    reports = [
        Metrics(values=(("lr", 1.0), ("train_loss", 2.0))),
        Metrics(values=(("train_loss", 4.0),)),
        Metrics(values=(("train_loss", math.nan),)),
        Metrics(),
    ]
    assert loss_of(reports) == ("train_loss", 3.0)
    assert loss_of([Metrics(values=(("reward", 5.0),))]) == ("reward", 5.0)
    assert loss_of([Metrics()]) is None


def test_a_chart_keeps_its_shape_and_its_size() -> None:
    """However many rounds there are; the newest is at its end, and rounds never go back."""
    daemon, chart = ScriptedDaemon(), Chart()
    for step in range(1, 5000):
        daemon.train(step)
        chart.look(daemon.jobs[JOB], float(step))
        assert len(chart.points) <= limits.DASHBOARD_POINTS_MAX
    rounds = [point[0] for point in chart.points]
    assert rounds == sorted(set(rounds))
    assert (rounds[0], rounds[-1] > 4950) == (1, True)
    assert chart.points[-1][2] == pytest.approx(96.0)  # 3 devices, 32 samples a second each


def test_rounds_that_are_given_up_leave_the_chart() -> None:
    daemon, chart = ScriptedDaemon(), Chart()
    for step in (1, 2, 3, 4, 5):
        daemon.train(step)
        chart.look(daemon.jobs[JOB], float(step))
    daemon.train(3)
    assert chart.look(daemon.jobs[JOB], 6.0)
    assert [point[0] for point in chart.points] == [1, 2, 3]


def test_a_chart_begins_with_what_the_daemon_has_kept() -> None:
    """Before the first point that a page has seen, and within the bound; the next point is no nearer than those are."""
    daemon, chart = ScriptedDaemon(), Chart()
    daemon.train(20)
    chart.look(daemon.jobs[JOB], 1.0)
    chart.begin(course(*range(4, 32, 4)))
    assert [point[0] for point in chart.points] == [4, 8, 12, 16, 20]
    assert (chart.value, chart.points[0]) == ("loss", (4, 9.0, 50.0))
    daemon.train(22)
    assert not chart.look(daemon.jobs[JOB], 2.0)
    long = Chart()
    long.begin(course(*range(1, 2 * limits.DASHBOARD_POINTS_MAX)))
    assert len(long.points) <= limits.DASHBOARD_POINTS_MAX
    assert long.points[0][0] == 1


async def looked(daemon: ScriptedDaemon, *changes: Any) -> Feed:
    """A feed after a look, and one after each change."""
    feed = Feed(daemon, ShownCode(daemon), Sessions())
    await feed._look()
    for change in changes:
        change()
        await feed._look()
    return feed


def told(feed: Feed) -> list[str]:
    return [event["text"] for event in feed._events]


@pytest.mark.asyncio
async def test_what_happens_is_told_in_plain_words() -> None:
    daemon = ScriptedDaemon()
    daemon.train(1)

    def away() -> None:
        daemon.peers[0] = peer(1, "bert", "paired")
        daemon.train(2, present=(0, 2), learning=(0, 2), generation=3)

    def back() -> None:
        daemon.peers[0] = peer(1, "bert")
        daemon.jobs[JOB] = daemon.jobs[JOB].model_copy(update={"state": JobState.SUCCEEDED.value, "ended_at_s": 5.0})

    feed = await looked(daemon, away, back, daemon.peers.clear)
    assert told(feed) == [
        "bert cannot be reached any more",
        f"train ({JOB}): bert was lost; anna and carl go on (generation 3)",
        "bert is linked",
        f"train ({JOB}) is succeeded",
        "bert was removed",
        "carl was removed",
    ]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_events_jobs_and_charts_do_not_grow() -> None:
    """An hour of a mesh of 12 in which links come and go, and jobs."""
    names = tuple(f"laptop{at}" for at in range(12))
    daemon = ScriptedDaemon(names)
    feed = Feed(daemon, ShownCode(daemon), Sessions())
    sizes = []
    for turn in range(120):
        daemon.train(turn + 1)
        own = f"1kx3{turn:08d}"
        daemon.jobs[own] = daemon.jobs[JOB].model_copy(update={"job": own})
        for at in range(turn % 7):
            daemon.peers[at] = peer(at + 1, names[at + 1], "paired" if turn % 2 else "linked")
        if len(daemon.jobs) > 12:
            daemon.jobs.pop(next(iter(daemon.jobs)))
        await feed._look()
        sizes.append(sum(len(part.text) for part in feed._parts.values()))
    assert len(feed._events) == limits.DASHBOARD_EVENTS_MAX
    assert len(feed._watched) <= limits.DASHBOARD_CHARTS_MAX
    assert len([name for name in feed._parts if name.startswith("chart")]) <= limits.DASHBOARD_CHARTS_MAX
    assert max(sizes[60:]) < 1.2 * max(sizes[30:60])


@pytest.mark.asyncio
async def test_names_of_others_reach_no_part_of_the_page_as_they_are() -> None:
    daemon = ScriptedDaemon(("anna", HOSTILE[:50]))
    daemon.train(3, waiting_for=HOSTILE)
    daemon.warnings = (HOSTILE,)
    feed = await looked(daemon, lambda: daemon.peers.append(peer(9, HOSTILE[:40], "seen")), daemon.peers.clear)
    for name, part in feed._parts.items():
        data = part.text.partition("data: ")[2]
        assert part.text.count("\n") == 3, name  # one event of one line: no name ends it
        assert all(char.isprintable() for text in texts(json.loads(data)) for char in text), name


def texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts(each)]
    return [text for each in value for text in texts(each)] if isinstance(value, list) else []


def test_devices_of_this_scene_are_devices() -> None:
    assert len(device(3)) == 64
