"""Learners that are forked for a test do as those that are not: `tests/daemon/learnerforks.py`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshtraind.learner.process import SCRIPT_RUN
from tests.daemon.learnerforks import LearnerForks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors that kill are Linux's")

NO_TORCH = "import sys, types; sys.modules['torch'] = types.ModuleType('torch')"  # it takes seconds to load
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def forks() -> Iterator[LearnerForks]:
    with LearnerForks(NO_TORCH, {"PATH": os.environ["PATH"], "ONLY": "the server's"}) as made:
        yield made


def started(folder: Path, script: str, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """As a daemon starts a script."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-u", str(SCRIPT_RUN), str(folder / "record"), "alone", "", "train.py", *arguments]
    environment = {"PATH": os.environ["PATH"], "ITS": "own"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    with process:
        out, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, errors


TELLS = """
import os, sys
print(sys.argv, os.getcwd(), __name__, __file__, sys.path[0], "ONLY" in os.environ, os.environ["ITS"], os.nice(0))
print(os.pread(int(sys.argv[1]), 5, 0), sys.stdin.read(), flush=True)
import atexit, threading, time
atexit.register(print, "the last thing")
threading.Thread(target=lambda: (time.sleep(0.05), print("a thread is waited for"))).start()
{ends}
"""


@pytest.mark.parametrize(
    "ends", ["sys.exit()", "sys.exit(3)", "sys.exit('enough')", "raise ValueError('mine')", "os.kill(os.getpid(), 9)"]
)
def test_a_fork_says_and_ends_what_it_would_alone(tmp_path: Path, forks: LearnerForks, ends: str) -> None:
    """Code, signal, output, traceback and what the daemon reads of the error are the same, to the letter."""
    shared = os.memfd_create("shared")
    os.write(shared, b"seen?")
    told = []
    for line in ("", forks.line):
        script = line + TELLS.format(ends=ends)
        how = ended(started(tmp_path, script, str(shared), pass_fds=[shared], stdin=subprocess.DEVNULL))
        record = tmp_path / "record"
        told.append((*how, record.read_bytes() if record.exists() else None))
        record.unlink(missing_ok=True)
    os.close(shared)
    assert "b'seen?'" in told[0][1]
    assert told[0] == told[1]


WAITS = """
import os, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True) or os._exit(7))
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_it_is_asked_to_end_as_the_process_that_waits_for_it(tmp_path: Path, forks: LearnerForks) -> None:
    waiting = started(tmp_path, forks.line + WAITS)
    assert waiting.stdout is not None
    assert int(waiting.stdout.readline()) != waiting.pid
    waiting.terminate()
    assert ended(waiting) == (7, "asked to end\n", "")


def test_it_ends_with_the_process_that_waits_for_it(tmp_path: Path, forks: LearnerForks) -> None:
    """By the kernel, whatever it does, as a learner with its daemon."""
    waiting = started(tmp_path, forks.line + WAITS)
    assert waiting.stdout is not None
    fork = psutil.Process(int(waiting.stdout.readline()))
    waiting.send_signal(signal.SIGKILL)
    assert ended(waiting)[0] == -signal.SIGKILL
    assert not psutil.wait_procs([fork], TIMEOUT_S)[1]
