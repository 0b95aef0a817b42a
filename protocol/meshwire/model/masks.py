"""Dynamic sparse training with masks that all members agree on (`--masks`): how many weights of each tensor are kept,
in which rounds masks change, and by how much.

All of it follows from shapes and the round's number, so every member knows in advance how long the vector of each round
is. Which weights are kept follows from the base and a round's mean alone: `meshtrain/train/partial/masks.py`.

FedDST (Bibikar et al. 2022, arXiv 2112.09824) with the split and the changes of RigL (Evci et al. 2020, arXiv
1911.11134). There clients change masks on their own, and a server makes one of them; here all change one mask alike.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

from pydantic import Field, ValidationError

from meshwire.codecs.schedules import number_text
from meshwire.codecs.spec import CodecSpec
from meshwire.message_base import Wire
from meshwire.model.manifest import TensorSpec
from meshwire.model.schedule import Stretch, Travel, refusal
from meshwire.sync_modes.mode import SyncSettings

ROUNDS_MAX = 10**7
_LEGAL = (
    "use SPARSITY[,every=ROUNDS,move=PART,until=ROUND], such as 0.8,every=100,move=0.3,until=2000: SPARSITY from 0 to "
    f"0.999 of the weights is left out, move is from 0 to 0.9, rounds are from 1 to {ROUNDS_MAX}"
)


NOT_BOTH = "--masks does not go with mt.Progressive, of which other parts travel in other rounds: use one of them"


class MaskSettings(Wire):
    """Equal on all members of a job.

    Attributes:
        sparsity: S, the part of the weights that is left out.
        every: in each round whose number is a multiple of it masks change.
        move: alpha, the part of the kept weights that is exchanged for others, in the first rounds.
        until: masks stay as they are from this round on, and alpha falls to 0 by a cosine until then; None: neither.
    """

    sparsity: Annotated[float, Field(ge=0, le=0.999)]
    every: Annotated[int, Field(ge=1, le=ROUNDS_MAX)] = 100
    move: Annotated[float, Field(ge=0, le=0.9)] = 0.3
    until: Annotated[int, Field(ge=1, le=ROUNDS_MAX)] | None = None

    @property
    def change(self) -> bool:
        """Whether they ever do."""
        return self.sparsity > 0 and self.move > 0

    def changes_in(self, number: int) -> bool:
        """Whether masks change with the mean of this round, of which all values travel then. Rounds count from 1."""
        return self.change and number % self.every == 0 and (self.until is None or number < self.until)

    def moved(self, number: int, kept: int) -> int:
        """How many of a tensor's kept weights are exchanged in a round, at most."""
        if not self.changes_in(number):
            return 0
        part = self.move if self.until is None else self.move * (1 + _cos_pi(number / self.until)) / 2
        return int(part * kept)

    def text(self) -> str:
        """As typed after --masks."""
        until = "" if self.until is None else f",until={self.until}"
        return f"{number_text(self.sparsity)},every={self.every},move={number_text(self.move)}{until}"


def parse_masks(typed: str) -> MaskSettings:
    """What is typed behind --masks. Raises ValueError, which names what is legal."""
    sparsity, *rest = typed.split(",")
    fields = {name: value for name, _, value in (part.partition("=") for part in rest)}
    if len(fields) != len(rest) or not set(fields) <= {"every", "move", "until"}:
        raise ValueError(f"--masks {typed}: {_LEGAL}")
    try:
        return MaskSettings.model_validate_strings({"sparsity": sparsity, **fields})
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise ValueError(f"--masks {typed}: {str(name)!r} is not possible: {_LEGAL}") from None


def masks_of(typed: str | None, sync: SyncSettings, codec: CodecSpec) -> MaskSettings | None:
    """The masks of a job, from --masks; None: nothing was typed. Raises ValueError, which names what is legal."""
    if typed is None:
        return None
    masks = parse_masks(typed)
    if sync.signs or sync.sparse or sync.muon:
        raise ValueError(
            f"--masks with --sync {sync.text()}: it keeps what masks would have to know of: use --sync bsp, or local:H"
        )
    if (reason := refusal(sync, codec)) is not None:
        raise ValueError(f"--masks with {reason}")
    return masks


def kept_of(tensors: Sequence[TensorSpec], masks: MaskSettings | None) -> dict[int, int]:
    """How many values each trained tensor keeps, by its index, of those that are not whole. Raises ValueError when one
    would keep nothing."""
    if masks is None:
        return {}
    trained = [index for index, tensor in enumerate(tensors) if tensor.kind == "parameter"]
    kept = split([tensors[index].shape for index in trained], masks.sparsity)
    return {trained[position]: count for position, count in kept.items()}


def travel_of(tensors: Sequence[TensorSpec], masks: MaskSettings | None) -> Travel | None:
    """In which rounds kept values travel, and in which all, for masks change (T1); None: all in all. Raises as
    `kept_of`."""
    kept = kept_of(tensors, masks)
    if masks is None or not kept:
        return None
    counts = tuple(kept.get(index, tensor.count if tensor.in_vector else 0) for index, tensor in enumerate(tensors))
    change = masks.change and masks.until != 1
    stretches = [Stretch(first=1, counts=counts, whole_every=masks.every if change else 0)]
    if change and masks.until is not None:
        stretches.append(Stretch(first=masks.until, counts=counts))
    return Travel(stretches=tuple(stretches))


def mask_bytes(tensors: Sequence[TensorSpec], masks: MaskSettings | None, sync: SyncSettings) -> int:
    """What a learner keeps for its masks: the places of kept values, 8 bytes each, and with a period, before a change,
    what the others would have changed, in fp32 (M1). Raises as `kept_of`."""
    kept = kept_of(tensors, masks)
    sums = sum(tensors[index].count for index in kept) if masks is not None and masks.change and sync.period else 0
    return 8 * sum(kept.values()) + 4 * sums


def split(shapes: Sequence[tuple[int, ...]], sparsity: float) -> dict[int, int]:
    """How many values each tensor keeps: Erdos-Renyi-Kernel, in which that is in proportion to the sum of the tensor's
    dimensions (RigL, section 3), so that small layers stay denser. One whose share is more than it has stays whole.
    (The code of FedDST's authors takes what is left out, and not what is kept, in proportion to 1 minus that sum by the
    size.)

    Tensors of less than two dimensions, biases and norms, are whole and do not count. Of all others together exactly
    `sparsity` is left out, rounded to a value.

    Returns:
        By index, of those that are not whole.

    Raises:
        ValueError: a tensor would keep nothing.
    """
    sizes: dict[int, int] = {
        index: math.prod(shape) for index, shape in enumerate(shapes) if len(shape) > 1 and 0 not in shape
    }
    left = round(sum(sizes.values()) * (1 - sparsity))
    parts = {index: sum(shapes[index]) for index in sizes}
    while parts:
        share = Fraction(left, sum(parts.values()))
        whole = [index for index, part in parts.items() if share * part >= sizes[index]]
        if not whole:
            break
        for index in whole:
            left -= sizes[index]
            del parts[index]
    if not parts:
        return {}
    kept = {index: int(share * part) for index, part in parts.items()}
    by_remainder = sorted(parts, key=lambda index: (kept[index] - share * parts[index], index))
    for index in by_remainder[: left - sum(kept.values())]:
        kept[index] += 1
    if not all(kept.values()):
        poorest = min(kept, key=lambda index: kept[index])
        raise ValueError(
            f"--masks {number_text(sparsity)} would keep none of the {sizes[poorest]} values of a tensor of shape "
            f"{shapes[poorest]}: use a lower sparsity"
        )
    return {index: count for index, count in kept.items() if count < sizes[index]}  # rounding may leave one whole


def _cos_pi(part: float) -> float:
    """cos(pi * part) for part in [0, 1], by additions and multiplications alone: a machine's own cosine may differ in
    the last bit from another's, and with it the number of weights that are exchanged."""
    if part > 0.5:
        return -_cos_pi(1 - part)
    square = -(math.pi * part) * (math.pi * part)
    term = total = 1.0
    for order in range(2, 24, 2):
        term *= square / (order * (order - 1))
        total += term
    return total
