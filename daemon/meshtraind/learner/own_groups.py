"""Where the scripts of a job with `submit --engine torchrun` meet (P9): rank 0's address and port, and the interface.

Torch's own store and gloo carry what they exchange, and not the daemons.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from meshtraind.peers.interfaces import interface_of
from meshtraind.storage.cleanup import DATA
from meshtraind.storage.fetch import output_folder
from meshtraind.storage.job_record import Job
from meshtraind.trust.pairing_channel import canonical_ip
from meshwire.memory_layout.shared_slots import SCRIPT_DATA_VARIABLE, SCRIPT_OUTPUT_VARIABLE, SCRIPT_SEED_VARIABLE
from meshwire.peer_news import joined

GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
ALONE = "127.0.0.1"


class NoMeetingError(Exception):
    """The scripts could not find each other; the text says why and what to do."""


class HostsOfLink(Protocol):
    """A link, as far as the addresses of its two ends go. `Connection` is one."""

    @property
    def remote_host(self) -> str | None:
        """IP address of the other end."""

    @property
    def local_host(self) -> str | None:
        """IP address of this end."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a script finds the others.

    Attributes:
        address: of rank 0's device, as this one reaches it; of its own, there.
        port: on which rank 0's script listens.
        interface: by which gloo of this device is to be reached; None: nothing is said, for it is alone, or the job's
            owner has named one.
    """

    address: str
    port: int
    interface: str | None


def free_port() -> int:
    """A port of this device that nobody listens on now. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def meet(job: Job, links: Mapping[int, HostsOfLink]) -> Meeting:
    """Where the script of this device meets those of the others.

    Args:
        links: to each other member, by rank.

    Raises NoMeetingError where they have no way to each other.
    """
    if job.port is None:
        raise NoMeetingError("nobody has told on which port rank 0 listens: submit the job again")
    others = [rank for rank in range(len(job.members)) if rank != job.rank]
    if missing := [job.members[rank].name for rank in others if rank not in links]:
        raise NoMeetingError(f"{joined(missing)} was lost before the scripts began: submit the job again")
    if not others:
        return Meeting(ALONE, job.port, None)
    looked_at = others if job.rank == 0 else [0]
    own = {rank: _host(links[rank].local_host) for rank in looked_at}
    address = own[looked_at[0]] if job.rank == 0 else _host(links[0].remote_host)
    return Meeting(address, job.port, _interface(job, own))


def _interface(job: Job, own: Mapping[int, str]) -> str | None:
    """The one with this device's addresses on its links to these ranks."""
    if GLOO_INTERFACE_VARIABLE in dict(job.spec.env):
        return None
    found = {rank: interface_of(address) for rank, address in own.items()}
    for rank, name in found.items():
        if name is None:
            raise NoMeetingError(
                f"no interface of this device has the address {own[rank]} any more, by which it is linked with "
                f"{job.members[rank].name}: submit the job again, or name the interface with -e "
                f"{GLOO_INTERFACE_VARIABLE}=NAME"
            )
    names = {name for name in found.values() if name is not None}
    if len(names) > 1:
        ways = joined([f"{job.members[rank].name} by {name}" for rank, name in found.items()])
        raise NoMeetingError(
            f"gloo uses one interface, and this device is linked with {ways}: put all on one network, leave some out "
            f"(--on), or name the interface, if all have one of that name, with -e {GLOO_INTERFACE_VARIABLE}=NAME"
        )
    return names.pop()


def _host(address: str | None) -> str:
    if address is None:
        raise NoMeetingError("a link has no address any more: submit the job again")
    return canonical_ip(address)


def folders_and_seed(job: Job) -> dict[str, str]:
    """What `mt` asks a daemon for elsewhere: the job's folders, and the seed of the order of samples."""
    told = {
        SCRIPT_OUTPUT_VARIABLE: str(output_folder(job.folder, job.rank).absolute()),
        SCRIPT_SEED_VARIABLE: str(job.spec.seed),
    }
    if job.spec.data is not None:
        told[SCRIPT_DATA_VARIABLE] = str((job.folder / DATA).absolute())
    return told
