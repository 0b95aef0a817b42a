"""What a connection has sent, in bytes, as the kernel counts them where it does."""

import asyncio
import socket
import struct
from typing import Literal

from meshtraind.transport.tcp_socket import tcp_info

_BYTES_SENT = struct.Struct("200xQ")  # place of tcpi_bytes_sent in Linux's struct tcp_info (since 4.19)


class Traffic:
    """Counts the bytes that one connection has sent.

    Attributes:
        frame_bytes: headers and what followed them.
        chunk_payload_bytes: of chunk frames, without their headers, as they travelled.
    """

    def __init__(self) -> None:
        self.frame_bytes = 0
        self.chunk_payload_bytes = 0
        self._kernel_bytes: int | None = None

    def ask_kernel(self, transport: asyncio.Transport) -> None:
        """Asks the kernel while the socket is there; afterwards what was known last stays."""
        count = kernel_bytes_sent(transport.get_extra_info("socket"))
        if count is not None:
            self._kernel_bytes = count

    def socket_bytes(self) -> tuple[int, Literal["kernel", "link"]]:
        """How many bytes were sent, as the kernel counts them (TLS, retransmissions), else of our frames only."""
        if self._kernel_bytes is not None:
            return self._kernel_bytes, "kernel"
        return self.frame_bytes, "link"


def kernel_bytes_sent(sock: socket.socket | None) -> int | None:
    """Bytes sent, TLS and retransmissions included; None where the system does not say, or the socket is gone."""
    told = tcp_info(sock, _BYTES_SENT)
    return None if told is None else int(told[0])
