"""A blocking connection to a daemon's local endpoint: for commands and for learners."""

import json
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshtrain.errors import ConnectionLost, DaemonNotRunning, OtherVersion, RequestError, UnexpectedReply
from meshtrain.machine import connect_unix
from meshwire import limits
from meshwire.frames.header import control_frames
from meshwire.frames.parser import Broken, ControlReceived, FrameParser
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done, Envelope, Failure, Role, decode, encode
from meshwire.messages.link import Refuse
from meshwire.messages.local import Attach

__all__ = ["Client", "ConnectionLost", "DaemonNotRunning", "OtherVersion", "RequestError", "ask"]

CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 30.0  # what a daemon answers from memory or from a linked peer
SEND_TIMEOUT_S = 30.0  # a daemon that reads nothing for so long hangs

OnEvent = Callable[[Wire], None]
Reply = TypeVar("Reply", bound=Wire)


class Client:
    """One connection. Sending is safe from several threads; only one may wait for answers at a time."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._stream.setblocking(False)
        self._parser = FrameParser()
        self._parser.long_messages = True
        self._sending = threading.Lock()
        self._notices: deque[Wire] = deque()
        self._next_request = 1

    @classmethod
    def connect(cls, data_dir: Path, timeout_s: float = CONNECT_TIMEOUT_S) -> "Client":
        """Connects a command to the daemon of this data folder. Raises DaemonNotRunning."""
        endpoint, token = _running(data_dir)
        try:
            client, reply = cls.attach(endpoint, Attach(token=token, role="client"), timeout_s)
        except OSError as error:
            raise DaemonNotRunning(f"no daemon answers behind {data_dir} ({error})") from error
        if not isinstance(reply, Done):
            client.close()
            raise ConnectionLost(f"the daemon answered with {type(reply).__name__}: it is of another version")
        return client

    @classmethod
    def attach(cls, endpoint: str, attach: Attach, timeout_s: float = CONNECT_TIMEOUT_S) -> tuple["Client", Wire]:
        """Connects to `unix:PATH` or `tcp:HOST:PORT` and says who asks; returns the daemon's answer, too.

        Raises OSError (nobody listens there), RequestError (refused), ConnectionLost.
        """
        client = cls(_open(endpoint, timeout_s))
        try:
            return client, client.request(attach, timeout_s=timeout_s, name="attach")
        except BaseException:
            client.close()
            raise

    def notify(self, *bodies: Wire) -> None:
        """Sends messages that expect nothing, at once: the daemon wakes up for all of them. Raises ConnectionLost."""
        self._send(*(Envelope(Role.NOTICE, 0, body) for body in bodies))

    def request(
        self,
        body: Wire,
        *,
        timeout_s: float,
        name: str,
        on_event: OnEvent | None = None,
        silence_s: float | None = None,
    ) -> Wire:
        """Asks, and waits for the reply. Notices that arrive meanwhile are kept for `next_notice`.

        Args:
            timeout_s: for the whole answer.
            name: what is asked, for the error.
            on_event: gets every event before the reply, on this thread.
            silence_s: the longest time without any message at all.

        Raises:
            RequestError: the daemon could not do it.
            TimeoutError: after `timeout_s`; names `name`.
            ConnectionLost: the daemon went away, or was silent for `silence_s`.
        """
        with self._sending:
            number = self._next_request
            self._next_request += 1
        self._send(Envelope(Role.REQUEST, number, body))
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            envelope = self._receive(left_s if silence_s is None else min(left_s, silence_s))
            if envelope is None:
                if time.monotonic() < deadline_s:
                    raise ConnectionLost(f"{name}: no sign of life from the daemon for {silence_s:g} s")
                raise TimeoutError(f"{name}: no answer from the daemon within {timeout_s:g} s")
            if envelope.role is Role.NOTICE:
                self._notices.append(envelope.body)
            if envelope.id != number:
                continue  # the answer to a request that was given up
            match envelope.role:
                case Role.EVENT:
                    if on_event is not None:
                        on_event(envelope.body)
                case Role.FAILURE:
                    what = envelope.body.error if isinstance(envelope.body, Failure) else repr(envelope.body)
                    raise RequestError(what)
                case _:
                    return envelope.body

    def next_notice(self, timeout_s: float) -> Wire | None:
        """The next notice in order; None when there is none within `timeout_s` (0: look only)."""
        deadline_s = time.monotonic() + timeout_s
        while not self._notices:
            envelope = self._receive(deadline_s - time.monotonic())
            if envelope is None:
                return None
            if envelope.role is Role.NOTICE:
                self._notices.append(envelope.body)
        return self._notices.popleft()

    def close(self, *, linger_s: float = 0.0) -> None:
        """Ends the connection; waits at most `linger_s` for the daemon to read what was sent and to close, too."""
        deadline_s = time.monotonic() + linger_s
        try:
            if linger_s:
                self._stream.shutdown(socket.SHUT_WR)
                while (left_s := deadline_s - time.monotonic()) > 0 and self._receive(left_s) is not None:
                    pass
        except (OSError, ConnectionLost):
            return  # it has closed: what was wanted
        finally:
            self._stream.close()

    def release(self) -> tuple[socket.socket, FrameParser]:
        """Gives the connection away, between two messages: to whoever reads frames that are none of a client's."""
        self._stream.setblocking(True)
        return self._stream, self._parser

    def _send(self, *envelopes: Envelope) -> None:
        left = memoryview(b"".join(control_frames(encode(envelope)) for envelope in envelopes))
        deadline_s = time.monotonic() + SEND_TIMEOUT_S
        with self._sending:
            while left:
                try:
                    left = left[self._stream.send(left) :]
                except BlockingIOError:
                    if not select.select([], [self._stream], [], max(0.0, deadline_s - time.monotonic()))[1]:
                        raise ConnectionLost(f"the daemon has read nothing for {SEND_TIMEOUT_S:.0f} s") from None
                except OSError as error:
                    raise self._why_closed(error) from error

    def _receive(self, timeout_s: float) -> Envelope | None:
        """The next message; None after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                count = self._stream.recv_into(self._parser.buffer())
            except BlockingIOError:
                left_s = max(0.0, deadline_s - time.monotonic())
                if not select.select([self._stream], [], [], left_s)[0]:
                    return None
                continue
            except (OSError, ValueError) as error:
                raise ConnectionLost(f"the connection to the daemon broke: {error}") from error
            if not count:
                raise ConnectionLost("the daemon closed the connection")
            event = self._parser.received(count)
            match event:
                case None:
                    continue
                case ControlReceived(_, payload):
                    return self._decoded(payload)
                case Broken(_, version) if version is not None:
                    raise OtherVersion(version)
                case Broken(reason):
                    raise ConnectionLost(f"what the daemon sent cannot be read: {reason}")
                case _:
                    raise ConnectionLost("the daemon sent a chunk, which travel between daemons only")

    def _decoded(self, payload: bytes) -> Envelope:
        envelope = decode(payload)
        if isinstance(envelope, str):
            raise ConnectionLost(f"what the daemon sent cannot be read: {envelope}; are both of the same version?")
        if isinstance(envelope.body, Refuse):
            raise ConnectionLost(f"the daemon refused: {envelope.body.reason}")
        return envelope

    def _why_closed(self, error: OSError) -> ConnectionLost:
        """A daemon that refuses says why before it closes."""
        try:
            while self._receive(0.0) is not None:
                pass
        except ConnectionLost as lost:
            return lost
        return ConnectionLost(f"the connection to the daemon broke: {error}")


def ask(
    client: Client,
    body: Wire,
    reply_type: type[Reply],
    *,
    name: str,
    timeout_s: float = REQUEST_TIMEOUT_S,
    on_event: OnEvent | None = None,
    silence_s: float | None = None,
) -> Reply:
    """Makes one request. Raises what `Client.request` raises, and UnexpectedReply when something else is answered."""
    reply = client.request(body, timeout_s=timeout_s, name=name, on_event=on_event, silence_s=silence_s)
    if not isinstance(reply, reply_type):
        raise UnexpectedReply(name, reply)
    return reply


def _running(data_dir: Path) -> tuple[str, str]:
    """Endpoint and token of the daemon of this data folder. Raises DaemonNotRunning."""
    path = data_dir / "run" / "daemon.json"
    try:
        if path.stat().st_size > limits.RUN_FILE_BYTES_MAX:
            raise DaemonNotRunning(f"{path} is not a daemon's file: it is too large")
        described = json.loads(path.read_text(encoding="utf-8"))
        endpoint, token_file = described["endpoint"], Path(described["token_file"])
        return endpoint, token_file.read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise DaemonNotRunning(f"no daemon runs on this device (nothing at {path})") from error
    except PermissionError as error:
        raise DaemonNotRunning(f"the daemon behind {data_dir} belongs to another user ({error})") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DaemonNotRunning(f"{path} cannot be read: {error}") from error


def _open(endpoint: str, timeout_s: float) -> socket.socket:
    kind, _, where = endpoint.partition(":")
    if kind == "unix":
        return connect_unix(where, timeout_s)
    host, _, port = where.rpartition(":")
    if kind != "tcp" or not port.isdigit():
        raise OSError(f"{endpoint!r} is neither unix:PATH nor tcp:HOST:PORT")
    stream = socket.create_connection((host, int(port)), timeout_s)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream
