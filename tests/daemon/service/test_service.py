"""The daemon as a service: what systems are told, and what happens to what was there before."""

import dataclasses
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
        f'if [ -e "{tmp_path}/fails" ] && echo "$2" | grep -q "$(cat "{tmp_path}/fails")"; then\n'
        '  echo "Failed to connect to bus" >&2; exit 1\nfi\n'
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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("folder", ["a b", "50 %h", "$HOME", "a$b c", "100%$"])
def test_systemd_finds_a_program_wherever_it_lies(tmp_path: Path, folder: str) -> None:
    program = tmp_path / folder / "python"
    program.parent.mkdir()
    program.symlink_to(sys.executable)
    unit = tmp_path / "meshtraind.service"
    unit.write_text(systemd_unit([str(program), *COMMAND[1:]]))
    verify = ["systemd-analyze", "--user", "verify", "--man=no", str(unit)]
    done = subprocess.run(
        verify, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("folder", ['the "new"', "it's", "back\\slash", "line\nfeed"])
def test_a_program_that_systemd_cannot_run_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`systemd-analyze verify` says of each: "Executable name contains special characters"."""
    monkeypatch.setattr(sys, "executable", f"/{folder}/python")
    assert main(["install"]) == 1
    assert "make the virtual environment elsewhere" in capsys.readouterr().err
    assert not (home / UNIT).exists()


def test_launchd_reads_every_argument_as_it_was_typed() -> None:
    agent = plistlib.loads(launchd_agent(COMMAND, PurePosixPath("/data/service.log")).encode())
    assert agent["ProgramArguments"] == COMMAND
    assert agent["KeepAlive"] == {"SuccessfulExit": False}, "not again after `meshtrain down`"


def test_the_task_of_windows_is_xml_with_every_argument() -> None:
    task = ElementTree.fromstring(windows_task(COMMAND, "HOME\\anna & co"))
    who = [each.text for each in task.iter(f"{XML}UserId")]
    assert who == ["HOME\\anna & co"] * 2, "at nobody else's logon, and as nobody else"
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
    (home / "fails").write_text(".")
    assert main(["install"]) == 1
    assert "`systemctl --user daemon-reload` failed: Failed to connect to bus" in capsys.readouterr().err
    assert not (home / UNIT).exists()


def test_what_was_taken_up_half_is_taken_back(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`enable --now` links the unit before it starts it; a link to nothing would stay."""
    (home / "fails").write_text("enable")
    assert main(["install"]) == 1
    assert "Nothing was changed; without a service: `meshtrain up`" in capsys.readouterr().err
    assert list((home / UNIT).parent.iterdir()) == []
    asked = (home / "asked").read_text().splitlines()
    assert asked[-2:] == ["--user disable --now meshtraind.service", "--user daemon-reload"]


def test_a_service_that_was_there_outlives_a_second_install_that_fails(home: Path) -> None:
    assert main(["install", "--name", "attic"]) == 0
    unit = (home / UNIT).read_text()
    (home / "asked").unlink()
    (home / "fails").write_text("enable")
    assert main(["install", "--name", "cellar"]) == 1
    assert (home / UNIT).read_text() == unit
    asked = (home / "asked").read_text().splitlines()
    assert "disable" not in " ".join(asked)
    assert asked[-1] == "--user daemon-reload", "systemd knows the one of before again"


def test_a_full_disk_leaves_no_half_of_a_definition(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is cut off would be taken for somebody else's."""

    def half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", half)
    monkeypatch.setattr(Path, "write_text", lambda path, text, *_: half(path, text.encode()))
    assert main(["install"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list((home / UNIT).parent.iterdir()) == []


def test_ctrl_c_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str], **_: object) -> None:
        if "enable" in command:
            raise KeyboardInterrupt
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "", ""))
    service = service_for("linux", (), home, home)
    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(service, take_up=service.take_up[1:]).install()
    assert list((home / UNIT).parent.iterdir()) == []


def test_a_relative_folder_of_configuration_is_not_taken(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does systemd: the unit would be found by nobody."""
    for named in ("config", ""):
        monkeypatch.setenv("XDG_CONFIG_HOME", named)
        assert service_for("linux", (), tmp_path, home).path == home / ".config/systemd/user/meshtraind.service"


@pytest.mark.usefixtures("home")
def test_a_user_without_a_home_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for command in ("install", "uninstall"):
        with pytest.raises(SystemExit):
            main([command])
        assert "set HOME" in capsys.readouterr().err


def test_an_agent_that_has_ended_is_in_nobodys_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launchd keeps one after `meshtrain down`: a second one of its name is refused, and is none to be taken out."""
    asked: list[str] = []

    def launchctl(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        asked.append(command[1])
        return subprocess.CompletedProcess(command, 3 if command[1] == "bootout" else 0, "", "No such process")

    monkeypatch.setattr(subprocess, "run", launchctl)
    service = service_for("darwin", (), home, home)
    service.install()
    service.uninstall()
    assert asked == ["bootout", "bootstrap", "bootout"]
    assert not service.path.exists()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_log_of_a_service_without_a_journal_has_an_end(platform: str, tmp_path: Path) -> None:
    """The daemon begins a new file by itself; what launchd writes for it has no end."""
    definition = service_for(platform, (), tmp_path, tmp_path).definition
    assert "--log-file" in definition
    assert str(tmp_path / "service.log") in definition


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
