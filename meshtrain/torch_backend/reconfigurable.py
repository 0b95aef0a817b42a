"""A process group that goes on with the ranks that are left (torch 2.14 and later, `enable_reconfigure=True`).

torch calls it reconfiguration: every process has a handle, scripts tell each other theirs, by whatever means, and then
name those that are to go on together. This adds that one is told when a member is lost, by name, and need not find out.
"""

from collections.abc import Collection
from hashlib import blake2b
from random import SystemRandom
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from meshtrain.torch_backend import collectives
from meshtrain.torch_backend.operation import Members, Operation
from meshtrain.torch_backend.process_group import MeshProcessGroup
from meshtrain.torch_backend.relay import GroupError, Relay
from meshtrain.torch_backend.work import GroupWork

PREFIX = "meshtrain"  # of a handle
RECONFIGURATIONS_MAX = 65_536  # of one process: each one's number is remembered
NUMBER_MAX = 2**32 - 1
WHAT = "reconfigure"


class GroupOwner(Protocol):
    """Whoever keeps what a process has of its groups: `World`."""

    def close(self) -> None:
        """The group was destroyed."""

    def members_changed(self, ranks: tuple[int, ...]) -> None:
        """The job's ranks of the members, by their ranks in the group."""


class ProcessHandle(NamedTuple):
    """A process that can be a member: its rank in the job, and the number that tells it from others of that rank."""

    job: str
    rank: int
    process: int

    @property
    def text(self) -> str:
        """As torch and scripts pass it on."""
        return f"{PREFIX}/{self.job}/{self.rank}/{self.process}"

    @classmethod
    def parse(cls, text: str, relay: Relay) -> "ProcessHandle":
        """Raises dist.DistBackendError where it is not of a process of this job."""
        prefix, *rest = text.split("/")
        job = relay.welcome.spec.job
        if prefix == PREFIX and len(rest) == 3 and rest[0] == job and rest[1].isdecimal() and rest[2].isdecimal():
            rank, process = int(rest[1]), int(rest[2])
            if rank < len(relay.welcome.members) and 1 <= process <= NUMBER_MAX:
                return cls(job, rank, process)
        raise dist.DistBackendError(f"{WHAT}: {text!r} is no handle of a process of job {job}")


class ReconfigurableGroup(MeshProcessGroup):
    """The default group of a script that goes on when it loses ranks: it has members from the first `reconfigure` on.

    Args:
        relay: which has begun no instance.
        options: torch's, of the group.
    """

    def __init__(
        self,
        relay: Relay,
        options: Any,
        owner: GroupOwner,
    ) -> None:
        nobody_yet = Members(relay, options.group_id, tuple(range(options.group_size)), options.group_rank, 0)
        super().__init__(nobody_yet, options.timeout, owner.close)
        self._relay = relay
        self._owner = owner
        self._used: set[int] = set()
        self._own = ProcessHandle(
            relay.welcome.spec.job, relay.welcome.rank, SystemRandom().randrange(1, NUMBER_MAX + 1)
        )
        relay.join(self._own.process)

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        """This process's: it stays the same."""
        return self._own.text

    def get_error(self) -> Any:
        """Errors are told by what waits."""
        return dist.distributed_c10d.ErrorType.SUCCESS  # type: ignore[attr-defined]

    def abort(self) -> None:
        """What is pending, and what is called from now on, ends by an error, until the next `reconfigure`."""
        self._relay.revoke("the process group was aborted: call torch.distributed's _reconfigure")

    def reconfigure(self, options: Any) -> GroupWork:
        """From now on the group is of the processes of these handles; it has begun when all of them have called this.

        All that is pending ends by an error, and subgroups are to be made again. Equal numbers and handles make the
        same instance on all ranks: nobody is asked for it.

        Args:
            options: torch's ReconfigureOptions: uuid, handles (a list by rank, or a set), timeout, hints (none).

        Raises dist.DistBackendError.
        """
        members = self._members_of(options.handles)
        if options.uuid in self._used:
            raise dist.DistBackendError(f"{WHAT}: the uuid {options.uuid} was already used: each one is of one world")
        if len(self._used) == RECONFIGURATIONS_MAX:
            raise dist.DistBackendError(f"{WHAT}: more than {RECONFIGURATIONS_MAX} times in one process")
        self._used.add(options.uuid)
        instance = _instance(options.uuid, members)
        ranks = tuple(member.rank for member in members)
        self._relay.revoke("the process group was reconfigured")
        self._worker.close()  # what waited in it has ended by that, and must not be taken for the next world's
        self._relay.begin_next(instance, {member.rank: member.process for member in members})
        self._members = Members(self._relay, self._members.name, ranks, members.index(self._own), instance)
        self._sent.clear()
        self._worker = self._new_worker()
        self._owner.members_changed(ranks)
        return self._start(WHAT, [], self._meet, options)

    def _meet(self, op: Operation) -> None:
        try:
            collectives.barrier(op)
        except GroupError as error:
            self._relay.revoke(f"{WHAT} has failed: {error}")
            raise

    def _members_of(self, handles: Collection[str]) -> tuple[ProcessHandle, ...]:
        """By their ranks in the group. A set has no order: then by their ranks in the job."""
        members = [ProcessHandle.parse(handle, self._relay) for handle in handles]
        if not isinstance(handles, list | tuple):
            members.sort()
        if self._own not in members:
            raise dist.DistBackendError(f"{WHAT}: this process's handle, {self._own.text!r}, is not among those given")
        if len({member.rank for member in members}) != len(members):
            raise dist.DistBackendError(f"{WHAT}: two handles of one rank: {', '.join(handles)}")
        return tuple(members)


def _instance(uuid: int, members: tuple[ProcessHandle, ...]) -> int:
    """The number of a world: equal on all its members, and another one for any other."""
    text = "/".join((str(uuid), *(member.text for member in members)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") % NUMBER_MAX + 1
