"""Learners that are forked from a process in which torch is loaded: most of what a test's learner computes is that.

A daemon starts a script that has `LearnerForks.line` before it as it starts any other. By that line its process hands
arguments, environment and descriptors over to a server, whose fork runs the script anew, from the very beginning
(`meshtraind.learner.script_run`), and waits: it ends as the fork does, passes SIGTERM on, and the kernel ends the fork
with it. What is not as in a process of its own: SIGSTOP reaches only the one that waits, the script's other processes
are not in its session, and hashes are seeded alike on all ranks. So tests that kill, stop or time learners start them
cold, and of all others some do.

This file is a module of tests, the server's program, and what a script runs to hand itself over.
"""

import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HANDING_OVER, SERVER = "handing over", "server_path"  # how this file is called, and what it is given, in a script
READY = b"ready\n"
START_TIMEOUT_S = 60.0
FIRST_FREE = 500  # descriptors from here on are in nobody's way
LENGTH = struct.Struct("!I")


class LearnerForks:
    """A server, between entering and leaving the context.

    Args:
        loads: Python text: what is imported before anything is forked.
        environment: of the server.
    """

    def __init__(self, loads: str, environment: dict[str, str]) -> None:
        self._loads = loads
        self._environment = environment

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="learners-")
        self._path = Path(self._folder.name) / "server"
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(self._path), self._loads],
            stdin=subprocess.PIPE,  # its end is this process's
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        with self._process.stdout as said:
            told, _, _ = select.select([said], [], [], START_TIMEOUT_S)
            assert told, f"torch was not loaded within {START_TIMEOUT_S:.0f} s"
            assert said.readline() == READY, "what learners are forked from has ended: see stderr"
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(START_TIMEOUT_S)
        self._folder.cleanup()

    @property
    def line(self) -> str:
        """A statement for a script's first line; others may follow it there. In a fork, where torch is, it does
        nothing."""
        given = {"__name__": HANDING_OVER, SERVER: str(self._path)}
        return f"import sys; 'torch' in sys.modules or exec(open({__file__!r}).read(), {given!r}); "


# In the process that a daemon has started


def hand_over(server: str) -> None:
    """Has a fork of the server run what this process was started for, and ends as that does."""
    inherited = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_inherited(number)]
    _alive, tie = socket.socketpair()  # the fork ends with this end of it, which is never closed
    fork, early = 0, list[int]()

    def pass_on(number: int, _frame: object) -> None:
        if not fork:
            early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(fork, number)

    signal.signal(signal.SIGTERM, pass_on)
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(server)
    told = {
        "command": sys.orig_argv,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "niceness": os.nice(0),
        "descriptors": inherited,
    }
    body = json.dumps(told).encode()
    socket.send_fds(asking, [LENGTH.pack(len(body))], [tie.fileno(), *inherited])
    asking.sendall(body)
    tie.close()
    answers = asking.makefile()
    fork = int(answers.readline())
    for number in early:
        pass_on(number, None)
    code = int(answers.readline())
    if code < 0:
        with contextlib.suppress(OSError):  # nobody catches this one
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # by which they were listed
        return False


# In the server


def serve(path: str, loads: str) -> list[str]:
    """Forks whenever it is asked to, until its standard input ends. Returns in each fork, with the arguments of the
    program that runs scripts."""
    from meshtraind.learner.script_run import provide_process_groups

    provide_process_groups()  # as that program does before the script imports torch
    exec(loads, {"__name__": "loads"})
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    heard, woken = socket.socketpair()
    for end in (heard, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno())
    asking: dict[int, socket.socket] = {}  # by the process that was forked for it
    os.write(1, READY)
    while True:
        ready = select.select([0, listener.fileno(), heard.fileno()], [], [])[0]
        if heard.fileno() in ready:
            heard.recv(4096)
            _tell_of_ends(asking)
        if 0 in ready and not os.read(0, 1):
            sys.exit()
        if listener.fileno() not in ready:
            continue
        one, _ = listener.accept()
        told, descriptors = _received(one)
        fork = os.fork()
        if not fork:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (listener, heard, woken, one, *asking.values()):
                end.close()
            return _become(told, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        asking[fork] = one
        with contextlib.suppress(OSError):  # it has ended meanwhile, and its fork with it
            one.sendall(b"%d\n" % fork)


def _tell_of_ends(asking: dict[int, socket.socket]) -> None:
    while asking:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if not ended:
            return
        with asking.pop(ended) as one, contextlib.suppress(OSError):
            one.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _received(one: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, _, _ = socket.recv_fds(one, LENGTH.size, 100)
    (length,) = LENGTH.unpack(head)
    body = b""
    while len(body) < length:
        body += one.recv(length - len(body))
    return json.loads(body), descriptors


# In a fork


def _become(told: dict[str, Any], descriptors: list[int]) -> list[str]:
    """The process that has asked, to all purposes of the script."""
    os.setsid()
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for number in descriptors]
    for number in descriptors:
        os.close(number)
    tie, *given = moved
    fcntl.fcntl(tie, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(tie, fcntl.F_SETSIG, signal.SIGKILL)  # when the other end is closed
    fcntl.fcntl(tie, fcntl.F_SETFL, fcntl.fcntl(tie, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([tie], [], [], 0.0)[0]:  # it was before
        os.kill(os.getpid(), signal.SIGKILL)
    for number, to in zip(given, told["descriptors"], strict=True):
        os.dup2(number, to)
        os.close(number)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    os.nice(told["niceness"] - os.nice(0))
    command: list[str] = told["command"]
    return command[1 + next(at for at, word in enumerate(command) if word.endswith("script_run.py")) :]


def run(arguments: list[str]) -> None:
    """The script, and at its end what Python does at that of its main program, but for this file's frames."""
    from meshtraind.learner import script_run

    try:
        script_run.main(arguments)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace.tb_next if trace is not None else None)
        sys.exit(1)


if __name__ == HANDING_OVER:
    hand_over(globals()[SERVER])
elif __name__ == "__main__":
    del sys.path[0]  # a script's modules are not looked for here
    run(serve(*sys.argv[1:]))
