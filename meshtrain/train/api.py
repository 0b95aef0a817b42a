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
from meshtrain.train.data.stream_share import note_asked
from meshtrain.train.dry_run import MeasuringProcess
from meshtrain.train.link.environment import Environment, environment_of_job
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.session import LearnerSession
from meshtrain.train.single import SingleProcess
from meshtrain.train.torchrun.distributed_session import DistributedSession
from meshtrain.train.torchrun.launched import launched
from meshtrain.train.traced_run import TracedProcess

__all__ = ["check_given", "joined", "note_asked", "world"]

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
    for each in model if isinstance(model, list | tuple) else [model]:
        if not isinstance(each, torch.nn.Module):
            raise UsageError(
                f"mt.prepare takes a torch.nn.Module as its model, or a list of them, not a {type(each).__name__}"
            )
    for each in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        if not isinstance(each, torch.optim.Optimizer):
            raise UsageError(
                f"mt.prepare takes a torch optimizer, or a list of them, not a {type(each).__name__}: {_SEVERAL}"
            )
    if model in ([], ()) or optimizer in ([], ()):
        raise UsageError("mt.prepare was given an empty list: it takes at least one model and one optimizer")
    for other in (loader, *others):
        if isinstance(other, torch.nn.Module | torch.optim.Optimizer):
            raise UsageError(f"mt.prepare takes several models and optimizers as lists: {_SEVERAL}")
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


_SEVERAL = (
    "models, optimizers, loader = mt.prepare([a, b], [optimizer_of_a, optimizer_of_b], loader), optimizers in the "
    "order in which they step, each behind a backward pass of its own"
)


def joined(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Several models as one, and several optimizers. Raises UsageError where these share a parameter."""
    whole = model if isinstance(model, torch.nn.Module) else torch.nn.ModuleList(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        return whole, optimizer
    return whole, optimizer[0] if len(optimizer) == 1 else JointOptimizer(optimizer)


def _enter(environment: Environment) -> LearnerSession:
    session = LearnerSession.attach(environment)
    atexit.register(_at_exit, session)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stopped)
    return session


def _at_exit(session: LearnerSession) -> None:
    """A script that forgot mt.finish() has finished; one that raised has not: its step is in no round (V2, cut off)."""
    try:
        if getattr(sys, "last_value", None) is None:
            session.finish()
        if signal.getsignal(signal.SIGTERM) is _stopped:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending, and has nothing left to save
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
