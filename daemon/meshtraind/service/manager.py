"""`meshtraind install` and `uninstall`: the definition's file, and the commands of the system that take it up."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtraind.service.definition import LABEL, MARK, NAME, launchd_agent, systemd_unit, windows_task

COMMAND_TIMEOUT_S = 60.0

Commands = Sequence[Sequence[str]]


class ServiceError(Exception):
    """It was not installed, or not removed; says why, and what helps."""


@dataclass(frozen=True)
class Service:
    """The daemon as one system's service.

    Attributes:
        path: where the system, or its command, reads the definition.
        take_up: commands that have it started now, and whenever the user is there.
        drop: commands that stop it and forget it; run before the file is removed.
        after: commands once the file is gone.
        next_steps: for a person, once it is installed.
    """

    path: Path
    definition: str
    take_up: Commands
    drop: Commands
    after: Commands = ()
    next_steps: Sequence[str] = ()

    def install(self) -> None:
        """Raises ServiceError; then nothing runs that did not run before."""
        if self.path.exists() and not self._is_ours():
            raise ServiceError(f"{self.path} is there, and not of `meshtraind install`: move it away first")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.definition, "utf-8")
        try:
            for command in self.take_up:
                _run(command)
        except ServiceError:
            self.path.unlink()  # it would be taken up by itself some day
            raise

    def uninstall(self) -> None:
        """The data folder stays. Raises ServiceError."""
        if not self.path.exists():
            raise ServiceError(f"nothing is installed: there is no {self.path}")
        if not self._is_ours():
            raise ServiceError(f"{self.path} is not of `meshtraind install`: remove it by hand")
        for command in self.drop:
            _run(command)
        self.path.unlink()
        for command in self.after:
            _run(command)

    def _is_ours(self) -> bool:
        return MARK in self.path.read_text("utf-8", errors="replace")


def service_for(platform: str, arguments: Sequence[str], data: Path, home: Path) -> Service:
    """The daemon, run with these arguments, as a service of this system (`sys.platform`'s names).

    Its modules are its environment's, and not what lies in the folder in which the system starts it (-P).

    Args:
        data: the daemon's data folder.

    Raises:
        ServiceError: the system has no service manager that is known here.
    """
    command = [sys.executable, "-P", "-m", "meshtraind", "run", *arguments]
    if platform == "linux":
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        systemctl = ("systemctl", "--user")
        unit = f"{NAME}.service"
        return Service(
            path=folder / "systemd" / "user" / unit,
            definition=systemd_unit(command),
            take_up=((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", unit)),
            drop=((*systemctl, "disable", "--now", unit),),
            after=((*systemctl, "daemon-reload"),),
            next_steps=(
                f"Its log: journalctl --user -u {NAME} -f",
                "To run it while nobody is logged in, too: loginctl enable-linger",
            ),
        )
    if platform == "darwin":
        path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        log = data / "service.log"
        domain = f"gui/{os.getuid()}"
        return Service(
            path=path,
            definition=launchd_agent(command, log),
            take_up=(("launchctl", "bootstrap", domain, str(path)),),
            drop=(("launchctl", "bootout", f"{domain}/{LABEL}"),),
            next_steps=(f"Its log: tail -f '{log}'",),
        )
    if platform == "win32":
        path = data / "task.xml"
        return Service(
            path=path,
            definition=windows_task(command),
            take_up=(
                ("schtasks", "/Create", "/TN", NAME, "/XML", str(path), "/F"),
                ("schtasks", "/Run", "/TN", NAME),
            ),
            drop=(("schtasks", "/End", "/TN", NAME), ("schtasks", "/Delete", "/TN", NAME, "/F")),
            next_steps=(f"Its state: schtasks /Query /TN {NAME}",),
        )
    raise ServiceError(f"no service manager is known on {platform}: start `meshtraind run` by what there is")


def _run(command: Sequence[str]) -> None:
    line = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise ServiceError(f"this system has no {command[0]}; without it: `meshtrain up` after each start") from None
    except subprocess.TimeoutExpired:
        raise ServiceError(f"`{line}` did not end within {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise ServiceError(f"`{line}` failed: {said}")
