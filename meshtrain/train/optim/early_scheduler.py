"""Notices a learning rate scheduler that was made before `mt.prepare`, and so expects the steps of one machine."""

import logging

import torch

log = logging.getLogger("meshtrain")


def warn_of_early_scheduler(optimizer: torch.optim.Optimizer, given: int, dealt: int) -> None:
    """A schedule by the steps of one machine ends in the middle, for each of several takes fewer.

    Args:
        given: batches of an epoch of the script's own loader.
        dealt: of the prepared one.
    """
    if any("initial_lr" in group for group in optimizer.param_groups) and given != dealt:
        log.warning(
            "a learning rate scheduler was made before mt.prepare: if it counts steps by len(loader), it expects "
            "%d in an epoch, and each device takes %d; make it after mt.prepare, with the loader that this returns",
            given,
            dealt,
        )
