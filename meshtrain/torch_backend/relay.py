"""Messages from learner to learner, through their daemons: the transport below every collective of a process group.

A message has a channel (which operation it belongs to) and an index on that channel; whoever receives names both, as in
MPI or gloo. Small ones go at once, large ones when the receiver has asked for them (a rendezvous), so that nobody holds
what nobody wants; and of one learner for another at most RELAY_WINDOW_BYTES are under way (P1).
"""

import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from meshtrain.client import Client
from meshtrain.errors import ConnectionLost, UnexpectedReply
from meshtrain.machine import send_some
from meshtrain.train.link.environment import Environment
from meshwire import limits
from meshwire.frames.header import GROUP_BREAKS, GROUP_ENDS, Header, Kind, control_frames
from meshwire.frames.parser import Broken, ChunkAnnounced, ChunkReceived, ControlReceived, Event, FrameParser
from meshwire.jobs.lifecycle import job_number
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, Failure, Role, decode, encode
from meshwire.messages.group import GroupBegin, GroupEnd, GroupWelcome, MemberLost, SignOfLife, StoreAnswer, StoreAsk
from meshwire.messages.learner import Stop
from meshwire.messages.link import Refuse
from meshwire.messages.local import Attach

log = logging.getLogger("meshtrain")

CLOSE_TIMEOUT_S = 2.0  # for the daemon to close its end
ANSWER_GRACE_S = 20.0  # for the way of a store's answer, beyond what it may take itself
PREFIX = struct.Struct("<B3xIQQ")  # what it is, index | channel | bytes in all, or credited
UNASKED_MAX = 65_536  # messages of all ranks that nobody here has asked for, offers and places among them
DATA_BYTES = limits.CHUNK_BYTES - PREFIX.size  # of a message, in one frame
WINDOW_CREDIT_BYTES = limits.RELAY_WINDOW_BYTES // 4  # are given back together
EAGER_CREDIT_BYTES = limits.EAGER_BYTES_MAX // 4
WORLD_IS_OVER = "its ranks are those of before the last _reconfigure: make the group again"


class What(IntEnum):
    """What a relayed frame says."""

    DATA = 1  # a part of a message that was asked for
    EAGER = 2  # a whole small message
    OFFER = 3  # a message of so many bytes waits
    READY = 4  # the receiver has a place for it
    WINDOW = 5  # so many bytes have arrived
    USED = 6  # of so many eager bytes somebody has wanted to know


class MessageAddress(NamedTuple):
    """One message: between this learner and `rank`."""

    rank: int
    channel: int
    number: int


@dataclass(eq=False)
class MessageTransfer:
    """One message that is sent or received.

    Attributes:
        place: what is sent, or where it goes.
        rank: of the other end; None while a receiver takes any.
        moved: bytes.
        error: why it will not end.
        among: the ranks of the collective that it belongs to: if one of them is lost, that cannot end.
    """

    place: memoryview
    rank: int | None
    channel: int
    index: int
    moved: int = 0
    error: str | None = None
    among: tuple[int, ...] = ()
    ended: bool = False
    _event: threading.Event = field(default_factory=threading.Event)

    def wait(self, deadline_s: float, what: str) -> None:
        """Waits until it has ended, at most until then (time.monotonic). Raises GroupError."""
        if not self._event.wait(max(0.0, deadline_s - time.monotonic())):
            raise GroupTimeout(what)
        if self.error is not None:
            raise GroupError(self.error)


class GroupError(Exception):
    """The other end of a transfer is gone, or did not do what was agreed."""


class GroupTimeout(GroupError):
    """It took too long."""


class Relay:
    """The connection of this process to its daemon for process groups, and all messages on it.

    `connect` makes one; `begin` follows once all ranks have agreed on a number for this instance of their world, or
    `join` and then `begin_next`, again and again, where a world is to go on when it has lost a rank. Any thread may
    send and receive; one of its own reads.

    Attributes:
        welcome: who takes part.
        instance: of the world, now; 0 before the first.
    """

    def __init__(self, stream: socket.socket, welcome: GroupWelcome, parser: FrameParser) -> None:
        self.welcome = welcome
        self._stream = stream
        self._parser = parser
        self._number = job_number(welcome.spec.job)
        self._lock = threading.RLock()
        self.instance = 0
        self._past: set[int] = set()  # instances of before
        self._process = 0  # this one's number, where instances follow each other; else 0
        self._processes: Mapping[int, int] = {}  # by rank: whose are in this instance
        self._ended: dict[int, tuple[int, str]] = {}  # by rank: the process that has ended last, and why
        self._lost: dict[int, str] = {}  # members, for good
        self._held: list[tuple[Header, bytes]] = []  # frames of instances that have not begun here
        self._held_bytes = 0
        self._place = memoryview(b"")
        self._revoked: str | None = None
        self._forget()
        self._broken: str | None = None
        self._answers: dict[int, Wire | None] = {}
        self._answered = threading.Condition(self._lock)
        self._next_request = 2  # the first was to attach
        self._reader = threading.Thread(target=self._read, name="meshtrain relay", daemon=True)
        self._reader.start()

    def _forget(self) -> None:
        """Nothing is under way, in either direction: an instance begins."""
        everybody = range(len(self.welcome.members))
        self._window = dict.fromkeys(everybody, limits.RELAY_WINDOW_BYTES)
        self._eager = dict.fromkeys(everybody, limits.EAGER_BYTES_MAX)
        self._arrived = dict.fromkeys(everybody, 0)  # bytes, not yet given back
        self._used = dict.fromkeys(everybody, 0)
        self._unasked = dict.fromkeys(everybody, 0)  # bytes of small messages
        self._sending: dict[int, deque[MessageTransfer]] = {rank: deque() for rank in everybody}
        self._offered: dict[MessageAddress, MessageTransfer] = {}  # sends that wait for READY
        self._asked_for: set[MessageAddress] = set()  # READY came before the send
        self._receiving: dict[MessageAddress, MessageTransfer] = {}
        self._any: dict[int, deque[MessageTransfer]] = {}  # by channel
        self._early: dict[MessageAddress, bytes] = {}  # small messages that nobody has asked for yet
        self._offers: dict[MessageAddress, int] = {}
        self._next_in: dict[tuple[int, int], int] = {}  # of point-to-point channels
        self._gone: dict[int, str] = {}  # whose messages end by this error
        self._failed: dict[int, str] = {}  # of those, who did not leave in order

    @classmethod
    def connect(cls, environment: Environment) -> "Relay":
        """Calls the daemon. Raises ConnectionLost, RequestError, UnexpectedReply."""
        attach = Attach(token=environment.token, role="group", job=environment.job, pid=os.getpid())
        try:
            client, welcome = Client.attach(environment.endpoint, attach)
        except OSError as error:
            raise ConnectionLost(f"the daemon that started this script does not answer: {error}") from error
        if not isinstance(welcome, GroupWelcome):
            client.close()
            raise UnexpectedReply("the process group's call", welcome)
        stream, parser = client.release()
        return cls(stream, welcome, parser)

    def begin(self, instance: int) -> None:
        """All ranks are in this instance of the world, the only one; frames of others are dropped."""
        with self._lock:
            self.instance = instance
            self._send_control(Envelope(Role.NOTICE, 0, GroupBegin(instance=instance)))
            self._take_held()

    def join(self, process: int) -> None:
        """This process is to be in instances that follow each other, and goes on when one of its members is lost.

        Args:
            process: a number that no other process of this job has.
        """
        with self._lock:
            self._process = process
            self._revoked = "this group has no members yet: call torch.distributed's _reconfigure first"
            self._send_control(Envelope(Role.NOTICE, 0, GroupBegin(instance=process, survives_losses=True)))
            self._take_held()

    def begin_next(self, instance: int, processes: Mapping[int, int]) -> None:
        """Another instance begins, of these processes, by rank; all that was under way has ended by `revoke`."""
        with self._lock:
            self._past.add(self.instance)
            self.instance, self._processes, self._revoked = instance, processes, None
            self._forget()
            for rank, process in processes.items():
                ended, why = self._ended.get(rank, (0, ""))
                if rank in self._lost or ended == process:
                    self._revoke(self._lost.get(rank, why))
            self._take_held()

    def revoke(self, why: str) -> None:
        """Whatever is under way or begins ends by this error, until another instance begins."""
        with self._lock:
            self._revoke(why)

    def _revoke(self, why: str) -> None:
        if self._revoked is None:
            self._revoked = why
            self._end_all(why)

    def _take_held(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        for header, data in held:
            self._take(header, memoryview(data))

    def close(self) -> None:
        """Ends the connection; the other ranks hear of it behind all that was sent."""
        with self._lock:
            self._send_control(Envelope(Role.NOTICE, 0, GroupEnd()))
            self._break("the process group was destroyed")
        try:
            self._stream.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the daemon was faster
        finally:
            self._reader.join(CLOSE_TIMEOUT_S)  # until the daemon has closed too, so that the next one finds it free
            self._stream.close()

    def name(self, rank: int) -> str:
        """A rank as people know it."""
        return f"rank {rank} ({self.welcome.members[rank].name})"

    # The job's store

    def ask_store(self, asked: StoreAsk) -> StoreAnswer:
        """Asks, and waits for the answer. Raises GroupError, GroupTimeout."""
        with self._answered:
            if self._broken is not None:
                raise GroupError(self._broken)
            number = self._next_request
            self._next_request += 1
            self._answers[number] = None
            self._send_control(Envelope(Role.REQUEST, number, asked))
            until = time.monotonic() + asked.timeout_s + ANSWER_GRACE_S
            while self._answers[number] is None and self._broken is None and time.monotonic() < until:
                self._answered.wait(max(0.0, until - time.monotonic()))
            answer = self._answers.pop(number)
            if answer is None and self._broken is not None:
                raise GroupError(self._broken)
        if isinstance(answer, Failure):
            raise GroupTimeout(answer.error) if asked.op in ("get", "wait") else GroupError(answer.error)
        if not isinstance(answer, StoreAnswer):
            raise GroupTimeout(f"the job's store has not answered within {asked.timeout_s + ANSWER_GRACE_S:.0f} s")
        return answer

    # Sending

    def send(
        self,
        rank: int,
        channel: int,
        index: int,
        data: memoryview,
        among: tuple[int, ...] = (),
        instance: int | None = None,
    ) -> MessageTransfer:
        """Sends a message; `data` must stay unchanged until it has ended.

        Args:
            instance: of the world that it belongs to, which may be over; None: that of now.
        """
        transfer = MessageTransfer(data, rank, channel, index, among=among)
        address = MessageAddress(rank, channel, index)
        with self._lock:
            if why := self._over(instance) or self._why_not(rank, among):
                self._end(transfer, why)
                return transfer
            size = len(data)
            if address in self._asked_for:
                self._asked_for.discard(address)
                self._queue(transfer)
            elif size <= limits.EAGER_MESSAGE_BYTES_MAX and size <= self._eager[rank] and self._window[rank] > size:
                self._eager[rank] -= size
                self._window[rank] -= size + PREFIX.size
                self._frame(rank, What.EAGER, index, channel, size, data)
                transfer.moved = size
                self._end(transfer)
            else:
                self._offered[address] = transfer
                self._frame(rank, What.OFFER, index, channel, size)
        return transfer

    def _queue(self, transfer: MessageTransfer) -> None:
        assert transfer.rank is not None
        self._sending[transfer.rank].append(transfer)
        self._pump(transfer.rank)

    def _pump(self, rank: int) -> None:
        """Sends what the window has room for."""
        waiting = self._sending[rank]
        while waiting and self._window[rank] > 0:
            transfer = waiting[0]
            part = transfer.place[transfer.moved : transfer.moved + DATA_BYTES]
            self._window[rank] -= len(part) + PREFIX.size
            self._frame(rank, What.DATA, transfer.index, transfer.channel, len(transfer.place), part)
            transfer.moved += len(part)
            if transfer.moved == len(transfer.place):
                waiting.popleft()
                self._end(transfer)

    def _frame(
        self, rank: int, what: What, index: int, channel: int, number: int, data: memoryview | bytes = b""
    ) -> None:
        header = Header(
            Kind.RELAYED,
            PREFIX.size + len(data),
            job=self._number,
            round=self.instance,
            contributors=1 << rank,
        )
        self._write(header.encode() + PREFIX.pack(what, index, channel, number), data)

    def _send_control(self, envelope: Envelope) -> None:
        self._write(control_frames(encode(envelope)), b"")

    def _write(self, head: bytes, data: memoryview | bytes) -> None:
        """Writes all of it. The daemon always reads, so this ends; if the daemon has, everything does."""
        if self._broken is not None:
            return
        left = len(head) + len(data)
        views = [view for view in (memoryview(head), memoryview(data)) if view]
        try:
            while left:
                sent = send_some(self._stream, views)
                left -= sent
                while sent and views:
                    step = min(sent, len(views[0]))
                    views[0] = views[0][step:]
                    sent -= step
                    if not views[0]:
                        views.pop(0)
        except OSError as error:
            self._break(f"the connection to the daemon broke: {error}")

    # Receiving

    def receive(
        self,
        rank: int | None,
        channel: int,
        index: int | None,
        place: memoryview,
        among: tuple[int, ...] = (),
        instance: int | None = None,
    ) -> MessageTransfer:
        """Receives a message into `place`, of exactly its size.

        Args:
            rank: None: from anybody.
            index: None: the next one of this channel.
            instance: as of `send`.
        """
        with self._lock:
            transfer = MessageTransfer(place, rank, channel, -1 if index is None else index, among=among)
            if why := self._over(instance):
                self._end(transfer, why)
                return transfer
            if rank is None:
                if why := self._broken or self._revoked:
                    self._end(transfer, why)
                else:
                    self._any.setdefault(channel, deque()).append(transfer)
                    self._match_any(channel)
                return transfer
            if index is None:
                index = self._claim(rank, channel)
            transfer.index = index
            self._bind(transfer, MessageAddress(rank, channel, index))
        return transfer

    def _claim(self, rank: int, channel: int) -> int:
        index = self._next_in.get((rank, channel), 0)
        self._next_in[rank, channel] = index + 1
        return index

    def _bind(self, transfer: MessageTransfer, address: MessageAddress) -> None:
        """The transfer is to get this message."""
        transfer.rank, transfer.index = address.rank, address.number
        early = self._early.pop(address, None)
        if early is not None:
            self._unasked[address.rank] -= len(early)
            self._deliver_eager(transfer, address, memoryview(early))
            return
        if why := self._why_not(address.rank, transfer.among):
            self._end(transfer, why)
            return
        self._receiving[address] = transfer
        offered = self._offers.pop(address, None)
        if offered is not None or len(transfer.place) > limits.EAGER_MESSAGE_BYTES_MAX:
            self._frame(address.rank, What.READY, address.number, address.channel, 0)

    def _match_any(self, channel: int) -> None:
        """Gives receivers from anybody what has come, in the order in which it came."""
        waiting = self._any.get(channel)
        while waiting:
            came = next(
                (
                    address
                    for address in (*self._early, *self._offers)
                    if address.channel == channel and address.number == self._next_in.get((address.rank, channel), 0)
                ),
                None,
            )
            if came is None:
                break
            self._claim(came.rank, channel)
            self._bind(waiting.popleft(), came)
        if waiting is not None and not waiting:
            del self._any[channel]

    def _deliver_eager(self, transfer: MessageTransfer, address: MessageAddress, data: memoryview) -> None:
        self._give_back_eager(address.rank, len(data))
        if len(data) != len(transfer.place):
            self._end(transfer, self._wrong_size(address.rank, len(data), len(transfer.place)))
            return
        transfer.place[:] = data
        transfer.moved = len(data)
        self._end(transfer)

    def _wrong_size(self, rank: int, sent: int, expected: int) -> str:
        return f"{self.name(rank)} sent {sent} bytes where {expected} were expected: are shapes and types equal?"

    def cancel(self, transfer: MessageTransfer) -> None:
        """Nobody waits for this one any more."""
        with self._lock:
            if transfer.ended:
                return
            if transfer.rank is not None:
                address = MessageAddress(transfer.rank, transfer.channel, transfer.index)
                self._receiving.pop(address, None)
                self._offered.pop(address, None)
            elif transfer.channel in self._any and transfer in self._any[transfer.channel]:
                self._any[transfer.channel].remove(transfer)
            self._end(transfer, "it was given up")

    # The reader's thread

    def _read(self) -> None:
        why = "the daemon closed the connection of the process group"
        try:
            while count := self._stream.recv_into(self._parser.buffer()):
                event = self._parser.received(count)
                while event is not None:
                    event = self._event(event)
        except OSError as error:
            why = f"the connection to the daemon broke: {error}"
        except GroupError as error:
            why = str(error)
        except Exception as error:  # a bug here, or of the other end: nobody shall wait for what is not read any more
            log.exception("what came on the connection of the process group cannot be taken")
            why = f"what came cannot be taken: {type(error).__name__}: {error}"
        with self._lock:
            self._break(why)

    def _event(self, event: Event) -> Event | None:
        match event:
            case ChunkAnnounced(header):
                self._place = memoryview(bytearray(header.payload_bytes))
                return self._parser.land(self._place)
            case ChunkReceived(header):
                with self._lock:
                    self._take(header, self._place)
            case ControlReceived(_, payload):
                self._told(payload)
            case Broken(reason):
                raise GroupError(f"what the daemon sent cannot be read: {reason}")
            case _:
                raise GroupError("the daemon sent a packed frame, which travel between daemons only")
        return None

    def _told(self, payload: bytes) -> None:
        envelope = decode(payload)
        if isinstance(envelope, str):
            raise GroupError(f"what the daemon sent cannot be read: {envelope}")
        body = envelope.body
        with self._answered:
            match body:
                case _ if envelope.id:
                    if envelope.id in self._answers:
                        self._answers[envelope.id] = body
                        self._answered.notify_all()
                case SignOfLife():
                    self._send_control(Envelope(Role.NOTICE, 0, body))
                case MemberLost(rank=rank, reason=reason):
                    self._lost[rank] = why = f"{self.name(rank)} is gone: {reason}"
                    if not self._process:
                        self._peer_lost(rank, why)
                    elif rank in self._processes:
                        self._revoke(why)
                case Stop(reason=reason):
                    self._break(f"the process group ends: {reason}")
                case Refuse(reason=reason):
                    raise GroupError(f"the daemon refused: {reason}")
                case _:
                    raise GroupError(f"the daemon sent {type(body).__name__} to a process group: versions differ")

    def _take(self, header: Header, payload: memoryview) -> None:
        rank = header.contributors.bit_length() - 1
        if header.step in (GROUP_ENDS, GROUP_BREAKS) and (self.instance or self._process):
            why = f"{self.name(rank)} has left the process group: {bytes(payload).decode(errors='replace')}"
            self._process_ended(rank, header.round, why, in_order=header.step == GROUP_ENDS)
            return
        if header.round != self.instance:
            if not self.instance or (self._process and header.round not in self._past):
                self._hold(rank, header, payload)
            return
        what, index, channel, number = PREFIX.unpack_from(payload)
        data, address = payload[PREFIX.size :], MessageAddress(rank, channel, index)
        match what:
            case What.DATA:
                self._give_back_window(rank, len(payload))
                self._take_data(address, data, number)
            case What.EAGER:
                self._give_back_window(rank, len(payload))
                transfer = self._receiving.pop(address, None)
                if transfer is not None:
                    self._deliver_eager(transfer, address, data)
                else:
                    self._early[address] = bytes(data)
                    self._unasked[rank] += len(data)
                    self._check_unasked(rank, len(self._early))
                    self._match_any(channel)
            case What.OFFER:
                transfer = self._receiving.get(address)
                if transfer is None:
                    self._offers[address] = number
                    self._check_unasked(rank, len(self._offers))
                    self._match_any(channel)
                elif number != len(transfer.place):
                    del self._receiving[address]
                    self._end(transfer, self._wrong_size(rank, number, len(transfer.place)))
                elif number <= limits.EAGER_MESSAGE_BYTES_MAX:  # else it was asked for when its receiver came
                    self._frame(rank, What.READY, index, channel, 0)
            case What.READY:
                waiting = self._offered.pop(address, None)
                if waiting is not None:
                    self._queue(waiting)
                else:
                    self._asked_for.add(address)
                    self._check_unasked(rank, len(self._asked_for))
            case What.WINDOW:
                self._window[rank] += number
                self._pump(rank)
            case What.USED:
                self._eager[rank] += number
            case _:
                raise GroupError(f"{self.name(rank)} sent {what}: versions differ")

    def _process_ended(self, rank: int, process: int, why: str, *, in_order: bool) -> None:
        if not self._process:
            if process == self.instance:
                (self._peer_gone if in_order else self._peer_lost)(rank, why)
            return
        self._ended[rank] = process, why
        if self._processes.get(rank) == process:
            self._revoke(why)  # others may be waiting for those that wait for it

    def _hold(self, rank: int, header: Header, payload: memoryview) -> None:
        """Keeps what belongs to an instance that others have begun first."""
        self._held.append((header, bytes(payload)))
        self._held_bytes += len(payload)
        self._check_unasked(rank, len(self._held))
        if self._held_bytes > limits.RELAY_WINDOW_BYTES * len(self.welcome.members):
            raise GroupError("the other ranks send more than anybody has asked for")

    def _check_unasked(self, rank: int, count: int) -> None:
        """P2 bounds what an honest rank sends before it is asked; others must not fill this process."""
        if count > UNASKED_MAX or self._unasked[rank] > limits.EAGER_BYTES_MAX:
            raise GroupError(f"{self.name(rank)} sends more than anybody has asked for")

    def _take_data(self, address: MessageAddress, data: memoryview, total: int) -> None:
        transfer = self._receiving.get(address)
        if transfer is None:
            return  # it was given up
        if total != len(transfer.place):
            del self._receiving[address]
            self._end(transfer, self._wrong_size(address.rank, total, len(transfer.place)))
            return
        transfer.place[transfer.moved : transfer.moved + len(data)] = data
        transfer.moved += len(data)
        if transfer.moved == total:
            del self._receiving[address]
            self._end(transfer)

    def _give_back_window(self, rank: int, count: int) -> None:
        self._arrived[rank] += count
        if self._arrived[rank] >= WINDOW_CREDIT_BYTES:
            self._frame(rank, What.WINDOW, 0, 0, self._arrived[rank])
            self._arrived[rank] = 0

    def _give_back_eager(self, rank: int, count: int) -> None:
        self._used[rank] += count
        if self._used[rank] >= EAGER_CREDIT_BYTES:
            self._frame(rank, What.USED, 0, 0, self._used[rank])
            self._used[rank] = 0

    # Ends

    def _over(self, instance: int | None) -> str | None:
        return None if instance in (None, self.instance) else self._broken or WORLD_IS_OVER

    def _why_not(self, rank: int, among: tuple[int, ...] = ()) -> str | None:
        failed = next((why for each, why in self._failed.items() if each in among), None)
        return self._broken or self._revoked or failed or self._gone.get(rank)

    def _end(self, transfer: MessageTransfer, error: str | None = None) -> None:
        if transfer.ended:
            return
        transfer.ended = True
        transfer.error = error
        transfer.place = memoryview(b"") if error is not None else transfer.place
        transfer._event.set()

    def _peer_lost(self, rank: int, why: str) -> None:
        """No collective that this rank is in can end, whomever it waits for now."""
        if rank not in self._gone:
            self._failed[rank] = why
        for transfers in (self._receiving, self._offered):
            for address in [address for address, each in transfers.items() if rank in each.among]:
                self._end(transfers.pop(address), why)
        for waiting in self._sending.values():
            for transfer in [each for each in waiting if rank in each.among]:
                waiting.remove(transfer)
                self._end(transfer, why)
        self._peer_gone(rank, why)

    def _peer_gone(self, rank: int, why: str) -> None:
        self._gone.setdefault(rank, why)
        for transfers in (self._receiving, self._offered):
            for address in [each for each in transfers if each.rank == rank]:
                self._end(transfers.pop(address), why)
        while self._sending[rank]:
            self._end(self._sending[rank].popleft(), why)
        if len(self._gone) == len(self.welcome.members) - 1:
            self._end_any(why)

    def _end_any(self, why: str) -> None:
        for waiting in self._any.values():
            for transfer in waiting:
                self._end(transfer, why)
        self._any.clear()

    def _break(self, why: str) -> None:
        """Nothing follows any more."""
        if self._broken is not None:
            return
        self._broken = why
        self._end_all(why)
        self._answered.notify_all()

    def _end_all(self, why: str) -> None:
        """Nothing of what is under way ends well any more."""
        for transfers in (self._receiving, self._offered):
            for transfer in tuple(transfers.values()):
                self._end(transfer, why)
            transfers.clear()
        for waiting in self._sending.values():
            while waiting:
                self._end(waiting.popleft(), why)
        self._end_any(why)
