"""Becomes a learner: run by path, in the learner's new process, before the script replaces it.

A learner that computes without talking to its daemon would outlive it; the kernel ends it instead (Linux). Done here
because code between fork and exec in a daemon with threads could deadlock. Windows has no exec, and a control pipe in
place of this (`machine/control_pipe.py`).
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Arguments: process id of the daemon, by how much the learner yields to it (M3), then the command."""
    daemon, niceness, *command = arguments
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(daemon):  # it died before it could be a reason to
            sys.exit(1)
    if sys.platform != "win32":
        os.nice(int(niceness))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
