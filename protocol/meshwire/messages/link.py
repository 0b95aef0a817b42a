"""Messages between two daemons about the link itself."""

from typing import Annotated

from pydantic import Field

from meshwire import limits
from meshwire.addresses import Address
from meshwire.message_base import DeviceId, Name, Wire
from meshwire.messages.envelope import message

Version = Annotated[str, Field(max_length=64)]


class Software(Wire):
    """What a device runs; a difference that can break a run is named at submit."""

    meshtrain: Version
    python: Version
    torch: Version | None  # None: it could run no learner
    system: Version  # e.g. "Linux x86_64"


@message("hello")
class Hello(Wire):
    """First message in both directions, after the pinned handshake. Its frame says which wire version it is (W6)."""

    incarnation: Annotated[int, Field(ge=0, lt=2**63)]  # random per daemon start (G1)
    name: Name
    listen_port: Annotated[int, Field(ge=0, lt=65536)]
    software: Software
    cores: Annotated[int, Field(ge=0)]
    memory_bytes: Annotated[int, Field(ge=0)]
    hub: bool = False  # it runs no learner, as its owner has said (H1)
    machine: Annotated[str, Field(max_length=32)] = ""
    """Of the running system: daemons with the same one share its cores (M3). Empty where nobody can tell."""


@message("refuse")
class Refuse(Wire):
    """The link will be closed, and why; for a person to read."""

    reason: Annotated[str, Field(max_length=limits.REFUSAL_CHARS_MAX)]


@message("heartbeat")
class Heartbeat(Wire):
    """Sent in every interval. A request, so that its reply measures the round trip; a notice while that is awaited."""


class KnownPeer(Wire):
    """Where a device was last reachable. A candidate, never an identity."""

    device: DeviceId
    addresses: Annotated[tuple[Address, ...], Field(max_length=limits.ADDRESSES_PER_PEER_MAX)]


@message("addresses")
class Addresses(Wire):
    """Gossip: one reachable peer is enough to find all others."""

    peers: Annotated[tuple[KnownPeer, ...], Field(max_length=limits.PEERS_MAX)]


class Introduction(Wire):
    """A device that was paired with the sender by a code. Its id is the hash of the certificate (K2)."""

    certificate_der: Annotated[bytes, Field(min_length=1, max_length=limits.CERTIFICATE_BYTES_MAX)]
    name: Name
    addresses: Annotated[tuple[Address, ...], Field(max_length=limits.ADDRESSES_GOSSIPED_PER_PEER_MAX)]


@message("introductions")
class Introductions(Wire):
    """Notice: all whom the sender introduces (K1), anew whenever they change.

    `removed`: by a person, there. People are told of it, and nobody obeys it (K5).
    """

    devices: Annotated[tuple[Introduction, ...], Field(max_length=limits.INTRODUCTIONS_MAX)]
    removed: Annotated[tuple[DeviceId, ...], Field(max_length=limits.REMOVALS_TOLD_MAX)] = ()


@message("ask.linked")
class AskLinked(Wire):
    """Request: with which devices there is a link now. Reply: `LinkedDevices`."""


@message("linked")
class LinkedDevices(Wire):
    """Reply: the devices that could take part in a job together with the one that answers."""

    devices: Annotated[tuple[DeviceId, ...], Field(max_length=limits.PEERS_MAX)]


@message("ask.machine")
class AskMachine(Wire):
    """Request: how the other device's machine is now, for a person who looks at it. Reply: `MachineState`."""


@message("machine")
class MachineState(Wire):
    """Reply. What a machine does not tell is None, and so is `busy` the first time.

    Attributes:
        busy: the part of its processor that was in use since this was asked last, 0 to 1.
        battery: how full its battery is, 0 to 1.
        plugged: whether it takes its power from outside.
    """

    busy: Annotated[float, Field(ge=0, le=1)] | None = None
    celsius: Annotated[float, Field(ge=-limits.CELSIUS_MAX, le=limits.CELSIUS_MAX)] | None = None
    battery: Annotated[float, Field(ge=0, le=1)] | None = None
    plugged: bool | None = None
