"""What a person sees of pairing and introductions: the code and its QR code, who joined, who waits, who is removed."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import segno

from meshtrain.cli.commands import mesh
from meshtrain.pictures.qr import BORDER, qr_lines, shows_qr
from meshwire.addresses import DEFAULT_PORT
from meshwire.jobs.lifecycle import JobState
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.job import Fetch
from meshwire.messages.local import (
    GetJobs,
    GetPeers,
    GetStatus,
    IntroducedDevice,
    IntroductionPolicy,
    MeasureLinks,
    PairAccept,
    PairCode,
    Paired,
    PairHost,
    PairJoin,
    Peers,
    PeerSummary,
    SetIntroductions,
    Unpair,
    Unpaired,
    Watch,
    Watched,
)
from tests.daemon.cli.test_cli import serving
from tests.daemon.cli.test_plan import FakeMesh
from tests.daemon.fakedaemon import BERT, JOB, STATUS, Emit, Endpoint, known_jobs, run, summary

pytestmark = pytest.mark.usefixtures("plain_environment")

CARL = "ef" * 32
LONGEST = "meshtrain pair 483-917 --at [fe80:1111:2222:3333:4444:5555:6666:7777]:65535"


def introduced(name: str = "carl", ago_s: float = 7200.0) -> IntroducedDevice:
    return IntroducedDevice(device=CARL, name=name, added_by="bert", added_at_s=time.time() - ago_s)


def peer(device: str, name: str, state: Any, added_by: str | None = None) -> PeerSummary:
    return PeerSummary(
        device=device, name=name, state=state, address=None, rtt_s=None, software=None, cores=None, memory_bytes=None,
        added_by=added_by,
    )  # fmt: skip


# --- the QR code ---


def modules(lines: list[str]) -> list[list[bool]]:
    """What a reader sees: True is dark. Two rows a line."""
    rows = []
    for line in lines:
        assert line.startswith("\x1b[30;107m")
        assert line.endswith("\x1b[0m")
        shown = line.removeprefix("\x1b[30;107m").removesuffix("\x1b[0m")
        rows += [[char in "█▀" for char in shown], [char in "█▄" for char in shown]]
    return rows


@pytest.mark.parametrize("text", ["meshtrain pair 483-917 --at 192.168.1.20", "meshtrain pair 483-917", LONGEST])
def test_the_drawn_code_is_the_code_in_a_light_frame(text: str) -> None:
    """Dark on light, whatever the terminal's colours: half blocks show every module, and a border round them all."""
    matrix = [[bool(module) for module in row] for row in segno.make(text, error="m", micro=False).matrix]
    rows = modules(qr_lines(text))
    inner = [row[BORDER:-BORDER] for row in rows[BORDER : BORDER + len(matrix)]]
    assert inner == matrix
    assert sum(map(sum, rows)) == sum(map(sum, matrix)), "nothing dark in the border"
    assert len({len(row) for row in rows}) == 1


class Stream:
    def __init__(self, encoding: str | None, terminal: bool) -> None:
        self.encoding, self._terminal = encoding, terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("encoding", "terminal", "term", "size", "shown"),
    [
        ("utf-8", True, "xterm", (80, 40), True),
        ("UTF-8", True, "xterm", (33, 27), True),
        ("utf-8", False, "xterm", (80, 40), False),
        ("iso8859-1", True, "xterm", (80, 40), False),
        (None, True, "xterm", (80, 40), False),
        ("utf-8", True, "dumb", (80, 40), False),
        ("utf-8", True, "xterm", (32, 40), False),
        ("utf-8", True, "xterm", (80, 26), False),
    ],
)
def test_a_code_is_drawn_where_it_can_be_read(
    monkeypatch: pytest.MonkeyPatch, encoding: str | None, terminal: bool, term: str, size: tuple[int, int], shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Stream(encoding, terminal))
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("shutil.get_terminal_size", lambda **_: os.terminal_size(size))
    drawn = qr_lines("meshtrain pair 483-917 --at 192.168.1.20")
    assert (len(drawn), len(modules(drawn)[0])) == (17, 33)
    assert shows_qr(drawn, 10) is shown


def shown_by_pair(endpoint: Endpoint, *options: str, addresses: tuple[str, ...] = ("10.0.0.1", "10.8.0.1")) -> str:
    def host(_: Wire, emit: Emit) -> Wire:
        emit(PairCode(code="483-917", port=DEFAULT_PORT, expires_s=300.0, addresses=addresses))
        return Paired(device=BERT, name="bert")

    endpoint.answers[PairHost] = host
    shown = run("pair", *options)
    assert shown.stdout == "paired with bert (cdcdcdcd)\n"
    return str(shown.stderr)


def test_the_code_holds_the_whole_command(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the likeliest address: what a phone has read works where the network hides devices, too."""
    drawn: list[str] = []

    def draw(text: str) -> list[str]:
        drawn.append(text)
        return ["drawn"]

    monkeypatch.setattr(mesh, "qr_lines", draw)
    said = shown_by_pair(endpoint, "--qr")
    assert drawn == ["meshtrain pair 483-917 --at 10.0.0.1"]
    assert "drawn\n" in said
    assert "  meshtrain pair 483-917\n" in said
    shown_by_pair(endpoint, "--qr", addresses=())
    assert drawn[1:] == ["meshtrain pair 483-917"]


def test_in_a_pipe_the_text_is_all(endpoint: Endpoint) -> None:
    for options in ((), ("--no-qr",)):
        said = shown_by_pair(endpoint, *options)
        assert said.isascii()
        assert "\x1b" not in said


def test_pair_says_that_one_code_is_enough(endpoint: Endpoint) -> None:
    assert "these are introduced, too, and join within seconds" in shown_by_pair(endpoint)


# --- who joined, who waits ---


def test_status_says_who_joined_and_by_whom(endpoint: Endpoint) -> None:
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"joined": (introduced("ca\x1b[2Jrl"),)})
    shown = run("status")
    assert "ca\\x1b[2Jrl (efefefef) joined 2 h ago, added by bert\n" in shown.stderr
    assert "joining" not in shown.stdout
    assert json.loads(run("status", "--json").stdout)["joined"][0]["added_by"] == "bert"


@pytest.mark.parametrize("policy", list(IntroductionPolicy))
def test_status_says_what_is_done_with_introductions(endpoint: Endpoint, policy: IntroductionPolicy) -> None:
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"introductions": policy})
    shown = run("status").stdout
    line = f"(up --introductions {policy})\n"
    assert (line in shown) is (policy is not IntroductionPolicy.ACCEPT)
    assert line in run("status", "-v").stdout


def test_who_waits_is_shown_with_both_answers(endpoint: Endpoint) -> None:
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"waiting": (introduced(),)})
    said = run("status").stderr
    assert "bert introduces carl (efefefef)." in said
    assert "meshtrain pair --accept efefefef." in said
    assert "meshtrain unpair efefefef\n" in said


def test_peers_say_by_whom_each_was_added(endpoint: Endpoint) -> None:
    rows = (
        peer(BERT, "bert", "linked"),
        peer(CARL, "carl", "paired", "bert"),
        peer("12" * 32, "dora", "waiting", "ca\nrl"),
        peer("34" * 32, "emil", "seen"),
    )
    endpoint.answers[GetPeers] = Peers(peers=rows)
    head, *lines = run("peers").stdout.splitlines()
    column = head.index("ADDED BY")
    assert [line[column : head.index("ADDRESS")].strip() for line in lines] == ["a code", "bert", "ca\\nrl", "-"]


def test_accept_takes_one_that_waits(endpoint: Endpoint) -> None:
    endpoint.answers[PairAccept] = Paired(device=CARL, name="carl")
    assert run("pair", "--accept", "carl").stdout == "paired with carl (efefefef)\n"
    assert json.loads(run("pair", "--accept", "carl", "--json").stdout) == {"device": CARL, "name": "carl"}
    assert endpoint.of_type(PairAccept) == [PairAccept(peer="carl")] * 2


@pytest.mark.parametrize("more", [("483-917",), ("--at", "10.0.0.1")])
def test_accept_goes_without_a_code(endpoint: Endpoint, more: tuple[str, ...]) -> None:
    shown = run("pair", "--accept", "carl", *more)
    assert shown.exit_code == 2
    assert endpoint.asked == []


def test_unpair_names_what_stays_and_what_to_type_elsewhere(endpoint: Endpoint) -> None:
    bert, carl = Paired(device=BERT, name="bert"), Paired(device=CARL, name="carl")
    endpoint.answers[Unpair] = Unpaired(removed=(bert,), stay=(carl,), others=("carl", "do\x07ra"))
    shown = run("unpair", "bert")
    assert shown.stdout == "removed bert (cdcdcdcd): only a code that is typed here takes it in again\n"
    assert "By its word joined, and are still trusted: carl (efefefef)" in shown.stderr
    assert "type there: meshtrain unpair cdcdcdcd\n" in shown.stderr
    assert "The other devices are carl, do\\x07ra." in shown.stderr
    assert endpoint.of_type(Unpair) == [Unpair(peer="bert", introduced=False)]
    endpoint.answers[Unpair] = Unpaired(removed=(bert, carl))
    shown = run("unpair", "--introduced", "bert", "--json")
    assert [one["name"] for one in json.loads(shown.stdout)["removed"]] == ["bert", "carl"]
    assert endpoint.of_type(Unpair)[-1] == Unpair(peer="bert", introduced=True)


def test_a_follower_is_told_once_who_joined(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING))
    over = threading.Event()

    def watch(_: Wire, emit: Emit) -> Wire:
        emit(Watched(summary=summary(JobState.RUNNING), joined=(introduced("ca\x1brl"),)))
        emit(Watched(summary=summary(JobState.RUNNING)))
        over.set()
        return Watched(summary=summary(JobState.SUCCEEDED))

    endpoint.answers[Watch] = watch
    endpoint.answers[Fetch] = serving({0: b"", 1: b""}, over.is_set)
    assert run("logs", "-f", JOB).stderr.count("ca\\x1brl joined, added by bert\n") == 1


def test_up_passes_the_policy_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshtrain.cli.commands import daemon

    given: list[str] = []

    def start(_folder: Path, options: list[str]) -> Any:
        given.extend(options)
        return STATUS

    monkeypatch.setattr(daemon, "_start", start)
    assert run("up", "--data-dir", str(tmp_path), "--introductions", "ask").exit_code == 0
    assert given == ["--introductions=ask"]
    assert run("up", "--data-dir", str(tmp_path), "--introductions", "sometimes").exit_code == 2


def test_up_tells_the_policy_to_a_daemon_that_runs(endpoint: Endpoint) -> None:
    """Who is asked by a screen to type it has not to stop the jobs of a laptop for that."""
    endpoint.answers |= {GetStatus: STATUS, SetIntroductions: Done()}
    shown = run("up", "--introductions", "never")
    assert [body.policy for body in endpoint.of_type(SetIntroductions)] == [IntroductionPolicy.NEVER]
    assert "From now on it takes no device that another one introduces, and introduces none.\n" in shown.stdout
    assert "meshtrain down" not in shown.stderr
    shown = run("up", "--introductions", "ask", "--patience", "7")
    assert "From now on it asks" in shown.stdout
    assert "Its other options are those of its start. To change them: meshtrain down" in shown.stderr
    assert run("up").exit_code == 0
    assert len(endpoint.of_type(SetIntroductions)) == 2


def test_status_stays_a_screen_however_many_came(endpoint: Endpoint) -> None:
    many = tuple(introduced(f"d{number}") for number in range(64))
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"joined": many, "waiting": many})
    said = run("status").stderr.splitlines()
    assert sum("joined" in line for line in said) == sum("wait" in line or "introduces" in line for line in said) == 9
    assert "d63 (efefefef) joined" in said[7]
    assert "and 56 more joined within a day: meshtrain peers" in said
    assert "and 56 more wait: meshtrain peers" in said


# --- the new link ---


@pytest.fixture
def mesh_of_bert(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> FakeMesh:
    """Anna's daemon, which is about to be paired with bert's."""
    monkeypatch.setattr(mesh, "LINK_POLL_S", 0.0)
    endpoint.answers[PairJoin] = Paired(device=BERT, name="bert")
    return FakeMesh(endpoint)


@pytest.mark.usefixtures("mesh_of_bert")
def test_what_the_new_link_carries_is_said_where_the_code_is_typed(endpoint: Endpoint) -> None:
    """And kept for the next plan; a script that pairs waits for nothing."""
    shown = run("pair", "483917")
    assert (shown.exit_code, shown.stdout) == (0, "paired with bert (cdcdcdcd)\n")
    *_, figures, next_step = shown.stderr.splitlines()
    assert figures == "Its link sends 1,000 and receives 1,000 Mbit/s, a round trip takes 1.0 ms."
    assert next_step == "Next: meshtrain peers"
    assert run("pair", "483917", "--json").exit_code == 0
    assert [body.devices for body in endpoint.of_type(MeasureLinks)] == [(BERT,)]


def test_a_link_that_cannot_be_measured_now_is_measured_later(mesh_of_bert: FakeMesh) -> None:
    mesh_of_bert.mbit[BERT] = 0.0
    shown = run("pair", "483917")
    assert shown.exit_code == 0, "it is paired"
    assert "measured when a job is planned, for now it was not: a job runs on it\n" in shown.stderr


@pytest.mark.usefixtures("mesh_of_bert")
def test_a_link_that_comes_later_is_waited_for_and_one_that_does_not_is_told_of(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked: Any = endpoint.answers[GetPeers]
    asked: list[Wire] = []

    def peers(body: Wire, emit: Emit) -> Wire:
        asked.append(body)
        return linked(body, emit) if len(asked) > 3 else Peers(peers=(peer(BERT, "bert", "paired"),))

    endpoint.answers[GetPeers] = peers
    shown = run("pair", "483917")
    assert shown.stderr.count("waiting for the link to bert\n") == 1
    assert "Its link sends 1,000" in shown.stderr
    monkeypatch.setattr(mesh, "LINK_TIMEOUT_S", -1.0)
    asked.clear()
    shown = run("pair", "483917")
    assert shown.exit_code == 0
    assert "There is no link to bert yet. If there is none in a minute: meshtrain doctor, on both\n" in shown.stderr
