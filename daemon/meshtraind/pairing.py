"""Pairing two devices by a six-digit code: the side that shows it, on a TLS listener that exists only meanwhile.

The listener asks for no certificate (the guest's is not known yet); `pairproof` holds what makes that safe. A code dies
at its third wrong proof, when it was used, and after five minutes. Only a wrong *proof* is a try: noise, half-open
connections and guests that leave early have tested no code, so they cannot take the tries of the right guest either.
"""

import asyncio
import logging
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from meshtraind.identity import CertificateError, Identity, check_certificate, device_id_of
from meshtraind.pairchannel import ProtocolError, canonical_ip, profile_of, receive, send
from meshtraind.pairproof import (
    PROTOCOL,
    Answer,
    ElementError,
    Exchange,
    Keys,
    Offer,
    Profile,
    Proof,
    Reason,
    Refusal,
    Role,
    new_code,
)
from meshtraind.tasks import TaskSet
from meshwire import limits
from meshwire.addresses import Address

log = logging.getLogger(__name__)


class PairingError(Exception):
    """Pairing did not happen; the message says why and what to do."""


class CodeExpiredError(PairingError):
    """Nobody used the code in time."""


class CodeSpentError(PairingError):
    """The code died of wrong tries, or was used already."""


class WrongCodeError(PairingError):
    """The host does not know this code."""


class RelayedError(PairingError):
    """The two devices did not see each other's certificates."""


class UnreachableError(PairingError):
    """Nobody answers at that address, or not in time."""


class NotPairingError(PairingError):
    """Somebody answers at that address, but not as a device that shows a code."""


@dataclass(frozen=True)
class PairedDevice:
    """A device that proved to know the code; it is to be pinned.

    Attributes:
        name: how it calls itself; show it through `pins.printable`.
        address: where it was met, with the port of its peer links: a hint for dialling.
    """

    device_id: str
    name: str
    certificate_pem: str
    address: Address


class PairingHost:
    """Shows a code and listens, from entering the context to leaving it.

    Args:
        identity: what this device shows and is called.
        listen_port: of this device's peer links, told to the guest.
        host: IP address to listen on; `::` takes IPv4 as well.
        lifetime_s: how long the code holds.

    Attributes:
        code: `483-917`.
        port: where the listener is, known once the context is entered.
    """

    def __init__(
        self, identity: Identity, listen_port: int, host: str, lifetime_s: float = limits.PAIRING_LIFETIME_S
    ) -> None:
        self.code = new_code()
        self.port = 0
        self._identity = identity
        self._profile = Profile(name=identity.name, listen_port=listen_port)
        self._host = host
        self._lifetime_s = lifetime_s
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.num_tickets = 0
        identity.load_into(self._context)
        self._tries_left = limits.PAIRING_TRIES_MAX
        self._wrong_from: list[str] = []
        self._claimed = False  # somebody proved to know the code, and is being told so
        self._outcome: PairedDevice | PairingError | None = None
        self._tasks = TaskSet("pairing")
        self._connections: deque[asyncio.Task[None]] = deque()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._expires_at = loop.time() + self._lifetime_s
        self._ended = asyncio.Event()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (self._host, 0),
                family=family,
                backlog=limits.PAIRING_CONNECTIONS_MAX,
                dualstack_ipv6=self._host == "::",
            )
        except (OSError, ValueError) as error:
            raise PairingError(f"cannot listen on {self._host} for pairing: {error}") from error
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._tasks.spawn(self._accept(), "accept")
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._tasks.close()
        self._listener.close()

    async def wait(self) -> PairedDevice:
        """The guest that knew the code.

        Raises:
            CodeExpiredError, CodeSpentError: the code is dead; show a new one.
            PairingError: the listener broke.
        """
        try:
            async with asyncio.timeout_at(self._expires_at):
                await self._ended.wait()
        except TimeoutError:
            raise CodeExpiredError(
                f"nobody used the code within {self._lifetime_s:.0f} s: run `meshtrain pair` again for a new one"
            ) from None
        assert self._outcome is not None
        if isinstance(self._outcome, PairingError):
            raise self._outcome
        return self._outcome

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                self._end(PairingError(f"the pairing listener broke: {error}"))
                return
            while len(self._connections) >= limits.PAIRING_CONNECTIONS_MAX:
                self._connections.popleft().cancel()
            task = self._tasks.spawn(self._serve(connection, canonical_ip(peer[0])), f"guest {peer[0]}:{peer[1]}")
            self._connections.append(task)
            task.add_done_callback(partial(self._forget, connection))
            # While clients queue up, sock_accept returns without yielding, and a flood would stop the whole daemon.
            await asyncio.sleep(0)

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        connection.close()  # a task that is cancelled before its first step could not
        if task in self._connections:
            self._connections.remove(task)

    async def _serve(self, connection: socket.socket, guest_ip: str) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=limits.PAIRING_FRAME_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(limits.PAIRING_EXCHANGE_TIMEOUT_S):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._context)
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                await self._exchange(reader, writer, guest_ip)
        except (OSError, EOFError, ProtocolError) as error:  # TimeoutError and ssl.SSLError are OSErrors
            log.info("pairing: a connection from %s came to nothing: %s", guest_ip, str(error) or type(error).__name__)
        finally:
            if transport is not None:
                transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, guest_ip: str) -> None:
        offered = await receive(reader, Offer)
        if offered.protocol != PROTOCOL:
            return await self._refuse(reader, writer, Reason.VERSION)
        if offered.host_seen != self._identity.device_id:
            log.warning("pairing: somebody between this device and %s ends TLS; refused", guest_ip)
            return await self._refuse(reader, writer, Reason.RELAYED)
        try:
            certificate_pem = check_certificate(offered.certificate_der)
        except CertificateError as error:
            raise ProtocolError(str(error)) from error
        if (dead := self._dead()) is not None:
            return await self._refuse(reader, writer, dead)
        element, keys = await asyncio.to_thread(self._answer, offered)
        await send(writer, Answer(element=element))
        proof = await receive(reader, Proof)
        # No await from here to the verdict: proofs that arrive at once are judged one after the other.
        if (dead := self._dead()) is not None:
            return await self._refuse(reader, writer, dead)
        if not keys.accepts(proof):
            self._count_wrong(guest_ip)
            return await self._refuse(reader, writer, Reason.WRONG_CODE)
        guest = profile_of(proof)
        self._claimed = True
        try:
            await send(writer, keys.prove(self._profile))
        except BaseException:
            self._claimed = False
            raise
        device_id = device_id_of(offered.certificate_der)
        address = Address(host=guest_ip, port=guest.listen_port)
        # The guest closes when it has the proof: closing before it does could throw the proof away.
        try:
            await reader.read(1)
        except OSError as error:
            log.info("pairing: %s did not close its connection in order: %s", guest_ip, error)
        finally:
            self._end(PairedDevice(device_id, guest.name, certificate_pem, address))

    def _answer(self, offered: Offer) -> tuple[bytes, Keys]:
        exchange = Exchange(Role.HOST, self.code)
        try:
            keys = exchange.keys(offered.element, self._identity.certificate_der, offered.certificate_der)
        except ElementError as error:
            raise ProtocolError(str(error)) from error
        return exchange.element, keys

    def _dead(self) -> Reason | None:
        if self._claimed or self._tries_left == 0:
            return Reason.SPENT
        return Reason.EXPIRED if asyncio.get_running_loop().time() >= self._expires_at else None

    def _count_wrong(self, guest_ip: str) -> None:
        self._tries_left -= 1
        self._wrong_from.append(guest_ip)
        log.warning("pairing: wrong code from %s, %d tries left", guest_ip, self._tries_left)
        if self._tries_left == 0:
            self._end(
                CodeSpentError(
                    f"the code was tried wrongly {limits.PAIRING_TRIES_MAX} times, from "
                    f"{', '.join(dict.fromkeys(self._wrong_from))}, and is dead now: if that was not you, somebody on "
                    "this network is guessing; run `meshtrain pair` again for a new code"
                )
            )

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reason: Reason) -> None:
        await send(writer, Refusal(reason=reason, tries_left=self._tries_left))
        await reader.read(1)

    def _end(self, outcome: PairedDevice | PairingError) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._ended.set()
