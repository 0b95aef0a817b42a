"""This device's identity: an Ed25519 key and a self-signed certificate, made once, kept in DATA/identity/.

A device is known by the SHA-256 of its certificate; nothing else in the certificate is looked at. `cryptography` costs
10 MB of memory, so it is imported only when a certificate is made or judged, never on an ordinary start.
"""

import datetime
import hashlib
import os
import re
import ssl
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshtraind.machine.facts import has_modes
from meshwire import limits

FOLDER_NAME = "identity"
FILE_NAME = "device.pem"
VALIDITY_DAYS = 20 * 365
# Laptops with a dead clock battery start in 1970: the certificate must hold there as well. Expiry is not a means of
# revoking (unpairing is), so the far end is generous too, and counted from no earlier than this release.
NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
NOT_AFTER_FROM = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

_FILE_FORM = re.compile(
    r"meshtrain device (?P<device>[0-9a-f]{64})\n"
    r"(?P<certificate>-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]+-----END CERTIFICATE-----\n)"
    r"-----BEGIN PRIVATE KEY-----\n[A-Za-z0-9+/=\n]+-----END PRIVATE KEY-----\n"
)
_START_ANEW = "restore it from a backup, or remove it and pair this device again (it then is a new device to its peers)"


class IdentityError(Exception):
    """The identity cannot be made or used; the message names the file and what to do."""


class CertificateError(ValueError):
    """A certificate that no meshtrain device would have made."""


@dataclass(frozen=True)
class Identity:
    """This device's name, id, key and certificate.

    Attributes:
        device_id: lowercase hexadecimal SHA-256 of `certificate_der`.
        key_path: the file that holds the certificate and the private key.
        name: how the device calls itself; peers show it and never trust it.
    """

    device_id: str
    certificate_pem: str
    certificate_der: bytes
    key_path: Path
    name: str

    def load_into(self, context: ssl.SSLContext) -> None:
        """Makes this device's certificate and key the ones that `context` shows. Raises IdentityError."""
        try:
            # Without a password callback OpenSSL would ask on the terminal for an encrypted key.
            context.load_cert_chain(self.key_path, password=lambda: b"")
        except (OSError, ValueError) as error:
            raise IdentityError(
                f"{self.key_path} does not hold a certificate and its key ({error}): {_START_ANEW}"
            ) from error


def device_id_of(certificate_der: bytes) -> str:
    """The id of the device that has this certificate."""
    return hashlib.sha256(certificate_der).hexdigest()


def load_or_create(data_dir: Path, name: str) -> Identity:
    """Reads DATA/identity/, made on the first run.

    Args:
        data_dir: the data folder; made if missing.
        name: 1 to NAME_CHARS_MAX characters.

    Raises:
        IdentityError: the folder cannot be written, or what lies in it is unreadable, damaged or open to others.
        ValueError: the name is empty or too long.
    """
    if not 0 < len(name) <= limits.NAME_CHARS_MAX:
        raise ValueError(f"a device name has 1 to {limits.NAME_CHARS_MAX} characters, {name[:80]!r} has {len(name)}")
    folder = data_dir / FOLDER_NAME
    path = folder / FILE_NAME
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise IdentityError(
            f"cannot make the folder {folder} ({error.strerror}): "
            "make the data folder writable to the daemon's user, or choose another one with --data-dir"
        ) from error
    _require_private(folder, 0o700)
    if not os.path.lexists(path):
        _create(path)
    return _load(path, name)


def check_certificate(certificate_der: bytes) -> str:
    """The PEM form of another device's certificate, once it is known to be one that a trust store can hold.

    Raises:
        CertificateError: not exactly one self-signed Ed25519 certificate without the right to sign others.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    # What the package raises for other keys, versions and extensions than it knows, or that a certificate may have.
    unreadable = (
        ValueError,
        TypeError,
        UnsupportedAlgorithm,
        x509.InvalidVersion,
        x509.DuplicateExtension,
        x509.ExtensionNotFound,
        x509.UnsupportedGeneralNameType,
        InvalidSignature,
        ssl.SSLError,
    )
    if len(certificate_der) > limits.CERTIFICATE_BYTES_MAX:
        raise CertificateError(f"a certificate of {len(certificate_der)} bytes exceeds {limits.CERTIFICATE_BYTES_MAX}")
    try:
        certificate = x509.load_der_x509_certificate(certificate_der)
        if not isinstance(certificate.public_key(), Ed25519PublicKey):
            raise CertificateError("the certificate's key is not Ed25519")
        certificate.verify_directly_issued_by(certificate)
        if certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise CertificateError("the certificate may sign others")
        pem = ssl.DER_cert_to_PEM_cert(certificate_der)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
    except CertificateError:
        raise
    except unreadable as error:
        raise CertificateError(f"not a device certificate: {error or type(error).__name__}") from error
    return pem


def _create(path: Path) -> None:
    certificate_pem, key_pem = make_certificate()
    device_id = device_id_of(ssl.PEM_cert_to_DER_cert(certificate_pem))
    try:
        # Exclusively created with mode 0600, and complete on the disk before it gets its name.
        descriptor, draft = tempfile.mkstemp(prefix=f"{FILE_NAME}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii", newline="\n") as file:
                file.write(f"meshtrain device {device_id}\n{certificate_pem}{key_pem}")
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise IdentityError(
            f"cannot write {path} ({error.strerror}): make the folder writable to the daemon's user, or choose "
            "another data folder with --data-dir"
        ) from error


def make_certificate() -> tuple[str, str]:
    """A new (certificate, private key), both PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = Ed25519PrivateKey.generate()
    public = key.public_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "meshtrain")])
    valid_from = max(datetime.datetime.now(datetime.UTC), NOT_AFTER_FROM)
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(valid_from + datetime.timedelta(days=VALIDITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, algorithm=None)
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), key_pem.decode()


def _load(path: Path, name: str) -> Identity:
    _require_private(path, 0o600)
    try:
        with path.open("rb") as file:
            text = file.read(limits.IDENTITY_FILE_BYTES_MAX + 1).decode("ascii", "replace")
    except OSError as error:
        raise IdentityError(
            f"cannot read {path} ({error.strerror}): make it readable to the daemon's user (mode 600)"
        ) from error
    form = _FILE_FORM.fullmatch(text)
    if len(text) > limits.IDENTITY_FILE_BYTES_MAX or form is None:
        raise IdentityError(f"{path} is damaged: {_START_ANEW}")
    try:
        certificate_der = ssl.PEM_cert_to_DER_cert(form["certificate"])
    except ValueError as error:
        raise IdentityError(f"the certificate in {path} is damaged ({error}): {_START_ANEW}") from error
    identity = Identity(device_id_of(certificate_der), form["certificate"], certificate_der, path, name)
    if identity.device_id != form["device"]:
        raise IdentityError(f"{path} is damaged, its certificate is not that of the device it names: {_START_ANEW}")
    identity.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    return identity


def _require_private(path: Path, mode: int) -> None:
    """Refuses what others than the owner may touch, and what is neither a file nor a folder."""
    try:
        status = path.lstat()
    except OSError as error:
        raise IdentityError(f"cannot examine {path} ({error.strerror})") from error
    if not (stat.S_ISDIR(status.st_mode) if mode == 0o700 else stat.S_ISREG(status.st_mode)):
        raise IdentityError(f"{path} is not a {'folder' if mode == 0o700 else 'file'}: move it away")
    # Windows keeps access in lists of its own, and the data folder's list covers its user only.
    if has_modes() and status.st_mode & 0o077:
        raise IdentityError(
            f"others than its owner may use {path} (mode {stat.S_IMODE(status.st_mode):03o}): "
            f"run `chmod {mode:03o} {path}`; if somebody may have read the key, remove it and pair this device again"
        )
