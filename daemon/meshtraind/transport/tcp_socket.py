"""What a socket is, and what the kernel tells of its connection: asked alike by all who set or read its options."""

import socket
import struct
from typing import Any, TypeGuard


def is_tcp(sock: socket.socket | None) -> TypeGuard[socket.socket]:
    """Whether it has the options of TCP: not where it is a Unix socket, or the transport has none."""
    return sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6)


def tcp_info(sock: socket.socket | None, fields: struct.Struct) -> tuple[Any, ...] | None:
    """These fields of Linux's struct tcp_info; None where the system does not tell them, or the socket is gone."""
    if not is_tcp(sock) or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, fields.size)
    except OSError:
        return None
    return fields.unpack_from(info) if len(info) >= fields.size else None
