"""The processes that train together, as torch's process groups: who is where, and what they exchange besides gradients.

Vectors go over a group of the backend of the devices (NCCL, gloo). All that steers goes over one of gloo: it stays off
the GPUs, and it may wait for a rank without holding up what is computed there.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshtrain.errors import ConnectionLost, UsageError
from meshtrain.train.torchrun.launched import Launched

LINGER_S = 10.0  # at the end, for ranks that are about to end, too
DOING = ("takes step {}", "is in barrier {}", "has finished after {} steps")
STEP, BARRIER, FINISH = range(3)
NOT_OF_OTHERS = (torch.OutOfMemoryError, NotImplementedError)
NOT_ALIKE = (
    "every rank must take as many steps, and call mt.barrier and mt.finish at the same places: look for what the "
    "script does on some ranks only, or for loops whose length differs"
)


class Called(NamedTuple):
    """What a rank does now.

    Attributes:
        number: of the step or barrier; at the end, of steps it has taken.
        weight: of a step, in samples.
    """

    doing: int
    number: int
    weight: float


class RollCall:
    """All ranks say what they do; under way while a backward pass computes."""

    def __init__(self, own: Called, size: int, group: Any) -> None:
        self._own = own
        self._said = [torch.empty(len(own), dtype=torch.float64) for _ in range(size)]
        self._work = dist.all_gather(self._said, torch.tensor(own, dtype=torch.float64), group=group, async_op=True)

    def wait(self) -> list[Called]:
        """What each rank does. Raises UsageError when one does something else, ConnectionLost when one is gone."""
        with Reaching(DOING[self._own.doing].format(self._own.number)):
            self._work.wait()
        every = [Called(int(doing), int(number), weight) for doing, number, weight in (t.tolist() for t in self._said)]
        for rank, called in enumerate(every):
            if (called.doing, called.number) != (self._own.doing, self._own.number):
                other = DOING[called.doing].format(called.number)
                raise UsageError(
                    f"rank {rank} {other}, and this rank {DOING[self._own.doing].format(self._own.number)}: {NOT_ALIKE}"
                )
        return every

    def linger(self) -> None:
        """At the end: waits a moment for the other ranks' ends. One that goes on, or is gone, is no error of this."""
        try:
            self._work.wait(timedelta(seconds=LINGER_S))
        except RuntimeError:  # of torch, for a time-out and for a closed connection alike
            return


class Reaching:
    """A context in which the other ranks are waited for: torch's errors become one that says for what.

    Args:
        what: this rank does, with its verb.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, NOT_OF_OTHERS):  # dist.DistError is one, too
            raise ConnectionLost(
                f"this rank {self._what}, and another one cannot be reached: it has ended, or failed (its own log says "
                f"why), or the network is down. torch says: {error}"
            ) from error


class RankGroup:
    """The groups of one script. Made on all ranks at the same place; `close` on each.

    Args:
        told: by the launcher.
        device: on which this rank computes.

    Raises:
        ConnectionLost: the ranks do not find each other.

    Attributes:
        device: on which vectors are exchanged.
    """

    def __init__(self, told: Launched, device: torch.device) -> None:
        if not dist.is_available():
            raise UsageError("this build of torch has no torch.distributed: install one that has, or train alone")
        self._opened = not dist.is_initialized()
        with Reaching("opens torch's process group"):
            if self._opened:
                dist.init_process_group("nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo")
            self._vectors = dist.new_group()
            self._control = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device if device.type == "cuda" else torch.device("cpu")
        self._farewell: RollCall | None = None
        if (self.rank, self.size) != (told.rank, told.world_size):
            raise UsageError(
                f"the default process group has rank {self.rank} of {self.size} here, and RANK and WORLD_SIZE say "
                f"{told.rank} of {told.world_size}: open it before the first call of meshtrain, or leave it to "
                "mt.prepare"
            )

    def call(self, doing: int, number: int, weight: float = 0.0) -> RollCall:
        """Says what this rank does, and asks the others."""
        return RollCall(Called(doing, number, weight), self.size, self._control)

    def farewell(self, steps: int) -> None:
        """This rank takes no further step. Nobody is waited for, and nobody told where all groups have been ended."""
        if not dist.is_initialized():
            return
        with Reaching("finishes"):
            self._farewell = self.call(FINISH, steps)

    def sum(self, values: torch.Tensor) -> Any:
        """Begins to add up the values of all ranks, in place; all do so in the same order. Returns torch's Work."""
        return dist.all_reduce(values, group=self._vectors, async_op=True)

    def maxima(self, values: Sequence[int]) -> list[int]:
        """The largest value of any rank, for each position."""
        if not values:
            return []
        largest = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._control)
        return largest.tolist()

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, which torch pickles."""
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self._control, device=torch.device("cpu"))
        return held[0]

    def of_all(self, value: Any) -> list[Any]:
        """The values of all ranks, which torch pickles."""
        held: list[Any] = [None] * self.size
        dist.all_gather_object(held, value, group=self._control)
        return held

    @torch.no_grad()
    def share(self, tensor: torch.Tensor) -> None:
        """The tensor becomes rank 0's, whatever its type, its device and the order of its values in memory are."""
        staged = tensor.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(staged.reshape(-1).view(torch.uint8), src=0, group=self._vectors)
        tensor.copy_(staged)

    def close(self, *, linger: bool) -> None:
        """Ends the groups that were opened here. What is still under way is given up.

        Args:
            linger: waits a moment for the other ranks first.
        """
        if not dist.is_initialized():
            return  # somebody has ended all of them
        if linger and self._farewell is not None:
            self._farewell.linger()
        for group in (self._control, self._vectors):
            dist.destroy_process_group(group)
        if self._opened:
            dist.destroy_process_group()
