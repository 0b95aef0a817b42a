"""What TAB offers in bash, zsh and fish: names and ids as the daemon knows them, and nothing without one."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from meshtrain.cli.app import app
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.local import GetJobs, GetPeers, GetStatus, Peers, PeerSummary
from tests.daemon.fakedaemon import JOB, SOFTWARE, STATUS, Endpoint, known_jobs, member, summary

pytestmark = pytest.mark.usefixtures("plain_environment")

SHELLS = ("bash", "zsh", "fish")
NEWER = "1kz8000000aa"


def variables(shell: str, line: str) -> dict[str, str]:
    """What a shell says when TAB is pressed at the end of a line."""
    told = {"_MESHTRAIN_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        words = line.split()
        return told | {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - (not line.endswith(" ")))}
    return told | {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


def offered(shell: str, line: str) -> list[str]:
    said = CliRunner().invoke(app, [], prog_name="meshtrain", env=variables(shell, line)).stdout
    if shell == "zsh":
        return [] if said.strip() == "_files" else [text.split('"')[1] for text in said.split("((")[1].splitlines()]
    return [text.split("\t")[0] for text in said.splitlines() if text]


@pytest.fixture
def mesh(endpoint: Endpoint) -> Endpoint:
    facts = {"address": None, "rtt_s": None, "software": SOFTWARE, "cores": None, "memory_bytes": None}
    names = (("bert", "linked"), ("carl", "paired"), ("dora", "waiting"), ("emil", "seen"))
    peers = [
        PeerSummary(device=f"{at:08x}" * 8, name=name, state=state, **facts) for at, (name, state) in enumerate(names)
    ]
    third = member("ef" * 32, "my laptop")
    old = summary(name="gpt")
    new = summary(JobState.RUNNING, job=NEWER, name="gpt", created_at_s=1.8e9, members=(*old.members, third))
    odd = summary(job="1ka8000000aa", name="it's", created_at_s=1.0)
    endpoint.answers |= {GetJobs: known_jobs(old, new, odd), GetPeers: Peers(peers=tuple(peers)), GetStatus: STATUS}
    return endpoint


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("meshtrain logs ", [NEWER, JOB, "1ka8000000aa"]),
        ("meshtrain get 1kx", [JOB]),
        ("meshtrain rm 1kx", [JOB]),
        ("meshtrain top g", ["gpt"]),
        ("meshtrain cancel gpt", ["gpt"]),
        ("meshtrain logs it", []),  # a shell would read the name otherwise; its id is offered
        ("meshtrain submit --resume g", ["gpt"]),
        ("meshtrain unpair ", ["bert", "carl", "dora"]),
        ("meshtrain pair --accept ", ["dora"]),
        ("meshtrain submit --on ", ["anna", "bert"]),
        ("meshtrain submit --on anna,b", ["anna,bert"]),
        ("meshtrain submit --on bert,b", []),
        (f"meshtrain logs {NEWER} --rank ", ["anna", "bert", "2"]),
        ("meshtrain logs gpt --rank b", ["bert"]),
        ("meshtrain logs x9z --rank ", []),
    ],
)
def test_ids_and_names_are_offered(shell: str, line: str, offers: list[str]) -> None:
    assert offered(shell, line) == offers


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "line",
    [
        "meshtrain logs ",
        "meshtrain logs --rank ",
        "meshtrain unpair ",
        "meshtrain submit --on ",
        "meshtrain pair --accept ",
        "meshtrain config ",
    ],
)
def test_nothing_is_offered_nor_said_without_a_daemon(shell: str, line: str) -> None:
    assert offered(shell, line) == []


def test_an_id_that_begins_as_a_name_is_meant_by_it(endpoint: Endpoint) -> None:
    """So the name is not offered, as with the command itself."""
    endpoint.answers[GetJobs] = known_jobs(summary(), summary(job=NEWER, name="1kx"))
    assert offered("bash", "meshtrain logs 1kx") == [JOB]


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("shell", SHELLS)
def test_whoever_presses_tab_waits_for_nothing_that_is_not_needed(shell: str) -> None:
    """Neither torch nor rich, with which typer would look through each word."""
    heavy = ("torch", "numpy", "psutil", "meshtrain.train", "meshtraind", "typer.rich_utils", "rich.console")
    text = (
        "import sys\nfrom meshtrain.cli import main\ntry:\n    main()\nfinally:\n"
        f"    print([name for name in {heavy} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | variables(shell, "meshtrain logs 1kx"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert JOB in done.stdout
    assert done.stderr == "[]\n"
