"""Becomes a learner: run by path, in the learner's new process, before the script replaces it.

A learner that computes without talking to its daemon would outlive it; the kernel ends it instead (Linux). Done here
because code between fork and exec in a daemon with threads could deadlock.
"""

import os
import signal
import sys

NICENESS = 5  # M3: the learner yields to the daemon
PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Arguments: process id of the daemon, then the command."""
    daemon, *command = arguments
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(daemon):  # it died before it could be a reason to
            sys.exit(1)
    os.nice(NICENESS)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
