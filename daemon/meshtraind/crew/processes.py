"""The processes of a device's learners: started together, ended together (R6).

Each is tied to this process by its standard input (`machine/control_pipe.py`), on all systems: whatever ends this one
ends them. What the first one prints is the device's; what another prints has its place in front.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshtraind.learner.script_error import RECORD_BYTES_MAX, ScriptError
from meshtraind.machine.control_pipe import ASK_TO_END, CONTROL_VARIABLE
from meshtraind.runtime.tasks import TaskSet
from meshwire.jobs.script_log import ERROR_BEGINS, ERROR_ENDS

READ_BYTES = 64 * 1024
FRAMES = (ERROR_BEGINS.encode(), ERROR_ENDS.encode())  # by which the log's readers find an error
FAILED_CODE = 1
FIRST = 0
OUTPUT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class LearnerCommand:
    """What starts a learner.

    Attributes:
        words: before the record's path.
        record: where a learner tells of the exception that ends it; what lies there at the end is the device's.
        rest: behind it.
    """

    words: tuple[str, ...]
    record: Path
    rest: tuple[str, ...]

    def record_of(self, learner: int) -> Path:
        """That of one of them, which becomes the device's if it is the first to fail."""
        return self.record.with_name(f"{self.record.name}.{learner + 1}")

    def line(self, learner: int) -> list[str]:
        """The whole of it."""
        return [*self.words, str(self.record_of(learner)), *self.rest]


class LearnerProcesses:
    """All learners of one device."""

    def __init__(self, command: LearnerCommand) -> None:
        self._command = command
        self._processes: list[asyncio.subprocess.Process] = []
        self._tasks = TaskSet("learners")
        self._outputs: list[asyncio.Task[None]] = []
        self._asked_to_end = False
        self._why: str | None = None  # they were ended here

    async def start(self, variables: Mapping[str, str], inherited: Sequence[int]) -> None:
        """Starts the next one. Raises OSError.

        Args:
            variables: of its own, beside those of this process.
            inherited: descriptors.
        """
        learner = len(self._processes)
        self._command.record_of(learner).unlink(missing_ok=True)  # of one that was killed with this process
        process = await asyncio.create_subprocess_exec(
            *self._command.line(learner),
            env={**os.environ, **variables, CONTROL_VARIABLE: "stdin"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if learner else None,
            stderr=asyncio.subprocess.STDOUT if learner else None,
            pass_fds=inherited,
        )
        self._processes.append(process)
        if process.stdout is not None:
            passing = pass_on(learner, process.stdout)
            self._outputs.append(self._tasks.spawn(passing, f"output of learner {learner + 1}"))

    def asked_to_end(self) -> None:
        """This device's part is to end: the learners have a while for their last words, whoever ends first."""
        self._asked_to_end = True

    def ask_to_end(self) -> None:
        """The same where no signal has reached them."""
        self.asked_to_end()
        for process in self._processes:
            if process.stdin is not None and process.returncode is None:
                process.stdin.write(ASK_TO_END)

    def fail(self, why: str) -> None:
        """Ends all, for they cannot go on together."""
        if self._why is None:
            self._why = why
            self._end()

    async def wait(self, on_end: Callable[[int], None]) -> int:
        """Waits for the end of all, without a deadline of its own: whoever started this process has one. One that
        ends otherwise than well ends the others.

        Args:
            on_end: is told of each that ends well, by itself.

        Returns:
            The exit code of the first that did, negative where it was killed by that signal; 0: all ended well.
        """
        waiting = {
            self._tasks.spawn(process.wait(), f"learner {learner + 1}"): learner
            for learner, process in enumerate(self._processes)
        }
        failed: tuple[int, int] | None = None
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for learner, code in sorted((waiting.pop(task), task.result()) for task in done):
                if not code:
                    if not self._asked_to_end:
                        on_end(learner)
                elif failed is None:
                    failed = learner, code
                    if not self._asked_to_end:
                        self._end()
        if self._outputs:  # what a learner has left behind may hold its output open
            await asyncio.wait(self._outputs, timeout=OUTPUT_TIMEOUT_S)
        await self._tasks.close()
        if self._why is not None:
            self._tell(ScriptError("NotAlikeError", self._why, "", "", hopeless=True))
            sys.stderr.write(f"{ERROR_BEGINS}\n{self._why}\n{ERROR_ENDS}\n")
            failed = FIRST, FAILED_CODE
        elif failed is not None:
            self._tell_of(*failed)
        for learner in range(len(self._processes)):
            self._command.record_of(learner).unlink(missing_ok=True)
        return 0 if failed is None else failed[1]

    def _end(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    def _tell_of(self, learner: int, code: int) -> None:
        """What a learner has ended by is what the device has."""
        whose = f"learner {learner + 1} of this device"
        if code < 0:
            sys.stderr.write(f"meshtrain: {whose} was killed by signal {-code}, and the others are ended with it\n")
            return
        try:
            with self._command.record_of(learner).open("rb") as file:
                error = ScriptError.unpack(file.read(RECORD_BYTES_MAX))
        except FileNotFoundError:  # it has told of none
            return
        if error is not None:
            self._tell(replace(error, what=f"{whose}: {error.what}"))

    def _tell(self, error: ScriptError) -> None:
        try:
            self._command.record.write_bytes(error.pack())
        except OSError as problem:  # the log has it, if it has room
            sys.stderr.write(f"the daemon is not told of this error: {problem}\n")


async def pass_on(learner: int, output: asyncio.StreamReader) -> None:
    """Prints what a learner prints, each line behind its place."""
    place, left = f"[learner {learner + 1}] ".encode(), b""
    while data := await output.read(READ_BYTES):
        *lines, left = (left + data).split(b"\n")
        if len(left) > READ_BYTES:  # a bar that is drawn again and again, in one line
            lines, left = [*lines, left], b""
        _print(place, lines)
    if left:
        _print(place, [left])


def _print(place: bytes, lines: Sequence[bytes]) -> None:
    with contextlib.suppress(OSError):  # as with what a script prints itself, a full disk loses it and nothing else
        for line in lines:
            os.write(sys.stdout.fileno(), (b"" if line in FRAMES else place) + line + b"\n")
