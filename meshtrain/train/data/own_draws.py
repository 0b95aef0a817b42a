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
        why: samples are not dealt, for the log.
    """
    own = epoch_seed(seed, rank)
    torch.manual_seed(own)
    random.seed(own)
    np.random.seed(own % 2**32)
    if rank == 0:
        log.warning(
            "%s: each device draws its own samples, and each step weighs the same. torch, numpy and random are "
            "seeded by its rank; where the script or its data set seeds or orders samples itself, all devices get "
            "the same ones: use mt.rank() in the seed, or every mt.world_size()-th sample from mt.rank() on",
            why,
        )
