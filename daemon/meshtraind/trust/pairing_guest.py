"""The guest's side of pairing: it is given the code that another device shows, and dials that device.

Whoever answers, true or false, may guess the code once: it does when it is given this side's proof. `Target.admit` is
asked just before.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from meshtraind.trust.identity import CertificateError, Identity, check_certificate, device_id_of
from meshtraind.trust.pairing_channel import (
    PairingFrame,
    PairingFrameError,
    canonical_ip,
    loaded,
    profile_of,
    receive_plain,
    send,
)
from meshtraind.trust.pairing_host import (
    CodeExpiredError,
    CodeSpentError,
    NotPairingError,
    PairedDevice,
    PairingError,
    RelayedError,
    UnreachableError,
    WrongCodeError,
)
from meshtraind.trust.pairing_proof import (
    PROTOCOL,
    ElementError,
    PairingAnswer,
    PairingExchange,
    PairingRefusal,
    PairingRole,
    Profile,
    Proof,
    RefusalReason,
    at_even_times,
    normalised_code,
    offer,
)
from meshtraind.trust.tls import PAIRING_ALPN
from meshwire import limits
from meshwire.addresses import Address

RETRY_S = 0.5


@dataclass(frozen=True)
class Guest:
    """What this device brings along.

    Attributes:
        code: as typed.
        listen_port: of this device's peer links, told to the host.
    """

    identity: Identity
    code: str
    listen_port: int


@dataclass(frozen=True)
class Target:
    """The device that is asked to pair: its address, and how messages call it.

    Attributes:
        host: IP address or host name.
        name: how messages call it besides its address; printable.
        admit: called with the id of the device that is about to be given the proof; raises NotAskedError.
    """

    host: str
    port: int
    name: str = ""
    admit: Callable[[str], None] = lambda _device: None

    def __str__(self) -> str:
        where = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return f"{self.name} ({where})" if self.name else where


async def pair_at(guest: Guest, target: Target, say: Callable[[str], None]) -> PairedDevice:
    """Pairs as `pair_with` does, but tries a device that cannot be reached again for PAIRING_SEARCH_S: radios sleep.

    Args:
        say: is told when that begins.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + limits.PAIRING_SEARCH_S
    said = False
    while True:
        try:
            return await pair_with(guest, target)
        except UnreachableError as error:
            left_s = give_up_s - loop.time()
            if left_s < RETRY_S:
                raise
            if not said:
                say(f"{target} does not answer ({error.why}); trying for {left_s:.0f} s more.")
                said = True
        await asyncio.sleep(RETRY_S)


async def pair_with(guest: Guest, target: Target) -> PairedDevice:
    """Pairs with the device that shows the code, if that is the one at this address.

    Raises:
        CodeError: the code is not six digits.
        UnreachableError, NotPairingError, WrongCodeError, RelayedError, CodeExpiredError, CodeSpentError: as they say.
        PairingError: the exchange broke, the name is unknown, or the device is this one.
    """
    normalised_code(guest.code)
    writer = None
    try:
        reader, writer = await _dial(target)
        async with asyncio.timeout(limits.PAIRING_EXCHANGE_TIMEOUT_S):
            return await _join(reader, writer, guest, target)
    except TimeoutError:
        raise PairingError(
            f"{target} began to pair and then said nothing for {limits.PAIRING_EXCHANGE_TIMEOUT_S:.0f} s: check that "
            "it is awake, run `meshtrain pair` there again and type the new code"
        ) from None
    except PairingFrameError as error:
        raise NotPairingError(f"{target} does not speak this pairing protocol: {error}") from error
    except (OSError, EOFError) as error:
        raise PairingError(
            f"{target} broke off the pairing ({str(error) or 'connection closed'}): run `meshtrain pair` there again "
            "and type the new code"
        ) from error
    finally:
        if writer is not None:
            writer.transport.abort()


async def _dial(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the code vouches for the certificate
    context.set_alpn_protocols([PAIRING_ALPN])
    try:
        async with asyncio.timeout(limits.PAIRING_DIAL_TIMEOUT_S):
            return await asyncio.open_connection(
                target.host, target.port, ssl=context, limit=limits.PAIRING_FRAME_BYTES_MAX
            )
    except TimeoutError:
        raise UnreachableError(
            f"{target} does not answer: check that this is the address that `meshtrain pair` shows on the other "
            f"device, that both are on the same network, and that no firewall there keeps {target.port}/tcp out",
            f"no answer within {limits.PAIRING_DIAL_TIMEOUT_S:.0f} s",
        ) from None
    except (ssl.SSLError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError) as error:
        raise NotPairingError(
            f"what answers at {target} is not meshtrain (TLS failed): use the address that `meshtrain pair` shows on "
            "the other device"
        ) from error
    except socket.gaierror as error:
        raise PairingError(
            f"no device is known here by the name {target.host}: use the address that `meshtrain pair` shows on the "
            "other device"
        ) from error
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise UnreachableError(
            f"cannot reach {target} ({why}): check that this is the address that `meshtrain pair` shows on the other "
            "device, and that meshtrain is up there",
            why,
        ) from error


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, guest: Guest, target: Target
) -> PairedDevice:
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    identity = guest.identity
    host_der = tls.getpeercert(binary_form=True)
    if host_der is None:
        raise PairingFrameError("it shows no certificate")
    if host_der == identity.certificate_der:
        raise PairingError(
            f"{target} is this device itself: name the other one. (If it is the other one, it runs on a copy of this "
            "device's data folder: there, and only there, remove the folder `identity`, and start meshtrain again)"
        )
    try:
        certificate_pem = check_certificate(host_der)
    except CertificateError as error:
        raise NotPairingError(
            f"what answers at {target} is not meshtrain ({error}): use the address that `meshtrain pair` shows on the "
            "other device"
        ) from error
    if tls.selected_alpn_protocol() != PAIRING_ALPN:
        raise NotPairingError(
            f"{target} shows no code now: run `meshtrain pair` there, and type here the code that it shows"
        )
    exchange = await asyncio.to_thread(PairingExchange, PairingRole.GUEST, guest.code)
    await send(writer, offer(exchange, identity.certificate_der, host_der))
    answer = await _receive_or_refusal(reader, PairingAnswer, target)
    try:
        keys = await at_even_times(exchange.keys, answer.element, host_der, identity.certificate_der)
    except ElementError as error:
        raise PairingFrameError(str(error)) from error
    target.admit(device_id_of(host_der))
    await send(writer, keys.prove(Profile(name=identity.name, listen_port=guest.listen_port)))
    proof = await _receive_or_refusal(reader, Proof, target)
    if not keys.accepts(proof):
        raise WrongCodeError(f"{target} does not know this code, although it says so: do not pair with it")
    theirs = profile_of(proof)
    address = Address(host=canonical_ip(writer.get_extra_info("peername")[0]), port=theirs.listen_port)
    return PairedDevice(device_id_of(host_der), theirs.name, certificate_pem, address)


def _explain_refusal(refusal: PairingRefusal, target: Target) -> NoReturn:
    match refusal.reason:
        case RefusalReason.WRONG_CODE:
            then = (
                f"{refusal.tries_left} more {'try is' if refusal.tries_left == 1 else 'tries are'} left"
                if refusal.tries_left
                else "that was the last try: run `meshtrain pair` there again for a new one"
            )
            raise WrongCodeError(
                f"the code is not the one that {target} shows; {then}. If you typed it right, somebody may sit between "
                "the two devices: try another network"
            )
        case RefusalReason.RELAYED:
            raise RelayedError(
                f"something between this device and {target} ends TLS (a proxy, a virus scanner or an attacker), so "
                "the devices cannot see each other's certificates: pair them on a network without it"
            )
        case RefusalReason.EXPIRED:
            raise CodeExpiredError(f"the code of {target} has expired: run `meshtrain pair` there again for a new one")
        case RefusalReason.SPENT:
            raise CodeSpentError(
                f"the code of {target} was used already, or tried wrongly too often: run `meshtrain pair` there again"
            )
        case RefusalReason.VERSION:
            raise NotPairingError(f"{target} does not speak {PROTOCOL}: run the same version of meshtraind on both")


async def _receive_or_refusal(reader: asyncio.StreamReader, kind: type[PairingFrame], target: Target) -> PairingFrame:
    plain = await receive_plain(reader)
    if isinstance(plain, dict) and "reason" in plain:
        _explain_refusal(loaded(PairingRefusal, plain), target)
    return loaded(kind, plain)
