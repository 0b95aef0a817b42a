"""Runs a script as far as `mt.prepare`, to learn how large its model is (M1), or for a few steps more, to learn how
long they take. Torch is imported by the script alone."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, NamedTuple, Self

from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from meshtrain.machine import OwnedTree, detached
from meshwire.codecs.registry import FP32, CodecSpec
from meshwire.memory_layout.footprint import Measurement
from meshwire.memory_layout.shared_slots import (
    MEASURE_CODEC_VARIABLE,
    MEASURE_SCALE_LR_VARIABLE,
    MEASURE_STEPS_VARIABLE,
    MEASURE_SYNC_VARIABLE,
    MEASURE_TOGETHER_VARIABLE,
    MEASURE_VARIABLE,
    SCRIPT_DATA_VARIABLE,
    WHY_NOT_SUFFIX,
)
from meshwire.planning.step_trace import WARM_UP_STEPS, TracedScript
from meshwire.sync_modes.mode import SyncSettings

MEASURE_TIMEOUT_S = 120.0  # importing torch takes seconds on a cold disk, and a large model as long again to fill
POLL_S = 0.5
TRACED_STEPS = 20  # behind those that warm up; fewer if they take long
TRACED_STEPS_MIN = WARM_UP_STEPS + 1
OUTPUT_TAIL_BYTES = 4096
OUTPUT_TAIL_LINES = 10


class NotMeasured(Exception):
    """The script ended before it came to `mt.prepare`, or took the steps that were to be timed; says how.

    Attributes:
        failed: by an error; else it has ended well, and does not do what is wanted.
    """

    def __init__(self, text: str, *, failed: bool) -> None:
        super().__init__(text)
        self.failed = failed

    def of_steps(self, script: str, module: str | None = None) -> CliError:
        """What a person is told where its steps were to be timed."""
        runs = " ".join(("python", *_program(script, module)))
        prepared = f"mt.prepare in {script}, and {TRACED_STEPS_MIN} steps or more behind it (README, Your own script)"
        return CliError(str(self), f"{runs}, which should run by itself" if self.failed else prepared)


class NothingToChoose(NotMeasured):
    """The script trains in a way of which nothing can be predicted; says which."""

    def __init__(self, text: str) -> None:
        super().__init__(text, failed=False)

    def of_steps(self, script: str, module: str | None = None) -> CliError:
        """As that of `NotMeasured`."""
        typed = " ".join(_program(script, module))
        way_on = f"meshtrain submit {typed}, which takes --sync bsp --codec fp32 then, or what you type"
        return CliError(str(self), way_on)


def measure(
    root: Path,
    script: str,
    args: Sequence[str],
    env: Mapping[str, str],
    data: Path | None,
    sync: SyncSettings,
    codec: CodecSpec,
    stages: Stages,
    python: str = sys.executable,
    module: str | None = None,
    scale_lr: str | None = None,
) -> Measurement:
    """What `script` prepares, run in `root` as a learner of a job with these settings would run it.

    Args:
        module: its name, where it is run as by `python -m`.
        scale_lr: as typed.

    Raises:
        NotMeasured: with the end of its output.
        CliError: when it takes too long.
    """
    asked = {MEASURE_SYNC_VARIABLE: sync.text(), MEASURE_CODEC_VARIABLE: str(codec)}
    if scale_lr is not None:
        asked[MEASURE_SCALE_LR_VARIABLE] = scale_lr
    written = _run(
        root,
        [python, *_program(script, module), *args],
        {**env, **asked},
        data,
        _Awaited(
            script,
            f"running {script} as far as mt.prepare, to see how large its model is",
            "before it called mt.prepare",
            f"{script} has not come to mt.prepare in {MEASURE_TIMEOUT_S:.0f} s",
            "a script that does what takes long after mt.prepare; or submit it without --dry-run",
        ),
        stages,
    )
    return Measurement.model_validate_json(written)


def trace(
    root: Path,
    script: str,
    args: Sequence[str],
    env: Mapping[str, str],
    data: Path | None,
    stages: Stages,
    timeout_s: float = MEASURE_TIMEOUT_S,
    python: str = sys.executable,
    module: str | None = None,
) -> TracedScript:
    """How `script` steps, run in `root` alone for at most TRACED_STEPS steps behind `mt.prepare`.

    Args and raises as `measure`.
    """
    asked = {
        MEASURE_SYNC_VARIABLE: SyncSettings().text(),
        MEASURE_CODEC_VARIABLE: str(FP32),
        MEASURE_STEPS_VARIABLE: str(TRACED_STEPS),
    }
    written = _run(
        root,
        [python, *_program(script, module), *args],
        {**env, **asked},
        data,
        _Awaited(
            script,
            f"running {script} for a few steps, to see how long they take",
            f"before its steps were timed, {TRACED_STEPS_MIN} behind mt.prepare at least",
            f"{script} has not taken {TRACED_STEPS_MIN} steps in {timeout_s:.0f} s",
            "smaller batches, or less work before the first step",
            timeout_s,
        ),
        stages,
    )
    return TracedScript.model_validate_json(written)


def trace_together(
    root: Path,
    script: str,
    args: Sequence[str],
    env: Mapping[str, str],
    data: Path | None,
    copies: int,
    threads: int,
    stages: Stages,
    python: str = sys.executable,
    module: str | None = None,
) -> tuple[list[TracedScript], int]:
    """How so many copies of `script` step beside each other, each with so many threads; and how many bytes of memory
    their processes held together.

    Args and raises as `measure`.
    """
    running = f"running {script}" if copies == 1 else f"running {copies} copies of {script} beside each other"
    awaited = _Awaited(
        script,
        f"{running} for a few steps, to see how many learners pay",
        f"before its steps were timed, {TRACED_STEPS_MIN} behind mt.prepare at least",
        f"{copies} x {script} have not taken {TRACED_STEPS_MIN} steps in {MEASURE_TIMEOUT_S:.0f} s",
        "--learners with a number, or smaller batches",
    )
    with tempfile.TemporaryDirectory(prefix="meshtrain-") as gate:
        asked = {
            "OMP_NUM_THREADS": str(threads),  # as learners of a job have it, unless the script's environment says more
            **env,
            MEASURE_SYNC_VARIABLE: SyncSettings().text(),
            MEASURE_CODEC_VARIABLE: str(FP32),
            MEASURE_STEPS_VARIABLE: str(TRACED_STEPS),
            MEASURE_TOGETHER_VARIABLE: f"{copies}:{gate}",
        }
        argv = [python, *_program(script, module), *args]
        written, held_bytes = _run_copies(root, argv, asked, data, awaited, stages, copies)
    return [TracedScript.model_validate_json(each) for each in written], held_bytes


def _program(script: str, module: str | None) -> tuple[str, ...]:
    """The words behind `python`."""
    return (script,) if module is None else ("-m", module)


class _Awaited(NamedTuple):
    """What a script is run for, in words: while it runs, behind "it ended", and when it takes too long."""

    script: str
    doing: str
    too_early: str
    too_late: str
    hint: str
    timeout_s: float = MEASURE_TIMEOUT_S


def _run(
    root: Path, argv: list[str], env: Mapping[str, str], data: Path | None, awaited: _Awaited, stages: Stages
) -> bytes:
    """What the script's process writes into the file that it is told of. Raises NotMeasured, CliError."""
    return _run_copies(root, argv, env, data, awaited, stages, 1)[0][0]


def _run_copies(
    root: Path,
    argv: list[str],
    env: Mapping[str, str],
    data: Path | None,
    awaited: _Awaited,
    stages: Stages,
    copies: int,
) -> tuple[list[bytes], int]:
    """What each of so many processes of a script writes, and the most memory that they held together, as it was seen.
    The first one that ends without a word ends all. Raises NotMeasured, CliError."""
    held_bytes = 0
    deadline_s = time.monotonic() + awaited.timeout_s
    with ExitStack() as stack:
        running = [stack.enter_context(_Copy(root, argv, env, data)) for _ in range(copies)]
        while not all(copy.is_over() for copy in running):
            stages.show(awaited.doing)
            if any(copy.is_over() and not copy.file.exists() for copy in running):
                break
            held_bytes = max(held_bytes, sum(copy.held_bytes() for copy in running))
            if time.monotonic() > deadline_s:
                raise CliError(awaited.too_late, awaited.hint)
            next(copy for copy in running if not copy.is_over()).wait()
        for copy in running:
            if copy.is_over():
                copy.check(awaited)
        return [copy.file.read_bytes() for copy in running], held_bytes


class _Copy:
    """A script's process, which is to write into a file; what it has started ends with it. A context manager."""

    def __init__(self, root: Path, argv: list[str], env: Mapping[str, str], data: Path | None) -> None:
        self._root, self._argv, self._env, self._data = root, argv, env, data
        self._tree = OwnedTree()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
            self.file = folder / "measured.json"
            self._output = stack.enter_context((folder / "output").open("w+b"))
            variables = {**os.environ, **self._env, **self._tree.environment, MEASURE_VARIABLE: str(self.file)}
            if self._data is not None:
                variables[SCRIPT_DATA_VARIABLE] = str(self._data.resolve())
            self._process = subprocess.Popen(
                self._argv,
                cwd=self._root,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                **detached(),  # so that what it starts ends with it
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            if self._process.poll() is None:
                self._tree.end(self._process)

    def is_over(self) -> bool:
        """It has ended, or is about to: what was written is all that is wanted of it."""
        return self._process.poll() is not None or self.file.exists()

    def wait(self) -> None:
        """For its end, POLL_S at most."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(POLL_S)

    def held_bytes(self) -> int:
        """Of memory, as its process has it now."""
        import psutil

        with suppress(psutil.Error):  # it has just ended
            return psutil.Process(self._process.pid).memory_info().rss
        return 0

    def check(self, awaited: _Awaited) -> None:
        """Raises NotMeasured if it has ended without what was wanted."""
        why = self.file.with_suffix(WHY_NOT_SUFFIX)
        if why.exists():
            raise NothingToChoose(f"{awaited.script} {why.read_text('utf-8')}")
        if not self.file.exists():
            code = self._process.returncode
            how = f"ended with exit code {code}" if code else "ended"
            raise NotMeasured(f"{awaited.script} {how} {awaited.too_early}{_tail(self._output)}", failed=code != 0)


def _tail(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_TAIL_BYTES))
    lines = output.read().decode(errors="replace").rstrip().splitlines()[-OUTPUT_TAIL_LINES:]
    return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
