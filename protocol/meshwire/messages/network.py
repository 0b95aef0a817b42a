"""What a daemon sees of the network, for `meshtrain doctor`, on the local endpoint."""

from typing import Annotated, Literal

from pydantic import Field

from meshwire import limits
from meshwire.addresses import Address
from meshwire.message_base import DeviceId, Name, Wire
from meshwire.messages.envelope import message
from meshwire.messages.job import Text


@message("get.network")
class GetNetwork(Wire):
    """Request. Reply: `NetworkView`."""


class DeviceSeen(Wire):
    """Another device, where it may be, and why there is no link to it."""

    device: DeviceId
    name: Name
    state: Literal["linked", "paired", "waiting", "seen"]  # as of `PeerSummary`
    addresses: Annotated[tuple[Address, ...], Field(max_length=limits.ADDRESSES_PER_PEER_MAX)]  # the likeliest first
    announced_version: int | None = None  # the wire version in its announcement; None: mDNS does not show it
    refused: Text | None = None  # of a paired one that answers: why there is no link
    dial_failed: Text | None = None  # how the newest dial to it ended, since it was linked last


@message("network")
class NetworkView(Wire):
    """Reply to `GetNetwork`."""

    host: Text  # that the listener is bound to; 0.0.0.0: all
    port: Annotated[int, Field(ge=0, le=65535)]
    mdns: bool  # False: up was told --no-mdns
    interfaces: tuple[Text, ...]  # that this device is announced on or, without mDNS, may be reached at
    devices: tuple[DeviceSeen, ...]
