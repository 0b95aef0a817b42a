"""A child process that is told what to do, and answers, in lines of JSON. Both sides of the comparison are such."""

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Self

from meshtraind.bench.settings import WORKER_TIMEOUT_S, BenchError

LINE_BYTES_MAX = 64 * 1024
ERROR_CHARS = 2000  # of what a process that failed wrote last
QUIT_TIMEOUT_S = 10.0

Answer = Mapping[str, Any]


class Worker:
    """One process of the benchmark. Its standard error is kept, and shown when it fails.

    Args:
        environment: variables beside this process's own.
    """

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._argv = argv
        self._environment = {**os.environ, **(environment or {})}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> Self:
        """Raises BenchError when the command cannot be run."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                env=self._environment,
                limit=LINE_BYTES_MAX,
            )
        except OSError as error:
            raise BenchError(f"cannot start {self.name}: {error}") from error
        return self

    async def ask(self, timeout_s: float = WORKER_TIMEOUT_S, **command: object) -> Answer:
        """Sends a command and returns its answer. Raises BenchError, with what the process wrote last."""
        self.tell(**command)
        return await self.answer(timeout_s, str(command["do"]))

    def tell(self, **command: object) -> None:
        """Sends a command; `answer` returns what it says to it."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def answer(self, timeout_s: float, awaited: str) -> Answer:
        """The next answer. Raises BenchError."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchError(
                f"{self.name}: no answer to {awaited!r} within {timeout_s:g} s{self._last_words()}"
            ) from None
        if not line:
            raise BenchError(f"{self.name} ended before it answered {awaited!r}{self._last_words()}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    async def stop(self) -> None:
        """Ends the process: by the end of its input, else by force."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                async with asyncio.timeout(QUIT_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return f"; it wrote:\n{text[-ERROR_CHARS:]}" if text else ""


async def ask_all(workers: Sequence[Worker], timeout_s: float = WORKER_TIMEOUT_S, **command: object) -> list[Answer]:
    """Gives the same command to all at once; the answers by rank."""
    for worker in workers:
        worker.tell(**command)
    return [await worker.answer(timeout_s, str(command["do"])) for worker in workers]
