"""Memory that is no longer used goes back to the system: a daemon runs for months, most of the time without a job.

glibc gives every thread that allocates an arena of its own, up to eight for each core, and each keeps what it had at
its peak: the threads of one job, which write states and serve them, left 9 MB each behind. The daemon's threads wait
for disks, and hold Python's lock otherwise, so one arena serves them all. Elsewhere than on glibc nothing is done.
"""

import ctypes
import gc
import sys

M_ARENA_MAX = -8  # malloc.h


def keep_one_arena() -> bool:
    """To be called before the first thread starts. Returns whether the system's allocator has such a thing."""
    mallopt = _of_libc("mallopt")
    return mallopt is not None and bool(mallopt(M_ARENA_MAX, 1))


def release_unused() -> None:
    """A job has ended: what hangs in circles of references is freed, and pages that hold nothing are given back."""
    gc.collect()
    if (malloc_trim := _of_libc("malloc_trim")) is not None:
        malloc_trim(0)


def _of_libc(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
