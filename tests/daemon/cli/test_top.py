"""`status` and `top`: the peers of a running job, and who waits for whom and why (R1)."""

import io
import json
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
from rich.console import Console

from meshtrain.cli.ui.follow_view import View
from meshtrain.cli.ui.peer_table import COLUMNS, peer_rows, render_peers
from meshwire.jobs.lifecycle import JobState
from meshwire.message_base import Wire
from meshwire.messages.job import JobSummary, Metrics, RankReport
from meshwire.messages.local import Cancel, GetJobs, GetStatus, Watch, Watched
from meshwire.peer_news import with_names
from tests.daemon.fakedaemon import JOB, MEMBERS, STATUS, Emit, Endpoint, known_jobs, run, summary

pytestmark = pytest.mark.usefixtures("plain_environment")

WAIT_S = 20.0
LATE = "3 rounds ahead, 2 allowed: round 7 waits for rank 1: its last contribution is of step 6, to round 6"
LATE_NAMED = LATE.replace("rank 1", "bert")


def running(waiting_for: str | None = LATE, **changes: Any) -> JobSummary:
    fast = Metrics(step=9, round=6, step_s=0.25, ahead=3, age=2, nulls=0, batch=24, waiting_for=waiting_for)
    slow = Metrics(step=6, round=6, step_s=2.5, ahead=0, age=0, nulls=4, batch=8)
    ranks = (
        RankReport(job=JOB, rank=0, state="running", metrics=fast),
        RankReport(job=JOB, rank=1, state="running", metrics=slow),
    )
    return summary(JobState.RUNNING, **{"ranks": ranks, "rounds": 6, **changes})


def test_one_line_per_peer_says_all_there_is() -> None:
    assert peer_rows(running()) == [
        ("anna", "-", "9", "250 ms", "3", "2", "0", "24", LATE_NAMED),
        ("bert", "-", "6", "2.5 s", "0", "0", "4", "8", "-"),
    ]


def test_what_is_not_known_yet_is_a_dash_and_who_has_finished_waits_for_nobody() -> None:
    ranks = (
        RankReport(job=JOB, rank=0, state="running"),
        RankReport(job=JOB, rank=1, state="running", metrics=Metrics(step=9, finished=True, waiting_for=LATE)),
    )
    assert peer_rows(running(ranks=ranks)) == [
        ("anna", "-", "0", "-", "0", "-", "0", "-", "-"),
        ("bert", "-", "9", "-", "0", "-", "0", "-", "(has finished)"),
    ]


def test_a_job_of_process_groups_says_what_it_does_and_has_no_rounds(endpoint: Endpoint) -> None:
    """P5: nobody prepares there, and steps and rounds of it are not known."""
    metrics = Metrics(stage="process group")
    ranks = tuple(RankReport(job=JOB, rank=rank, state="running", metrics=metrics) for rank in range(2))
    job = running(ranks=ranks, rounds=0, generation=1, present=(0, 1), learning=(0, 1))
    assert [row[2:8] for row in peer_rows(job)] == [("-",) * 6] * 2
    endpoint.answers |= {GetStatus: STATUS.model_copy(update={"jobs_running": 1}), GetJobs: known_jobs(job)}
    line = f"{JOB} train running, generation 1; training by torch.distributed"
    assert line in run("status").stdout.splitlines()
    assert run("top").stdout.splitlines()[0] == line
    assert run("jobs").stdout.splitlines()[1].split()[2:5] == ["running", "2", "-"]
    begun = running(ranks=(ranks[0], running().ranks[1]), rounds=0)
    assert "; training by" not in run("status").stdout.replace(line, "") + str(peer_rows(begun))


def test_before_the_first_step_it_says_how_far_scripts_are() -> None:
    starting = RankReport(job=JOB, rank=0, state="running", metrics=Metrics(stage="script"))
    told = io.StringIO()
    Console(file=told, width=200).print(render_peers(running(ranks=(starting,), rounds=0, learning=(0,))))
    assert "running, round 0; anna: the script runs, up to mt.prepare" in told.getvalue()


def test_ranks_become_names_and_nothing_else_does() -> None:
    assert with_names("rank 1: a, rank 0: b, rank 7, crank 1\x07", MEMBERS) == "bert: a, anna: b, rank 7, crank 1\\x07"


def test_status_shows_the_peers_of_running_jobs(endpoint: Endpoint) -> None:
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"jobs_running": 1})
    endpoint.answers[GetJobs] = known_jobs(running(), summary(job="1kx2000000aa"))
    lines = run("status").stdout.splitlines()
    at = lines.index(f"{JOB} train running, round 6")
    assert lines[at + 1].split() == " ".join(COLUMNS).split()
    assert [line.split()[0] for line in lines[at + 2 :]] == ["anna", "bert"]
    assert lines[at + 2].endswith(LATE_NAMED)  # a pipe cuts nothing off
    assert not any("1kx2" in line for line in lines)
    assert json.loads(run("status", "--json").stdout)["jobs_running"] == 1


def test_status_without_a_running_job_asks_for_none(endpoint: Endpoint) -> None:
    endpoint.answers[GetStatus] = STATUS
    assert run("status").exit_code == 0
    assert endpoint.of_type(GetJobs) == []


def test_top_in_a_pipe_is_one_table_of_the_latest_job_that_runs(endpoint: Endpoint) -> None:
    newer = summary(job="1kx9000000aa", created_at_s=1_800_000_000.0)
    endpoint.answers[GetJobs] = known_jobs(newer, running())
    shown = run("top")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[0] == f"{JOB} train running, round 6"
    assert len(shown.stdout.splitlines()) == 4
    assert endpoint.of_type(Watch) == []


def test_top_of_a_job_that_has_ended_says_how(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary(rounds=12))
    shown = run("top", "1kx3")
    assert shown.stdout == f"{JOB} train succeeded, round 12\n"
    assert f"job {JOB} (train) succeeded after 35 s, 12 rounds" in shown.stderr


def test_top_json_is_one_line_per_update_until_the_end(endpoint: Endpoint) -> None:
    def watch(_: Wire, emit: Emit) -> Wire:
        emit(Watched(summary=running()))
        emit(Watched(summary=running(None)))
        return Watched(summary=summary())

    endpoint.answers[GetJobs] = known_jobs(running())
    endpoint.answers[Watch] = watch
    documents = [json.loads(line) for line in run("top", "--json").stdout.splitlines()]
    assert [document["state"] for document in documents] == ["running", "running", "succeeded"]
    assert [document["ranks"][0]["metrics"]["waiting_for"] for document in documents[:2]] == [LATE, None]


def test_top_on_a_terminal_is_drawn_anew_until_the_job_ends(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays is the last table and the outcome."""

    def watch(_: Wire, emit: Emit) -> Wire:
        emit(Watched(summary=running(rounds=41)))
        return Watched(summary=running(rounds=42).model_copy(update={"state": "failed"}))

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the pipe for a terminal
    monkeypatch.setenv("TERM", "xterm")
    endpoint.answers[GetJobs] = known_jobs(running())
    endpoint.answers[Watch] = watch
    shown = run("top")
    assert shown.exit_code == 0
    assert f"{JOB} train running, round 41" in shown.stdout
    assert shown.stdout.count(f"{JOB} train failed, round 42") == 1
    assert f"job {JOB} (train) failed after 35 s, 42 rounds" in shown.stderr


def test_ctrl_c_ends_top_and_not_the_job(endpoint: Endpoint) -> None:
    over = threading.Event()

    def watch(_: Wire, emit: Emit) -> Wire:
        emit(Watched(summary=running()))
        assert over.wait(WAIT_S)
        return Watched(summary=summary())

    endpoint.answers[GetJobs] = known_jobs(running())
    endpoint.answers[Watch] = watch
    command = [sys.executable, "-m", "meshtrain.cli", "top", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "running"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WAIT_S)
    over.set()
    assert (process.returncode, said) == (0, "")
    assert endpoint.of_type(Cancel) == []


def test_a_narrow_terminal_breaks_reasons_and_no_figures() -> None:
    out = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    out.print(render_peers(running()))
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split()[:9] == ["anna", "-", "9", "250", "ms", "3", "2", "0", "24"]
    column = lines[1].index("WAITS FOR")
    assert " ".join(" ".join(line[column:] for line in lines[2:-1]).split()) == LATE_NAMED


def test_the_followed_line_names_only_who_waits_for_the_same_for_long() -> None:
    """Between two steps everybody waits a little; one line is for what lasts."""
    shown: list[str] = []
    view = View(["anna", "bert"], [0, 1], io.StringIO())

    class Line:
        def update(self, text: object) -> None:
            shown.append(str(text))

    view._live = Line()  # type: ignore[assignment]
    other = LATE.replace("round 7", "round 8")
    for reason in (LATE, other, other, None):
        view.status(running(reason))
    assert [LATE_NAMED.replace("round 7", "round 8") in line for line in shown] == [False, False, True, False]
    assert all("\n" not in line for line in shown)
