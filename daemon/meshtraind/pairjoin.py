"""The guest's side of pairing: it is given the code that another device shows, and dials that device."""

import asyncio
import ssl
from typing import NoReturn

from meshtraind.identity import CertificateError, Identity, check_certificate, device_id_of
from meshtraind.pairchannel import Frame, ProtocolError, canonical_ip, loaded, profile_of, receive_plain, send
from meshtraind.pairing import (
    CodeExpiredError,
    CodeSpentError,
    NotPairingError,
    PairedDevice,
    PairingError,
    RelayedError,
    UnreachableError,
    WrongCodeError,
)
from meshtraind.pairproof import (
    PROTOCOL,
    Answer,
    ElementError,
    Exchange,
    Profile,
    Proof,
    Reason,
    Refusal,
    Role,
    normalised_code,
    offer,
)
from meshwire import limits
from meshwire.addresses import Address


async def pair_with(host: str, port: int, code: str, identity: Identity, listen_port: int) -> PairedDevice:
    """Pairs with the device that shows `code` and listens for pairing at (host, port).

    Whoever answers there gets one guess at the code: try the few devices that a person may mean, not every address.

    Args:
        host: IP address or host name.
        listen_port: of this device's peer links, told to the host.

    Raises:
        CodeError: `code` is not six digits.
        UnreachableError, NotPairingError, WrongCodeError, RelayedError, CodeExpiredError, CodeSpentError: as they say.
        PairingError: the exchange broke, or the device is this one.
    """
    normalised_code(code)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    writer = None
    try:
        async with asyncio.timeout(limits.PAIRING_EXCHANGE_TIMEOUT_S):
            reader, writer = await _dial(host, port, where)
            return await _join(
                reader, writer, where, code, identity, Profile(name=identity.name, listen_port=listen_port)
            )
    except TimeoutError:
        raise UnreachableError(
            f"{where} did not answer within {limits.PAIRING_EXCHANGE_TIMEOUT_S:.0f} s: check that both devices are on "
            "the same network and that no firewall is between them"
        ) from None
    except ProtocolError as error:
        raise NotPairingError(f"{where} does not speak this pairing protocol: {error}") from error
    except (OSError, EOFError) as error:
        raise PairingError(
            f"{where} broke off the pairing ({str(error) or 'connection closed'}): run `meshtrain pair` there again"
        ) from error
    finally:
        if writer is not None:
            writer.transport.abort()


async def _dial(host: str, port: int, where: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the code vouches for the certificate
    try:
        return await asyncio.open_connection(host, port, ssl=context, limit=limits.PAIRING_FRAME_BYTES_MAX)
    except TimeoutError:
        raise
    except (ssl.SSLError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError) as error:
        raise NotPairingError(
            f"{where} is not waiting to be paired (TLS failed): use the address and port that `meshtrain pair` shows "
            "on the other device"
        ) from error
    except OSError as error:
        raise UnreachableError(
            f"cannot reach {where} ({error.strerror or error}): the code may have ended there; run `meshtrain pair` on "
            "that device and use what it shows"
        ) from error


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    where: str,
    code: str,
    identity: Identity,
    profile: Profile,
) -> PairedDevice:
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    host_der = tls.getpeercert(binary_form=True)
    if host_der is None:
        raise ProtocolError("it shows no certificate")
    if host_der == identity.certificate_der:
        raise PairingError(
            f"{where} is this same device; if it is another one, the data folder was copied to it: remove its "
            "`identity` folder and pair it again"
        )
    try:
        certificate_pem = check_certificate(host_der)
    except CertificateError as error:
        raise ProtocolError(str(error)) from error
    exchange = await asyncio.to_thread(Exchange, Role.GUEST, code)
    await send(writer, offer(exchange, identity.certificate_der, host_der))
    answer = await _receive_or_refusal(reader, Answer, where)
    try:
        keys = await asyncio.to_thread(exchange.keys, answer.element, host_der, identity.certificate_der)
    except ElementError as error:
        raise ProtocolError(str(error)) from error
    await send(writer, keys.prove(profile))
    proof = await _receive_or_refusal(reader, Proof, where)
    if not keys.accepts(proof):
        raise WrongCodeError(f"{where} does not know this code, although it says so: do not pair with it")
    theirs = profile_of(proof)
    address = Address(host=canonical_ip(writer.get_extra_info("peername")[0]), port=theirs.listen_port)
    return PairedDevice(device_id_of(host_der), theirs.name, certificate_pem, address)


def _explain_refusal(refusal: Refusal, where: str) -> NoReturn:
    match refusal.reason:
        case Reason.WRONG_CODE:
            then = (
                f"{refusal.tries_left} more tries are left"
                if refusal.tries_left
                else "that was the last try: run `meshtrain pair` there again for a new one"
            )
            raise WrongCodeError(
                f"the code is not the one that {where} shows; {then}. If you typed it right, somebody may sit between "
                "the two devices: try another network"
            )
        case Reason.RELAYED:
            raise RelayedError(
                f"something between this device and {where} ends TLS (a proxy, a virus scanner or an attacker), so the "
                "devices cannot see each other's certificates: pair them on a network without it"
            )
        case Reason.EXPIRED:
            raise CodeExpiredError(f"the code of {where} has expired: run `meshtrain pair` there again for a new one")
        case Reason.SPENT:
            raise CodeSpentError(
                f"the code of {where} was used already, or tried wrongly too often: run `meshtrain pair` there again"
            )
        case Reason.VERSION:
            raise NotPairingError(f"{where} does not speak {PROTOCOL}: run the same version of meshtraind on both")


async def _receive_or_refusal(reader: asyncio.StreamReader, kind: type[Frame], where: str) -> Frame:
    plain = await receive_plain(reader)
    if isinstance(plain, dict) and "reason" in plain:
        _explain_refusal(loaded(Refusal, plain), where)
    return loaded(kind, plain)
