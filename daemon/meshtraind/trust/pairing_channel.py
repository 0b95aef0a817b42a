"""Pairing's frames on a stream: two bytes of length, then one msgpack map, checked before it is used."""

import asyncio
import ipaddress
from typing import TypeVar

import msgpack
from pydantic import ValidationError

from meshtraind.trust.pairing_proof import Profile, Proof
from meshwire import limits
from meshwire.message_base import Wire, what_is_wrong

PairingFrame = TypeVar("PairingFrame", bound=Wire)

_LENGTH_BYTES = 2


class PairingFrameError(Exception):
    """The other end does not keep to the protocol."""


async def send(writer: asyncio.StreamWriter, body: Wire) -> None:
    packed = body.pack()
    writer.write(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed)
    await writer.drain()


async def receive(reader: asyncio.StreamReader, kind: type[PairingFrame]) -> PairingFrame:
    return loaded(kind, await receive_plain(reader))


async def receive_plain(reader: asyncio.StreamReader) -> object:
    """Reads one frame's msgpack. Raises PairingFrameError, asyncio.IncompleteReadError, OSError."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > limits.PAIRING_FRAME_BYTES_MAX:
        raise PairingFrameError(f"a frame of {length} bytes, at most {limits.PAIRING_FRAME_BYTES_MAX} are allowed")
    return _unpacked(await reader.readexactly(length))


def _unpacked(packed: bytes) -> object:
    try:
        plain: object = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise PairingFrameError(f"not msgpack: {error}") from error
    return plain


def loaded(kind: type[PairingFrame], plain: object) -> PairingFrame:
    try:
        return kind.load(plain)
    except ValidationError as error:
        raise PairingFrameError(f"not a valid {kind.__name__}: {what_is_wrong(error)}") from error


def profile_of(proof: Proof) -> Profile:
    return loaded(Profile, _unpacked(proof.profile))


def canonical_ip(text: str) -> str:
    """An IPv4 address that came through an IPv6 socket in its own form."""
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
