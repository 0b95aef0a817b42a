"""Laptops of different speeds on one machine: a share of a core for all processes of each, by the kernel's cgroups."""

import contextlib
import itertools
import os
from pathlib import Path
from typing import Self

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000  # short, so that a share is one within a calculation of milliseconds too

_numbers = itertools.count()


def quotas_unavailable() -> str | None:
    """Why none can be made here, None when they can."""
    if os.geteuid() != 0:
        return "shares of a core take root"
    return None if _parent() is not None else f"shares of a core take the cgroup controller cpu below {ROOT}"


def _parent() -> Path | None:
    if (ROOT / "cpu" / "cpu.shares").exists():
        return ROOT / "cpu"
    controllers = ROOT / "cgroup.subtree_control"
    return ROOT if controllers.exists() and "cpu" in controllers.read_text().split() else None


class Quota:
    """So much of a core for the processes that are put into it, and for those that they start. A context manager: it is
    removed when these have ended."""

    def __init__(self, cores: float) -> None:
        parent = _parent()
        assert parent is not None
        self._folder = parent / f"meshlab-{os.getpid()}-{next(_numbers)}"
        self._cores = cores
        self._second = parent == ROOT

    def __enter__(self) -> Self:
        self._folder.mkdir()
        quota_us = round(self._cores * PERIOD_US)
        if self._second:
            (self._folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # something that was started there has not ended: it is empty soon
            self._folder.rmdir()

    def hold(self, pid: int) -> None:
        """Puts a process into it, with its threads; what it has started already stays outside."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def prefix(self) -> tuple[str, ...]:
        """Words in front of a command that is to run in it from its beginning; `ip netns exec` comes behind them, for
        in a namespace the cgroups are not seen."""
        return ("sh", "-c", f'echo $$ > {self._folder}/cgroup.procs && exec "$@"', "sh")
