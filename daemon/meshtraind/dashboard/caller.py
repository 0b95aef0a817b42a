"""Whose program is at the other end of a connection on this machine."""

import socket
from pathlib import Path

from meshtraind.machine.facts import user_number

TABLE = Path("/proc/self/net/tcp")  # Linux alone has it
OWNER_AT = 7  # column of the user's number


def is_another_user(client: tuple[str, int], server: tuple[str, int], table: Path = TABLE) -> bool:
    """Whether the system says that the client's socket belongs to another user than this process does.

    A one-time token stands in the command line of the browser that is opened with it, which every user of a machine can
    read there.
    """
    if not table.exists():
        return False
    wanted = (_in_hex(client), _in_hex(server))
    for line in table.read_text("ascii").splitlines()[1:]:
        columns = line.split()
        if (columns[1], columns[2]) == wanted:
            return int(columns[OWNER_AT]) != user_number()
    return True  # it is gone already, or this is no socket of this machine


def _in_hex(address: tuple[str, int]) -> str:
    number = int.from_bytes(socket.inet_aton(address[0]), "little")
    return f"{number:08X}:{address[1]:04X}"
