"""Runs a script as far as `mt.prepare`, to learn how large its model is (M1). Torch is imported by the script alone."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from meshwire.codecs.registry import CodecSpec
from meshwire.memory_layout.footprint import Measurement
from meshwire.memory_layout.shared_slots import (
    MEASURE_CODEC_VARIABLE,
    MEASURE_SYNC_VARIABLE,
    MEASURE_VARIABLE,
    SCRIPT_DATA_VARIABLE,
)
from meshwire.sync_modes.mode import SyncSettings

MEASURE_TIMEOUT_S = 120.0  # importing torch takes seconds on a cold disk, and a large model as long again to fill
POLL_S = 0.5
OUTPUT_TAIL_BYTES = 4096
OUTPUT_TAIL_LINES = 10


class NotMeasured(Exception):
    """The script ended before it came to `mt.prepare`; says how."""


def measure(
    root: Path,
    script: str,
    args: Sequence[str],
    env: Mapping[str, str],
    data: Path | None,
    sync: SyncSettings,
    codec: CodecSpec,
    stages: Stages,
) -> Measurement:
    """What `script` prepares, run in `root` as a learner of a job with this `sync` and `codec` would run it.

    Raises:
        NotMeasured: with the end of its output.
        CliError: when it takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="meshtrain-") as folder:
        file = Path(folder) / "size.json"
        asked = {
            MEASURE_VARIABLE: str(file),
            MEASURE_SYNC_VARIABLE: sync.text(),
            MEASURE_CODEC_VARIABLE: str(codec),
        }
        variables = {**os.environ, **env, **asked}
        if data is not None:
            variables[SCRIPT_DATA_VARIABLE] = str(data.resolve())
        with (Path(folder) / "output").open("w+b") as output:
            process = subprocess.Popen(
                [sys.executable, script, *args],
                cwd=root,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that what it starts ends with it
            )
            try:
                code = _wait(process, script, stages)
            finally:
                _end(process)
            if not file.exists():
                how = f"ended with exit code {code}" if code else "ended"
                raise NotMeasured(f"{script} {how} before it called mt.prepare{_tail(output)}")
        return Measurement.model_validate_json(file.read_bytes())


def _wait(process: "subprocess.Popen[bytes]", script: str, stages: Stages) -> int:
    deadline_s = time.monotonic() + MEASURE_TIMEOUT_S
    while True:
        stages.show(f"running {script} as far as mt.prepare, to see how large its model is")
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline_s:
                raise CliError(
                    f"{script} has not come to mt.prepare in {MEASURE_TIMEOUT_S:.0f} s",
                    "a script that does what takes long after mt.prepare; or submit it without --dry-run",
                ) from None


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    if sys.platform == "win32":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_TAIL_BYTES))
    lines = output.read().decode(errors="replace").rstrip().splitlines()[-OUTPUT_TAIL_LINES:]
    return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
