"""`owner/notifier.py`: each end and each need is told once, by whatever the owner has chosen."""

import asyncio
import os
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.owner.live_settings import LiveSettings
from meshtraind.owner.notifier import (
    HELP,
    QUEUED_MAX,
    WAITS_S,
    JobWatch,
    Notifier,
    OwnerNotice,
    desktop_command,
    keep_command,
)
from meshtraind.storage.job_record import Job
from meshwire.jobs.lifecycle import TERMINAL_STATES, JobState
from tests.daemon.waiting import until

NEWS = OwnerNotice(
    "1kx3", "gpt", "failed", 'it "broke"; $(touch evil)', 'gpt (1kx3) has failed: it "broke"; $(touch evil)'
)


def a_job(job: str = "1kx3", **now: Any) -> Any:
    made = SimpleNamespace(
        spec=SimpleNamespace(job=job, name="gpt"), rank=0, state=JobState.RUNNING, error=None, waiting="", left=False,
        reports={0: SimpleNamespace(part="computes", failure=None)},
    )  # fmt: skip
    return changed(made, **now)


def changed(job: Any, **now: Any) -> Any:
    for name, value in now.items():
        setattr(job, name, value)
    job.ended = job.state in TERMINAL_STATES
    return job


def told(watch: JobWatch, job: Any, now_s: float) -> list[tuple[str, str]]:
    return [(news.state, news.text) for news in watch.look([cast(Job, job)], now_s)]


def test_an_end_is_told_once_with_its_error() -> None:
    watch, job = JobWatch(), a_job()
    assert not told(watch, job, 0)
    changed(job, state=JobState.FAILED, error="rank 1 (bert): ValueError: no\x1b[2J\n    raise it\n")
    found = told(watch, job, 1)
    assert found == [("failed", "gpt (1kx3) has failed: rank 1 (bert): ValueError: no\\x1b[2J")]
    assert not told(watch, job, 2)
    assert told(watch, a_job("other", state=JobState.SUCCEEDED), 3) == [("succeeded", "gpt (other) has succeeded")]


def test_who_has_left_a_job_is_not_told_that_it_is_over_here() -> None:
    assert not told(JobWatch(), a_job(state=JobState.CANCELLED, left=True), 0)


def test_a_wait_is_told_when_it_has_lasted_and_again_after_the_next() -> None:
    watch, job = JobWatch(), a_job(waiting="bert, who is away")
    assert not told(watch, job, 10)
    assert not told(watch, changed(job, waiting="bert and carl"), 10 + WAITS_S - 1)
    assert told(watch, job, 10 + WAITS_S) == [(HELP, "gpt (1kx3) waits: bert and carl")]
    assert not told(watch, job, 20 + WAITS_S)
    assert not told(watch, changed(job, waiting=""), 30 + WAITS_S)
    assert not told(watch, changed(job, waiting="bert"), 40 + WAITS_S)
    assert told(watch, job, 40 + 2 * WAITS_S) == [(HELP, "gpt (1kx3) waits: bert")]


def test_a_learner_that_is_given_up_is_told_once() -> None:
    watch, job = JobWatch(), a_job()
    job.reports[0] = SimpleNamespace(part="forwards", failure="rank 0 (anna): ImportError: no module x")
    assert [text for _, text in told(watch, job, 0)] == [
        "gpt (1kx3) does not train here any more: rank 0 (anna): ImportError: no module x"
    ]
    assert not told(watch, job, 1)


def test_what_is_known_of_jobs_does_not_grow() -> None:
    watch = JobWatch()
    for number in range(100):
        told(watch, a_job(str(number)), 0)
    assert len(watch._told) == 1


def notifier(folder: Path, setting: str, **environment: str) -> Notifier:
    settings = LiveSettings(folder)
    settings.change("notify", setting)
    return Notifier(folder, settings, {}, {"PATH": os.environ["PATH"], **environment})


@pytest.mark.asyncio
async def test_a_command_gets_the_news_as_data(tmp_path: Path) -> None:
    """What others have chosen, names and errors, is in variables and never in what the shell reads as commands."""
    command = (
        'echo "$MESHTRAIN_JOB|$MESHTRAIN_JOB_NAME|$MESHTRAIN_JOB_STATE|$MESHTRAIN_JOB_ERROR|$MESHTRAIN_DATA_DIR" > told'
    )
    made = notifier(tmp_path, command)
    made.tell(NEWS)
    file = tmp_path / "told"
    await until(lambda: file.exists() and file.read_text().endswith("\n"), "the command")
    assert file.read_text() == f"1kx3|gpt|failed|{NEWS.why}|{tmp_path}\n"
    assert not (tmp_path / "evil").exists()
    await made.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("setting", ["off", "touch of-the-owner"])
async def test_a_job_s_own_command_is_run_in_place_of_the_owner_s(tmp_path: Path, setting: str) -> None:
    """`submit --notify`: of this job alone, also where nobody is told of others; nobody else may read it."""
    folder = tmp_path / "jobs" / NEWS.job
    folder.mkdir(parents=True)
    keep_command(folder, "touch of-an-earlier-one")
    keep_command(folder, 'echo "$MESHTRAIN_TEXT" > told')
    assert (folder / "notify").stat().st_mode & 0o777 == 0o600
    made = notifier(tmp_path, setting)
    made.tell(NEWS)
    await until((tmp_path / "told").exists, "the command")
    made.tell(replace(NEWS, job="other"))
    if setting != "off":
        await until((tmp_path / "of-the-owner").exists, "the owner's command")
    await made.close()
    assert not (tmp_path / "of-an-earlier-one").exists()


@pytest.mark.asyncio
async def test_a_command_that_fails_or_hangs_is_told_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With all that it has started, and the next one is run all the same."""
    monkeypatch.setattr("meshtraind.owner.notifier.RUN_TIMEOUT_S", 0.3)
    made = notifier(tmp_path, "echo cannot reach it; exit 3")
    made.tell(NEWS)
    await until(lambda: "exit code 3: cannot reach it" in caplog.text, "the failure")
    made._settings.change("notify", "sleep 60 & echo $! > pid; wait")
    made.tell(NEWS)
    await until(lambda: "was ended" in caplog.text, "the end of the one that hangs")
    made._settings.change("notify", "touch later")
    made.tell(NEWS)
    await until((tmp_path / "later").exists, "the next one")
    worker = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")
    await until(lambda: not worker.exists() or worker.read_text().split()[2] == "Z", "the end of what it has started")
    await made.close()


@pytest.mark.asyncio
async def test_no_more_wait_than_somebody_could_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = notifier(tmp_path, "sleep 60")
    for _ in range(QUEUED_MAX + 3):
        made.tell(NEWS)
    assert caplog.text.count("not told") == 3
    await made.close()


@pytest.mark.asyncio
async def test_off_runs_nothing(tmp_path: Path) -> None:
    made = notifier(tmp_path, "off")
    made.tell(NEWS)
    assert len(asyncio.all_tasks()) == 1
    await made.close()


@pytest.mark.asyncio
async def test_a_desktop_is_told_by_notify_send(tmp_path: Path) -> None:
    """Through the program that a desktop has, here one that writes down its arguments."""
    program = tmp_path / "bin" / "notify-send"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(tmp_path / "shown"))}\n')
    program.chmod(0o755)
    made = notifier(tmp_path, "desktop", DISPLAY=":0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        made.tell(NEWS)
        await until(lambda: (tmp_path / "shown").exists() and "evil" in (tmp_path / "shown").read_text(), "it")
    assert (tmp_path / "shown").read_text().splitlines() == ["--app-name=meshtrain", "--", "meshtrain", NEWS.text]
    await made.close()


def test_a_desktop_reads_no_markup_and_runs_nothing_of_what_others_have_chosen() -> None:
    def find(name: str) -> str:
        return f"/bin/{name}"

    text = '-e <a href="http://evil">x</a>'
    shown = desktop_command(text, "linux", {"WAYLAND_DISPLAY": "wayland-0"}, find)
    assert shown == [
        "/bin/notify-send",
        "--app-name=meshtrain",
        "--",
        "meshtrain",
        '-e &lt;a href="http://evil"&gt;x&lt;/a&gt;',
    ]
    mac = desktop_command('"; do shell script "x', "darwin", {}, find)
    assert mac is not None
    assert (mac[0], mac[-1]) == ("/bin/osascript", 'Job "; do shell script "x')
    assert not any("shell" in part for part in mac[:-1])
    assert desktop_command(text, "linux", {}, find) is None
    assert desktop_command(text, "linux", {"DISPLAY": ":0"}, lambda _name: None) is None
    assert desktop_command(text, "win32", {"DISPLAY": ":0"}, find) is None
