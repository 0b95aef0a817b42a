"""One collective operation's messages: among the ranks of its group, on a channel of its own, until its deadline."""

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import torch

from meshtrain.torch_backend.relay import WORLD_IS_OVER, GroupError, MessageTransfer, Relay


@dataclass(frozen=True)
class Members:
    """The ranks of a group, in one world.

    Attributes:
        name: of the group, equal on all.
        ranks: of the job, by rank of the group.
        rank: one's own in the group.
        instance: of the world that the group is of.
        numbers: of its operations, each of which takes the next one; callbacks take theirs in other threads.
    """

    relay: Relay
    name: str
    ranks: tuple[int, ...]
    rank: int
    instance: int
    numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1), compare=False, repr=False)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)

    def check(self) -> None:
        """Raises GroupError where another world has begun since."""
        if self.relay.instance != self.instance:
            raise GroupError(WORLD_IS_OVER)

    def channel(self, *what: object) -> int:
        """A channel's number: equal on all ranks, and another one for everything else."""
        text = "/".join(map(str, (self.name, self.instance, self.ranks, *what)))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Operation:
    """What one rank says and hears in one collective.

    Args:
        number: of the collective in its group, equal on all ranks.
        what: as errors call it.
    """

    def __init__(self, members: Members, number: int, what: str, timeout_s: float) -> None:
        self.members = members
        self.what = what
        self.rank, self.size = members.rank, members.size
        self._channel = members.channel("collective", number)
        self._deadline_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._open: list[MessageTransfer] = []

    def send(self, peer: int, tensor: torch.Tensor) -> MessageTransfer:
        """Sends the values of a contiguous tensor, which stay unchanged until the transfer has ended."""
        members, index = self.members, self._sent[peer]
        transfer = members.relay.send(
            members.ranks[peer], self._channel, index, as_bytes(tensor), members.ranks, members.instance
        )
        self._sent[peer] += 1
        self._open.append(transfer)
        return transfer

    def receive(self, peer: int, tensor: torch.Tensor) -> MessageTransfer:
        """Receives values into a contiguous tensor."""
        members, index = self.members, self._received[peer]
        transfer = members.relay.receive(
            members.ranks[peer], self._channel, index, as_bytes(tensor), members.ranks, members.instance
        )
        self._received[peer] += 1
        self._open.append(transfer)
        return transfer

    def wait(self, transfer: MessageTransfer) -> None:
        """Raises GroupError, which names the other end."""
        assert transfer.rank is not None
        peer = self.members.relay.name(transfer.rank)
        transfer.wait(self._deadline_s, f"Timed out after {self._timeout_s:g} s, waiting for {peer}")

    @property
    def left_s(self) -> float:
        """Until its deadline."""
        return self._deadline_s - time.monotonic()

    def finish(self) -> None:
        """Waits for all that is open. Raises GroupError."""
        for transfer in self._open:
            self.wait(transfer)

    def give_up(self) -> None:
        """What is open is not waited for any more."""
        for transfer in self._open:
            self.members.relay.cancel(transfer)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
