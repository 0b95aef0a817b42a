"""Parts that take turns and are drawn from the values of all tensors (`--sync local:H,stream=P,random`).

SPARTA, sparse parameter averaging (Beton et al. 2025, openreview.net stFPf3gzq1), has a random part of all values
averaged behind each step. As in its authors' code (`PartitionedIndexSelector`) the values of each tensor are put into a
random order and cut into P parts, and in each cycle of P rounds anew: so each travels once in each cycle.

The order here is that of a walk round the tensor, whose first place and stride are drawn, and the stride has no divisor
in common with the number of values; each part is a run of its steps. These are integers alone, so they are equal on
every machine, and a part takes no more memory than its own places.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from meshwire.model.manifest import TensorSpec


class Walk(NamedTuple):
    """The places of a tensor's values that travel in a round: (first + at * stride) mod length, for each `at` below
    `steps`. `length`: how many values the tensor has."""

    first: int
    stride: int
    steps: int
    length: int


class DrawnParts:
    """Which values of each tensor a round carries where parts are drawn. Nothing of it depends on who computes.

    Args:
        seed: of the job.
    """

    def __init__(self, tensors: Sequence[TensorSpec], parts: int, seed: int) -> None:
        self._parts = parts
        self._seed = seed
        self._counts: dict[int, int] = {}  # of trained tensors, by index
        self._before: dict[int, int] = {}  # how many values such tensors before it have
        self.total = 0
        for index, tensor in enumerate(tensors):
            if tensor.kind == "parameter" and tensor.in_vector:
                self._counts[index] = tensor.count
                self._before[index] = self.total
                self.total += tensor.count

    def count(self, part: int, index: int) -> int:
        """How many values of a trained tensor a part has, in every cycle: as many as each other part but for one, and
        who has one more goes by turns from tensor to tensor. 0 for any other tensor."""
        return self._begins(part + 1, index) - self._begins(part, index) if index in self._counts else 0

    def of(self, round_: int, index: int) -> Walk:
        """Of a round, numbered from 1, and a trained tensor."""
        cycle, part = divmod(round_ - 1, self._parts)
        length = self._counts[index]
        drawn = hashlib.sha256(f"{self._seed} {cycle} {index}".encode()).digest()
        first, stride = (int.from_bytes(half, "big") % length for half in (drawn[:16], drawn[16:]))
        while math.gcd(stride, length) > 1:
            stride += 1
        return Walk((first + self._begins(part, index) * stride) % length, stride, self.count(part, index), length)

    def _begins(self, part: int, index: int) -> int:
        """How many of a tensor's values the parts before this one have, where the model's are dealt one by one."""
        before, behind = self._before[index], self._before[index] + self._counts[index]
        until_here, until_tensor = (n // self._parts * part + min(n % self._parts, part) for n in (behind, before))
        return until_here - until_tensor
