"""The daemon as a service: what systems are told, and what happens to what was there before."""

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import pytest

from meshtraind.api.rundir import RunDir
from meshtraind.cli import main
from meshtraind.service.definition import MARK, launchd_agent, systemd_unit, windows_task
from meshtraind.service.manager import ServiceError, service_for

COMMAND = ["/a b/python", "-P", "-m", "meshtraind", "run", "--name", 'the "50 %" $HOME\\attic', "<&>"]
UNIT = Path("config", "systemd", "user", "meshtraind.service")
XML = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a `systemctl` that notes what it is asked, and fails where `fails` lies."""
    tools = tmp_path / "bin"
    tools.mkdir()
    systemctl = tools / "systemctl"
    systemctl.write_text(
        f'#!/bin/sh\necho "$@" >> "{tmp_path}/asked"\n'
        f'if [ -e "{tmp_path}/fails" ]; then echo "Failed to connect to bus" >&2; exit 1; fi\n'
    )
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MESHTRAIN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_systemd_reads_every_argument_as_it_was_typed() -> None:
    (line,) = [line for line in systemd_unit(COMMAND).splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(line.removeprefix("ExecStart="))  # quoted alike, but for what systemd replaces
    assert [word.replace("%%", "%").replace("$$", "$") for word in words] == COMMAND


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    unit = tmp_path / "meshtraind.service"
    unit.write_text(systemd_unit([sys.executable, *COMMAND[1:]]))
    verify = ["systemd-analyze", "--user", "verify", "--man=no", str(unit)]
    done = subprocess.run(
        verify, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_launchd_reads_every_argument_as_it_was_typed() -> None:
    agent = plistlib.loads(launchd_agent(COMMAND, PurePosixPath("/data/service.log")).encode())
    assert agent["ProgramArguments"] == COMMAND
    assert agent["KeepAlive"] == {"SuccessfulExit": False}, "not again after `meshtrain down`"


def test_the_task_of_windows_is_xml_with_every_argument() -> None:
    task = ElementTree.fromstring(windows_task(COMMAND))
    assert task.findtext(f".//{XML}Command") == COMMAND[0]
    assert task.findtext(f".//{XML}Arguments") == subprocess.list2cmdline(COMMAND[1:])


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_each_definition_says_who_has_written_it(platform: str, tmp_path: Path) -> None:
    assert MARK in service_for(platform, (), tmp_path, tmp_path).definition


def test_install_starts_it_and_uninstall_takes_all_of_it_back(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install", "--name", "attic", "--peer", "192.168.1.20"]) == 0
    unit = (home / UNIT).read_text()
    assert f'"--data-dir" "{home}/data" "--name" "attic" "--peer" "192.168.1.20"' in unit
    assert f"meshtraind is a service now: {home / UNIT}\nIts log: journalctl" in capsys.readouterr().out
    assert main(["install"]) == 0, "again, with other options"
    assert "attic" not in (home / UNIT).read_text()
    assert main(["uninstall"]) == 0
    assert not (home / UNIT).exists()
    asked = (home / "asked").read_text().splitlines()
    started = ["--user daemon-reload", "--user enable --now meshtraind.service"]
    assert asked == [*started, *started, "--user disable --now meshtraind.service", "--user daemon-reload"]


def test_a_unit_that_somebody_has_written_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / UNIT).parent.mkdir(parents=True)
    (home / UNIT).write_text("[Service]\nExecStart=/mine\n")
    assert main(["install"]) == main(["uninstall"]) == 1
    assert (home / UNIT).read_text() == "[Service]\nExecStart=/mine\n"
    assert not (home / "asked").exists()
    install, uninstall = capsys.readouterr().err.splitlines()
    assert "move it away" in install
    assert "remove it by hand" in uninstall


def test_what_the_system_says_is_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "fails").touch()
    assert main(["install"]) == 1
    assert "`systemctl --user daemon-reload` failed: Failed to connect to bus" in capsys.readouterr().err
    assert not (home / UNIT).exists()


def test_nothing_is_installed_where_a_daemon_runs_already(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir(home / "data"):
        assert main(["install"]) == 1
    assert "stop it with `meshtrain down`" in capsys.readouterr().err
    assert not (home / UNIT).exists()


def test_nothing_to_uninstall_is_an_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["uninstall"]) == 1
    assert f"there is no {home / UNIT}" in capsys.readouterr().err


def test_print_changes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install", "--print"]) == 0
    assert capsys.readouterr().out.startswith(f"# {MARK}")
    assert not (home / UNIT).exists()
    assert not (home / "data").exists()


def test_a_system_without_a_service_manager_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="no service manager is known on plan9"):
        service_for("plan9", (), tmp_path, tmp_path)
