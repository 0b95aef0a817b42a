"""How fast this device computes: a short calculation in a process of its own, on all its cores."""

import asyncio
import contextlib
import os
import sys
import time
from typing import Protocol

from meshtraind.transport.connection import RequestFailed
from meshwire import limits

MODULE = "meshtraind.measuring.speed"
SIZE = 512  # of two square matrices that are multiplied: 0.27 * 10^9 operations
RUN_S = 0.15  # beside warming up; the fastest run counts
KEPT_S = 600.0  # then it may have been plugged in, or grown hot
THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"  # the daemon has it for itself


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
    environment = {name: value for name, value in os.environ.items() if name != THREADS_VARIABLE}
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
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
    """Prints the seconds of one product."""
    import numpy as np

    first = np.random.default_rng(1).random((SIZE, SIZE), np.float32)
    second = first @ first  # starts the threads
    fastest_s, until_s = float("inf"), time.perf_counter() + RUN_S
    while (began_s := time.perf_counter()) < until_s:
        np.matmul(first, first, out=second)
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
    sys.stdout.write(f"{fastest_s!r}\n")


if __name__ == "__main__":
    main()
