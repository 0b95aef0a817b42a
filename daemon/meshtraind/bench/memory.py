"""How much memory this process has, and had at most."""

import resource
import sys
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Now, shared pages included."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The most memory that this process ever had. getrusage would count what the parent had before this process was
    made from it."""
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
