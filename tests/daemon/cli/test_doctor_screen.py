"""`meshtrain doctor` as people meet it: what it prints, how it ends, and what it refuses."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshtrain.cli.ui.progress import Stages
from meshtrain.doctor.examination import Examination
from meshtrain.doctor.facts import Daemon, Facts, OtherLaptop, PortHolder, Reach, Unknown
from meshtrain.doctor.machine_rules import EARLIEST_S
from tests.daemon.fakedaemon import WAIT_S, run

pytestmark = pytest.mark.usefixtures("plain_environment")

WELL = Facts(now_s=EARLIEST_S + 1, daemon=Daemon(running=True), looked_at=("port 29610/tcp", "the clock"))
TAKEN = replace(WELL, daemon=Daemon(), port_taken=PortHolder(29610, "py\x1bthon (pid 7)", 29611))


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> list[Facts]:
    """What the examination finds out: one entry, to be exchanged."""
    found = [WELL]
    monkeypatch.setattr(Examination, "run", lambda _: found[0])
    return found


@pytest.mark.usefixtures("facts")
def test_nothing_wrong_is_said_with_what_was_looked_at() -> None:
    shown = run("doctor")
    assert (shown.exit_code, shown.stdout) == (0, "nothing wrong was found\n")
    assert "Looked at: port 29610/tcp, the clock." in shown.stderr
    assert "meshtrain doctor there, or here with --at its address" in shown.stderr


def test_a_finding_is_what_why_and_one_command(facts: list[Facts]) -> None:
    facts[0] = TAKEN
    shown = run("doctor")
    assert shown.exit_code == 1
    assert shown.stdout == (
        "1. Port 29610/tcp of this laptop is taken by py\\x1bthon (pid 7).\n"
        "   The daemon cannot start there: stop that program, or let the daemon listen elsewhere.\n"
        "   meshtrain up --listen 0.0.0.0:29611\n\n"
    )
    assert "No daemon runs on this laptop" in shown.stderr


def test_what_was_not_looked_at_is_said_with_the_command_that_does(facts: list[Facts]) -> None:
    facts[0] = replace(WELL, unknown=(Unknown("nftables' rules", "only root may see them", "sudo nft list ruleset"),))
    shown = run("doctor")
    assert shown.exit_code == 0
    assert "Not looked at: nftables' rules (only root may see them): sudo nft list ruleset" in shown.stderr


def test_a_laptop_that_is_away_is_named_without_blame(facts: list[Facts]) -> None:
    away = OtherLaptop("bert", "192.168.1.20", reach=Reach.SILENT)
    facts[0] = replace(WELL, laptops=(away,))
    shown = run("doctor")
    assert shown.exit_code == 0
    assert shown.stdout == "nothing wrong was found here\n"  # what there is over there nobody here has seen
    assert "bert does not answer at 192.168.1.20. If it is on and in this network: meshtrain doctor" in shown.stderr
    facts[0] = replace(WELL, laptops=(replace(away, reach=Reach.REFUSED),))
    assert "A machine answers at 192.168.1.20, where bert was, and no daemon listens there" in run("doctor").stderr


def test_json_is_one_document(facts: list[Facts]) -> None:
    facts[0] = TAKEN
    shown = run("doctor", "--json")
    assert shown.exit_code == 1
    document: dict[str, Any] = json.loads(shown.stdout)
    assert document["daemon_running"] is False
    (finding,) = document["findings"]
    assert (finding["fault"], finding["mend"]) == ("port taken", "meshtrain up --listen 0.0.0.0:29611")
    assert document["looked_at"] == ["port 29610/tcp", "the clock"]


def test_a_bundle_is_written_beside_the_screen(facts: list[Facts], tmp_path: Path) -> None:
    facts[0] = TAKEN
    path = tmp_path / "report.json"
    shown = run("doctor", "--bundle", str(path))
    assert shown.exit_code == 1
    assert json.loads(path.read_text())["faults"] == ["port taken"]
    again = run("doctor", "--bundle", str(path))
    assert again.exit_code == 1
    assert "exists already, and is not overwritten" in again.stderr
    assert not again.stdout, "said before anything is looked at"


@pytest.mark.usefixtures("facts")
@pytest.mark.parametrize("at", ["attic", "192.168.1", "fd00::2", "[fd00::2]", "192.168.1.20:0"])
def test_a_wrong_address_is_refused_with_a_right_one(at: str) -> None:
    shown = run("doctor", "--at", at)
    assert shown.exit_code == 2
    assert "try: meshtrain doctor --at 192.168.1.20" in shown.stderr


def test_help_has_examples() -> None:
    shown = run("doctor", "--help").stdout
    assert "meshtrain doctor --at 192.168.1.20" in shown
    assert "meshtrain doctor --bundle report.json" in shown


def test_what_takes_long_is_said_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first look is over, and once where no terminal is."""
    said: list[str] = []

    def run_slowly(_: Examination) -> Facts:
        deadline_s = time.monotonic() + WAIT_S
        while not said:
            assert time.monotonic() < deadline_s, "nothing is said"
            time.sleep(0.01)
        return WELL

    monkeypatch.setattr(Examination, "run", run_slowly)
    monkeypatch.setattr(Stages, "show", lambda _, text: said.append(text))
    assert run("doctor").exit_code == 0
    assert "Looking at this laptop" in said[0]
