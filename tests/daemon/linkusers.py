"""Doubles for both sides of the links: one who uses them and expects nothing, and links that dial nobody."""

from collections.abc import Collection, Mapping
from typing import Any

from meshtraind.peers.links import Link
from meshtraind.transport.connection import Connection


class QuietUser:
    """Of links on which hellos are all that is said."""

    def chunk_announced(self, conn: Connection, header: object) -> str:
        raise AssertionError

    def chunk_received(self, conn: Connection, header: object) -> None:
        raise AssertionError

    def notice(self, conn: Connection, header: object, body: object) -> None:
        raise AssertionError

    async def request(self, conn: Connection, header: object, body: object, emit: object) -> Any:
        raise AssertionError

    def lost(self, conn: Connection, reason: str) -> None:
        pass

    def link_made(self, link: Link) -> None:
        pass

    def was_away(self) -> None:
        pass

    def peer_gone(self, device: str, incarnation: int) -> None:
        pass

    def violated(self, device: str, reason: str) -> None:
        pass


class DialsNobody:
    """What jobs see of links that are not there."""

    unlinkable: Mapping[str, str] = {}
    away: Mapping[str, str] = {}

    def await_devices(self, devices: Collection[str]) -> None:
        pass
