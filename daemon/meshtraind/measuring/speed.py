"""How fast this device computes: a short calculation in a process of its own, on all its cores."""

import asyncio
import contextlib
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from meshtraind.transport.connection import RequestFailed
from meshwire import limits

MODULE = "meshtraind.measuring.speed"
SIZE = 256  # of two square matrices that are multiplied: 33 * 10^6 operations, shorter than a turn of another program
SLICE_S = 0.1  # one of the kernel's turns, where a container may use a part of its cores
SLICES = 8
KEPT_S = 600.0  # then it may have been plugged in, or grown hot
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # for each product


class ComputeKernel(Protocol):
    """Whoever knows how long the calculation takes here."""

    async def kernel_s(self) -> float:
        """In seconds. Raises RequestFailed."""


class OwnSpeed:
    """Runs the calculation when somebody asks, once in a while at most, and never twice at a time."""

    def __init__(self) -> None:
        self._running = asyncio.Lock()
        self._found: tuple[float, float] | None = None  # when, and what

    async def kernel_s(self) -> float:
        """What it took, now or a moment ago. Raises RequestFailed."""
        async with self._running:
            now_s = time.monotonic()
            if self._found is None or now_s - self._found[0] > KEPT_S:
                self._found = now_s, await _measured_s()
            return self._found[1]


async def _measured_s() -> float:
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD},
        )
    except OSError as error:
        raise RequestFailed(f"its speed was not measured: {error}") from error
    try:
        async with asyncio.timeout(limits.SPEED_S_MAX):
            told, _ = await process.communicate()
        return float(told)
    except TimeoutError:
        raise RequestFailed(f"its speed was not measured within {limits.SPEED_S_MAX:g} s") from None
    except ValueError:
        raise RequestFailed(f"its speed was not measured: exit code {process.returncode}") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def main() -> None:
    """Prints the seconds of one product, with all cores at work on products of their own.

    Of each the fastest counts, and they are short: other programs, and a core that waits for another one, take turns
    with some of them only. So it is the machine that is measured, and not how busy it is. Where a container, or another
    limit of the system's, lets a core be used a part of the time alone, that part is seen in every slice of time: in
    the best of them as well, in which nothing else wants the core.
    """
    import numpy as np

    start = threading.Barrier(os.cpu_count() or 1)

    def usual_s(seed: int) -> float:
        first = np.random.default_rng(seed).random((SIZE, SIZE), np.float32)
        second = first @ first
        start.wait(limits.SPEED_S_MAX)
        slices = [measured_slice(first, second) for _ in range(SLICES)]
        return min(fastest_s for fastest_s, _ in slices) / max(part for _, part in slices)

    def measured_slice(first: Any, second: Any) -> tuple[float, float]:
        """The fastest product in it, and the part of the time in which this thread was at work."""
        fastest_s, began_s, began_cpu_s = float("inf"), time.perf_counter(), time.thread_time()
        while (now_s := time.perf_counter()) < began_s + SLICE_S:
            np.matmul(first, first, out=second)
            fastest_s = min(fastest_s, time.perf_counter() - now_s)
        return fastest_s, min(1.0, (time.thread_time() - began_cpu_s) / (now_s - began_s))

    with ThreadPoolExecutor(start.parties) as threads:
        found = list(threads.map(usual_s, range(start.parties)))
    sys.stdout.write(f"{1 / sum(1 / each_s for each_s in found)!r}\n")


if __name__ == "__main__":
    main()
