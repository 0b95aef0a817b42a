"""The classes that torch takes a group for: one adapter for each way in which a version of torch calls what is Python.

torch 2.6 to 2.13 takes a subclass of its ProcessGroup, which then is the group; from 2.14 on it takes a subclass of its
Backend, behind a ProcessGroup of its own. A torch.compile of a DDP model, and what else looks into groups, knows the
second kind alone.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshtrain.torch_backend.operation import Members
from meshtrain.torch_backend.process_group import GroupCollectives

BACKENDS_IN_PYTHON = (2, 14)  # the first version of torch that takes them
_c10d: Any = torch._C._distributed_c10d  # whose stubs are of C++ classes: with overloads that Python is not called by


def takes_backends() -> bool:
    """Whether this torch takes a Backend that is written in Python."""
    return torch.torch_version.TorchVersion(torch.__version__) >= BACKENDS_IN_PYTHON


def devices() -> list[str]:
    """Whose tensors reach a group of this torch: those that it refuses with them. A ProcessGroup is given them all; of
    a Backend torch itself would say that there is none for them."""
    return ["cpu", "cuda", "mps", "xpu"] if takes_backends() else ["cpu"]


class MeshProcessGroup(GroupCollectives, _c10d.ProcessGroup):  # type: ignore[misc]
    """A group that is torch's ProcessGroup itself, of any version."""

    def __init__(self, members: Members, timeout: timedelta, on_shutdown: Callable[[], None]) -> None:
        _c10d.ProcessGroup.__init__(self, members.rank, members.size)
        GroupCollectives.__init__(self, members, timeout, on_shutdown)
        self._group_name = self._group_desc = ""

    # Of C++, which would answer by what it was made with

    def getRank(self) -> int:  # noqa: N802
        """As `rank`."""
        return self.rank()

    def getSize(self) -> int:  # noqa: N802
        """As `size`."""
        return self.size()

    # torch keeps these in a C++ backend, and there is none

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Kept here."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """As set."""
        return self._group_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        """As `setGroupName`."""
        self._group_desc = text

    def getGroupDesc(self) -> str:  # noqa: N802
        """As set."""
        return self._group_desc

    # What older versions call some collectives

    _allgather_base = GroupCollectives.all_gather_single
    allgather_into_tensor_coalesced = GroupCollectives.all_gather_single_coalesced
    _reduce_scatter_base = GroupCollectives.reduce_scatter_single
    reduce_scatter_tensor_coalesced = GroupCollectives.reduce_scatter_single_coalesced
    alltoall_base = GroupCollectives.all_to_all_single


class MeshBackend(GroupCollectives, _c10d.Backend):  # type: ignore[misc]
    """A group's collectives behind torch's own ProcessGroup (torch 2.14 and later)."""

    def __init__(self, members: Members, timeout: timedelta, on_shutdown: Callable[[], None]) -> None:
        _c10d.Backend.__init__(self, members.rank, members.size)
        GroupCollectives.__init__(self, members, timeout, on_shutdown)

    def monitored_barrier(self, options: Any, wait_all_ranks: bool = False) -> None:
        """As of `GroupCollectives`; torch hands a Backend its options, and a ProcessGroup the time-out alone."""
        limit = options.timeout
        super().monitored_barrier(limit if limit.total_seconds() > 0 else None, wait_all_ranks)

    def _set_sequence_number_for_group(self) -> None:
        """Operations are numbered as they are called."""

    def _get_sequence_number_for_group(self) -> int:
        """Of the newest operation."""
        return self._operations


def new_group(members: Members, timeout: timedelta, on_shutdown: Callable[[], None]) -> GroupCollectives:
    """A group of the class that this torch wants.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL torch puts a gloo of its own in front of every Backend, which talks past the
    daemons; a ProcessGroup it leaves alone.
    """
    wrapped = dist.get_debug_level() == dist.DebugLevel.DETAIL
    kind = MeshBackend if takes_backends() and not wrapped else MeshProcessGroup
    return kind(members, timeout, on_shutdown)
