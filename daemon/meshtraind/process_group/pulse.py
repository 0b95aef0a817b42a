"""Notices that a process with a process group stands still: all other ranks would wait for it until their time-out.

A process is asked several times within a patience, and its connection's own thread answers, whatever the script does.
One that is silent may still compute, in C code that does not let Python run, or wait for its disk: so only that one
stands still which has used no processor time either. A machine that sleeps counts no beats.
"""

from meshtraind.transport.connection import Connection
from meshwire.messages.group import SignOfLife

BEAT_S_MAX = 0.25
BEATS_MIN = 8  # within a patience


class Pulse:
    """Of one process after the other.

    Args:
        patience_s: for so long a process may be silent and still.
    """

    def __init__(self, patience_s: float) -> None:
        self.beat_s = min(BEAT_S_MAX, patience_s / BEATS_MIN)
        self._patience_s = patience_s
        self._missed = 0
        self._heard_s = 0.0  # when the last byte came, as of the last beat
        self._used_s: float | None = None

    def beat(self, end: Connection | None) -> bool:
        """To be called once in `beat_s`. Returns whether the process at this end stands still."""
        if end is None or end.attached is None or end.last_received_s != self._heard_s:
            self._missed, self._used_s = 0, None
            self._heard_s = 0.0 if end is None else end.last_received_s
        else:
            used_s = busy_s(end.attached.pid)
            moves = used_s is None or (self._used_s is not None and used_s > self._used_s)
            self._missed, self._used_s = 0 if moves else self._missed + 1, used_s
        if end is not None and end.writable:
            end.notify(SignOfLife())
        return self._missed * self.beat_s >= self._patience_s


def busy_s(pid: int) -> float | None:
    """How much processor time a process has used; None where it waits for its disk, or that cannot be said."""
    import psutil  # once a process group runs, and not for each daemon that waits

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_DISK_SLEEP:
            return None
        times = process.cpu_times()
    except psutil.Error:
        return None  # it has ended, which is noticed elsewhere
    return times.user + times.system
