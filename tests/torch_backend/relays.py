"""Relays of several ranks in one process, with a router in the place of their daemons and links."""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from meshtrain.torch_backend.operation import Members, Operation
from meshtrain.torch_backend.relay import Relay
from meshwire.frames.header import GROUP_ENDS, Header, Kind, control_frames
from meshwire.frames.parser import ChunkAnnounced, ChunkReceived, ControlReceived, FrameParser
from meshwire.messages.envelope import Envelope, Role, decode, encode
from meshwire.messages.group import GroupBegin, GroupWelcome, MemberLost
from meshwire.messages.job import JobSpec, Member

JOB = "1kx3000000aa"
T = TypeVar("T")


class Router:
    """Passes frames on, as daemons do: it always reads, and holds what an end does not take yet."""

    def __init__(self, size: int) -> None:
        pairs = [socket.socketpair() for _ in range(size)]
        self.ends = [pair[0] for pair in pairs]
        self.others = [pair[1] for pair in pairs]
        self._queues: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in pairs]
        self._writers = [threading.Thread(target=self._write, args=(rank,)) for rank in range(size)]
        self._readers = [threading.Thread(target=self._route, args=(rank,)) for rank in range(size)]
        for thread in (*self._writers, *self._readers):
            thread.start()

    def _write(self, rank: int) -> None:
        with contextlib.suppress(OSError):
            while (data := self._queues[rank].get()) is not None:
                self.others[rank].sendall(data)
            self.others[rank].shutdown(socket.SHUT_RDWR)

    def _route(self, rank: int) -> None:
        parser, place, instance = FrameParser(), memoryview(b""), 0
        with contextlib.suppress(OSError):
            while count := self.others[rank].recv_into(parser.buffer()):
                event = parser.received(count)
                while event is not None:
                    match event:
                        case ChunkAnnounced(header):
                            place = memoryview(bytearray(header.payload_bytes))
                            event = parser.land(place)
                        case ChunkReceived(header):
                            self._pass(rank, header.contributors.bit_length() - 1, header.round, bytes(place))
                            event = None
                        case ControlReceived(_, payload):
                            envelope = decode(payload)
                            assert isinstance(envelope, Envelope)
                            if isinstance(envelope.body, GroupBegin):
                                instance = envelope.body.instance
                            event = None
                        case _:
                            event = None
        for other in range(len(self.ends)):
            if other != rank and instance:
                self._pass(rank, other, instance, b"its script has ended", GROUP_ENDS)
        self._queues[rank].put(None)

    def _pass(self, rank: int, to: int, instance: int, payload: bytes, step: int = 0) -> None:
        header = Header(Kind.RELAYED, len(payload), job=1, round=instance, step=step, contributors=1 << rank)
        self.write(to, header.encode() + payload)

    def write(self, to: int, data: bytes) -> None:
        """Sends bytes to a relay."""
        self._queues[to].put(data)

    def lose(self, rank: int, lost: int, reason: str) -> None:
        """Tells a relay that a member is gone."""
        self.write(rank, control_frames(encode(Envelope(Role.NOTICE, 0, MemberLost(rank=lost, reason=reason)))))

    def close(self) -> None:
        """Ends all."""
        for end in self.others:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for waiting in self._queues:
            waiting.put(None)
        for thread in (*self._writers, *self._readers):
            thread.join(5.0)
        for end in self.others:
            end.close()


@contextlib.contextmanager
def relays(size: int, spec: JobSpec, instance: int | None = 7) -> Iterator[tuple[list[Relay], Router]]:
    """So many, in one world; None: in none yet."""
    router = Router(size)
    members = tuple(Member(device=f"{rank:064x}", incarnation=1, name=f"n{rank}") for rank in range(size))
    made = []
    try:
        for rank, end in enumerate(router.ends):
            parser = FrameParser()
            parser.long_messages = True
            made.append(Relay(end, GroupWelcome(spec=spec, rank=rank, members=members), parser))
        for relay in made:
            if instance is not None:
                relay.begin(instance)
        yield made, router
    finally:
        for relay in made:
            relay.close()
        router.close()


def everywhere(
    made: list[Relay], run: Callable[[int, Operation], T], number: int = 1, timeout_s: float = 10.0
) -> list[T]:
    """Runs one operation on every rank, each in a thread. Raises what the first that fails raises."""
    ranks = tuple(range(len(made)))
    results: list[Any] = [None] * len(made)
    errors: list[BaseException] = []

    def on(rank: int) -> None:
        op = Operation(Members(made[rank], "world", ranks, rank, made[rank].instance), number, "test", timeout_s)
        try:
            results[rank] = run(rank, op)
        except BaseException as error:
            op.give_up()
            errors.append(error)

    threads = [threading.Thread(target=on, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    if errors:
        raise errors[0]
    return results
