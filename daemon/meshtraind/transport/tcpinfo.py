"""What the kernel knows of a TCP socket."""

import socket
import struct

_BYTES_SENT = struct.Struct("200xQ")  # place of tcpi_bytes_sent in Linux's struct tcp_info (since 4.19)


def kernel_bytes_sent(sock: socket.socket | None) -> int | None:
    """Bytes sent, TLS and retransmissions included; None where the system does not say, or the socket is gone."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT.size)
    except OSError:
        return None
    if len(info) < _BYTES_SENT.size:
        return None
    (count,) = _BYTES_SENT.unpack_from(info)
    return int(count)
