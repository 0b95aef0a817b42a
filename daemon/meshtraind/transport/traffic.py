"""What a connection has sent, in bytes."""

import asyncio
from typing import Literal

from meshtraind.transport.tcpinfo import kernel_bytes_sent


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
        """While the socket is there; afterwards what was known last stays."""
        count = kernel_bytes_sent(transport.get_extra_info("socket"))
        if count is not None:
            self._kernel_bytes = count

    def socket_bytes(self) -> tuple[int, Literal["kernel", "link"]]:
        """As the kernel counts them (TLS, retransmissions), else of our frames only."""
        if self._kernel_bytes is not None:
            return self._kernel_bytes, "kernel"
        return self.frame_bytes, "link"
