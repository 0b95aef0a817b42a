"""Frames over one stream transport: chunks straight into their places, messages to a handler, requests with answers.

Works the same over TCP, TLS and Unix sockets, on uvloop and on asyncio.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Protocol, cast

from meshtraind.runtime.log_limit import caused_by
from meshtraind.runtime.tasks import TaskSet
from meshtraind.transport.compression import LinkRate, Lossless, unpack_into
from meshtraind.transport.congestion import prefer_bbr
from meshtraind.transport.low_extra_delay import LinkPacer, PathSample, path_of
from meshtraind.transport.low_water import LowWater
from meshtraind.transport.notice_frames import NoticeFrames
from meshtraind.transport.requests import ConnectionEnded, RequestFailed, Requests
from meshtraind.transport.send_cap import SendCap
from meshtraind.transport.traffic import Traffic
from meshwire import limits
from meshwire.addresses import same_host
from meshwire.frames.header import HEADER_BYTES, Header, Kind, control_frames
from meshwire.frames.parser import (
    Broken,
    ChunkAnnounced,
    ChunkPacked,
    ChunkReceived,
    ControlReceived,
    Event,
    FrameParser,
)
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, Failure, Role, decode, encode
from meshwire.messages.link import Refuse
from meshwire.messages.local import Attach
from meshwire.text import printable

__all__ = ["Connection", "ConnectionEnded", "Emit", "Handler", "RequestFailed"]

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0  # for what is still queued, and for TLS's goodbye, when a connection is closed
LARGE_ANSWER_BYTES = 16 * limits.KIB  # a piece of a file, of a state or of a log: it waits where sending is capped
TRASH_BYTES = 16 * limits.KIB  # where bytes go that arrive after the decision to close
_NOTICES = NoticeFrames()  # of all connections of this process

Emit = Callable[[Wire], None]  # tells whoever waits for the answer to a request how far it is


class Handler(Protocol):
    """Whoever gets what arrives on a connection. Everything is called on the event loop and must be quick."""

    def chunk_announced(self, conn: "Connection", header: Header) -> memoryview | str | None:
        """Where the payload goes: its place (`payload_bytes` long); None to drain it; or what is wrong with it.

        A wrong chunk is a violation of the protocol, which closes the connection.
        """

    def chunk_received(self, conn: "Connection", header: Header) -> None:
        """Hears that the payload lies in its place. Not called for drained ones."""

    def notice(self, conn: "Connection", header: Header, body: Wire) -> None:
        """Takes a message that expects no answer."""

    async def request(self, conn: "Connection", header: Header, body: Wire, emit: Emit) -> Wire:
        """Answers a request; cancelled when the connection ends. `emit` sends an event before the reply.

        RequestFailed becomes the requester's; any other error is logged here and told without details.
        """

    def lost(self, conn: "Connection", reason: str) -> None:
        """Hears that the connection has ended, whoever ended it. Called once, last."""


class Connection(asyncio.BufferedProtocol):
    """One connection to a peer, a client or a learner.

    Messages overtake chunks because chunks are taken only while `writable`: at most about LINK_QUEUE_BYTES_MAX of them
    are queued before a message. After the end what is sent is dropped: `lost` is how the owner learns of it.

    Args:
        handler: gets what arrives; may be replaced at any time.
        name: who is at the other end, as errors and logs call it.

    Attributes:
        device: id of the peer at the other end, once its certificate was verified.
        attached: what the client or learner at the other end said first, once its token was verified.
        broke: it has ended without a word, and this side did not close it.
        same_host: both ends are on this machine, so the bytes never leave it.
        congestion: the congestion control that the system uses for it; None where it does not say.
        last_received_s: when the last byte came, on time.monotonic's clock.
        lossless: the stage that chunks' payloads pass, with the link's rate.
        cap: on what leaves this machine; None: nobody has set one here.
        pacer: sends slower where others' packets wait for those of this connection, if the cap says so.
        on_other_version: where frames of another wire version are to be expected (W6): is told which, notes it, and
            returns what to refuse them with. None: they break the protocol.
        on_violated: called with what is wrong where the other end sent no frame, no message or no payload, just before
            the connection ends for that.
    """

    def __init__(self, handler: Handler, *, name: str) -> None:
        self.handler = handler
        self.name = name
        self.device: str | None = None
        self.attached: Attach | None = None
        self.broke = False
        self.same_host = False
        self.congestion: str | None = None
        self.last_received_s = time.monotonic()
        self.lossless = Lossless(LinkRate())
        self.cap: SendCap | None = None
        self.pacer = LinkPacer()
        self.on_other_version: Callable[[int], str] | None = None
        self.on_violated: Callable[[str], None] = lambda _reason: None
        self._transport: asyncio.Transport | None = None
        self._parser = FrameParser()
        self._low_water = LowWater()
        self._paused = False
        self._close_reason: str | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._refused = False  # the other side is told why, and is to close
        self._peer_ended = False
        self._ended = asyncio.Event()
        self._writable_callbacks: dict[int, Callable[[], None]] = {}
        self._next_callback = 0
        self._requests = Requests()
        self._answering: set[asyncio.Task[None]] = set()
        self._tasks = TaskSet(f"connection {name}")
        self._traffic = Traffic()

    # Sending

    def notify(self, body: Wire, *, job: int = 0, generation: int = 0, complete: int = 0) -> None:
        """Sends a message that expects nothing. Sent on many links, one after the other, it is encoded once."""
        self._write(_NOTICES.of(body, job=job, generation=generation, complete=complete))

    async def request(
        self,
        body: Wire,
        *,
        timeout_s: float,
        name: str,
        job: int = 0,
        generation: int = 0,
        on_event: Emit | None = None,
    ) -> Wire:
        """Sends a request and returns its reply.

        Raises RequestFailed (the other side could not do it), ConnectionEnded, or TimeoutError, which names `name`.
        """
        if self.closing:
            raise ConnectionEnded(f"{name}: {self._ended_text()}")
        number, answer = self._requests.begin(on_event)
        try:
            self._send(Envelope(Role.REQUEST, number, body), job, generation)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise TimeoutError(f"{name}: no answer from {self.name} within {timeout_s:g} s") from None
        finally:
            self._requests.end(number)

    def send_chunk(self, header: Header, payload: memoryview | bytes | None) -> None:
        """Queues one chunk, or relayed frame; the caller has checked `writable`.

        The payload is not copied, unless it is packed: its memory must stay unchanged until it has left, which can be
        later than this call. The topology programs guarantee it: a run of segments is only overwritten by bytes that a
        peer sends after it has received this run.
        """
        assert header.kind is not Kind.CONTROL
        assert header.payload_bytes == (0 if payload is None else len(payload))
        if self._transport is None or self.closing:
            return
        packed = None
        if payload and self.attached is None:
            packed = self.lossless.packed(payload, self._capped_rate)
        if packed is not None:
            header, payload = replace(header, packed_bytes=len(packed)), packed
        # Not writelines, which copies on asyncio before Python 3.12 and ignores the high-water mark in some later ones.
        self._transport.write(header.encode())
        if payload:
            self._transport.write(payload)
        self._count(HEADER_BYTES + header.carried_bytes)
        self._traffic.chunk_payload_bytes += header.carried_bytes
        if self.cap is not None and not self.same_host:
            self.pacer.sends(self._transport, self.cap)

    def path(self) -> PathSample | None:
        """What the kernel says of the way to another machine; None within this one, and where it does not."""
        if self._transport is None or self.same_host:
            return None
        return path_of(self._transport.get_extra_info("socket"))

    def share(self, owner: object, bytes_s: float | None) -> None:
        """What is sent leaves at most so fast, for other links send too; None: this owner sets no limit more."""
        if self._transport is not None and not self.same_host:
            self.pacer.share(self._transport.get_extra_info("socket"), owner, bytes_s)

    @property
    def remote_host(self) -> str | None:
        """IP address of the other end; None on a Unix socket, and before there is a transport."""
        there = self._transport.get_extra_info("peername") if self._transport is not None else None
        return there[0] if isinstance(there, tuple) else None

    @property
    def local_host(self) -> str | None:
        """IP address of this end; None where `remote_host` is."""
        here = self._transport.get_extra_info("sockname") if self._transport is not None else None
        return here[0] if isinstance(here, tuple) else None

    def ssl_object(self) -> ssl.SSLObject:
        """TLS's state, of which the peer's certificate is asked; the connection must be open and have TLS."""
        if self._transport is None:
            raise ConnectionEnded(self._ended_text())
        return cast(ssl.SSLObject, self._transport.get_extra_info("ssl_object"))

    @property
    def writable(self) -> bool:
        """Whether a chunk may be sent now. If not, those of `on_writable` are called when it may."""
        if self._paused or self._transport is None or self.closing:
            return False
        return self.cap is None or self.same_host or self.cap.may_send(self._tell_writable)

    def on_writable(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` whenever chunks may be sent again. Returns what unsubscribes."""
        number = self._next_callback
        self._next_callback += 1
        self._writable_callbacks[number] = callback

        def unsubscribe() -> None:
            self._writable_callbacks.pop(number, None)

        return unsubscribe

    def socket_bytes_sent(self) -> tuple[int, Literal["kernel", "link"]]:
        """Bytes sent on the socket, and who counted them."""
        self._ask_kernel()
        return self._traffic.socket_bytes()

    @property
    def chunk_bytes_received(self) -> int:
        """How many bytes of chunk frames have come, those under way included: while it grows, the other end sends."""
        return self._parser.chunk_bytes

    @property
    def chunk_payload_bytes_sent(self) -> int:
        """How many bytes of payloads were sent, without headers, as they travelled."""
        return self._traffic.chunk_payload_bytes

    # Ending

    @property
    def closing(self) -> bool:
        """Whether the connection has ended or is about to."""
        return self._close_reason is not None or self._ended.is_set()

    def close(self, reason: str, *, now: bool = False) -> None:
        """Ends the connection once what is queued has left, at the latest after CLOSE_TIMEOUT_S; `now`: at once."""
        if self.closing and not self._refused:
            return
        self._refused = False
        self._ask_kernel()
        self._close_reason = self._close_reason or reason
        if self._transport is not None:
            self._transport.close()
            self._abort_after(0.0 if now else CLOSE_TIMEOUT_S)

    def abort(self, reason: str) -> None:
        """Ends the connection without another byte, on a transport in whatever state."""
        if not self.closing:
            self._close_reason = reason
            if self._transport is not None:
                self._transport.abort()

    def cut_short(self) -> None:
        """Ends a connection now that is closing: its last words have had their time."""
        if self._transport is not None and self.closing:
            self._transport.abort()

    def refuse(self, reason: str) -> None:
        """Tells the other side why, and ends the connection: when the other side has read it and closes, at the latest
        after CLOSE_TIMEOUT_S. What arrives meanwhile is dropped, but read: a socket that is closed with unread input
        sends a reset, and that can overtake what it has sent before."""
        if self.closing:
            return
        self.notify(Refuse(reason=reason[: limits.REFUSAL_CHARS_MAX]))
        self._ask_kernel()
        self._close_reason = reason
        if self._transport is not None:
            self._refused = True
            if self._transport.can_write_eof():  # not with TLS
                self._transport.write_eof()
            self._abort_after(CLOSE_TIMEOUT_S)

    def _abort_after(self, wait_s: float) -> None:
        assert self._transport is not None
        if self._close_timer is not None:
            self._close_timer.cancel()
        self._close_timer = asyncio.get_running_loop().call_later(wait_s, self._transport.abort)

    async def closed(self) -> None:
        """Waits until the connection has ended and its last request is no longer worked on."""
        await self._ended.wait()
        await self._tasks.close()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it
        if self._close_reason is not None:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=limits.LINK_QUEUE_BYTES_MAX, low=limits.LINK_QUEUE_BYTES_MAX // 2)
        here, there = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        self.same_host = not (isinstance(here, tuple) and isinstance(there, tuple)) or same_host(here[0], there[0])
        if not self.same_host:
            sock = transport.get_extra_info("socket")
            self.congestion, self._low_water = prefer_bbr(sock), LowWater(sock)
        self.last_received_s = time.monotonic()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(bytearray(TRASH_BYTES)) if self.closing else self._parser.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.last_received_s = time.monotonic()
        if self.closing:
            return
        self._parser.long_messages = self.device is not None or self.attached is not None
        try:
            event = self._parser.received(nbytes)
            while event is not None and not self.closing:
                event = self._take(event)
            self._low_water.expect(0 if self.closing else self._parser.payload_left_bytes)
        except Exception:  # a bug in whoever handles it: this connection ends, and all others go on
            log.exception("cannot handle what %s sent", self.name, extra=caused_by(self.remote_host))
            self.refuse("meshtraind failed on what it received; its log has the traceback")

    def eof_received(self) -> bool:
        self._peer_ended = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._close_reason is None:
            self.broke = True
            if exc is not None:
                self._close_reason = f"the connection broke: {exc or type(exc).__name__}"
            elif self._peer_ended:
                self._close_reason = "the other side closed the connection"
            else:
                self._close_reason = "the connection broke"
        if self._close_timer is not None:
            self._close_timer.cancel()
        self.pacer.close()
        self._transport = None
        self._refused = False
        self._parser = FrameParser()  # lets go of a chunk's place
        self._writable_callbacks.clear()
        self._ended.set()
        self._requests.lost(self._ended_text())
        for task in self._answering:
            task.cancel()
        self.handler.lost(self, self._close_reason)

    def pause_writing(self) -> None:
        self._paused = True
        if self._transport is not None:
            self.lossless.rate.full(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None:
            self.lossless.rate.drained(self._transport.get_write_buffer_size())
        self._tell_writable()

    # Inside

    def _tell_writable(self) -> None:
        for number, callback in tuple(self._writable_callbacks.items()):
            if self.writable and number in self._writable_callbacks:
                callback()

    @property
    def _capped_rate(self) -> float | None:
        return None if self.cap is None or self.same_host else self.cap.bytes_per_s

    def _count(self, frame_bytes: int) -> None:
        self._traffic.frame_bytes += frame_bytes
        if self.cap is not None and not self.same_host:
            self.cap.spend(frame_bytes)

    def _take(self, event: Event) -> Event | None:
        """Handles one event of the parser; returns the next when it follows without more bytes."""
        match event:
            case ChunkAnnounced(header):
                place = self.handler.chunk_announced(self, header)
                if self.closing:
                    return None
                if place is None:
                    return self._parser.drain()
                if isinstance(place, str):
                    self._violated(place)
                    return None
                return self._parser.land(place)
            case ChunkReceived(header, drained):
                if not drained:
                    self.handler.chunk_received(self, header)
            case ChunkPacked(header, packed, place):
                wrong = unpack_into(packed, place)
                if wrong is not None:
                    self._violated(wrong)
                else:
                    self.handler.chunk_received(self, header)
            case ControlReceived(header, payload):
                envelope = decode(payload)
                if isinstance(envelope, str):
                    self._violated(envelope)
                else:
                    self._take_message(header, envelope)
            case Broken(_, version) if version is not None and self.on_other_version is not None:
                self.refuse(self.on_other_version(version))
            case Broken(reason):
                self._violated(reason)
        return None

    def _take_message(self, header: Header, envelope: Envelope) -> None:
        body = envelope.body
        match envelope.role:
            case Role.NOTICE:
                if isinstance(body, Refuse):
                    self.close(f"{self.name} refused: {printable(body.reason)}")
                else:
                    self.handler.notice(self, header, body)
            case Role.REQUEST:
                if len(self._answering) >= limits.REQUESTS_PER_CONNECTION_MAX:
                    busy = Failure(error=f"{limits.REQUESTS_PER_CONNECTION_MAX} requests are being answered already")
                    self._send(Envelope(Role.FAILURE, envelope.id, busy))
                    return
                task = self._tasks.spawn(self._answer(header, envelope), name=type(body).__name__)
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case Role.EVENT | Role.REPLY | Role.FAILURE:
                wrong = self._requests.answered(envelope)
                if wrong is not None:
                    self._violated(wrong)

    async def _answer(self, header: Header, envelope: Envelope) -> None:
        def emit(event: Wire) -> None:
            self._send(Envelope(Role.EVENT, envelope.id, event))

        asked = type(envelope.body).__name__
        try:
            answer = Envelope(Role.REPLY, envelope.id, await self.handler.request(self, header, envelope.body, emit))
            if self.cap is not None and not self.same_host and len(encode(answer)) > LARGE_ANSWER_BYTES:
                await self.cap.turn()
            self._send(answer)
        except RequestFailed as error:
            self._send(Envelope(Role.FAILURE, envelope.id, Failure(error=str(error)[: limits.ERROR_CHARS_MAX])))
        except Exception as error:  # a bug in whoever answers it: who asked is told, and the connection goes on
            log.exception("cannot answer %s of %s", asked, self.name, extra=caused_by(self.remote_host))
            text = f"meshtraind failed on {asked} ({type(error).__name__}); its log has the traceback"
            self._send(Envelope(Role.FAILURE, envelope.id, Failure(error=text)))

    def _send(self, envelope: Envelope, job: int = 0, generation: int = 0) -> None:
        self._write(control_frames(encode(envelope), job=job, generation=generation))

    def _write(self, frames: bytes) -> None:
        if self._transport is None or self.closing:
            return
        self._transport.write(frames)
        self._count(len(frames))
        if self._transport.get_write_buffer_size() > limits.LINK_BACKLOG_BYTES_MAX:
            self._close_reason = f"{self.name} does not read what it is sent"
            self._transport.abort()

    def _violated(self, reason: str) -> None:
        log.warning("%s broke the protocol: %s", self.name, reason, extra=caused_by(self.remote_host))
        self.on_violated(reason)
        self.refuse(f"protocol violation: {reason}")

    def _ended_text(self) -> str:
        return f"the connection to {self.name} has ended: {self._close_reason}"

    def _ask_kernel(self) -> None:
        if self._transport is not None and not self.closing:
            self._traffic.ask_kernel(self._transport)
