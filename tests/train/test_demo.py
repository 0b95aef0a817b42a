"""`meshtrain demo` as a person starts it: what it promises, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(240)


def test_the_demo_keeps_its_promises() -> None:
    """One cell of the matrix: equal replicas, learning, the loss of one process on the same samples, a ring's bytes."""
    matrix = subprocess.run(
        [sys.executable, "-m", "tests.bench.demo_matrix", "--peers", "2", "--codec", "fp16", "--steps", "24", "--json"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert matrix.returncode == 0, matrix.stdout + matrix.stderr
    assert json.loads(matrix.stdout)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """Daemons, learners and folders are gone, and the exit code is a shell's for an interruption."""
    command = [sys.executable, "-m", "meshtrain.cli", "demo", "--peers", "2", "--steps", "60"]
    # A shell may have told its background jobs to ignore ctrl-C; the demo must see it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        demo = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={"TMPDIR": str(tmp_path)})
    finally:
        signal.signal(signal.SIGINT, before)
    with demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if line.startswith("round "):
                break
        started = psutil.Process(demo.pid).children(recursive=True)
        assert len(started) >= 4, "two daemons and two learners"
        demo.send_signal(signal.SIGINT)
        demo.stderr.read()
        assert demo.wait(30) == 130
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    kept = f"meshtrain-{os.getuid()}"  # where sockets were
    assert not [path for path in tmp_path.glob("meshtrain-*") if path.name != kept or list(path.iterdir())]
