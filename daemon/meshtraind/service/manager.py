"""`meshtraind install` and `uninstall`: the definition's file, and the commands of the system that take it up."""

import contextlib
import getpass
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtraind.machine.facts import user_number
from meshtraind.service.definition import LABEL, MARK, NAME, launchd_agent, systemd_unit, windows_task
from meshwire.text import printable

COMMAND_TIMEOUT_S = 60.0
LOG_NAME = "service.log"  # where the system keeps no journal

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
        prepare: commands that may fail, before the others: what they end may not be there.
        after: commands once the file is gone.
        next_steps: for a person, once it is installed.
    """

    path: Path
    definition: str
    take_up: Commands
    drop: Commands
    prepare: Commands = ()
    after: Commands = ()
    next_steps: Sequence[str] = ()

    def install(self) -> None:
        """Raises ServiceError; then all is as it was before."""
        before = self._ours()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _write(self.path, self.definition)
            for command in self.prepare:
                _try(command)
            for command in self.take_up:
                _run(command)
        except (ServiceError, OSError, UnicodeEncodeError) as error:
            self._take_back(before)
            raise ServiceError(f"{error}. Nothing was changed; without a service: `meshtrain up`") from error
        except BaseException:  # ctrl-C
            self._take_back(before)
            raise

    def _take_back(self, before: str | None) -> None:
        """Puts back the definition of before, or takes up none: also one that the system has taken up half."""
        if self.path.exists() and before is None:
            for command in self.drop:
                _try(command)
        if before is None:
            self.path.unlink(missing_ok=True)
        elif self.path.read_text("utf-8") != before:
            _write(self.path, before)
        for command in self.after:
            _try(command)

    def uninstall(self) -> None:
        """The data folder stays. Raises ServiceError; then it is still installed."""
        if self._ours() is None:
            raise ServiceError(f"nothing is installed: there is no {self.path}")
        for command in self.prepare:
            _try(command)
        for command in self.drop:
            _run(command)
        self.path.unlink()
        for command in self.after:
            _run(command)

    def _ours(self) -> str | None:
        """The definition that is there, or None. Raises ServiceError for one that somebody else has written."""
        if not os.path.lexists(self.path):
            return None
        text = self.path.read_text("utf-8", errors="replace") if self.path.is_file() else ""
        if MARK not in text:
            raise ServiceError(
                f"{self.path} is there, and not of `meshtraind install`: move it away first, or remove it by hand"
            )
        return text


def service_for(platform: str, arguments: Sequence[str], data: Path, home: Path) -> Service:
    """The daemon, run with these arguments, as a service of this system (`sys.platform`'s names).

    Its modules are its environment's, and not what lies in the folder in which the system starts it (-P).

    Args:
        data: the daemon's data folder.

    Raises:
        ServiceError: the system has no service manager that is known here, or that one cannot run this Python.
    """
    command = [sys.executable, "-P", "-m", "meshtraind", "run", *arguments]
    environment = f"It runs with the Python in {sys.prefix}: if you move or remove that, `meshtraind install` again"
    if platform == "linux":
        if not sys.executable.isprintable() or any(sign in sys.executable for sign in "\"'\\"):
            raise ServiceError(
                f"systemd runs no program with quotes, backslashes or control characters in its path, as has "
                f"{printable(sys.executable)}: make the virtual environment elsewhere"
            )
        named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
        folder = named if named.is_absolute() else home / ".config"  # systemd, too, takes no other
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
                environment,
            ),
        )
    if platform == "darwin":
        path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        log = data / LOG_NAME
        domain = f"gui/{user_number()}"
        return Service(
            path=path,
            definition=launchd_agent([*command, "--log-file", str(log)], log),
            take_up=(("launchctl", "bootstrap", domain, str(path)),),
            drop=(),
            prepare=(("launchctl", "bootout", f"{domain}/{LABEL}"),),  # an agent that has ended is there as well
            next_steps=(f"Its log: tail -f '{log}'", environment),
        )
    if platform == "win32":
        path = data / "task.xml"
        return Service(
            path=path,
            definition=windows_task([*command, "--log-file", str(data / LOG_NAME)], _windows_user()),
            take_up=(
                ("schtasks", "/Create", "/TN", NAME, "/XML", str(path), "/F"),
                ("schtasks", "/Run", "/TN", NAME),
            ),
            drop=(("schtasks", "/Delete", "/TN", NAME, "/F"),),
            prepare=(("schtasks", "/End", "/TN", NAME),),
            next_steps=(f"Its state: schtasks /Query /TN {NAME}", environment),
        )
    raise ServiceError(f"no service manager is known on {platform}: start `meshtraind run` by what there is")


def _windows_user() -> str:
    name, domain = getpass.getuser(), os.environ.get("USERDOMAIN", "")
    return f"{domain}\\{name}" if domain else name


def _write(path: Path, text: str) -> None:
    """The whole text, or the file stays as it was. Raises OSError, UnicodeEncodeError."""
    draft = path.with_name(f"{path.name}.new")
    try:
        draft.write_bytes(text.encode("utf-8"))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _try(command: Sequence[str]) -> None:
    """A command for something that may not be there. What it says otherwise is said by the next one as well."""
    with contextlib.suppress(ServiceError):
        _run(command)


def _run(command: Sequence[str]) -> None:
    line = " ".join(command)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise ServiceError(f"this system has no {command[0]}") from None
    except OSError as error:
        raise ServiceError(f"`{line}` cannot be run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired:
        raise ServiceError(f"`{line}` did not end within {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise ServiceError(f"`{line}` failed: {said}")
