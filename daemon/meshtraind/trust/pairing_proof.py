"""What pairing says and computes: the code, the four frames, and the proof that both ends know the code.

    guest -> host   PairingOffer    guest's SPAKE2 element and certificate, and which host certificate it was shown
    host  -> guest  PairingAnswer   host's SPAKE2 element
    guest -> host   Proof           guest's profile, authenticated
    host  -> guest  Proof           host's profile, authenticated
    host  -> guest  PairingRefusal  instead of PairingAnswer or Proof, and the end

SPAKE2 (RFC 9382's group of roles, the `spake2` package) turns the code into a key that only somebody with the same code
shares, one guess per exchange. The key is bound to both certificates through HKDF (RFC 5869), so whoever terminates
TLS in between, and therefore showed another certificate, ends with another key. HMAC and not an AEAD confirms the key:
an AEAD's ciphertext can be made to open under many keys, which would test many codes in one try.

The package computes in plain Python, and how long it takes depends on the code. So whatever it computed leaves at times
that tell nothing of that: `at_even_times`.

The guest proves first. A host that proved first would let a stranger test a code and leave without being counted.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, ParamSpec, TypeVar

from pydantic import Field

from meshtraind.trust.identity import device_id_of
from meshwire import limits
from meshwire.message_base import DeviceId, Name, Wire

PROTOCOL = "meshtrain-pair-1"
CODE_DIGITS = 6
_ELEMENT_BYTES = 33  # one byte of role, one compressed point of Ed25519
_KEY_BYTES = 32
_SEPARATORS = re.compile(r"[\s\-\u2010-\u2015]+")  # also what typesetting makes of a hyphen

P = ParamSpec("P")
T = TypeVar("T")

Element = Annotated[bytes, Field(min_length=_ELEMENT_BYTES, max_length=_ELEMENT_BYTES)]


class PairingRole(StrEnum):
    HOST = "host"  # shows the code and listens
    GUEST = "guest"  # is given the code and dials


class RefusalReason(StrEnum):
    """Why a host refuses a guest. Not authenticated: a hint for the guest's message, never for a decision."""

    VERSION = "version"
    RELAYED = "relayed"
    WRONG_CODE = "wrong-code"
    SPENT = "spent"
    EXPIRED = "expired"


class PairingOffer(Wire):
    protocol: Annotated[str, Field(max_length=64)]
    element: Element
    certificate_der: Annotated[bytes, Field(max_length=limits.CERTIFICATE_BYTES_MAX)]
    host_seen: DeviceId  # names an honest relay; a dishonest one may change it and fails at the proof


class PairingAnswer(Wire):
    element: Element


class Profile(Wire):
    """What a device tells of itself under the confirmed key."""

    name: Name
    listen_port: Annotated[int, Field(ge=1, le=65535)]  # of its peer links


class Proof(Wire):
    profile: Annotated[bytes, Field(max_length=1024)]  # packed Profile: the bytes that are authenticated
    tag: Annotated[bytes, Field(min_length=32, max_length=32)]  # HMAC-SHA256


class PairingRefusal(Wire):
    reason: RefusalReason
    tries_left: Annotated[int, Field(ge=0, le=limits.PAIRING_TRIES_MAX)]


class CodeError(ValueError):
    """What was typed is not a pairing code."""


class ElementError(Exception):
    """What the other end sent is no SPAKE2 element of its role."""


def new_code() -> str:
    """A random code as people read it: `483-917`."""
    digits = f"{secrets.randbelow(10**CODE_DIGITS):0{CODE_DIGITS}}"
    return f"{digits[:3]}-{digits[3:]}"


def normalised_code(text: str) -> str:
    """The six digits of a typed code; spaces and hyphens do not matter. Raises CodeError."""
    digits = _SEPARATORS.sub("", text)
    if not (len(digits) == CODE_DIGITS and digits.isascii() and digits.isdigit()):
        raise CodeError(f"{text[:32]!r} is not a pairing code: it has six digits, as in 483-917")
    return digits


class PairingExchange:
    """One side of one SPAKE2 exchange. Each method takes milliseconds: call it off the event loop.

    Args:
        role: which side this is.
        code: as typed.
    """

    def __init__(self, role: PairingRole, code: str) -> None:
        from spake2 import SPAKE2_A, SPAKE2_B

        side = SPAKE2_A if role is PairingRole.HOST else SPAKE2_B
        self._role = role
        self._spake = side(
            normalised_code(code).encode(), idA=PairingRole.HOST.encode(), idB=PairingRole.GUEST.encode()
        )
        self.element: bytes = self._spake.start()

    def keys(self, their_element: bytes, host_certificate_der: bytes, guest_certificate_der: bytes) -> "Keys":
        """The keys that both ends share if they share the code and saw the same certificates. Raises ElementError."""
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        from spake2 import SPAKEError
        from spake2.ed25519_basic import NotOnCurve

        try:
            secret = self._spake.finish(their_element)
        except (SPAKEError, NotOnCurve, ValueError, AssertionError) as error:  # the package asserts on some input
            raise ElementError(f"not a SPAKE2 element: {type(error).__name__}") from error
        certificates = b"".join(
            hashlib.sha256(certificate).digest() for certificate in (host_certificate_der, guest_certificate_der)
        )
        info = PROTOCOL.encode() + certificates
        material = HKDF(algorithm=SHA256(), length=2 * _KEY_BYTES, salt=None, info=info).derive(secret)
        keys = {PairingRole.HOST: material[:_KEY_BYTES], PairingRole.GUEST: material[_KEY_BYTES:]}
        return Keys(own=keys.pop(self._role), theirs=keys.popitem()[1])


async def at_even_times(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work` in a thread, and returns or raises PAIRING_ANSWER_DELAY_S after the call, whenever that was through.

    Where one delay is too short (a machine that does other things), after the next whole number of them.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    (result,) = await asyncio.gather(asyncio.to_thread(work, *args, **kwargs), return_exceptions=True)
    delay_s = limits.PAIRING_ANSWER_DELAY_S
    await asyncio.sleep(delay_s - (loop.time() - began_s) % delay_s)
    if isinstance(result, BaseException):
        raise result
    return result


class Keys:
    """The two authentication keys of one exchange, one a direction, so that no proof can be sent back as its answer."""

    def __init__(self, own: bytes, theirs: bytes) -> None:
        self._own = own
        self._theirs = theirs

    def prove(self, profile: Profile) -> Proof:
        packed = profile.pack()
        return Proof(profile=packed, tag=hmac.digest(self._own, packed, "sha256"))

    def accepts(self, proof: Proof) -> bool:
        """Whether the other end has the same key; constant time."""
        return hmac.compare_digest(proof.tag, hmac.digest(self._theirs, proof.profile, "sha256"))


def offer(exchange: PairingExchange, own_certificate_der: bytes, host_certificate_der: bytes) -> PairingOffer:
    """The guest's first frame."""
    return PairingOffer(
        protocol=PROTOCOL,
        element=exchange.element,
        certificate_der=own_certificate_der,
        host_seen=device_id_of(host_certificate_der),
    )
