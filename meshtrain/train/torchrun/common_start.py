"""What the ranks do before the first step: they compare what they prepared, and begin from rank 0's state."""

from typing import Any

import torch

from meshtrain.errors import RequestError
from meshtrain.train.optim.loss_scaling import LossScaling
from meshtrain.train.step.preparation import PreparedModel
from meshtrain.train.torchrun.rank_group import RankGroup, Reaching
from meshwire.model.manifest import ModelManifest, first_difference


def begin_alike(group: RankGroup, prepared: PreparedModel, scaling: LossScaling) -> None:
    """Returns when parameters, buffers, the optimizer's state and options and the scaler's are rank 0's on all ranks.

    Raises:
        RequestError: the ranks have prepared different things; the text names the first difference.
        ConnectionLost: a rank is gone.
    """
    with Reaching("compares its model with the others'"):
        _compare(group, prepared.tensors.manifest)
    with Reaching("takes over rank 0's state"):
        for place in prepared.tensors.places:
            group.share(place.tensor())
        _share_optimizer(group, prepared.optimizer)
        scale = group.from_first(scaling.state())
        if scale is not None:
            scaling.load(scale)


def _compare(group: RankGroup, manifest: ModelManifest) -> None:
    if len(set(group.of_all(manifest.digest()))) == 1:
        return
    firsts: ModelManifest = group.from_first(manifest)
    for rank, difference in enumerate(group.of_all(first_difference(firsts, manifest))):
        if difference is not None:
            raise RequestError(
                f"what rank {rank} gave to mt.prepare is not what rank 0 gave (here: rank 0, there: rank {rank}): "
                f"{difference}; all ranks must run the same script with the same settings"
            )


def _share_optimizer(group: RankGroup, optimizer: torch.optim.Optimizer) -> None:
    state = group.from_first(_on_cpu(optimizer.state_dict()) if group.rank == 0 else None)
    if group.rank:
        optimizer.load_state_dict(state)


def _on_cpu(value: Any) -> Any:
    """A copy of a state with all its tensors in memory that every rank has."""
    match value:
        case torch.Tensor():
            return value.detach().cpu()
        case dict():
            return {key: _on_cpu(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_on_cpu(item) for item in value)
    return value
