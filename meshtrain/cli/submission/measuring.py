"""Runs a script as far as `mt.prepare`, to learn how large its model is (M1), or for a few steps more, to learn how
long they take. Torch is imported by the script alone."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

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
    with tempfile.TemporaryDirectory(prefix="meshtrain-") as folder:
        file = Path(folder) / "measured.json"
        tree = OwnedTree()
        variables = {**os.environ, **env, **tree.environment, MEASURE_VARIABLE: str(file)}
        if data is not None:
            variables[SCRIPT_DATA_VARIABLE] = str(data.resolve())
        with (Path(folder) / "output").open("w+b") as output:
            process = subprocess.Popen(
                argv,
                cwd=root,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                **detached(),  # so that what it starts ends with it
            )
            try:
                code = _wait(process, file, awaited, stages)
            finally:
                _end(process, tree)
            why = file.with_suffix(WHY_NOT_SUFFIX)
            if why.exists():
                raise NothingToChoose(f"{awaited.script} {why.read_text('utf-8')}")
            if not file.exists():
                how = f"ended with exit code {code}" if code else "ended"
                raise NotMeasured(f"{awaited.script} {how} {awaited.too_early}{_tail(output)}", failed=code != 0)
        return file.read_bytes()


def _wait(process: "subprocess.Popen[bytes]", file: Path, awaited: _Awaited, stages: Stages) -> int:
    """Until it has ended, or is about to: what was written is all that is wanted of it."""
    deadline_s = time.monotonic() + awaited.timeout_s
    while True:
        stages.show(awaited.doing)
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if file.exists():
                return 0
            if time.monotonic() > deadline_s:
                raise CliError(awaited.too_late, awaited.hint) from None


def _end(process: "subprocess.Popen[bytes]", tree: OwnedTree) -> None:
    if process.poll() is None:
        tree.end(process)


def _tail(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_TAIL_BYTES))
    lines = output.read().decode(errors="replace").rstrip().splitlines()[-OUTPUT_TAIL_LINES:]
    return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
