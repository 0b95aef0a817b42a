"""A daemon's own disk, clock and time since boot: filled, stepped and set for one process, and for nobody else."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from tests.bench.soakhost import Host, HostError, can_mount, clock_library

HOUR_S = 3600.0
TELLS = "import sys, time\nfor _ in sys.stdin: print(time.time() - time.clock_gettime(7), flush=True)"  # 7: boot time


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_wall_clock_of_one_process_is_stepped_while_it_runs(tmp_path: Path) -> None:
    folder = tmp_path / "anna"
    folder.mkdir()
    with clock_library() as library:
        host = Host(folder, clock=library, boots=None, disk_bytes=0)
        command = [sys.executable, "-c", TELLS]
        environment = {**os.environ, **host.environment}
        with subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            told = []
            for step_s in (0.0, HOUR_S, -24 * HOUR_S):
                host.step(step_s)
                process.stdin.write("\n")
                process.stdin.flush()
                told.append(float(process.stdout.readline()))
            process.stdin.close()
        host.close()
    here_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    assert told == pytest.approx([here_s, here_s + HOUR_S, here_s - 24 * HOUR_S], abs=5.0)


@pytest.mark.skipif(not can_mount(), reason="needs root")
def test_a_disk_is_filled_and_emptied_and_gone(tmp_path: Path) -> None:
    folder = tmp_path / "anna"
    folder.mkdir()
    host = Host(folder, clock=None, boots=Random(1), disk_bytes=1 << 20)
    try:
        host.fill()
        with pytest.raises(OSError, match="No space left"):
            (folder / "more").write_bytes(bytes(4096))
        host.empty()
        (folder / "more").write_bytes(bytes(4096))
        assert {word.partition("=")[0] for word in host.prefix} == {"unshare", "--time", "--monotonic", "--boottime"}
    finally:
        host.close()
    assert not list(folder.iterdir())


def test_what_a_machine_cannot_do_is_said(tmp_path: Path) -> None:
    host = Host(tmp_path, clock=None, boots=None, disk_bytes=0)
    with pytest.raises(HostError, match="no disk"):
        host.fill()
    with pytest.raises(HostError, match="clock"):
        host.step(1.0)
    assert (host.prefix, host.environment) == ((), {})
    host.close()
