"""Which modules a script would not find here. Asked of an interpreter of its own: what was installed since this daemon
began, by whatever means, is found by a new process alone."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence

from meshtraind.transport.connection import RequestFailed

TIMEOUT_S = 15.0

# Looking for a top-level module imports nothing. -P: no module of whatever folder the daemon was started in.
LOOK = """
import sys
from importlib.util import find_spec
def lacks(name):
    try:
        return find_spec(name) is None
    except (ImportError, ValueError):
        return True
print(*filter(lacks, sys.argv[1:]))
"""


async def lacking_modules(modules: Sequence[str]) -> tuple[str, ...]:
    """Those of some top-level modules that a script here cannot import. Raises RequestFailed."""
    if not modules:
        return ()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", LOOK, *modules),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise RequestFailed(f"cannot look for packages: {error}") from error
    try:
        async with asyncio.timeout(TIMEOUT_S):
            told, _ = await process.communicate()
    except TimeoutError:
        raise RequestFailed(f"has not found out within {TIMEOUT_S:g} s which packages there are") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise RequestFailed(f"cannot look for packages: {sys.executable} ended with {process.returncode}")
    asked = set(modules)
    return tuple(name for name in told.decode(errors="replace").split() if name in asked)
