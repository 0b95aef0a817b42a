"""What torchrun, Slurm or Ray Train has told this process: which of how many it is, and where the first one listens."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshtrain.errors import UsageError
from meshtrain.train.device import DEVICE_VARIABLE

log = logging.getLogger("meshtrain")

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GUIDE = "deploy/CLUSTERS.md has the lines to start it with"


@dataclass(frozen=True)
class Launched:
    """This process's place among those that train together.

    Attributes:
        local_rank: which of the processes of this machine it is; None: nobody has said.
    """

    rank: int
    world_size: int
    local_rank: int | None = None


def launched(variables: Mapping[str, str] = os.environ) -> Launched | None:
    """What the launcher has said, by torch's variables or by a default process group that is open already; None: the
    script runs alone.

    Raises UsageError where the variables contradict each other, or some are missing: else each process would train by
    itself, without a word.
    """
    local_rank = _number(variables, "LOCAL_RANK") if variables.get("LOCAL_RANK") else None
    if dist.is_available() and dist.is_initialized():
        return Launched(dist.get_rank(), dist.get_world_size(), local_rank)
    there = [name for name in VARIABLES if variables.get(name)]
    if len(there) < len(VARIABLES):
        if "WORLD_SIZE" in there and _number(variables, "WORLD_SIZE") > 1:
            missing = ", ".join(name for name in VARIABLES if name not in there)
            raise UsageError(
                f"WORLD_SIZE={variables['WORLD_SIZE']} says that this process is one of several, and {missing} "
                f"{'is' if missing in VARIABLES else 'are'} not set: set all of {', '.join(VARIABLES)}, or none to "
                f"train alone; {GUIDE}"
            )
        _warn_of_slurm(variables)
        return None
    rank, world_size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UsageError(f"RANK={rank} with WORLD_SIZE={world_size}: ranks go from 0 to WORLD_SIZE-1; {GUIDE}")
    return Launched(rank, world_size, local_rank)


def choose_device(told: Launched) -> torch.device:
    """Where this process computes: $MESHTRAIN_DEVICE, its own GPU, else as alone. Where there are GPUs it becomes the
    current one.

    Raises UsageError for a machine with fewer GPUs than processes, and where nobody has said which one is whose.
    """
    if os.environ.get(DEVICE_VARIABLE):
        device = torch.device(os.environ[DEVICE_VARIABLE])
    elif torch.cuda.is_available():
        device = torch.device("cuda", _own_gpu(told, torch.cuda.device_count()))
    else:
        return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _own_gpu(told: Launched, gpus: int) -> int:
    if gpus == 1 and (told.local_rank is None or told.local_rank == 0 or "CUDA_VISIBLE_DEVICES" in os.environ):
        return 0  # the launcher shows each process its own alone
    if told.local_rank is None:
        raise UsageError(
            f"this machine has {gpus} GPUs, and LOCAL_RANK is not set, so which one is this process's is not known: "
            f"set LOCAL_RANK (srun: $SLURM_LOCALID), or MESHTRAIN_DEVICE=cuda:N; {GUIDE}"
        )
    if told.local_rank >= gpus:
        raise UsageError(
            f"LOCAL_RANK={told.local_rank} on a machine with {gpus} {'GPU' if gpus == 1 else 'GPUs'}: start as many "
            "processes as there are GPUs, or MESHTRAIN_DEVICE=cpu"
        )
    return told.local_rank


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise UsageError(f"{name}={variables[name]!r} is not a number; {GUIDE}") from None


def _warn_of_slurm(variables: Mapping[str, str]) -> None:
    """srun starts a script several times, and sets none of torch's variables."""
    tasks = variables.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdecimal() and int(tasks) > 1 and variables.get("SLURM_PROCID") == "0":
        log.warning(
            "srun has started this script %s times, and each of them trains alone: to train together they need %s; %s",
            tasks,
            ", ".join(VARIABLES),
            GUIDE,
        )
