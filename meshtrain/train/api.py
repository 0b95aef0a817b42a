"""Which world this process trains in: a job's, or its own."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

import torch
from torch.optim.lr_scheduler import LRScheduler

from meshtrain.errors import JobStopped, UsageError
from meshtrain.train.dry_run import MeasuringProcess
from meshtrain.train.link.environment import Environment, environment_of_job
from meshtrain.train.session import LearnerSession
from meshtrain.train.single import SingleProcess
from meshtrain.train.torchrun.distributed_session import DistributedSession
from meshtrain.train.torchrun.launched import launched
from meshtrain.train.traced_run import TracedProcess

World = SingleProcess | LearnerSession | DistributedSession

_world: World | None = None


def world() -> World:
    """The world of this process, entered at the first call. Raises what `LearnerSession.attach` and `launched` do."""
    global _world
    if _world is None:
        environment = environment_of_job("")
        _world = _without_job() if environment is None else _enter(environment)
    return _world


def _without_job() -> SingleProcess | DistributedSession:
    if (looked_at := TracedProcess.take() or MeasuringProcess.take()) is not None:
        return looked_at
    told = launched()
    if told is None:
        return SingleProcess()
    session = DistributedSession(told)
    atexit.register(_leave, session)
    return session


def check_given(model: object, optimizer: object, loader: object, others: Sequence[object]) -> None:
    """Raises UsageError for what `mt.prepare` does not take, with or without a job."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"mt.prepare takes a torch.nn.Module as its model, not a {type(model).__name__}: put several models into "
            "one nn.ModuleDict and prepare that"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"mt.prepare takes one torch optimizer, not a {type(optimizer).__name__}: {_ONE_OPTIMIZER}")
    for other in (loader, *others):
        if isinstance(other, torch.optim.Optimizer):
            raise UsageError(f"mt.prepare takes one optimizer: {_ONE_OPTIMIZER}")
        if isinstance(other, LRScheduler):
            raise UsageError(
                "mt.prepare takes no learning rate scheduler: make it after mt.prepare, of the optimizer that it "
                "returns, and step it as without a job"
            )
    if others:
        raise UsageError(
            f"mt.prepare takes a model, an optimizer and a loader, not a {type(others[0]).__name__} too: other "
            "loaders, for validation say, are used as they are"
        )


_ONE_OPTIMIZER = (
    "a job trains one model with one; give each part of the model a param group of its own in it, e.g. "
    "torch.optim.AdamW([{'params': a.parameters(), 'lr': 1e-3}, {'params': b.parameters(), 'lr': 1e-4}])"
)


def _enter(environment: Environment) -> LearnerSession:
    session = LearnerSession.attach(environment)
    atexit.register(_at_exit, session)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stopped)
    return session


def _at_exit(session: LearnerSession) -> None:
    """A script that forgot mt.finish() has finished; one that raised has not: its step is in no round (V2, cut off)."""
    if getattr(sys, "last_value", None) is not None:
        return
    try:
        session.finish()
    except Exception:
        # Whatever it is: Python would print it and keep the script's exit code, which tells the daemon of a success.
        _exit_by_error()


def _leave(session: DistributedSession) -> None:
    """A script that forgot mt.finish() has finished here, too."""
    try:
        session.leave(failed=getattr(sys, "last_value", None) is not None)
    except Exception:  # as above, and the launcher is told
        _exit_by_error()


def _exit_by_error() -> None:
    sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _stopped(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Raised in the script, so that its `finally` blocks can save what they want before the daemon's patience ends."""
    raise JobStopped("the daemon ends this script: the job was cancelled, or has failed on another peer")
