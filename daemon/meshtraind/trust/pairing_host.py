"""Pairing two devices by a six-digit code: the side that shows it.

Guests come to the daemon's one port and name pairing's ALPN, which TLS refuses at all other times (`tls`, `greeting`).
They need no certificate there (it is not known yet); `pairproof` holds what makes that safe. A code dies at its third
wrong proof, after PAIRING_ANSWERS_MAX answers, when it was used, and after five minutes. Only a wrong *proof* is a try:
noise, half-open connections and guests that leave early have tested no code, so they cannot take the tries of the right
guest either.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from meshtraind.runtime.log_limit import caused_by
from meshtraind.trust.identity import CertificateError, Identity, check_certificate, device_id_of
from meshtraind.trust.pairing_channel import PairingFrameError, canonical_ip, profile_of, receive, send
from meshtraind.trust.pairing_proof import (
    PROTOCOL,
    ElementError,
    Keys,
    PairingAnswer,
    PairingExchange,
    PairingOffer,
    PairingRefusal,
    PairingRole,
    Profile,
    Proof,
    RefusalReason,
    at_even_times,
    new_code,
)
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
    """Nobody answers at that address, or not in time.

    Attributes:
        why: what the system says of it, in short.
    """

    def __init__(self, text: str, why: str) -> None:
        super().__init__(text)
        self.why = why


class NotPairingError(PairingError):
    """Somebody answers at that address, but not as a device that shows a code."""


class NotAskedError(PairingError):
    """The proof was not given: the caller wants no further guess from this device."""


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


ServeGuest = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[None]]


class GuestEntrance(Protocol):
    """A listener that can let in callers without a certificate, for as long as a pairing code is shown."""

    @property
    def port(self) -> int:
        """The port on which it listens."""

    def admit_guests(self, serve: ServeGuest) -> AbstractAsyncContextManager[None]:
        """While entered, callers that name pairing's ALPN are `serve`'s: given a guest's stream and IP address."""


class PairingHost:
    """Shows a code and lets guests in, from entering the context to leaving it.

    Args:
        identity: what this device shows and is called.
        entrance: where the guests come to: the listener of the peer links.
        lifetime_s: how long the code holds.

    Attributes:
        code: `483-917`.
    """

    def __init__(
        self, identity: Identity, entrance: GuestEntrance, lifetime_s: float = limits.PAIRING_LIFETIME_S
    ) -> None:
        self.code = new_code()
        self._identity = identity
        self._profile = Profile(name=identity.name, listen_port=entrance.port)
        self._guests = entrance.admit_guests(self._serve)
        self._lifetime_s = lifetime_s
        self._tries_left = limits.PAIRING_TRIES_MAX
        self._wrong_from: list[str] = []
        self._answered: Counter[str] = Counter()  # by IP address
        self._claimed = False  # somebody proved to know the code, and is being told so
        self._outcome: PairedDevice | PairingError | None = None

    async def __aenter__(self) -> Self:
        self._expires_at = asyncio.get_running_loop().time() + self._lifetime_s
        self._ended = asyncio.Event()
        await self._guests.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._guests.__aexit__(kind, error, trace)

    async def wait(self) -> PairedDevice:
        """The guest that knew the code.

        Raises:
            CodeExpiredError, CodeSpentError: the code is dead; show a new one.
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: str) -> None:
        guest_ip = canonical_ip(caller)
        try:
            async with asyncio.timeout(limits.PAIRING_EXCHANGE_TIMEOUT_S):
                await self._exchange(reader, writer, guest_ip)
        except (OSError, EOFError, PairingFrameError) as error:  # TimeoutError and ssl.SSLError are OSErrors
            reason = str(error) or type(error).__name__
            log.info("pairing: a connection from %s came to nothing: %s", guest_ip, reason, extra=caused_by(guest_ip))

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, guest_ip: str) -> None:
        offered = await receive(reader, PairingOffer)
        if offered.protocol != PROTOCOL:
            return await self._refuse(reader, writer, RefusalReason.VERSION)
        if offered.host_seen != self._identity.device_id:
            wrong = "pairing: somebody between this device and %s ends TLS; refused"
            log.warning(wrong, guest_ip, extra=caused_by(guest_ip))
            return await self._refuse(reader, writer, RefusalReason.RELAYED)
        try:
            certificate_pem = check_certificate(offered.certificate_der)
        except CertificateError as error:
            raise PairingFrameError(str(error)) from error
        if self._answered.total() >= limits.PAIRING_ANSWERS_MAX:
            self._end_over_answers()
        if (dead := self._dead()) is not None:
            return await self._refuse(reader, writer, dead)
        self._answered[guest_ip] += 1
        element, keys = await at_even_times(self._answer, offered)
        await send(writer, PairingAnswer(element=element))
        proof = await receive(reader, Proof)
        # No await from here to the verdict: proofs that arrive at once are judged one after the other.
        if (dead := self._dead()) is not None:
            return await self._refuse(reader, writer, dead)
        if not keys.accepts(proof):
            self._count_wrong(guest_ip)
            return await self._refuse(reader, writer, RefusalReason.WRONG_CODE)
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
            unclosed = "pairing: %s did not close its connection in order: %s"
            log.info(unclosed, guest_ip, error, extra=caused_by(guest_ip))
        finally:
            self._end(PairedDevice(device_id, guest.name, certificate_pem, address))

    def _answer(self, offered: PairingOffer) -> tuple[bytes, Keys]:
        exchange = PairingExchange(PairingRole.HOST, self.code)
        try:
            keys = exchange.keys(offered.element, self._identity.certificate_der, offered.certificate_der)
        except ElementError as error:
            raise PairingFrameError(str(error)) from error
        return exchange.element, keys

    def _dead(self) -> RefusalReason | None:
        if self._claimed or self._outcome is not None:
            return RefusalReason.SPENT
        return RefusalReason.EXPIRED if asyncio.get_running_loop().time() >= self._expires_at else None

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

    def _end_over_answers(self) -> None:
        callers = ", ".join(ip for ip, _ in self._answered.most_common(3))
        self._end(
            CodeSpentError(
                f"{limits.PAIRING_ANSWERS_MAX} connections asked about the code and none proved to know it, most of "
                f"them from {callers}: it is dead now, so that nobody can measure it out; if that was not you, "
                "somebody on this network is probing; run `meshtrain pair` again for a new code"
            )
        )

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reason: RefusalReason) -> None:
        await send(writer, PairingRefusal(reason=reason, tries_left=self._tries_left))
        await reader.read(1)

    def _end(self, outcome: PairedDevice | PairingError) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._ended.set()
