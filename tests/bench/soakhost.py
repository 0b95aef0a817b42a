"""A machine of its own for each daemon of a soak, as far as this one can play it: a disk, a clock, a time since boot.

The disk is a small tmpfs, mounted where the data folder is (root): filling it leaves everybody else's alone. The wall
clock is stepped for one process by a library that is loaded in front of libc's (a C compiler; learners do not inherit
it): the daemon itself knows nothing of it. Each start has another time since boot, in a time namespace of its own.
"""

import contextlib
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

DISK_BYTES = 192 * 1024 * 1024
UP_S = (0.0, 40 * 86_400.0)  # since boot, at a start
FILLER = "full"
FILL_BYTES = 1024 * 1024
COMMAND_TIMEOUT_S = 30.0

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile const long long *step_s;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SOAK_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof *step_s, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) step_s = page;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (!failed && step_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *step_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void) zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (seconds) *seconds = precise.tv_sec;
    return precise.tv_sec;
}
"""


class HostError(Exception):
    """This machine cannot play that part; says why."""


class Host:
    """One daemon's machine. Made before its data folder holds anything.

    Args:
        folder: the data folder.
        clock: the library that steps the wall clock; None: it cannot be stepped.
        boots: draws the time since boot of each start; None: that of this machine.
        disk_bytes: of its disk; 0: that of this machine.
    """

    def __init__(self, folder: Path, *, clock: Path | None, boots: Random | None, disk_bytes: int) -> None:
        self._folder = folder
        self._clock = clock
        self._boots = boots
        self._mounted = False
        self._step: mmap.mmap | None = None
        if clock is not None:
            self._step_path = clock.with_name(f"{folder.name}.step")
            self._step_path.write_bytes(struct.pack("q", 0))
            with self._step_path.open("r+b") as file:
                self._step = mmap.mmap(file.fileno(), 8)
        if disk_bytes:
            run(["mount", "-t", "tmpfs", "-o", f"size={disk_bytes},mode=0700", "soak", str(folder)])
            self._mounted = True

    @property
    def prefix(self) -> Sequence[str]:
        """Words in front of its daemon's command, of the next start."""
        if self._boots is None:
            return ()
        up_s = self._boots.uniform(*UP_S)
        return ("unshare", "--time", f"--monotonic={up_s:.0f}", f"--boottime={up_s:.0f}")

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables beside those of this process."""
        if self._clock is None:
            return {}
        return {"LD_PRELOAD": str(self._clock), "SOAK_CLOCK": str(self._step_path)}

    def step(self, seconds: float) -> None:
        """Its wall clock differs by so much from this machine's from now on."""
        if self._step is None:
            raise HostError("its clock cannot be stepped")
        self._step[:8] = struct.pack("q", round(seconds))

    def fill(self) -> None:
        """Nothing more fits on its disk."""
        if not self._mounted:
            raise HostError("it has no disk of its own")
        with contextlib.suppress(OSError), (self._folder / FILLER).open("ab", buffering=0) as file:  # ENOSPC ends it
            while True:
                file.write(bytes(FILL_BYTES))

    def empty(self) -> None:
        """There is room again."""
        (self._folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """What was mounted is gone, with all that it held."""
        if self._step is not None:
            self._step.close()
        if self._mounted:
            run(["umount", "--lazy", str(self._folder)])


@contextlib.contextmanager
def clock_library() -> Iterator[Path]:
    """The library, built for as long as the context lasts. Raises HostError."""
    with tempfile.TemporaryDirectory(prefix="meshtrain-clock-") as folder:
        source, library = Path(folder) / "clock.c", Path(folder) / "clock.so"
        source.write_text(CLOCK)
        run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(library), str(source), "-ldl"])
        yield library


def run(command: Sequence[str]) -> None:
    """Raises HostError with what the command said."""
    if shutil.which(command[0]) is None:
        raise HostError(f"there is no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise HostError(f"{command[0]}: {done.stderr.strip() or done.returncode}")


def can_mount() -> bool:
    """Mounting and time namespaces are root's."""
    return os.geteuid() == 0
