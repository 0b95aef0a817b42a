"""Numbers and names of this machine and this user, from whoever knows them here."""

import functools
import os
import sys
from hashlib import blake2b
from pathlib import Path

import psutil

if sys.platform != "win32":
    import resource

_STATUS = Path("/proc/self/status")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return int(psutil.virtual_memory().total)


def peak_bytes() -> int:
    """The most memory that this process ever had. getrusage would count what the parent had before this process was
    made from it."""
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    if sys.platform != "win32":
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    return int(psutil.Process().memory_info().peak_wset)


@functools.cache
def running_system() -> str:
    """A name of the kernel that runs here since it has started: equal in all containers and namespaces on it, and for
    nobody else. Empty where the system does not tell one."""
    try:
        boot = _BOOT.read_bytes().strip()
    except OSError:
        return ""
    return blake2b(boot, digest_size=16, person=b"meshtrain").hexdigest() if boot else ""


def user_number() -> int:
    """This user's number; -1 where users have names alone."""
    if sys.platform == "win32":
        return -1
    return os.getuid()


def has_modes() -> bool:
    """Whether a file's mode says who may use it. On Windows the folder's rights do, and a user's profile is private."""
    return os.name == "posix"


def bytes_on_disk(file: os.stat_result) -> int:
    """What a file takes on its disk; on Windows its size, which is more where it is sparse."""
    if sys.platform != "win32":
        return file.st_blocks * 512
    return file.st_size


def shell_command(text: str) -> list[str]:
    """A command line as a person types it, as the words of the shell that reads it."""
    if sys.platform == "win32":
        return [os.environ.get("COMSPEC", "cmd.exe"), "/d", "/c", text]
    return ["/bin/sh", "-c", text]
