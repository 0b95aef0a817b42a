"""`--sync muloco:H`: within a period Muon steps the hidden matrices, and the script's AdamW steps all else.

MuLoCo (Therien et al. 2025, arXiv 2505.23725) is DiLoCo with Muon (Jordan et al. 2024, github.com/KellerJordan/Muon) as
the inner optimizer: a matrix moves by its momentum, with all singular values brought near 1. As the authors have it,
embeddings, the output layer, and what is no matrix stay with AdamW.

A script has one learning rate, so Muon takes that of the matrix's param group, and its weight decay, with steps scaled
to the root mean square that AdamW's have (Liu et al. 2025, arXiv 2502.16982: adjust_lr_fn="match_rms_adamw").
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshtrain.errors import NotSupported
from meshtrain.train.optim.optimizer_step import OptimizerStep, run_closure

CHOICE = "use_muon"  # in a param group: whether its matrices are Muon's, where the model does not tell rightly
NAMED_MAX = 5
_INSTEAD = "--sync diloco:H --codec twobit"


def check_muon_possible(optimizer: Optimizer) -> None:
    """Raises NotSupported for an optimizer that has no part for Muon to take, or where torch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise NotSupported(
            f"--sync muloco steps with torch.optim.Muon, and torch {torch.__version__} has none: install torch 2.9 or "
            f"newer on all devices, or submit with {_INSTEAD}, which keeps the script's optimizer as it is"
        )
    if type(optimizer) is torch.optim.Muon:
        return
    if type(optimizer) is not torch.optim.AdamW:
        raise NotSupported(
            f"--sync muloco gives hidden matrices to Muon and leaves all else to AdamW, and "
            f"{type(optimizer).__name__} is neither: use torch.optim.AdamW for all parameters, or submit with "
            f"{_INSTEAD}, which keeps the script's optimizer as it is"
        )
    for position, group in enumerate(optimizer.param_groups):
        for option in ("fused", "maximize", "differentiable"):
            if group.get(option):
                raise NotSupported(
                    f"param group {position} of AdamW has {option}=True, which Muon does not know, and with --sync "
                    "muloco it steps the matrices: leave it out"
                )


def hidden_matrices(model: nn.Module, outputs: Sequence[nn.Module], optimizer: Optimizer) -> list[nn.Parameter]:
    """What Muon steps in place of AdamW: weights of two dimensions, but for embeddings and output layers. A param group
    with `use_muon` says so for its own ones. None where the script's optimizer is Muon already.

    Args:
        outputs: parts of the model that end in an output layer each: their last `nn.Linear`.

    Raises:
        NotSupported: there are none.
    """
    if type(optimizer) is not torch.optim.AdamW:
        return []
    elsewhere = {id(weight) for weight in _embeddings_and_outputs(model, outputs)}
    found = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
        and parameter.dim() == 2
        and not parameter.is_complex()
        and group.get(CHOICE, id(parameter) not in elsewhere)
    ]
    if not found:
        raise NotSupported(
            "--sync muloco has Muon step the matrices between a model's embeddings and its output layer, and this "
            f"model trains none (kernels of convolutions are no matrices): submit with {_INSTEAD}"
        )
    return found


def _embeddings_and_outputs(model: nn.Module, outputs: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield module.weight
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if "embed" in name.lower():  # as a learned position often is, which is no module
            yield parameter
    for part in outputs:
        layers = [module for module in part.modules() if isinstance(module, nn.Linear)]
        if layers:
            yield layers[-1].weight


def what_is_muons(model: nn.Module, matrices: Sequence[nn.Parameter]) -> str:
    """For people: how the parameters are shared out, for a model does not say which layer is its output."""
    ids = {id(matrix) for matrix in matrices}
    left = [name for name, each in model.named_parameters() if each.requires_grad and each.dim() > 1]
    left = [name for name in left if id(model.get_parameter(name)) not in ids]
    named = f", {', '.join(left[:NAMED_MAX])}{' ..' * (len(left) > NAMED_MAX)} among them" if left else ""
    return (
        f"Muon steps {len(ids)} matrices, AdamW all other parameters{named}; {CHOICE}=True or False in a param group "
        "says otherwise"
    )


def inner_muon(optimizer: Optimizer, matrices: Sequence[nn.Parameter]) -> Optimizer | None:
    """The optimizer that steps these parameters of another one, in groups as they are there; None: there are none."""
    ids = {id(matrix) for matrix in matrices}
    groups = [[each for each in group["params"] if id(each) in ids] for group in optimizer.param_groups]
    if not ids:
        return None
    return torch.optim.Muon([{"params": own} for own in groups if own], adjust_lr_fn="match_rms_adamw")


class WithMuon(OptimizerStep):
    """AdamW's step, but for the parameters that Muon has; each keeps the state of its own.

    AdamW's hooks see the gradients of all other parameters alone.

    Args:
        muon: of `inner_muon`.
    """

    def __init__(self, optimizer: Optimizer, muon: Optimizer) -> None:
        super().__init__(optimizer)
        self._muon = muon
        self._adamw = self.original
        self.original = self._step
        group_of = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        self._groups = [(group_of[id(own["params"][0])], own) for own in muon.param_groups]
        self._matrices = [matrix for own in muon.param_groups for matrix in own["params"]]

    def forget(self) -> None:
        super().forget()
        self._muon.state.clear()

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As of a torch optimizer."""
        loss = run_closure(closure)
        gradients = [matrix.grad for matrix in self._matrices]
        for matrix in self._matrices:
            matrix.grad = None
        try:
            self._adamw()
        finally:
            for matrix, gradient in zip(self._matrices, gradients, strict=True):
                matrix.grad = gradient
        for group, of_muon in self._groups:
            of_muon["lr"], of_muon["weight_decay"] = group["lr"], group["weight_decay"]
        self._muon.step()
        return loss
