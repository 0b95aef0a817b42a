"""The ranks of a script under torchrun, each a process of its own, forked from one that has torch loaded."""

import datetime
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from meshtrain.train.torchrun.distributed_session import DistributedSession
from meshtrain.train.torchrun.launched import Launched

TIMEOUT_S = 30.0
CONTEXT = multiprocessing.get_context("forkserver")

Script = Callable[[DistributedSession, int], Any]


class Ended(NamedTuple):
    """How a rank ended: by a result, or by an error."""

    result: Any
    error: str  # its class and text; empty without one


def run_ranks(folder: Path, size: int, script: Script) -> list[Ended]:
    """Runs a module's function on so many ranks at once, which find each other by a file in `folder`."""
    pipes, processes = [], []
    try:
        for rank in range(size):
            here, there = CONTEXT.Pipe(duplex=False)
            pipes.append(here)
            process = CONTEXT.Process(target=_rank, args=(there, script, rank, size, str(folder / "store")))
            process.start()
            processes.append(process)
            there.close()
        ends = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} does not end"
            ends.append(Ended(*pipe.recv()))
        return ends
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(TIMEOUT_S)
            process.kill()
            process.join()
            process.close()


def results(folder: Path, size: int, script: Script) -> list[Any]:
    """Of all ranks, none of which may end by an error."""
    ends = run_ranks(folder, size, script)
    assert not [end.error for end in ends if end.error]
    return [end.result for end in ends]


def errors(folder: Path, size: int, script: Script) -> list[str]:
    """How each rank ended, class and text; empty without an error."""
    return [end.error for end in run_ranks(folder, size, script)]


def _rank(pipe: Connection, script: Script, rank: int, size: int, store: str) -> None:
    timeout = datetime.timedelta(seconds=TIMEOUT_S / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    session = DistributedSession(Launched(rank, size))
    result, error = None, ""
    try:
        result = script(session, rank)
    except Exception as problem:  # it is the result
        error = f"{type(problem).__name__}: {problem}"
    session.leave(failed=bool(error))
    dist.destroy_process_group()
    pipe.send((result, error))
    pipe.close()
