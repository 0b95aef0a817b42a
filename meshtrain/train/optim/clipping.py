"""Clipping by the norm of a round's means, by O4 (clipping), and the detection of clipping that would have no effect.

The norm of a mean over all peers' samples is known only when the round is there. Its owners compute it once for all,
and it travels with the result: so every peer scales by the same number, to the bit.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from meshtrain.errors import UsageError
from meshtrain.train.optim.momentum_handover import CLIPPED_LATE
from meshwire.codecs.spec import CodecSpec

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
NORM_UNKNOWN = (
    "with --codec lgc:conv what arrives does not tell the norm of a mean, by which mt.clip_grad_norm_ clips: use "
    "torch.nn.utils.clip_grad_norm_ with --sync bsp, or another codec, e.g. --codec lgc"
)


class Clipping:
    """Which limit rules the rounds that are applied late (s>0).

    A round is clipped equally on all peers: by what the contributor that rules its hyperparameters, the leader (O3),
    sent with its bind. The script names its limit after the backward pass, when the bind has left, so a bind carries
    the limit of the step before.

    Attributes:
        bound: what the next bind carries: the limit of the step before, None if that was not clipped.
        known: whether there was a step before, so that a bind can say so: false in a learner's first step.
    """

    def __init__(self) -> None:
        self.bound: float | None = None
        self.known = False
        self._noted: float | None = None

    def note(self, max_norm: float) -> None:
        """The script clips the step at hand. Raises UsageError for what is no limit."""
        self._noted = checked(max_norm)

    @property
    def newest(self) -> float | None:
        """The newest limit: of the step at hand if that is clipped already, else of the one before."""
        return self._noted if self._noted is not None else self.bound

    def step_ended(self) -> None:
        """Clips no more until it is noted again: called at the boundary, once the step's rounds are applied."""
        self.bound, self._noted = self._noted, None

    def ruling(self, leader_clip: float | None, *, known: bool) -> float | None:
        """The limit for a round; None: it is not clipped.

        Args:
            leader_clip: what the leader's bind carried.
            known: false for the first bind of a learner, which is too early to know: the local limit rules then.
        """
        if known:
            return leader_clip
        return self.newest

    @staticmethod
    def coefficient(squared_norm: float, max_norm: float) -> float:
        """What gradients are multiplied by, in [0, 1], so that their norm is at most `max_norm`, as torch computes it.

        Raises UsageError for what is no limit.
        """
        return min(1.0, checked(max_norm) / (math.sqrt(squared_norm) + EPSILON))


def refusal_to_clip(codec: CodecSpec) -> str | None:
    """Why means cannot be clipped that such a codec brings, and what to do instead; None where they can."""
    if codec.momentum:
        return CLIPPED_LATE
    return None if codec.norm_known else NORM_UNKNOWN


def checked(max_norm: float) -> float:
    """A limit as torch takes it: a number or a tensor of one value, infinity to measure only. Raises UsageError."""
    try:
        limit = float(max_norm)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"mt.clip_grad_norm_(..., max_norm={max_norm!r}): not one number: {error}") from error
    if math.isnan(limit) or limit < 0:
        raise UsageError(f"mt.clip_grad_norm_(..., max_norm={limit}): use a number that is not negative")
    return limit


@torch.no_grad()
def scale(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiplies the gradients that there are, in place."""
    if factor == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def covers(parameters: torch.Tensor | Iterable[torch.Tensor], trained: Iterable[torch.Tensor]) -> bool:
    """Whether the given parameters are the trained ones, except that those without a gradient may be left out.

    Only then is their norm the one that travels with a round. Frozen parameters, as `model.parameters()` gives them,
    add nothing to it.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    own = list(trained)
    known, found = {id(p) for p in own}, {id(p) for p in given}
    return all(id(p) in known for p in given if p.requires_grad or p.grad is not None) and all(
        id(p) in found for p in own if p.grad is not None
    )


class UntouchedGradients:
    """Sees that a script changes gradients between `backward()` and `optimizer.step()`, which only s=0 allows.

    Args:
        parameters: the trained ones with their names.

    Attributes:
        ever_changed: whether any step has ended with others than remembered.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._parameters = parameters
        self._seen: list[tuple[torch.Tensor | None, int]] | None = None
        self.ever_changed = False

    def remember(self) -> None:
        """The gradients are as they should be: at the end of the backward pass, or after an unscaling."""
        self._seen = [(p.grad, p.grad._version if p.grad is not None else 0) for _, p in self._parameters]

    def forget(self) -> None:
        """The step has ended: from now on gradients may change."""
        self._seen = None

    def changed(self) -> str | None:
        """The first gradient that is another than remembered, and how, as words after which "between" can follow."""
        for (name, parameter), (gradient, version) in zip(self._parameters, self._seen or (), strict=False):
            replaced = parameter.grad is not gradient
            if replaced or (gradient is not None and gradient._version != version):
                return f"the gradient of {name} was {'replaced' if replaced else 'changed'}"
        return None

    def note(self) -> None:
        """Remembers the gradients when the step ends."""
        self.ever_changed |= self.changed() is not None

    def check(self) -> None:
        """Compares, before the step. Raises UsageError that names the first gradient that is another than
        remembered."""
        if changed := self.changed():
            raise UsageError(
                f"{changed} between backward() and optimizer.step(). With a bound above 0 that has no effect: it has "
                "been sent already, and what is applied are the means of rounds, later. To clip, call "
                "mt.clip_grad_norm_(parameters, max_norm), which clips every round by the norm of its means; else "
                "use --sync bsp"
            )
