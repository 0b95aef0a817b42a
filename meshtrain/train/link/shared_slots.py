"""The learner's side of the memory that it shares with its daemon, so that vectors are never copied through a socket.

Raw slots: the learner writes weight * gradient into one, in the order of the plan, and the daemon encodes it. The
result slot: the daemon writes the means of a round into it, and the learner applies them. M1 (memory) says how many
there are. Mixed slots, with `,gossip=G` (R9): one in which the learner shows its weights, others where neighbours' lie.
"""

import mmap
import os

import torch

from meshtrain.errors import MeshtrainError
from meshwire.codecs.spec import CodecSpec
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.model.plan import VALUE_BYTES, Plan, Span
from meshwire.sync_modes.mode import SyncSettings


class SharedSlots:
    """The slots as fp32 tensors over the shared memory.

    Args:
        descriptor: of the file that the daemon has made; sized here.

    Raises:
        MeshtrainError: when the system does not give that much memory.
    """

    def __init__(self, descriptor: int, plan: Plan, sync: SyncSettings, codec: CodecSpec) -> None:
        self.layout = MemoryLayout.for_job(plan.total_values, sync, codec)
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

    def mixed(self, slot: int) -> torch.Tensor:
        """Where weights are mixed: 0 is what this learner shows, from 1 on what neighbours do; in fp32 or bf16."""
        dtype = torch.float32 if self.layout.mixed_bytes == VALUE_BYTES else torch.bfloat16
        return self._slot(self.layout.mixed_offset(slot), dtype)

    def _slot(self, offset_bytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=dtype, count=self.layout.values, offset=offset_bytes)


def view(slot: torch.Tensor, span: Span, shape: torch.Size) -> torch.Tensor:
    """The part of a slot that belongs to one tensor, in its shape."""
    return slot[span.start : span.start + span.count].view(shape)
