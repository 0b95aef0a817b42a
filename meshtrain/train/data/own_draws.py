"""Seeds a process by its rank, where the samples of its loader cannot be dealt: X6 (seeds)."""

import logging
import random

import numpy as np
import torch

from meshwire.samples.epochs import epoch_seed

log = logging.getLogger("meshtrain")


def draw_apart(seed: int, rank: int, why: str) -> None:
    """Equal seeds would give all ranks the same samples.

    Args:
        seed: of all.
        why: samples are not dealt, and what follows, for the log: `NO_LOADER` or `STREAM`.
    """
    own = epoch_seed(seed, rank)
    torch.manual_seed(own)
    random.seed(own)
    np.random.seed(own % 2**32)
    if rank == 0:
        log.warning(why)


NO_LOADER = (
    "no loader was given to mt.prepare: each device draws its own samples, and each step weighs the same. torch, numpy "
    "and random are seeded by its rank; where the script or its data set seeds or orders samples itself, all devices "
    "get the same ones: use mt.rank() in the seed, or every mt.world_size()-th sample from mt.rank() on"
)
STREAM = (
    "the loader reads an IterableDataset: each device reads all of it and takes every m-th item, and each step weighs "
    "the same. torch, numpy and random are seeded by its rank, so a data set that shuffles by these should have a seed "
    "of its own; one that asks for mt.rank() or mt.world_size() takes its part itself"
)
