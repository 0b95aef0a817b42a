"""The files under deploy/ that a system reads: well-formed, about the port that is used, and of what is there."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshtraind.cli import main
from meshwire.addresses import DEFAULT_PORT

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "meshtraind.service").read_text("utf-8")
MDNS_PORT = 5353
EXPOSURE_MAX = 2.0  # systemd's own word for it is "OK"; without the hardening it is 9.2, "UNSAFE"


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The system unit, with a Python that is here in place of the one that it names."""
    path = tmp_path / "meshtraind.service"
    path.write_text(UNIT.replace("/opt/meshtrain/bin/python", sys.executable))
    return path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_finds_nothing_wrong_with_the_system_unit(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_the_system_unit_leaves_a_job_little_to_reach(unit: Path) -> None:
    """Whoever is paired may run code as its user: systemd's measure of what that code could do to the machine."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    if found is None:
        pytest.skip(f"this systemd-analyze cannot look at a file: {done.stderr.strip()}")
    assert float(found[1]) <= EXPOSURE_MAX


def test_the_system_units_command_is_one_of_meshtraind(capsys: pytest.CaptureFixture[str]) -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    python, *words = settings["ExecStart"].split()
    assert (python, words[:3]) == ("/opt/meshtrain/bin/python", ["-P", "-m", "meshtraind"])
    with pytest.raises(SystemExit, match="0"):
        main([*words[3:], "--help"])
    assert "usage: meshtraind run" in capsys.readouterr().out
    assert f"MESHTRAIN_DATA_DIR=/var/lib/{settings['StateDirectory']}" in settings["Environment"]
    assert "ProtectSystem" in settings, "only its own folder may be written"


def test_every_firewall_opens_the_ports_that_are_used_and_no_other() -> None:
    profile = configparser.ConfigParser(delimiters="=")
    profile.read(DEPLOY / "ufw-meshtrain", "utf-8")
    assert profile["meshtrain"]["ports"] == f"{DEFAULT_PORT}/tcp|{MDNS_PORT}/udp"
    service = ElementTree.parse(DEPLOY / "firewalld-meshtrain.xml").getroot()
    assert [port.attrib for port in service.iter("port")] == [{"protocol": "tcp", "port": str(DEFAULT_PORT)}]
    assert [include.get("service") for include in service.iter("include")] == ["mdns"]
    script = (DEPLOY / "windows-firewall.ps1").read_text("utf-8")
    rules = re.findall(r"Protocol = '(\w+)'; LocalPort = (\d+)", script)
    assert rules == [("TCP", str(DEFAULT_PORT)), ("UDP", str(MDNS_PORT))]
    assert "-Profile Private" in script
    assert "-RemoteAddress LocalSubnet" in script


def test_the_container_is_made_of_what_is_there_and_runs_as_nobody_else() -> None:
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for word in line.split()]
    assert {"meshtrain", "daemon", "protocol", "pyproject.toml"} <= set(copied)
    assert not [name for name in copied if not (ROOT / name).exists()]
    users = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert users
    assert "0" not in users
    assert f"EXPOSE {DEFAULT_PORT}/tcp" in text
    compose = (DEPLOY / "compose.yaml").read_text("utf-8")
    for line in ("network_mode: host", "read_only: true", 'cap_drop: ["ALL"]', "no-new-privileges:true"):
        assert line in compose
    assert "privileged: true" not in compose


def test_the_guide_names_every_file() -> None:
    guide = (DEPLOY / "README.md").read_text("utf-8")
    files = [path.name for path in DEPLOY.iterdir() if path.is_file() and path.suffix != ".md"]
    assert not [name for name in files if name not in guide]
