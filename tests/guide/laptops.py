"""Laptops for a recording: each a network namespace with a host name, a home and a terminal in which bash runs.

What is typed there is typed into the real shell, and what is recorded is what that terminal was sent, byte for byte.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.lab.lab import Lab

KEY_S = 0.03  # between two keys
READ_S = 0.05
STOP_TIMEOUT_S = 10.0
SCREEN = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x09\x0b-\x1f]")  # what moves or colours


class TerminalError(Exception):
    """What was waited for did not appear; says what did."""


class Terminal:
    """A context manager: bash in a terminal of a station's, and everything that appears there with its time.

    Args:
        lab: whose station it is.
        station: which one.
        name: the laptop's, and its host name.
        home: its home folder, where the shell begins.
        size: rows and columns.
        bin_folder: where `meshtrain` is installed; before all others in PATH.
    """

    def __init__(
        self,
        lab: Lab,
        station: int,
        name: str,
        home: Path,
        size: tuple[int, int],
        bin_folder: Path,
    ) -> None:
        self.name = name
        self.home = home
        self.rows, self.columns = size
        self.events: list[tuple[float, bytes]] = []
        self.prompt = f"{name}:"
        self._environment = _environment(name, home, bin_folder)
        # A host name of its own, for it is what other laptops see.
        shell = 'hostname "$0"; exec bash --noprofile --norc -i'
        self._command = lab.command(station, ["unshare", "--uts", "sh", "-c", shell, name])

    def __enter__(self) -> Self:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", self.rows, self.columns, 0, 0))
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *self._command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=self._environment,
            cwd=self.home,
        )
        os.close(slave)
        self.until_prompt(10.0)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        os.close(self._master)  # bash ends with its terminal
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def text(self, since: int = 0) -> str:
        """What appeared from an event on, without colours and movements."""
        return SCREEN.sub(b"", b"".join(said for _, said in self.events[since:])).decode(errors="replace")

    def type(self, line: str) -> int:
        """Types a line and Enter. Returns the number of the first event behind it."""
        for key in line:
            os.write(self._master, key.encode())
            self.watch(KEY_S)
        self.watch(10 * KEY_S)
        os.write(self._master, b"\r")
        return len(self.events)

    def watch(self, seconds: float) -> None:
        """Takes down what appears within this time."""
        deadline_s = time.monotonic() + seconds
        while (left := deadline_s - time.monotonic()) > 0:
            if select.select([self._master], [], [], min(left, READ_S))[0]:
                try:
                    self.events.append((time.monotonic(), os.read(self._master, 1 << 16)))
                except OSError:
                    raise TerminalError(f"{self.name}'s shell has ended:\n{self.text()}") from None

    def until(self, pattern: str, timeout_s: float, since: int = 0, beside: "Terminal | None" = None) -> re.Match[str]:
        """Waits until this appears; another terminal is watched meanwhile. Raises TerminalError after the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = re.search(pattern, self.text(since))
            if found is not None:
                return found
            if time.monotonic() > deadline_s:
                raise TerminalError(
                    f"{self.name} did not show {pattern!r} in {timeout_s:g} s, but:\n{self.text(since)[-3000:]}"
                )
            self.watch(READ_S)
            if beside is not None:
                beside.watch(READ_S / 10)

    def until_prompt(self, timeout_s: float, since: int = 0, beside: "Terminal | None" = None) -> None:
        """Waits until the shell takes the next command."""
        self.until(rf"{self.prompt}\S*\$ $", timeout_s, since, beside)

    @property
    def data_dir(self) -> Path:
        """Where its daemon keeps its things."""
        return self.home / ".local/share/meshtrain"

    def run(self, line: str, timeout_s: float, beside: "Terminal | None" = None) -> str:
        """Types a command and waits for its end. Returns what it has printed."""
        since = self.type(line)
        self.until_prompt(timeout_s, since, beside)
        return self.text(since).rpartition(self.prompt)[0].strip("\n")


def _environment(name: str, home: Path, bin_folder: Path) -> Mapping[str, str]:
    """A shell's own, and nothing of this process's but where programs are."""
    return {
        "HOME": str(home),
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PS1": f"{name}:\\w$ ",
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "HISTFILE": "/dev/null",
        "VIRTUAL_ENV": str(bin_folder.parent),
    }
