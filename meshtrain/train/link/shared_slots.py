"""The learner's side of the memory that it shares with its daemon, so that vectors are never copied through a socket.

Raw slots: the learner writes weight * gradient into one, in the order of the plan, and the daemon encodes it. The
result slot: the daemon writes the means of a round into it, and the learner applies them. M1 (memory) says how many
there are.
"""

import mmap
import os

import torch

from meshtrain.errors import MeshtrainError
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.model.plan import VALUE_BYTES, Plan, Span


class SharedSlots:
    """The slots as fp32 tensors over the shared memory.

    Args:
        descriptor: of the file that the daemon has made; sized here.

    Raises:
        MeshtrainError: when the system does not give that much memory.
    """

    def __init__(self, descriptor: int, plan: Plan, staleness: int) -> None:
        self.layout = MemoryLayout.for_bound(plan.total_values, staleness)
        try:
            os.ftruncate(descriptor, self.layout.total_bytes)
            self._map = mmap.mmap(descriptor, self.layout.total_bytes)
        except (OSError, ValueError) as error:
            raise MeshtrainError(
                f"no {self.layout.total_bytes} bytes of shared memory for the gradients of this model: {error}"
            ) from error
        self.result = self._slot(self.layout.result_offset)

    def raw(self, step: int) -> torch.Tensor:
        """Where step `step` writes its gradients."""
        return self._slot(self.layout.raw_offset(step))

    def _slot(self, offset_bytes: int) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=torch.float32, count=self.layout.values, offset=offset_bytes)


def view(slot: torch.Tensor, span: Span, shape: torch.Size) -> torch.Tensor:
    """The part of a slot that belongs to one tensor, in its shape."""
    assert slot.element_size() == VALUE_BYTES
    return slot[span.start : span.start + span.count].view(shape)
