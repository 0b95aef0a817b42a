"""Runs several learners of one device: the main program of the process that its daemon takes for the learner (R6).

Run by path, by the daemon's own interpreter, with the words that would start one learner behind their number.
"""

import asyncio
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import MutableMapping
from pathlib import Path

import psutil

from meshtraind.crew.joint_learner import DaemonEntrance, JointLearner
from meshtraind.crew.processes import LearnerCommand, LearnerProcesses
from meshtraind.crew.slots import CrewMemory
from meshtraind.machine.control_pipe import CONTROL_VARIABLE, ORPHANED_CODE
from meshtraind.machine.event_loop import loop_factory, on_stop_signals, serve_locally
from meshtraind.machine.memory_file import memory_found, private_folder
from meshtraind.machine.portable import portable
from meshtraind.machine.process_tree import end_as
from meshwire.memory_layout.kept_state import KEPT_FD_VARIABLE
from meshwire.memory_layout.shared_slots import ENDPOINT_VARIABLE, JOB_VARIABLE, MEMORY_FD_VARIABLE, TOKEN_VARIABLE

TOKEN_BYTES = 32
SOCKET_SUFFIX = "-learners.sock"
FIRST = 0


async def run(learners: int, command: LearnerCommand, variables: MutableMapping[str, str]) -> int:
    """Starts the learners and waits for their end. Returns the exit code, as `LearnerProcesses.wait` does.

    Args:
        variables: of this process, of which the learners get what is meant for one.
    """
    entrance = DaemonEntrance(variables.pop(ENDPOINT_VARIABLE), variables.pop(TOKEN_VARIABLE), variables[JOB_VARIABLE])
    memory = CrewMemory(learners, variables.pop(MEMORY_FD_VARIABLE))
    kept = variables.pop(KEPT_FD_VARIABLE, None)
    loop = asyncio.get_running_loop()
    processes = LearnerProcesses(command)
    if variables.pop(CONTROL_VARIABLE, None) is not None:
        threading.Thread(target=_hear, args=(loop, processes), name="meshtrain control", daemon=True).start()
    else:
        on_stop_signals(loop, processes.asked_to_end)  # a signal to this process goes to all that it has started
    tokens = [secrets.token_hex(TOKEN_BYTES) for _ in range(learners)]
    path = _socket_path()
    with tempfile.TemporaryDirectory(prefix="meshtrain-") as folder:
        joint = JointLearner(entrance, memory, tokens, Path(folder), processes.fail)
        server, address = await serve_locally(loop, joint.accept, path)
        try:
            for learner, token in enumerate(tokens):
                own = {ENDPOINT_VARIABLE: address, TOKEN_VARIABLE: token, MEMORY_FD_VARIABLE: memory.told(learner)}
                inherited = memory.inherited(learner)
                if learner == FIRST and kept is not None:
                    own[KEPT_FD_VARIABLE] = kept
                    inherited += (memory_found(kept),) if kept.isdecimal() else ()
                await processes.start(own, inherited)
            return await processes.wait(joint.ended)
        finally:
            server.close()
            await joint.close()
            memory.close()
            if path is not None:
                path.unlink(missing_ok=True)


def _socket_path() -> Path | None:
    """Where the learners find this process; None: by loopback TCP. What killed ones have left is removed."""
    if portable():
        return None
    folder = private_folder()
    for left in folder.glob(f"*{SOCKET_SUFFIX}"):
        owner = left.name.removesuffix(SOCKET_SUFFIX)
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            left.unlink(missing_ok=True)
    return folder / f"{os.getpid()}{SOCKET_SUFFIX}"


def _hear(loop: asyncio.AbstractEventLoop, processes: LearnerProcesses) -> None:
    """Where no signal says so, standard input does: that the learners are to end, or that the daemon is gone."""
    while os.read(0, 1):
        loop.call_soon_threadsafe(processes.ask_to_end)
    os._exit(ORPHANED_CODE)


def main(arguments: list[str], variables: MutableMapping[str, str]) -> None:
    """Arguments: how many learners; then the words that start one (`learner/process.py`)."""
    learners, python, unbuffered, script_run, record, *rest = arguments
    command = LearnerCommand((python, unbuffered, script_run), Path(record), tuple(rest))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code = runner.run(run(int(learners), command, variables))
    end_as(code)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
