"""Which congestion control a link uses: BBR where the system lets it, which loses no speed to frames that WiFi drops.

Cubic and Reno take every loss for a full queue and halve their rate; at 2 % of losses they leave a third of the link
unused. BBR (Cardwell and others, ACM Queue 2016) sends at the rate that it measures, and keeps the router's queue
short, which a neighbour's call feels. Linux has it as a module that users may choose where
`net.ipv4.tcp_allowed_congestion_control` names it.
"""

import contextlib
import socket

from meshtraind.transport.tcp_socket import is_tcp

BBR = b"bbr"
_NAME_BYTES = 16  # TCP_CA_NAME_MAX


def prefer_bbr(sock: socket.socket | None) -> str | None:
    """Asks for BBR; the system's own choice stays where it has none for us. Returns what is in use, None if unknown."""
    if not is_tcp(sock) or not hasattr(socket, "TCP_CONGESTION"):
        return None
    with contextlib.suppress(OSError):  # no such module, or not for users: what is in use is told below
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BBR)
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode()
