"""TCP addresses of daemons as people type them and as messages carry them."""

import ipaddress
import re
from typing import Annotated, Self

from pydantic import Field, field_validator

from meshwire import limits
from meshwire.message_base import Wire

# Unassigned by IANA, and below the range from which Linux (32768) and others (49152) take ports for outgoing
# connections, so that no such connection can hold it when the daemon starts.
DEFAULT_PORT = 29610

_ZONE = re.compile(r"[A-Za-z0-9_-]{1,15}(\.[0-9]{1,4})?")
_HOST_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


def _checked_host(host: str) -> str:
    """The canonical form of an IP address or host name. Raises ValueError."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        zone = address.scope_id if isinstance(address, ipaddress.IPv6Address) else None
        if zone is not None and not _ZONE.fullmatch(zone):  # ipaddress takes any text for a zone
            raise ValueError(f"{host[:80]!r}: after the % there must be the name or number of a network interface")
        return str(address)
    name = host.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > limits.HOST_CHARS_MAX or not all(_HOST_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{host[:80]!r} is neither an IP address nor a host name")
    if labels[-1].isdigit():
        raise ValueError(f"{host!r} is not a complete IPv4 address; it needs four numbers from 0 to 255")
    return name


def split_host_port(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Parses `HOST[:PORT]` or `[IPV6][:PORT]` to (canonical host, port 0..65535).

    Port 0 has a meaning only where one listens. Raises ValueError with what to write instead.
    """
    text = text.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text[:80]!r}: write an IPv6 address as [ADDRESS] or [ADDRESS]:PORT")
        if ":" not in host:
            raise ValueError(f"{text[:80]!r}: brackets are for IPv6 addresses only; write {host[:80]}{rest[:8]}")
        port_text = rest[1:] if rest else None
    elif text.count(":") > 1:
        raise ValueError(f"{text[:80]!r}: put an IPv6 address into brackets, as in [fd00::2]:{default_port}")
    else:
        host, colon, after = text.partition(":")
        port_text = after if colon else None
    if not host:
        raise ValueError(f"{text[:80]!r} has no host; write HOST or HOST:PORT, as in 192.168.1.20:{default_port}")
    if port_text is None:
        return _checked_host(host), default_port
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and int(port_text) <= 65535):
        raise ValueError(f"{text[:80]!r}: the port after the colon must be a number up to 65535")
    return _checked_host(host), int(port_text)


def same_host(one: str, other: str) -> bool:
    """Whether the two IP addresses of a connection's ends are of one machine: they are equal, or both loopback."""
    return one == other or (ipaddress.ip_address(one).is_loopback and ipaddress.ip_address(other).is_loopback)


class Address(Wire):
    """A TCP address of a daemon: canonical IP address or host name, and port. Hashable."""

    host: Annotated[str, Field(min_length=1, max_length=limits.HOST_CHARS_MAX)]
    port: Annotated[int, Field(ge=1, le=65535)]

    @field_validator("host")
    @classmethod
    def _canonical(cls, host: str) -> str:
        return _checked_host(host)

    @classmethod
    def parse(cls, text: str, default_port: int = DEFAULT_PORT) -> Self:
        """Parses `HOST[:PORT]`, IPv6 in brackets. Raises ValueError."""
        host, port = split_host_port(text, default_port)
        if port == 0:
            raise ValueError(f"{text[:80]!r}: port 0 cannot be dialled; leave it out to use {default_port}")
        return cls(host=host, port=port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The IP address, or None for a host name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def is_loopback(self) -> bool:
        ip = self.ip
        return self.host == "localhost" if ip is None else ip.is_loopback

    @property
    def is_link_local(self) -> bool:
        ip = self.ip
        return ip is not None and ip.is_link_local
