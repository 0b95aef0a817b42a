"""Memory that threads have used and freed does not stay with a daemon."""

import subprocess
import sys

import pytest

# Threads that live at once, each of which takes 16 MiB in small pieces and frees them but for one in a hundred.
PROGRAM = """
import ctypes, sys, threading
from meshtraind.runtime.free_memory import keep_one_arena, release_unused

if sys.argv[1] == "one":
    assert keep_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
barrier = threading.Barrier(4)

def use():
    barrier.wait()
    taken = [libc.malloc(16384) for _ in range(1024)]
    for place in taken:
        ctypes.memset(place, 1, 16384)
    barrier.wait()
    for number, place in enumerate(taken):
        if number % 100:
            libc.free(place)

threads = [threading.Thread(target=use) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
libc.fclose.argtypes = [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
file = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, file)
libc.fclose(file)

def resident_mib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4 // 1024

before = resident_mib()
release_unused()
print("given back", before - resident_mib())
"""


def said(which: str) -> str:
    return subprocess.run([sys.executable, "-c", PROGRAM, which], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="arenas are glibc's")
def test_threads_share_one_arena_and_what_they_freed_goes_back() -> None:
    if "<heap" not in (many := said("many")):
        pytest.skip("this libc is not glibc")
    assert many.count("<heap nr") > 1, "the test's threads would have had arenas of their own"
    one = said("one")
    assert one.count("<heap nr") == 1
    assert int(one.rpartition("given back ")[2]) > 40, "MiB of 64"
