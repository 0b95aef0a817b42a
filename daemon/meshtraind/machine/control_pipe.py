"""How a learner hears "end" from its daemon, and that the daemon is gone, where no signal says so: its standard input.

The daemon holds the other end. A byte asks the process to end, as SIGTERM would, once its main thread is back from a
call that waits; the pipe's end, which a kill -9 of the daemon brings too, ends it at once, as Linux's PR_SET_PDEATHSIG
would.
"""

import _thread
import os
import signal
import threading
from collections.abc import MutableMapping

CONTROL_VARIABLE = "MESHTRAIN_CONTROL"  # set where standard input is this pipe
ASK_TO_END = b"T"
ENDED_CODE = 128 + 15  # as a shell shows an end by SIGTERM
ORPHANED_CODE = 128 + 9


def hear_daemon(variables: MutableMapping[str, str] = os.environ) -> None:
    """Begins to listen, if there is such a pipe; the script's own standard input is empty, as without one."""
    if variables.pop(CONTROL_VARIABLE, None) is None:
        return
    control = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_hear, args=(control,), name="meshtrain control", daemon=True).start()


def _hear(control: int) -> None:
    while asked := os.read(control, 1):
        if asked == ASK_TO_END:
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # nobody wants to save anything
                os._exit(ENDED_CODE)
            _thread.interrupt_main(signal.SIGTERM)
    os._exit(ORPHANED_CODE)
