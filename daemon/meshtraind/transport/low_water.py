"""Has the kernel wake a process for a part of a chunk, and not for each packet of it.

A slow link brings packets one by one. Each that wakes this process costs it as much as 16 KiB do that come together:
the event loop's turn, a read, TLS that finds no whole record. While more of a chunk is to come than that, the kernel is
told to say nothing before so much is there (SO_RCVLOWAT), and it acknowledges packets all the same. Linux alone was
tried.
"""

import socket
import sys

from meshtraind.transport.tcp_socket import is_tcp

LOW_WATER_BYTES = 16 * 1024
# TLS holds what is no whole record yet: a byte that is missing here may have left the kernel, as a part of one.
RECORD_BYTES_MAX = 18 * 1024


class LowWater:
    """Of one connection. `sock`: None: it is of another kind, and each byte wakes."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._sock = sock if sys.platform == "linux" and is_tcp(sock) else None
        self._set_bytes = 1

    def expect(self, left_bytes: int) -> None:
        """So much of a frame has not been read: its last record, and whatever comes behind it, wakes at once."""
        level = LOW_WATER_BYTES if left_bytes >= LOW_WATER_BYTES + RECORD_BYTES_MAX else 1
        if level == self._set_bytes or self._sock is None:
            return
        self._set_bytes = level
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, level)
        except OSError:  # the socket is gone: its owner hears of that
            self._sock = None
