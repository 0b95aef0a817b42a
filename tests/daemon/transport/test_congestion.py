"""Links ask for BBR where the system offers it, and leave the system's choice where it does not."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtraind.transport.congestion import prefer_bbr

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.socket() as made:
        yield made


@pytest.mark.skipif(
    not ALLOWED.exists() or "bbr" not in ALLOWED.read_text(encoding="ascii").split(), reason="this system offers no BBR"
)
def test_a_link_uses_bbr_where_users_may_choose_it(sock: socket.socket) -> None:
    assert prefer_bbr(sock) == "bbr"
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr"


@pytest.mark.skipif(not DEFAULT.exists(), reason="Linux names its congestion control")
def test_the_systems_choice_stays_where_there_is_no_bbr(sock: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtraind.transport.congestion.BBR", b"no such module")
    assert prefer_bbr(sock) == DEFAULT.read_text(encoding="ascii").strip()


def test_what_is_no_tcp_socket_has_none() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert prefer_bbr(one) is None
    assert prefer_bbr(None) is None
