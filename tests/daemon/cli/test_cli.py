"""The `meshtrain` command against an endpoint that speaks real frames: what is asked, what is shown, how it ends."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from meshtrain.cli.app import app
from meshtrain.cli.ui import completion
from meshtrain.cli.ui.follow_view import View
from meshtrain.following.log_pieces import LINE_CHARS_MAX, Lines
from meshtrain.following.shown_text import human_seconds, printable_lines
from meshtrain.following.status_line import TimeLeft, prefixes, stages_text, status_text
from meshwire import limits
from meshwire.addresses import DEFAULT_PORT
from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.jobs.files import FileManifest
from meshwire.jobs.lifecycle import EXIT_CODES, JobState
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done, Failure
from meshwire.messages.job import (
    Checkpoints,
    CheckpointSummary,
    Fetch,
    Fetched,
    JobSummary,
    ListCheckpoints,
    ListOutputs,
    Member,
    Metrics,
    OutputFile,
    Outputs,
    RankReport,
    Stage,
)
from meshwire.messages.local import (
    Cancel,
    GetJobs,
    GetPeers,
    GetStatus,
    Leave,
    LinkTraffic,
    PairCode,
    Paired,
    PairHost,
    PairJoin,
    PairProgress,
    Peers,
    PeerSummary,
    Resubmit,
    Submit,
    Submitted,
    Unpair,
    Watch,
    Watched,
)
from meshwire.text import printable
from meshwire.timeouts import Timeouts
from tests.daemon.cli.test_plan import FakeMesh
from tests.daemon.fakedaemon import (
    ANNA,
    BERT,
    JOB,
    MEMBERS,
    SOFTWARE,
    STATUS,
    Answer,
    Emit,
    Endpoint,
    accepting,
    known_jobs,
    member,
    run,
    summary,
)

WAIT_S = 20.0

pytestmark = pytest.mark.usefixtures("plain_environment")


# --- what is printed ---


def test_no_name_of_a_stranger_reaches_the_terminal_as_a_command() -> None:
    """Unpaired devices choose their own names: escape sequences and text that runs backwards are shown, not obeyed."""
    assert printable("a\x1b[2Jb\u202ec\nd") == "a\\x1b[2Jb\\u202ec\\nd"
    assert printable("Müllers Rechner") == "Müllers Rechner"
    assert printable_lines("Traceback\n\tx\x07") == "Traceback\n\tx\\x07"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (2.44, "2.4 s"), (60, "60 s"), (180, "3 min"), (7300, "2 h"), (200_000, "2 days")],
)
def test_durations(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_lines_do_not_depend_on_how_a_log_is_cut_into_pieces() -> None:
    text = "eins\r\n10%\r50%\r100%\nzwölf\nrest"
    for size in (1, 2, 3, 100):
        lines = Lines()
        data = text.encode()
        got = [line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])] + lines.flush()
        assert got == ["eins", "100%", "zwölf", "rest"]


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    lines = Lines()
    assert lines.feed(b"x" * (LINE_CHARS_MAX + 1)) == ["x" * LINE_CHARS_MAX]
    assert lines.flush() == ["x"]


LATE = "round 8 waits for rank 0: it computes step 7"


def test_status_line_says_round_values_and_what_is_waited_for() -> None:
    ranks = (
        RankReport(job=JOB, rank=0, state="running", metrics=Metrics(round=7, values=(("loss", 2.0),), step_s=0.2)),
        RankReport(
            job=JOB, rank=1, state="running", metrics=Metrics(round=7, values=(("loss", 3.0),), waiting_for=LATE)
        ),
    )
    job = summary(JobState.RUNNING, ranks=ranks)
    text = "train running · round 7 · loss 2.5 · 200 ms/step"
    assert status_text(job) == text
    assert status_text(job, lasting=[1]) == f"{text} · bert waits: round 8 waits for anna: it computes step 7"
    assert prefixes(["a", "bert"]) == ["[0 a]    ", "[1 bert] "]


def starting(*stages: Stage | None, step: int = 0) -> JobSummary:
    ranks = tuple(
        RankReport(job=JOB, rank=rank, state="running", metrics=Metrics(stage=stage, step=step))
        for rank, stage in enumerate(stages)
    )
    return summary(JobState.RUNNING, ranks=ranks)


def test_until_the_first_step_it_says_what_each_does() -> None:
    """Who is last stands first."""
    assert status_text(starting("starting", "starting")) == "train running · the script has started"
    assert (
        stages_text(starting("preparing", "script")) == "bert: the script runs, up to mt.prepare; anna: at mt.prepare"
    )
    assert stages_text(starting("first step", "loading")) == "bert: taking over the model; anna: the first step"
    assert stages_text(starting("first step", None)) is None, "bert has taken a step"
    assert stages_text(starting("starting", "starting", step=1)) is None
    assert stages_text(summary(JobState.RUNNING)) is None


def test_stages_are_lines_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with View(["anna", "bert"], [0, 1]) as view:
        for job in (starting("starting", "starting"), starting("starting", "starting"), starting("script", "starting")):
            view.status(job)
        view.status(starting(None, None, step=1))
    assert capsys.readouterr().err.splitlines() == [
        f"job {JOB} running",
        "the script has started",
        "bert: the script has started; anna: the script runs, up to mt.prepare",
    ]


def test_status_line_says_how_far_how_fast_and_how_long_it_takes_yet() -> None:
    metrics = Metrics(round=30, rounds_planned=1200, epochs=1.42, step_s=0.2, throughput_samples_s=50, samples_per_s=60)
    ranks = tuple(RankReport(job=JOB, rank=rank, state="running", metrics=metrics) for rank in range(2))
    shown = status_text(summary(JobState.RUNNING, ranks=ranks, learning=(0, 1)), left_s=234.0)
    assert shown.split(" · ") == [
        *("train running", "round 30 of 1,200", "epoch 2, 42%"),
        *("100 samples/s, 1.7x one laptop", "4 min left"),
    ]
    over = RankReport(job=JOB, rank=0, state="running", metrics=Metrics(round=9, epochs=2.0))
    assert "epoch 2, 100%" in status_text(summary(JobState.RUNNING, ranks=(over,)))


def test_how_long_it_takes_yet_follows_the_rounds_of_the_last_minute() -> None:
    left = TimeLeft()
    assert [left.left_s(at, at, 103) for at in range(3)] == [None] * 3, "too few rounds say nothing"
    assert left.left_s(3.0, 3, 103) == pytest.approx(100.0)
    for at in range(4, 71):
        left.left_s(at, 3 + 2 * (at - 3), 1000)
    assert left.left_s(71, 3 + 2 * 68, 1139) == pytest.approx(500.0), "two a second by now"
    assert left.left_s(72, 100, 1139) is None, "rounds were given up"
    assert left.left_s(80, 140, 0) is None, "the script has not said"
    assert left.left_s(90, 140, 139) is None, "it goes on nevertheless"


# --- help, usage, and how commands fail ---

COMMANDS = (
    "up",
    "down",
    "status",
    "peers",
    "pair",
    "unpair",
    "init",
    "submit",
    "plan",
    "jobs",
    "checkpoints",
    "top",
    "dashboard",
    "logs",
    "cancel",
    "leave",
    "get",
    "codecs",
    "doctor",
    "config",
    "version",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    shown = run(command, "--help")
    assert shown.exit_code == 0
    assert f"  meshtrain {command}" in shown.stdout.partition("Examples:")[2]


def test_what_is_built_is_listed() -> None:
    shown = run("--help").stdout
    assert all(re.search(rf"^  {command} ", shown, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize(
    "command", [["status"], ["peers", "--json"], ["jobs"], ["logs"], ["get"], ["cancel", "1"], ["pair"]]
)
def test_without_a_daemon_every_command_says_how_to_start_it(command: list[str]) -> None:
    shown = run(*command)
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert "error: " in shown.stderr
    assert "try: meshtrain up" in shown.stderr


def test_down_without_a_daemon_is_done_already() -> None:
    shown = run("down")
    assert (shown.exit_code, shown.stdout) == (0, "meshtraind is not running\n")


def test_a_failure_of_the_daemon_is_shown_as_it_is(endpoint: Endpoint) -> None:
    endpoint.answers[Unpair] = Failure(error="no paired device is called \x1b[31mx")
    shown = run("unpair", "x")
    assert shown.exit_code == 1
    assert shown.stderr == "error: no paired device is called \\x1b[31mx\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["pair", "12"], "six digits"),
        (["pair", "--at", "host"], "--at goes with a code"),
        (["submit", "--peers", "2", "--on", "a", "train.py"], "exclude each other"),
        (["submit", "--peers", "two", "train.py"], "neither N, N:MAX nor N:"),
        (["submit", "--peers", ":3", "train.py"], "neither N, N:MAX nor N:"),
        (["submit", "--peers", "0:3", "train.py"], "1 to 64 devices, not 0"),
        (["submit", "--peers", "2:65", "train.py"], "1 to 64 devices, not 65"),
        (["submit", "--peers", "3:2", "train.py"], "--peers 2:3"),
        (["submit", "-e", "KEY", "train.py"], "K=V"),
        (["submit", "--on", "a,,b", "train.py"], "empty name"),
        (["submit", "train.py", "x" * 70_000], "at most 64.0 KiB"),
        (["submit", "-n", "x" * 65, "train.py"], "1 to 64 characters"),
        (["submit", "train.py", "\udc80"], "not valid Unicode"),
        (["unpair", "x" * 65], "peer: String should have at most 64 characters"),
        (["jobs", "x" * 33], "prefix: String should have at most 32 characters"),
    ],
)
def test_usage_errors_exit_with_2(
    endpoint: Endpoint, args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    shown = run(*args)
    assert shown.exit_code == 2
    assert endpoint.asked == []
    assert said in shown.stderr


def test_an_unknown_option_is_a_usage_error() -> None:
    assert run("status", "--nonsense").exit_code == 2


def test_start_up_imports_neither_torch_nor_rich() -> None:
    """`meshtrain status` takes less than 0.4 s: what only some commands need is imported by them."""
    code = "import sys, meshtrain.cli.app; print([m for m in ('torch', 'numpy', 'rich', 'psutil') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- status, peers, pairing ---


def test_status(endpoint: Endpoint) -> None:
    endpoint.answers[GetStatus] = STATUS
    shown = run("status")
    assert shown.stdout.splitlines()[:3] == [
        "anna (abababab) is up for 2 h",
        "  listens   0.0.0.0:7433",
        "  peers     1 linked of 2 paired",
    ]
    assert shown.stderr == "warning: the clock is off\n"
    assert json.loads(run("status", "--json").stdout)["peers_paired"] == 2


def test_status_v_shows_the_patience_and_what_follows_from_it(endpoint: Endpoint) -> None:
    """Every formula of `Timeouts` with its value."""
    timeouts = Timeouts(patience_s=8.0, rtt_s=0.25)
    told = {"patience_s": 8.0, "rtt_s": 0.25, "timeouts": tuple(timeouts.describe().items())}
    endpoint.answers[GetStatus] = STATUS.model_copy(update=told)
    lines = run("status", "-v").stdout.splitlines()
    at = lines.index("  patience  8 s (round trip 250.0 ms); from these two follows:")
    assert lines[at + 1 : at + 3] == [
        "       8.0 s  a silent link is closed",
        "       1.0 s  a closed link may come back",
    ]
    assert len(lines) == at + 1 + len(timeouts.describe())
    assert "patience" not in run("status").stdout


@pytest.mark.parametrize(
    ("chosen", "shown"),
    [
        (None, "waits 48 s for the others (6 x patience), then goes on, and yields to them"),
        (0.5, "waits 500 ms for the others (--partition-wait), then goes on, and yields to them"),
        ("never", "waits for the others for ever (--partition-wait never)"),
    ],
)
def test_status_v_shows_how_long_a_part_of_a_job_waits(endpoint: Endpoint, chosen: Any, shown: str) -> None:
    """G7: of each job, for it is the job's."""
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"patience_s": 8.0, "jobs_running": 1})
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING, partition_wait=chosen))
    assert f"  a part without a majority {shown}" in run("status", "-v").stdout.splitlines()
    assert "majority" not in run("status").stdout


def test_status_v_shows_what_links_took_and_were_spared(endpoint: Endpoint) -> None:
    """W5: a rate is known of links that were full once."""
    slow = LinkTraffic(name="bert", bytes_per_s=3.2e6, sent_bytes=40_000_000, spared_bytes=12_000_000)
    fast = LinkTraffic(name="cleo", bytes_per_s=None, sent_bytes=0, spared_bytes=0)
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"links": (slow, fast)})
    assert run("status", "-v").stdout.splitlines()[-2:] == [
        "  link      bert: takes 26 Mbit/s; 38.1 MiB of gradients sent, 11.4 MiB spared by LZ4",
        "  link      cleo: never full; 0 B of gradients sent, 0 B spared by LZ4",
    ]
    assert "LZ4" not in run("status").stdout


def test_status_v_says_which_devices_do_not_join_and_why(endpoint: Endpoint) -> None:
    """`--peers N:MAX`: a missing pairing is found there, not by whoever waits for the device."""
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"jobs_running": 1})
    why = "dora has no link to bert: pair these"
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING, not_joining=(("dora", why),)))
    assert f"  dora does not join: {why}" in run("status", "-v").stdout.splitlines()
    assert "dora" not in run("status").stdout


def test_peers_are_one_line_each_whatever_they_call_themselves(endpoint: Endpoint) -> None:
    linked = PeerSummary(
        device=BERT,
        name="bert",
        state="linked",
        address="192.168.1.20:7433",
        rtt_s=0.0034,
        software=SOFTWARE,
        cores=8,
        memory_bytes=16 * 2**30,
    )
    stranger = PeerSummary(
        device="ef" * 32,
        name="evil\n[bold]\x1b]0;x",
        state="seen",
        address=None,
        rtt_s=None,
        software=None,
        cores=None,
        memory_bytes=None,
    )
    endpoint.answers[GetPeers] = Peers(peers=(linked, stranger))
    lines = run("peers").stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:8] == ["bert", "cdcdcdcd", "linked", "a", "code", "192.168.1.20:7433", "3.4", "ms"]
    assert lines[1].rstrip().endswith("8      16.0 GiB")  # a pipe cuts nothing off
    assert lines[2].startswith("evil\\n[bold]\\x1b]0;x ")
    assert "Linux x86_64" in run("peers", "-v").stdout
    assert [peer["state"] for peer in json.loads(run("peers", "--json").stdout)] == ["linked", "seen"]


def test_no_peers_say_how_to_add_one(endpoint: Endpoint) -> None:
    endpoint.answers[GetPeers] = Peers(peers=())
    shown = run("peers")
    assert (shown.stdout, shown.stderr) == ("", "No other device is known. Add one: meshtrain pair\n")
    assert json.loads(run("peers", "--json").stdout) == []


def shown_by_pair(endpoint: Endpoint, port: int, *addresses: str) -> str:
    def host(_: Wire, emit: Emit) -> Wire:
        emit(PairCode(code="483-917", port=port, expires_s=300.0, addresses=addresses))
        return Paired(device=BERT, name="bert")

    endpoint.answers[PairHost] = host
    shown = run("pair")
    assert shown.stdout == "paired with bert (cdcdcdcd)\n"
    return str(shown.stderr)


def test_pair_shows_the_code_and_both_ways_to_type_it(endpoint: Endpoint) -> None:
    """The default port is left out: `--at` fills it in."""
    shown = shown_by_pair(endpoint, DEFAULT_PORT, "10.0.0.1", "10.8.0.1")
    assert "  meshtrain pair 483-917\n" in shown
    assert "  meshtrain pair 483-917 --at 10.0.0.1\n" in shown
    assert "  meshtrain pair 483-917 --at 10.8.0.1    (or this address)\n" in shown
    assert "may run code on this one" in shown


def test_pair_names_another_port_than_the_usual_one(endpoint: Endpoint) -> None:
    shown = shown_by_pair(endpoint, 7435, "10.0.0.1", "fd00::1")
    assert "  meshtrain pair 483-917 --at 10.0.0.1:7435\n" in shown
    assert "  meshtrain pair 483-917 --at [fd00::1]:7435    (or this address)\n" in shown


@pytest.mark.parametrize("typed", ["483-917", "483917", "483 917"])
def test_pair_takes_a_code_however_it_is_typed(endpoint: Endpoint, typed: str) -> None:
    FakeMesh(endpoint)
    endpoint.answers[PairJoin] = Paired(device=BERT, name="bert")
    assert run("pair", typed, "--at", "10.0.0.1").exit_code == 0
    assert endpoint.of_type(PairJoin) == [PairJoin(code="483-917", at="10.0.0.1")]


def test_pair_says_what_it_waits_for(endpoint: Endpoint) -> None:
    def join(_: Wire, emit: Emit) -> Wire:
        emit(PairProgress(text="Looking for \x1b[31mit"))
        return Paired(device=BERT, name="bert")

    FakeMesh(endpoint)
    endpoint.answers[PairJoin] = join
    assert run("pair", "483917").stderr.startswith("Looking for \\x1b[31mit\n")


# --- jobs ---

OLDER = "1kx2000000aa"


def test_jobs_newest_first(endpoint: Endpoint) -> None:
    old = summary(job=OLDER, created_at_s=1_780_000_000.0, rounds=300)
    endpoint.answers[GetJobs] = known_jobs(old, summary(JobState.FAILED))
    assert [line.split()[0] for line in run("jobs").stdout.splitlines()] == ["ID", JOB, OLDER]
    assert [job["job"] for job in json.loads(run("jobs", "--json").stdout)] == [JOB, OLDER]


def test_a_list_of_jobs_that_begin_so_is_not_a_list_of_all(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary())
    assert run("jobs", "zz").stderr == (
        "No job has an id that begins with 'zz', or is called so. See all: meshtrain jobs\n"
    )
    assert run("jobs", "train").stdout.splitlines()[1].startswith(JOB)
    endpoint.answers[GetJobs] = known_jobs()
    assert run("jobs").stderr == "No jobs. Start one: meshtrain submit train.py\n"


def test_json_has_no_nan(endpoint: Endpoint) -> None:
    bad = RankReport(job=JOB, rank=0, state="failed", metrics=Metrics(values=(("loss", float("nan")),)))
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.FAILED, ranks=(bad,)))
    document = json.loads(run("jobs", "--json").stdout, parse_constant=pytest.fail)
    assert document[0]["ranks"][0]["metrics"]["values"] == [["loss", None]]


def test_an_id_prefix_is_enough_unless_it_is_ambiguous(endpoint: Endpoint) -> None:
    now_s = time.time()
    old = summary(JobState.RUNNING, job=OLDER, created_at_s=now_s - 7200, script="gpt.py")
    endpoint.answers[GetJobs] = known_jobs(old, summary(JobState.RUNNING, created_at_s=now_s - 180))
    endpoint.answers[Cancel] = Done()
    endpoint.answers[GetStatus] = STATUS
    shown = run("cancel", "1KX2", "1kx", "9", "1kx2000000aab")
    assert shown.exit_code == 1  # one was cancelled, three could not be
    assert shown.stdout == f"{OLDER}\n"
    assert endpoint.of_type(Cancel) == [Cancel(job=OLDER, now=False)]
    both = [f"  {JOB}  train.py, 3 min ago, running", f"  {OLDER}  gpt.py, 2 h ago, running"]
    latest = [*both, "try: meshtrain jobs"]
    assert shown.stderr.splitlines() == [
        f"job {OLDER} (train) ends on anna, bert. To go on with it: meshtrain submit --resume {OLDER}",
        "error: 2 jobs have ids that begin with '1kx':", *both, "try: one more letter",
        "error: no job is called '9' or has an id that begins so; the latest are", *latest,
        "error: no job is called '1kx2000000aab' or has an id that begins so; the latest are", *latest,
    ]  # fmt: skip


def test_a_job_goes_by_its_name_too(endpoint: Endpoint) -> None:
    """The one of that name that has not ended, else the latest; an id goes first."""
    jobs = [
        summary(JobState.SUCCEEDED, job="1kx5000000aa", name="gpt", created_at_s=5.0),
        summary(JobState.RUNNING, job="1kx4000000aa", name="gpt", created_at_s=4.0),
        summary(JobState.FAILED, job="1kx3000000aa", name="mlp", created_at_s=3.0),
        summary(JobState.FAILED, job="1kx2000000aa", name="mlp", created_at_s=2.0),
        summary(JobState.FAILED, job="1kx1000000aa", name="1kx2", created_at_s=1.0),
    ]
    endpoint.answers |= {GetJobs: known_jobs(*jobs), Cancel: Done(), GetStatus: STATUS}
    assert run("cancel", "gpt").stdout == "1kx4000000aa\n"
    assert "1kx3000000aa has ended" in run("cancel", "mlp").stderr
    assert "1kx2000000aa has ended" in run("cancel", "1kx2").stderr


def test_two_running_jobs_of_one_name_are_not_guessed_between(endpoint: Endpoint) -> None:
    running = [summary(JobState.RUNNING, job=f"1kx{number}000000aa", name="gpt") for number in (1, 2)]
    endpoint.answers[GetJobs] = known_jobs(*running)
    shown = run("cancel", "gpt")
    assert shown.exit_code == 1
    assert "2 jobs called 'gpt' have not ended" in shown.stderr
    assert not endpoint.of_type(Cancel)


@pytest.mark.parametrize(("alias", "command"), [("ps", "jobs"), ("ls", "jobs"), ("stop", "cancel")])
def test_hands_that_know_docker_find_the_command(endpoint: Endpoint, alias: str, command: str) -> None:
    endpoint.answers |= {GetJobs: known_jobs(summary(JobState.RUNNING)), Cancel: Done(), GetStatus: STATUS}
    args = [JOB] if command == "cancel" else []
    assert run(alias, *args).stdout == run(command, *args).stdout != ""


def test_the_version_is_an_option_as_well() -> None:
    assert run("--version").stdout == run("version").stdout != ""


def completions(words: str, typed: str) -> list[str]:
    """What bash is offered: `words` is the line up to and with `typed`, the word that TAB completes."""
    count = len(words.split()) - (typed != "")
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(count), "_MESHTRAIN_COMPLETE": "complete_bash"}
    return CliRunner().invoke(app, [], prog_name="meshtrain", env=variables).stdout.split()


def test_tab_offers_jobs(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary(job="1kx1000000aa"), summary(job="1ky2000000aa"))
    assert completions("meshtrain logs 1k", "1k") == ["1ky2000000aa", "1kx1000000aa"]
    assert completions("meshtrain cancel 1ky", "1ky") == ["1ky2000000aa"]


def test_tab_offers_paired_devices(endpoint: Endpoint) -> None:
    known = [("anna", "linked"), ("attic", "paired"), ("stranger", "seen")]
    facts = {"address": None, "rtt_s": None, "software": None, "cores": None, "memory_bytes": None}
    peers = [PeerSummary(device=BERT, name=name, state=state, **facts) for name, state in known]
    endpoint.answers[GetPeers] = Peers(peers=tuple(peers))
    assert completions("meshtrain unpair a", "a") == ["anna", "attic"]
    assert completions("meshtrain unpair s", "s") == []


HOSTILE = (
    "my laptop",
    "it's",
    'a"b',
    "a:b",
    "$(touch x)",
    "\\\\$(touch x)",
    "`touch x`",
    "a;touch x",
    "-rf",
    "~",
    "a\\n",
    "*",
    "#a",
)


def test_tab_offers_ids_of_devices_whose_names_a_shell_reads_otherwise(endpoint: Endpoint) -> None:
    """Names are other devices' choice, and zsh evaluates what it is told."""
    facts = {"address": None, "rtt_s": None, "software": None, "cores": None, "memory_bytes": None}
    names = (*HOSTILE, "twin", "twin", "anna", "büro-2", "_x")
    peers = [
        PeerSummary(device=f"{number:08x}" * 8, name=name, state="linked", **facts) for number, name in enumerate(names)
    ]
    endpoint.answers |= {GetPeers: Peers(peers=tuple(peers)), GetJobs: known_jobs(summary(name=HOSTILE[5]))}
    plain = ["anna", "büro-2"]
    assert completions("meshtrain unpair ", "") == [
        name if name in plain else f"{number:08x}" for number, name in enumerate(names)
    ]
    for line in ("meshtrain unpair ", "meshtrain logs "):
        variables = {"_TYPER_COMPLETE_ARGS": line, "_MESHTRAIN_COMPLETE": "complete_zsh"}
        said = CliRunner().invoke(app, [], prog_name="meshtrain", env=variables).stdout
        assert said.startswith("_arguments '*: :((")
        assert re.fullmatch(r'("[\w.-]+":"[\w .,-]+"\n?)+', said.split("((")[1].split("))")[0])


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
def test_what_tab_offers_is_one_word_for_bash(endpoint: Endpoint) -> None:
    facts = {"address": None, "rtt_s": None, "software": None, "cores": None, "memory_bytes": None}
    peers = [PeerSummary(device=f"{n:08x}" * 8, name=name, state="linked", **facts) for n, name in enumerate(HOSTILE)]
    endpoint.answers[GetPeers] = Peers(peers=tuple(peers))
    offered = completions("meshtrain unpair ", "")
    read = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {' '.join(offered)}"], capture_output=True, text=True, check=True
    )
    assert read.stdout.split("\n")[:-1] == offered


@pytest.mark.parametrize("folder", ["~nobody-is-called-so/x", "a\0b"])
def test_tab_says_nothing_of_a_data_folder_that_cannot_be(folder: str) -> None:
    context: Any = SimpleNamespace(params={"data_dir": folder})
    assert completion.complete_jobs(context, "") == completion.complete_peers(context, "") == []


def test_tab_does_not_wait_for_a_daemon_that_takes_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped answers nobody, and soon its queue is full: then even connecting waits."""
    monkeypatch.setattr(completion, "ANSWER_TIMEOUT_S", 0.2)
    (tmp_path / "run").mkdir()
    waiting = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        (tmp_path / "run" / "token").write_text("x")
        described = {"endpoint": f"unix:{tmp_path / 's'}", "token_file": str(tmp_path / "run" / "token")}
        (tmp_path / "run" / "daemon.json").write_text(json.dumps(described))
        for _ in range(4):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            client.setblocking(False)
            waiting.append(client)
            with contextlib.suppress(BlockingIOError):
                client.connect(str(tmp_path / "s"))
        context: Any = SimpleNamespace(params={"data_dir": str(tmp_path)})
        began_s = time.monotonic()
        assert completion.complete_jobs(context, "") == []
        assert time.monotonic() - began_s < 5.0, "half of what a command may wait"
    for client in waiting:
        client.close()


def test_tab_does_not_wait_for_what_trains() -> None:
    """What takes a second to import is not imported for a word."""
    heavy = ("torch", "numpy", "meshtrain.train", "meshtraind")
    text = f"import sys, meshtrain.cli.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_tab_does_not_wait_for_a_daemon_that_hangs(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "ANSWER_TIMEOUT_S", 0.2)
    released = threading.Event()

    def late(_body: Any, _emit: Emit) -> Wire:
        released.wait(WAIT_S)
        return Done()

    endpoint.answers[GetJobs] = late
    began_s = time.monotonic()
    assert completions("meshtrain logs ", "") == []
    assert time.monotonic() - began_s < WAIT_S / 2
    released.set()


def test_tab_offers_nothing_and_says_nothing_without_a_daemon() -> None:
    assert completions("meshtrain logs ", "") == []


def test_of_many_candidates_the_newest_are_shown(endpoint: Endpoint) -> None:
    many = [summary(job=f"1kx{number:09d}", created_at_s=1e9 + number) for number in range(9)]
    endpoint.answers[GetJobs] = known_jobs(*many)
    lines = run("get", "1kx").stderr.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [f"1kx{number:09d}" for number in (8, 7, 6, 5, 4)]
    assert lines[6] == "  and 4 more"


def test_checkpoints_say_where_they_lie_and_what_is_wrong(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING))
    good = CheckpointSummary(round=300, rank=1, created_at_s=time.time() - 60, size_bytes=3 << 20, wrong=None)
    bad = CheckpointSummary(round=200, rank=0, created_at_s=None, size_bytes=None, wrong="0.safetensors is no file")
    lost = good.model_copy(update={"round": 310, "given_up": "ab12cd34"})
    endpoint.answers[ListCheckpoints] = Checkpoints(checkpoints=(lost, good, bad), unasked=("cleo",))
    shown = run("checkpoints", JOB[:4])
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["ROUND", "CREATED", "SIZE", "RANK", "DEVICE", "STATE"],
        ["310-ab12cd34", "60", "s", "ago", "3.0", "MiB", "1", "bert", "given", "up,", "ok"],
        ["300", "60", "s", "ago", "3.0", "MiB", "1", "bert", "ok"],
        ["200", "-", "-", "0", "anna", "0.safetensors", "is", "no", "file"],
    ]
    assert "cleo does not answer" in shown.stderr
    told = json.loads(run("checkpoints", "--json").stdout)["checkpoints"]
    assert [(one["round"], one["given_up"]) for one in told] == [(310, "ab12cd34"), (300, None), (200, None)]
    assert {body.job for body in endpoint.of_type(ListCheckpoints)} == {JOB}
    endpoint.answers[ListCheckpoints] = Checkpoints(checkpoints=())
    assert f"No checkpoints of job {JOB} (train)." in run("checkpoints").stderr


def test_cancel_of_an_ended_job_says_so(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary())
    shown = run("cancel", "--now", JOB)
    assert (shown.exit_code, shown.stderr) == (0, f"job {JOB} has ended already: succeeded\n")
    assert endpoint.of_type(Cancel) == []


@pytest.mark.parametrize("outside", [False, True])
def test_a_job_of_other_devices_is_cancelled_when_somebody_has_said_yes(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, outside: bool
) -> None:
    """A mistyped prefix ends nobody else's night of training."""
    others: dict[str, Any] = {"members": (member(BERT, "bert"),), "submitter": BERT if outside else ANNA}
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING, ended_at_s=None, **others))
    endpoint.answers[GetStatus] = STATUS
    endpoint.answers[Cancel] = Done()

    def cancelled() -> int:
        count = len(endpoint.of_type(Cancel))
        endpoint.asked.clear()
        return count

    shown = run("cancel", JOB)
    if not outside:
        assert (shown.exit_code, shown.stdout, cancelled()) == (0, f"{JOB}\n", 1), "submitted here"
        return
    assert (shown.exit_code, shown.stdout, cancelled()) == (1, "", 0)
    assert f"job {JOB} (train) has nothing to do with this device: it runs on bert" in shown.stderr
    assert f"try: meshtrain cancel --yes {JOB}" in shown.stderr
    shown = run("cancel", "--yes", JOB)
    assert (shown.exit_code, shown.stdout, cancelled()) == (0, f"{JOB}\n", 1)
    monkeypatch.setattr("meshtrain.cli.commands.jobs.at_terminal", lambda: True)
    for answer, ends in (("y\n", True), ("n\n", False), ("\n", False), ("", False)):
        shown = CliRunner().invoke(app, ["cancel", JOB], input=answer, catch_exceptions=False)
        assert (shown.exit_code == 0, cancelled() == 1) == (ends, ends), answer
        assert "Cancel it there? [y/N]" in shown.stderr
        assert (f"job {JOB} goes on" in shown.stderr) == (not ends and answer != "")


def test_leave_takes_this_device_out_of_a_job_that_runs(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING, ended_at_s=None))
    endpoint.answers[Leave] = Done()
    assert run("leave", "1kx3").stdout == f"{JOB}\n"
    assert endpoint.of_type(Leave) == [Leave(job=JOB)]
    endpoint.answers[GetJobs] = known_jobs(summary())
    shown = run("leave", JOB)
    assert (shown.exit_code, shown.stderr) == (1, f"error: job {JOB} has ended already: succeeded\n")
    assert len(endpoint.of_type(Leave)) == 1


def test_the_last_laptop_hears_who_keeps_the_state_when_it_leaves(endpoint: Endpoint) -> None:
    """H3: where a hub alone is left; not where another laptop goes on."""
    running = summary(JobState.RUNNING, ended_at_s=None)
    hub = Member(device="c" * 64, incarnation=1, name="nas", hub=True)
    endpoint.answers |= {GetStatus: STATUS, Leave: Done()}
    here = running.members[0].model_copy(update={"device": STATUS.device})
    for others, told in (((hub,), True), ((running.members[1], hub), False), ((running.members[1],), False)):
        members = (here, *others)
        ranks = tuple(range(len(members)))
        endpoint.answers[GetJobs] = known_jobs(running.model_copy(update={"members": members, "present": ranks}))
        shown = run("leave", JOB)
        assert shown.stdout == f"{JOB}\n"
        assert ("nas keeps its state, for no laptop is left" in shown.stderr) == told
        assert (f"meshtrain submit --resume {JOB}" in shown.stderr) == told


# --- logs ---


def serving(logs: dict[int, bytes], ended: Callable[[], bool] = lambda: True) -> Answer:
    def fetch(body: Fetch, _: Emit) -> Wire:
        data = logs.get(body.rank)
        if data is None:
            return Failure(error="bert is not reachable")
        piece = data[body.offset_bytes : body.offset_bytes + body.max_bytes]
        end = ended() and body.offset_bytes + len(piece) >= len(data)
        return Fetched(data=piece, total_bytes=len(data), end=end)

    return fetch


def test_logs_of_all_ranks_of_the_latest_job(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary(job=OLDER, created_at_s=1.0), summary())
    endpoint.answers[Fetch] = serving({0: b"a\nb\n", 1: b"c"})
    assert run("logs").stdout == "[0 anna] a\n[0 anna] b\n[1 bert] c\n"
    assert run("logs", "--rank", "1").stdout == "c\n"
    assert {body.job for body in endpoint.of_type(Fetch)} == {JOB}


@pytest.mark.parametrize(("lines", "first"), [(0, None), (1, 39_999), (3, 39_997), (50_000, 0)])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_the_last_lines_of_a_long_log(endpoint: Endpoint, lines: int, first: int | None, end: bytes) -> None:
    """A log of several pieces is read from its end."""
    text = b"\n".join(b"line %d" % number for number in range(40_000)) + end
    assert len(text) > limits.FETCH_BYTES_MAX
    endpoint.answers[GetJobs] = known_jobs(summary())
    endpoint.answers[Fetch] = serving({0: text})
    expected = [] if first is None else [f"line {number}" for number in range(first, 40_000)]
    assert run("logs", "--rank", "0", "-n", str(lines)).stdout.splitlines() == expected


def test_a_peer_that_is_away_does_not_hide_the_logs_of_others(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary())
    endpoint.answers[Fetch] = serving({0: b"here\n"})
    shown = run("logs")
    assert (shown.exit_code, shown.stdout) == (1, "[0 anna] here\n")
    assert "error: the log of rank 1 (bert): bert is not reachable" in shown.stderr


def test_a_rank_goes_by_its_device_too(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary())
    endpoint.answers[Fetch] = Fetched(data=b"", total_bytes=0, end=True)
    assert run("logs", "--rank", "bert").exit_code == 0
    assert {fetch.rank for fetch in endpoint.of_type(Fetch)} == {1}
    endpoint.answers[GetJobs] = known_jobs(summary(members=(member(ANNA, "x"), member(BERT, "x"))))
    assert "try: one of the ranks 0 and 1" in run("logs", "--rank", "x").stderr


def test_a_rank_that_is_not_there(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary())
    shown = run("logs", "--rank", "2")
    assert shown.exit_code == 2
    assert "has no rank '2'; it has 0 (anna), 1 (bert)" in shown.stderr


@pytest.mark.parametrize(("state", "code"), list(EXIT_CODES.items()))
def test_the_exit_code_of_a_followed_job_is_its_outcome(endpoint: Endpoint, state: JobState, code: int) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING))
    over = threading.Event()

    def watch(_: Wire, emit: Emit) -> Wire:
        emit(Watched(summary=summary(JobState.RUNNING)))
        over.set()
        error = None if state is JobState.SUCCEEDED else "rank 1 (bert): ValueError: no"
        return Watched(summary=summary(state, error=error, rounds=12, hashes_compared=2, replicas_equal=True))

    endpoint.answers[Watch] = watch
    endpoint.answers[Fetch] = serving({0: b"one\n", 1: b"two\n"}, over.is_set)
    shown = run("logs", "-f", JOB)
    assert shown.exit_code == code
    assert sorted(shown.stdout.splitlines()) == ["[0 anna] one", "[1 bert] two"]
    assert f"job {JOB} (train) {state} after 35 s, 12 rounds, replicas bit-equal (2 comparisons)" in shown.stderr
    assert ("ValueError: no" in shown.stderr) == (state is not JobState.SUCCEEDED)


def test_following_ends_when_the_daemon_does(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING))
    endpoint.answers[Fetch] = serving({0: b"", 1: b""}, lambda: False)
    endpoint.answers[Watch] = Failure(error="the daemon is stopping")
    shown = run("logs", "-f")
    assert shown.exit_code == 1
    assert f"job {JOB} can no longer be followed: the daemon is stopping" in shown.stderr


# --- submit ---


def paths(manifest: FileManifest) -> list[str]:
    return [entry.path for entry in manifest.entries]


@pytest.mark.parametrize("typed", [(), ("--",)], ids=["as it is", "behind two dashes"])
def test_submit_ships_the_folder_and_everything_after_the_script_is_the_scripts(
    typed: tuple[str, ...], endpoint: Endpoint, project: Path
) -> None:
    seen: dict[str, FileManifest] = {}
    endpoint.answers[Submit] = accepting(seen, ("torch differs",))
    options = ["-n", "first", "--peers", "2", "--data", "sets [1]", "-e", "A=b=c", "--codec", "fp16", "--seed", "3"]
    shown = run("submit", *options, "-d", "train.py", *typed, "--peers", "9", "--help", *typed, "x")
    assert (shown.exit_code, shown.stdout) == (0, f"{JOB}\n")
    [body] = endpoint.of_type(Submit)
    assert (body.name, body.peers, body.script, body.codec, body.seed) == ("first", 2, "train.py", "fp16", 3)
    assert body.args == ("--peers", "9", "--help", *typed, "x")
    assert body.env == (("A", "b=c"),)
    assert (body.root, body.data_root) == (str(project), str(project / "sets [1]"))
    assert paths(seen["source"]) == [".gitignore", "train.py"]  # neither what git ignores nor the data a second time
    assert paths(seen["data"]) == ["a.bin"]
    assert not Path(body.manifest).exists()
    assert "sending files to bert\n" in shown.stderr
    assert "note: torch differs\n" in shown.stderr
    misplaced = "note: --peers stands behind train.py, so it is the script's; for the job it goes before train.py\n"
    assert (misplaced in shown.stderr) == (not typed), "two dashes say that it is meant so"
    assert f"meshtrain logs -f {JOB}" in shown.stderr


@pytest.mark.usefixtures("project")
def test_options_of_the_job_between_the_script_and_two_dashes_are_put_right(endpoint: Endpoint) -> None:
    """Nothing is timed, shipped or started before it is said."""
    shown = run("submit", "train.py", "--sync", "ssp:2", "--no-plan", "--", "--epochs", "3")
    assert shown.exit_code == 2
    assert "--sync, --no-plan stand behind train.py, where everything is the script's" in shown.stderr
    assert "try: meshtrain submit --sync ssp:2 --no-plan train.py --epochs 3\n" in shown.stderr
    assert endpoint.of_type(Submit) == []
    assert run("submit", "-d", "train.py", "--epochs", "3", "--", "x").exit_code != 2, "none of the job's"


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("typed", "peers", "peers_max"), [("3", 3, None), ("2:8", 2, 8), ("2:2", 2, 2), ("2:", 2, limits.MEMBERS_MAX)]
)
def test_submit_says_how_many_devices_a_job_may_have(
    endpoint: Endpoint, typed: str, peers: int, peers_max: int | None
) -> None:
    endpoint.answers[Submit] = accepting({})
    endpoint.answers[Resubmit] = Submitted(job=JOB, members=MEMBERS, notes=())
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.FAILED))
    assert run("submit", "--peers", typed, "-d", "train.py").exit_code == 0
    assert run("submit", "--peers", typed, "-d", "--resume", JOB).exit_code == 0
    for body in (*endpoint.of_type(Submit), *endpoint.of_type(Resubmit)):
        assert (body.peers, body.peers_max) == (peers, peers_max)


@pytest.mark.usefixtures("project")
def test_submit_follows_to_the_end(endpoint: Endpoint) -> None:
    endpoint.answers[Submit] = accepting({})
    endpoint.answers[Watch] = Watched(summary=summary(JobState.FAILED, error="rank 1 (bert): ValueError: no"))
    endpoint.answers[Fetch] = serving({0: b"hi\n", 1: b"hi\n"})
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.FAILED))
    shown = run("submit", "train.py")
    assert shown.exit_code == 1
    assert sorted(shown.stdout.splitlines()) == ["[0 anna] hi", "[1 bert] hi"]
    document = json.loads(run("submit", "--json", "train.py").stdout)
    assert (document["job"], document["exit_code"], document["summary"]["state"]) == (JOB, 1, "failed")


@pytest.mark.usefixtures("project")
def test_the_log_of_a_device_that_joins_is_followed_too(endpoint: Endpoint) -> None:
    """`--peers N:MAX`: whoever follows all ranks sees the newcomer's output, and is told when it comes."""
    three: dict[str, Any] = {"members": (*MEMBERS, member("ef" * 32, "cleo")), "generation": 2, "present": (0, 1, 2)}
    before = summary(JobState.RUNNING, ended_at_s=None, generation=1, present=(0, 1), learning=(0, 1))
    after = summary(JobState.RUNNING, ended_at_s=None, learning=(0, 1), **three)

    def watch(_: Watch, emit: Emit) -> Wire:
        for seen in (before, after):
            emit(Watched(summary=seen))
        return Watched(summary=summary(JobState.SUCCEEDED, learning=(0, 1, 2), **three))

    endpoint.answers[Submit] = accepting({})
    endpoint.answers[Watch] = watch
    endpoint.answers[Fetch] = serving({0: b"a\n", 1: b"b\n", 2: b"c\n"})
    shown = run("submit", "train.py")
    assert shown.exit_code == 0
    assert sorted(line.split() for line in shown.stdout.splitlines()) == [
        ["[0", "anna]", "a"],
        ["[1", "bert]", "b"],
        ["[2", "cleo]", "c"],
    ]
    assert "cleo joined, loading (generation 2)" in shown.stderr


@pytest.mark.usefixtures("project")
def test_dry_run_lists_what_would_be_sent(endpoint: Endpoint) -> None:
    endpoint.answers[Submit] = accepting({})
    shown = run("submit", "--dry-run", "--data", "sets [1]", "train.py")
    assert shown.exit_code == 0
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == [".gitignore", "train.py", "a.bin"]
    assert endpoint.of_type(Submit)[0].dry_run
    document = json.loads(run("submit", "--dry-run", "--json", "train.py").stdout)
    assert [file["path"] for file in document["source"]] == [".gitignore", "sets [1]/a.bin", "train.py"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["missing.py"], "missing.py does not exist"),
        (["sets [1]"], "is a folder"),
        (["../outside.py"], "lies outside the working directory"),
        (["--exclude", "*.py", "train.py"], "would not be shipped"),
        (["--data", "nowhere", "train.py"], "--data nowhere is not a folder"),
        (["secret.txt"], "would not be shipped"),
    ],
)
def test_what_cannot_be_submitted_is_refused_before_the_daemon_hears_of_it(
    endpoint: Endpoint, project: Path, args: list[str], said: str
) -> None:
    (project.parent / "outside.py").touch()
    shown = run("submit", *args)
    assert shown.exit_code == 1
    assert said in shown.stderr
    assert endpoint.of_type(Submit) == []


# --- get ---


def with_outputs(endpoint: Endpoint, files: dict[tuple[int, str], bytes]) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary())
    endpoint.answers[ListOutputs] = Outputs(
        files=tuple(OutputFile(rank=rank, path=path, size_bytes=len(data)) for (rank, path), data in files.items())
    )

    def fetch(body: Fetch, _: Emit) -> Wire:
        data = files[body.rank, body.path or ""]
        piece = data[body.offset_bytes : body.offset_bytes + body.max_bytes]
        return Fetched(data=piece, total_bytes=len(data), end=body.offset_bytes + len(piece) >= len(data))

    endpoint.answers[Fetch] = fetch


def found_below(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_get_writes_one_folder_per_rank(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = bytes(range(256)) * 3000  # several pieces
    with_outputs(endpoint, {(0, "model.pt"): model, (0, "plots/a.png"): b"", (1, "model.pt"): b"other"})
    shown = run("get")
    assert shown.exit_code == 0
    expected = {"rank0/model.pt": model, "rank0/plots/a.png": b"", "rank1/model.pt": b"other"}
    assert found_below(tmp_path / JOB) == {path: hashlib.sha256(data).hexdigest() for path, data in expected.items()}
    assert shown.stdout.splitlines() == [f"{JOB}/{path}" for path in expected]


@pytest.mark.parametrize(
    ("wanted", "there"),
    [
        ("rank1", ["rank1/m", "rank1/mm"]),
        ("plots/", ["rank0/plots/a"]),
        ("m", ["rank0/m", "rank1/m"]),
        ("rank0/m", ["rank0/m"]),
    ],
)
def test_get_takes_a_file_or_a_folder(endpoint: Endpoint, tmp_path: Path, wanted: str, there: list[str]) -> None:
    with_outputs(endpoint, {(0, "m"): b"1", (0, "plots/a"): b"2", (1, "m"): b"3", (1, "mm"): b""})
    assert run("get", JOB, wanted, "-o", str(tmp_path / "out")).exit_code == 0
    assert sorted(found_below(tmp_path / "out")) == there


def test_get_overwrites_nothing_unless_told(endpoint: Endpoint, tmp_path: Path) -> None:
    with_outputs(endpoint, {(0, "a"): b"new", (1, "b"): b"new"})
    mine = tmp_path / "out" / "rank1" / "b"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    shown = run("get", JOB, "-o", str(tmp_path / "out"))
    assert shown.exit_code == 1
    assert f"not overwritten: {mine}" in shown.stderr
    assert list(found_below(tmp_path / "out")) == ["rank1/b"]
    assert mine.read_text() == "mine"
    assert run("get", JOB, "-o", str(tmp_path / "out"), "--force").exit_code == 0
    assert mine.read_text() == "new"


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "C:x", "a\\b"])
def test_get_writes_nothing_when_a_peer_offers_a_trick_path(endpoint: Endpoint, tmp_path: Path, path: str) -> None:
    with_outputs(endpoint, {(0, "good"): b"x", (1, path): b"x"})
    shown = run("get", JOB, "-o", str(tmp_path / "out"))
    assert shown.exit_code == 1
    assert "nothing was fetched" in shown.stderr
    assert not (tmp_path / "out").exists()


def test_a_result_that_breaks_off_leaves_no_half_file(endpoint: Endpoint, tmp_path: Path) -> None:
    with_outputs(endpoint, {(0, "a"): b"x" * 9})
    endpoint.answers[Fetch] = lambda body, _: Fetched(data=b"" if body.offset_bytes else b"x", total_bytes=9, end=False)
    shown = run("get", JOB, "-o", str(tmp_path / "out"))
    assert shown.exit_code == 4
    assert "rank0/a ended after 1 of 9 bytes" in shown.stderr
    assert found_below(tmp_path / "out") == {}


# --- up, init ---


def test_up_says_when_it_is_up_already(endpoint: Endpoint) -> None:
    endpoint.answers[GetStatus] = STATUS
    shown = run("up", "--name", "other")
    assert (shown.exit_code, shown.stdout) == (0, "anna (abababab) is already up, on 0.0.0.0:7433\n")
    assert "meshtrain down" in shown.stderr


def test_up_names_a_data_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shown = run("up", "--data-dir", str(tmp_path / "file" / "data"))
    assert shown.exit_code == 1
    assert f"the data folder {tmp_path / 'file' / 'data'} cannot be written" in shown.stderr
    assert "try: another one with --data-dir" in shown.stderr


def test_up_shows_why_the_daemon_did_not_start(tmp_path: Path) -> None:
    shown = run("up", "--listen", "nonsense:x")
    assert shown.exit_code == 1
    assert f"error: meshtraind ended with exit code 2. The end of {tmp_path / 'data' / 'daemon.log'}:" in shown.stderr
    assert "nonsense:x" in shown.stderr


def test_up_starts_a_daemon_that_keeps_its_log_bounded(tmp_path: Path) -> None:
    """Also where an earlier one has left a full log."""
    log = tmp_path / "data" / "daemon.log"
    log.parent.mkdir()
    log.write_bytes(b"x" * limits.LOG_FILE_BYTES_MAX)
    command = [sys.executable, "-m", "meshtrain.cli"]
    environment = os.environ | {"MESHTRAIN_DATA_DIR": str(log.parent)}
    up = [*command, "up", "--listen", "127.0.0.1:0", "--interface", "lo"]
    subprocess.run(up, check=True, capture_output=True, env=environment)
    subprocess.run([*command, "down"], check=True, capture_output=True, env=environment)
    assert "listens on 127.0.0.1" in log.read_text()
    assert log.with_suffix(".log.1").stat().st_size == limits.LOG_FILE_BYTES_MAX


def test_up_refuses_a_patience_out_of_range() -> None:
    shown = run("up", "--patience", "0.1")
    assert shown.exit_code == 2
    assert "--patience" in shown.stderr
    assert "0.5" in shown.stderr


def test_init_writes_an_example_and_the_next_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run("init", "--example", "mlp", "my disc")
    assert shown.exit_code == 0
    assert (tmp_path / "my disc" / "train.py").is_file()
    assert "cd 'my disc' && meshtrain submit train.py" in shown.stderr
    again = run("init", "--example", "mlp", "my disc")
    assert again.exit_code == 1
    assert "not overwritten" in again.stderr
    assert run("init", "--example", "nothing").exit_code == 2


def test_every_codec_is_listed_with_how_it_is_typed() -> None:
    """C2: what it takes on the wire, which way it goes, and what a device keeps for it; each example is legal."""
    listed = json.loads(run("codecs", "--json").stdout)
    assert [each["name"] for each in listed] == list(FAMILIES)
    by_name = {each["name"]: each for each in listed}
    assert by_name["fp16"]["bits_per_value"] == pytest.approx(16, abs=0.01)
    assert [by_name[name]["topologies"] for name in ("fp16", "int8", "topk")] == [
        ["ring", "tree", "butterfly", "grid", "sharded", "star", "hierarchical", "gather"],
        ["sharded", "star"],
        ["sharded", "star", "gather"],
    ]
    assert [by_name[name]["exchanges"] for name in ("fp16", "int8", "topk")] == [
        ["ring"],
        ["sharded"],
        ["sharded", "gather"],
    ]
    assert all(parse_codec(each["example"]).name == each["name"] for each in listed)
    table = run("codecs").stdout
    assert all(re.search(rf"^{name} ", table, re.MULTILINE) for name in FAMILIES)


def test_output_that_a_terminal_cannot_encode_does_not_end_the_command() -> None:
    code = "from meshtrain.cli import main; import sys; sys.argv = ['meshtrain', 'version']; main()"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment).returncode == 0


def test_a_view_in_a_pipe_writes_whole_lines() -> None:
    out = io.StringIO()
    with View(["anna", "bert"], [0, 1], out) as view:
        view.lines(1, ["x", "[red]y"])
    assert out.getvalue() == "[1 bert] x\n[1 bert] [red]y\n"


def test_ctrl_c_detaches_and_the_job_goes_on(endpoint: Endpoint) -> None:
    """Following is not owning: ctrl-C says how to follow again and exits with 0."""
    over = threading.Event()
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING))
    endpoint.answers[Fetch] = serving({0: b"started\n", 1: b""}, over.is_set)

    def watch(_: Wire, emit: Emit) -> Wire:
        emit(Watched(summary=summary(JobState.RUNNING)))
        assert over.wait(WAIT_S)
        return Watched(summary=summary())

    endpoint.answers[Watch] = watch
    command = [sys.executable, "-m", "meshtrain.cli", "logs", "-f", JOB]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[0 anna] started\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WAIT_S)
    over.set()
    assert process.returncode == 0
    assert f"Detached: job {JOB} is still running. Follow it: meshtrain logs -f {JOB}" in said
    assert endpoint.of_type(Cancel) == []
