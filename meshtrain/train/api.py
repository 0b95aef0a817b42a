"""Which world this process trains in: a job's, or its own."""

import atexit
import os
import signal
import sys
import threading
import traceback
from types import FrameType

from meshtrain.errors import JobStopped
from meshtrain.train.alone import Alone
from meshtrain.train.environment import Environment
from meshtrain.train.measure import Measuring
from meshtrain.train.session import Session

_world: Alone | Session | None = None


def world() -> Alone | Session:
    """The world of this process, entered at the first call. Raises what `Session.attach` raises."""
    global _world
    if _world is None:
        environment = Environment.take()
        _world = (Measuring.take() or Alone()) if environment is None else _enter(environment)
    return _world


def _enter(environment: Environment) -> Session:
    session = Session.attach(environment)
    atexit.register(_at_exit, session)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stopped)
    return session


def _at_exit(session: Session) -> None:
    """A script that forgot mt.finish() has finished; one that raised has not: its step is void (V2)."""
    if getattr(sys, "last_value", None) is not None:
        return
    try:
        session.finish()
    except Exception:
        # Python would print it and keep the script's exit code, which tells the daemon of a success.
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _stopped(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Raised in the script, so that its `finally` blocks can save what they want before the daemon's patience ends."""
    raise JobStopped("the daemon ends this script: the job was cancelled, or has failed on another peer")
