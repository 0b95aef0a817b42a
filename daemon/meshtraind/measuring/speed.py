"""How fast this device computes: a short calculation in a process of its own, on all its cores."""

import asyncio
import contextlib
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from meshtraind.transport.connection import RequestFailed
from meshwire import limits

MODULE = "meshtraind.measuring.speed"
SIZE = 256  # of two square matrices that are multiplied: 33 * 10^6 operations, shorter than a turn of another program
RUN_S = 0.4  # beside warming up: several of the kernel's turns, where a container may use a part of its cores
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
    with some of them only. So it is the machine that is measured, and not how busy it is.
    """
    import numpy as np
    import psutil

    start = threading.Barrier(os.cpu_count() or 1)

    def fastest_s(seed: int) -> float:
        first = np.random.default_rng(seed).random((SIZE, SIZE), np.float32)
        second = first @ first
        start.wait(limits.SPEED_S_MAX)
        found_s, until_s = float("inf"), time.perf_counter() + RUN_S
        while (began_s := time.perf_counter()) < until_s:
            np.matmul(first, first, out=second)
            found_s = min(found_s, time.perf_counter() - began_s)
        return found_s

    with ThreadPoolExecutor(start.parties) as threads:
        idle_s, used_s = psutil.cpu_times().idle, time.process_time()
        found = list(threads.map(fastest_s, range(start.parties)))
        idle_s, used_s = psutil.cpu_times().idle - idle_s, time.process_time() - used_s
    sys.stdout.write(f"{allowed_s(1 / sum(1 / each_s for each_s in found), used_s, idle_s)!r}\n")


def allowed_s(product_s: float, used_s: float, idle_s: float) -> float:
    """What a product takes with that part of the cores that this user may have. Where cores stood idle while all had
    products to do, a container or another limit of the system's keeps the others from it.

    Args:
        product_s: with all cores.
        used_s, idle_s: processor time meanwhile, of this process and of nobody.
    """
    return product_s * (used_s + max(0.0, idle_s)) / used_s


if __name__ == "__main__":
    main()
