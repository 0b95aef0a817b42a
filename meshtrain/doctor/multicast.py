"""Asks the network for daemons by multicast DNS (RFC 6762), as a daemon does, and a single laptop by itself.

What comes back is from anybody: it says where somebody answers, and never who that is.
"""

import contextlib
import errno
import ipaddress
import select
import socket
import struct
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass

from meshtrain.doctor.facts import Hearing
from meshwire import limits
from meshwire.text import printable

SERVICE_TYPE = "_meshtrain._tcp.local."
GROUP, PORT = "224.0.0.251", 5353
LISTEN_S = 2.5
LISTEN_S_MIN = 0.5  # also where all that are awaited have answered
ASK_AGAIN_S = 1.0  # multicast is lost easily on WiFi
ALONE_TIMEOUT_S = 1.5
ALONE_SOCKETS = 4  # two programs may share the port there, and one of them hears each
PACKET_BYTES_MAX = 9000
PTR, TXT, SRV = 12, 16, 33  # types of records
ANSWERS, POINTER = 0x8000, 0xC0  # bits of a header's flags and of a label's length
RECORDS_MAX, LABELS_MAX = 256, 128  # of an honest packet, a few
IP_MULTICAST_ALL = 49  # of Linux: hear only groups that this socket has joined


@dataclass(frozen=True, slots=True)
class Answer:
    """What a daemon announces, as far as it was in one packet from this address."""

    address: str
    device: str | None = None
    name: str | None = None
    port: int | None = None
    wire_version: int | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of asking all on one interface."""

    hearing: Hearing
    answers: tuple[Answer, ...] = ()


def ask_all(interface: str, address: str, awaited: Collection[str] = ()) -> Heard:
    """Asks on one interface which daemons there are, and listens for LISTEN_S, or until all of `awaited`, addresses, if
    there are any, have answered.

    Args:
        address: this machine's own there.
    """
    question = _question()
    answers: dict[str, Answer] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        try:
            _join(ear, interface, address)
        except OSError as error:
            return Heard(Hearing.TAKEN if error.errno == errno.EADDRINUSE else Hearing.DEAF)
        began_s = time.monotonic()
        asked, heard_self = 0, False
        while (past_s := time.monotonic() - began_s) < LISTEN_S:
            if past_s >= asked * ASK_AGAIN_S:
                asked += 1
                try:
                    ear.sendto(question, (GROUP, PORT))
                except PermissionError:
                    return Heard(Hearing.FORBIDDEN)
                except OSError:  # no carrier, no route: nothing goes out, and nothing is heard
                    return Heard(Hearing.DEAF)
            if heard_self and awaited and past_s > LISTEN_S_MIN and answers.keys() >= set(awaited):
                break
            if not select.select([ear], [], [], min(asked * ASK_AGAIN_S, LISTEN_S) - past_s)[0]:
                continue
            packet, (source, _) = ear.recvfrom(PACKET_BYTES_MAX)
            if source == address:
                heard_self = True
            elif (answer := parse_answer(packet, source)) is not None and len(answers) < limits.DEVICES_SEEN_MAX:
                answers[source] = answer
    return Heard(Hearing.WELL if heard_self else Hearing.DEAF, tuple(answers.values()))


def ask_alone(address: str) -> bool:
    """Puts the same question to one address alone. Returns whether a daemon answers there."""
    question = _question()
    with contextlib.ExitStack() as stack:
        mouths = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(ALONE_SOCKETS)]
        deadline_s = time.monotonic() + ALONE_TIMEOUT_S
        for mouth in mouths:
            with contextlib.suppress(OSError):  # no way there: then nobody answers, either
                mouth.sendto(question, (address, PORT))
        while (left_s := deadline_s - time.monotonic()) > 0:
            for mouth in select.select(mouths, [], [], left_s)[0]:
                try:
                    packet, (source, _) = mouth.recvfrom(PACKET_BYTES_MAX)
                except OSError:  # an error that an earlier packet has met: nobody listens there
                    continue
                if source == address and parse_answer(packet, source) is not None:
                    return True
    return False


def parse_answer(packet: bytes, source: str) -> Answer | None:
    """What a packet says of a daemon; None: nothing, or it is no answer."""
    try:
        records = _records(packet)
    except (IndexError, struct.error):  # cut off, or made up
        return None
    ours = False
    said: dict[str, str] = {}
    port = None
    for name, kind, data in records:
        ours = ours or name.endswith(SERVICE_TYPE)
        if kind == SRV and name.endswith(f".{SERVICE_TYPE}"):
            port = struct.unpack_from(">HHH", data)[2] if len(data) > 6 else None
        elif kind == TXT and name.endswith(f".{SERVICE_TYPE}") and len(data) <= limits.MDNS_TXT_BYTES_MAX:
            said |= _properties(data)
    if not ours:
        return None
    name_said, number = said.get("name"), said.get("v", "")
    return Answer(
        source,
        said.get("id"),
        None if name_said is None else printable(name_said)[: limits.NAME_CHARS_MAX],
        port or None,
        int(number) if number.isascii() and number.isdigit() and len(number) <= 5 else None,
    )


def _records(packet: bytes) -> list[tuple[str, int, bytes]]:
    """The (name, type, data) of an answer's records (RFC 1035, section 4). Raises IndexError or struct.error."""
    _, flags, questions, *counts = struct.unpack_from(">6H", packet)
    if not flags & ANSWERS:
        return []
    at = 12
    for _ in range(min(questions, RECORDS_MAX)):
        at = _name(packet, at)[1] + 4
    found = []
    for _ in range(min(sum(counts), RECORDS_MAX)):
        name, at = _name(packet, at)
        kind, _, _, length = struct.unpack_from(">HHIH", packet, at)
        at += 10
        found.append((name, kind, packet[at : at + length]))
        at += length
    return found


def _name(packet: bytes, at: int) -> tuple[str, int]:
    """A name in lower case with a dot behind each label, and where what follows it begins. Raises IndexError."""
    labels: list[str] = []
    end = None
    for _ in range(LABELS_MAX):
        length = packet[at]
        if length >= POINTER:
            end = at + 2 if end is None else end
            at = (length & 0x3F) << 8 | packet[at + 1]
        elif length == 0:
            return "".join(f"{label}." for label in labels).lower(), at + 1 if end is None else end
        else:
            labels.append(packet[at + 1 : at + 1 + length].decode(errors="replace"))
            at += 1 + length
    raise IndexError("a name without end")


def _properties(text: bytes) -> dict[str, str]:
    """KEY=VALUE of a TXT record (RFC 6763, section 6.3)."""
    found, at = {}, 0
    while at < len(text):
        end = at + 1 + text[at]
        key, _, value = text[at + 1 : end].partition(b"=")
        found[key.decode(errors="replace")] = value.decode(errors="replace")
        at = end
    return found


def _question() -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in SERVICE_TYPE.rstrip(".").split("."))
    return struct.pack(">6H", 0, 0, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", PTR, 1)


def _join(ear: socket.socket, interface: str, address: str) -> None:
    """Shares the port with the daemon and others, and hears this interface alone. Raises OSError."""
    ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    ear.bind(("", PORT))
    own = ipaddress.IPv4Address(address).packed
    group = ipaddress.IPv4Address(GROUP).packed
    if sys.platform == "linux":
        index = socket.if_nametoindex(interface)
        ear.setsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL, 0)
        member = struct.pack("=4s4si", group, own, index)
        ear.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, struct.pack("=4s4si", bytes(4), own, index))
    else:
        member = group + own
        ear.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
    ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    ear.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
    ear.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
