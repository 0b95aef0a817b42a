"""Virtual environments for jobs that bring a list of packages: one for each list, made once and used again."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import site
import sys
import sysconfig
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path

from meshtraind.machine.process_tree import ProcessTree
from meshtraind.transport.connection import RequestFailed
from meshwire import limits

log = logging.getLogger(__name__)

FOLDER = "environments"  # below the data folder
COMPLETE = "complete"  # a file in an environment that can be used; its time is that of its last use
PARENT = "meshtrain_parent.pth"
INSTALL_S_MAX = 1800.0
TOLD_S = 2.0  # between two words on an installation that goes on
UNUSED_S_MAX = 30 * 86_400.0
KILL_TIMEOUT_S = 10.0
TAIL_BYTES = 16 * limits.KIB
# In what pip says: behind the first line stand the requirements that are against each other, up to one of the next.
CONFLICT, CONFLICT_END = "The conflict is caused by:", ("To fix this", "Additionally")
PIP_HELP = "for help visit"
REASON_CHARS = 600  # of what pip says is wrong

Told = Callable[[str], None]
"""Hears what is being done, again and again; raises to stop it."""


def python_of(data_dir: Path, requirements: Sequence[str]) -> Path:
    """The interpreter for a script that asks for these packages, if it has been made; without any, the daemon's own."""
    if not requirements:
        return Path(sys.executable)
    return _python_in(_folder_of(data_dir, requirements))


class Environments:
    """Makes the environments of one daemon, one at a time, and deletes those that are used no more."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._making = asyncio.Lock()

    async def make(self, requirements: Sequence[str], told: Told) -> Path:
        """Sees to it that there is an environment with these packages, and returns its interpreter.

        Args:
            requirements: as of PEP 508, one a line.
            told: hears of an installation that takes its time.

        Raises:
            RequestFailed: they cannot be installed here; says why.
        """
        python = python_of(self._data_dir, requirements)
        if not requirements:
            return python
        folder = _folder_of(self._data_dir, requirements)
        text = f"installing {len(requirements)} {'package' if len(requirements) == 1 else 'packages'} for the job"
        await _told_until(self._making.acquire, lambda: told(text))
        try:  # no other is being made now, not even this very one
            if not await asyncio.to_thread(_is_complete, folder):
                await self._install(folder, requirements, lambda: told(text))
        except OSError as error:
            raise RequestFailed(f"an environment for the script cannot be made: {error}") from error
        finally:
            self._making.release()
        return python

    async def _install(self, folder: Path, requirements: Sequence[str], told: Callable[[], None]) -> None:
        log.info("an environment for %s is made in %s", ", ".join(requirements), folder)
        began_s = time.monotonic()
        told()
        await asyncio.to_thread(_remove, folder)
        await asyncio.to_thread(folder.parent.mkdir, mode=0o700, parents=True, exist_ok=True)
        try:
            parents = await asyncio.to_thread(_parents)
            # A pip that the environment sees anyway need not be copied into it, which takes most of the time.
            without = [] if PathFinder.find_spec("pip", parents) is None else ["--without-pip"]
            made = [sys.executable, "-m", "venv", *without, str(folder)]
            if wrong := await _run(made, folder.with_suffix(".log"), began_s, told):
                raise RequestFailed(
                    f"python -m venv has failed ({wrong}); on Debian and Ubuntu: apt install python3-venv"
                )
            wanted = await asyncio.to_thread(_prepare, folder, parents, requirements)
            installs = [str(_python_in(folder)), "-m", "pip", "install", "--no-input", *wanted]
            if wrong := await _run(installs, folder.with_suffix(".log"), began_s, told):
                raise RequestFailed(
                    f"the script's packages cannot be installed: {wrong}. Next: correct the list; where no index "
                    "can be reached, PIP_INDEX_URL or PIP_FIND_LINKS for meshtraind"
                )
            await asyncio.to_thread((folder / COMPLETE).touch)
        except BaseException:
            await asyncio.to_thread(_remove, folder)
            raise
        log.info("made in %.0f s", time.monotonic() - began_s)

    async def trim(self) -> None:
        """Deletes what nobody has used for a month, and what interrupted installations have left."""
        async with self._making:
            await asyncio.to_thread(_trim, self._data_dir / FOLDER)


def _folder_of(data_dir: Path, requirements: Sequence[str]) -> Path:
    """Named by all that decides what lies in it."""
    decides = [sorted(set(requirements)), platform.python_version(), sys.prefix, _torch()]
    return data_dir / FOLDER / hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]


def _python_in(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _torch() -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version("torch")
    return None


def _is_complete(folder: Path) -> bool:
    """Whether it can be used; notes that it is."""
    try:
        os.utime(folder / COMPLETE)
    except FileNotFoundError:
        return False
    return True


def _parents() -> list[str]:
    """Where this daemon's Python has its packages."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else ())]


def _prepare(folder: Path, parents: Sequence[str], requirements: Sequence[str]) -> list[str]:
    """Lets the environment see what this daemon's Python has, and returns what pip is to be given: files, so that no
    requirement can be an option."""
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    # addsitedir, and not the path alone: it reads the .pth files that lie there, of packages installed for editing.
    lines = [f"import site; site.addsitedir({parent!r})\n" for parent in parents]
    (own / PARENT).write_text("".join(lines), encoding="utf-8")
    wanted, held = folder / "requirements.txt", folder / "constraints.txt"
    wanted.write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
    torch = _torch()
    held.write_text("" if torch is None else f"torch=={torch}\n", encoding="utf-8")
    return ["-r", str(wanted), "-c", str(held)]


async def _told_until(wait: Callable[[], Awaitable[object]], told: Callable[[], None]) -> None:
    """Waits for what has a deadline elsewhere, and says again and again that it goes on. What `told` raises ends it."""
    while True:
        try:
            async with asyncio.timeout(TOLD_S):
                await wait()
            return
        except TimeoutError:
            told()


async def _run(argv: Sequence[str], output: Path, began_s: float, told: Callable[[], None]) -> str | None:
    """Runs a command to its end. Returns what was wrong; None: nothing. Raises RequestFailed when it takes too long,
    and what `told` raises."""
    tree = ProcessTree()
    environment = {
        **os.environ,
        **tree.environment,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file, env=environment, **tree.options
        )
        try:
            async with asyncio.timeout(max(0.0, began_s + INSTALL_S_MAX - time.monotonic())):
                await _told_until(process.wait, told)
        except TimeoutError:
            raise RequestFailed(
                f"the script's packages were not installed within {INSTALL_S_MAX / 60:.0f} minutes"
            ) from None
        finally:
            if process.returncode is None:
                await tree.end(process.pid)
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await process.wait()
    return None if process.returncode == 0 else await asyncio.to_thread(_wrong, output, process.returncode)


def _wrong(output: Path, code: int | None) -> str:
    """What pip calls an error, in its own words; else its last line."""
    with output.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ") and PIP_HELP not in line]
    if CONFLICT in lines:
        first = lines.index(CONFLICT) + 1
        errors += takewhile(lambda line: not line.startswith(CONFLICT_END), lines[first:])
    said = "; ".join(errors or lines[-1:]) or f"exit code {code}"
    return said.replace(f"{output.with_suffix('')}{os.sep}", "")[:REASON_CHARS]


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.with_suffix(".log").unlink(missing_ok=True)


def _trim(root: Path) -> None:
    if not root.is_dir():
        return
    for folder in [each for each in root.iterdir() if each.is_dir()]:
        done = folder / COMPLETE
        used_s = done.stat().st_mtime if done.exists() else 0.0
        if time.time() - used_s > UNUSED_S_MAX:
            _remove(folder)
    for output in root.glob("*.log"):
        if not output.with_suffix("").is_dir():
            output.unlink(missing_ok=True)
