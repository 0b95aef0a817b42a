"""What `mt.prepare` was given, described as peers compare it, and refused by name where it cannot be trained in a job.

A job's session does this before it asks the others, a dry run (`meshtrain submit --dry-run`) to refuse what they would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshtrain.errors import NotSupported
from meshtrain.train.model import optimizers, tensors
from meshtrain.train.model.joint_optimizer import check_joint, check_joint_mode
from meshtrain.train.model.tensors import ModelTensors
from meshtrain.train.optim.frozen_variance import check_variance_possible
from meshtrain.train.optim.momentum_handover import momentum_of
from meshtrain.train.optim.scaled_rates import check_scaled
from meshtrain.train.optim.sign_sgd import check_signs_possible
from meshtrain.train.partial import masks as masked
from meshtrain.train.partial import progressive
from meshtrain.train.partial.progressive import Progressive
from meshtrain.train.periods.inner_muon import check_muon_possible, hidden_matrices
from meshwire import limits
from meshwire.codecs.spec import CodecSpec
from meshwire.model.fragments import check_fragments, fragments_travel
from meshwire.model.manifest import TensorSpec
from meshwire.model.masks import NOT_BOTH, MaskSettings
from meshwire.model.schedule import Travel, refusal
from meshwire.sync_modes.mode import SyncSettings
from meshwire.sync_modes.rate_rule import RateRule


@dataclass(frozen=True)
class PreparedModel:
    """A model and its optimizer that can take part in a job.

    Attributes:
        tensors: of the model, with the manifest that must be equal on all peers.
        growing: the part of the model that grows; None without one.
        of_muon: what Muon steps in the optimizer's place.
    """

    tensors: ModelTensors
    optimizer: torch.optim.Optimizer
    growing: Progressive | None
    of_muon: Sequence[torch.nn.Parameter] = ()


def check_optimizer(optimizer: torch.optim.Optimizer, sync: SyncSettings, scale_lr: RateRule | None = None) -> None:
    """Raises NotSupported for an optimizer that cannot work with averaged gradients, or not with this `--sync`, or this
    `--scale-lr`."""
    optimizers.check(optimizer)
    check_joint_mode(optimizer, sync)
    if sync.signs:
        check_signs_possible(optimizer)
    if sync.muon:
        check_muon_possible(optimizer)
    if scale_lr is not None:
        check_scaled(optimizer, scale_lr)


def describe_model(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: SyncSettings,
    codec: CodecSpec,
    masks: MaskSettings | None,
    loader: str = "",
) -> PreparedModel:
    """Describes tensors, optimizer and loader, and which values travel in which rounds.

    Args:
        loader: its description, which is compared with the optimizer's.

    Raises:
        NotSupported, UsageError: naming what cannot be trained, and what to do instead.
    """
    specs, places = tensors.collect(model)
    growing = progressive.find(model)
    outputs = [model] if growing is None else list(growing.heads)
    of_muon = hidden_matrices(model, outputs, optimizer) if sync.muon else []
    check_joint(optimizer, codec, partial=growing is not None or masks is not None)
    layout = optimizers.describe(optimizer, specs, places, of_muon) + (f"; loader: {loader}" if loader else "")
    momentum = momentum_of(optimizer) if codec.momentum else None
    if codec.of_momentum:
        check_variance_possible(optimizer)
    if growing is not None and masks is not None:
        raise NotSupported(NOT_BOTH)
    travel = masked.travel(specs, masks) if growing is None else growing.travel(specs, places)
    if growing is not None and (reason := refusal(sync, codec)):
        raise NotSupported(f"mt.Progressive with {reason}")
    if sync.fragments:
        travel = _fragments_travel(specs, sync, codec, partial=growing is not None or masks is not None)
    built = tensors.build(model, layout, momentum, travel)
    size_bytes = len(built.manifest.pack())
    if size_bytes > limits.MODEL_BYTES_MAX:
        raise NotSupported(
            f"the description of this model's {len(built.manifest.tensors)} tensors has {size_bytes} bytes, "
            f"at most {limits.MODEL_BYTES_MAX} are possible: use fewer tensors, or shorter names of modules"
        )
    return PreparedModel(built, optimizer, growing, of_muon)


def _fragments_travel(
    specs: Sequence[TensorSpec], sync: SyncSettings, codec: CodecSpec, *, partial: bool
) -> Travel | None:
    """Of parts of the model that take turns. Raises NotSupported."""
    try:
        check_fragments(sync, codec, partial=partial)
        return fragments_travel(specs, sync)
    except ValueError as error:
        raise NotSupported(str(error)) from error
