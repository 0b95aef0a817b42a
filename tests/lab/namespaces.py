"""Network namespaces of a lab: commands in them, threads in them, and their removal with all that runs there.

Their names hold the process's id, so that labs of several test runs do not meet and what a killed run left is known.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PREFIX = "meshlab"
COMMAND_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0

_CAPABILITIES = {12: "CAP_NET_ADMIN", 21: "CAP_SYS_ADMIN"}
_CLONE_NEWNET = 0x40000000
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}


class LabError(Exception):
    """A command of the lab failed; the text has the command and what it said."""


def lab_unavailable(*tools: str) -> str | None:
    """Why no lab can be made here, None when it can.

    Args:
        tools: what this one takes besides `ip` and `tc`: "nft" for a cell or losses, "/dev/net/tun" for delays.
    """
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    effective = int(re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.M)[1], 16)  # type: ignore[index]
    lacking = [name for bit, name in _CAPABILITIES.items() if not effective >> bit & 1]
    if lacking:
        return f"making network namespaces takes {' and '.join(lacking)}"
    missing = [tool for tool in ("ip", "tc", *tools) if not Path(tool).is_char_device() and shutil.which(tool) is None]
    if missing:
        packages = sorted({_PACKAGES.get(tool, "the kernel's tun module") for tool in missing})
        return f"{' and '.join(missing)} not found: install {' and '.join(packages)}"
    return None


def do(*argv: str, text: str | None = None) -> str:
    """Runs a command, with a text as its input; returns what it prints. Raises LabError."""
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
        **({"stdin": subprocess.DEVNULL} if text is None else {"input": text}),
    )
    if done.returncode:
        given = "" if text is None else f" of\n{text}"
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}{given}")
    return str(done.stdout)


@contextlib.contextmanager
def entered(namespace: str) -> Iterator[None]:
    """While this holds, what this thread makes is a namespace's: sockets, devices, processes, threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as outside, open(f"/run/netns/{namespace}") as inside:
        _enter(libc, inside)
        try:
            yield
        finally:
            _enter(libc, outside)


def _enter(libc: ctypes.CDLL, namespace: IO[str]) -> None:
    if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
        raise LabError(f"cannot enter {namespace.name}: {os.strerror(ctypes.get_errno())}")


def remove_stale() -> None:
    """Removes the namespaces, and what runs in them, of labs whose process is gone."""
    for name in _namespaces():
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\d+-\w+", name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            remove_namespaces(name)


def remove_namespaces(prefix: str) -> None:
    """Those whose names begin so, and what runs in them."""
    for name in _namespaces():
        if not name.startswith(prefix):
            continue
        _kill(name)
        do("ip", "netns", "del", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in do("ip", "netns", "list").splitlines() if line.strip()]


def _kill(namespace: str) -> None:
    """Ends what runs in a namespace: a process would keep it, and its cables, beyond its name."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while pids := do("ip", "netns", "pids", namespace).split():
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(pids)} in {namespace} survive SIGKILL")
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
