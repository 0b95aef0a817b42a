"""The device's identity: made once, read back equal, and never used when it is damaged or open to others."""

import datetime
import os
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from meshtraind.trust.identity import (
    CertificateError,
    Identity,
    IdentityError,
    check_certificate,
    device_id_of,
    load_or_create,
)
from meshwire import limits

POSIX = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return load_or_create(tmp_path, "laptop")


def test_a_second_start_reads_the_same_identity(identity: Identity, tmp_path: Path) -> None:
    again = load_or_create(tmp_path, "renamed")
    assert (again.device_id, again.certificate_pem, again.name) == (
        identity.device_id,
        identity.certificate_pem,
        "renamed",
    )
    assert identity.device_id == device_id_of(ssl.PEM_cert_to_DER_cert(identity.certificate_pem))
    assert [path.name for path in identity.key_path.parent.iterdir()] == ["device.pem"], "no draft is left"


def test_two_devices_differ(identity: Identity, tmp_path: Path) -> None:
    assert load_or_create(tmp_path / "other", "laptop").device_id != identity.device_id


@POSIX
def test_nobody_else_may_read_the_key_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = load_or_create(tmp_path, "laptop").key_path
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_certificate_is_a_leaf_that_outlives_the_machine_and_bears_a_wrong_clock(identity: Identity) -> None:
    certificate = x509.load_der_x509_certificate(identity.certificate_der)
    extensions = {type(extension.value) for extension in certificate.extensions}
    assert extensions == {
        x509.BasicConstraints,
        x509.KeyUsage,
        x509.ExtendedKeyUsage,
        x509.SubjectKeyIdentifier,
        x509.AuthorityKeyIdentifier,
    }
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.not_valid_before_utc.year == 1970
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert left > datetime.timedelta(days=19 * 365)
    assert check_certificate(identity.certificate_der) == identity.certificate_pem


def test_an_ordinary_start_does_not_load_cryptography(identity: Identity, tmp_path: Path) -> None:
    """An idle daemon stays under 60 MB: the package costs 10 of them."""
    script = (
        "import pathlib, sys\n"
        "from meshtraind.trust import identity as own, pairing_guest, pairing_host, tls\n"
        "identity = own.load_or_create(pathlib.Path(sys.argv[1]), 'laptop')\n"
        "print(identity.device_id, *({'cryptography', 'spake2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [identity.device_id]


def _flip_in_certificate(text: str) -> str:
    at = text.index("-----END CERTIFICATE-----") - 20
    return text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]


def _break_key(text: str) -> str:
    return text.replace("-----BEGIN PRIVATE KEY-----\n", "-----BEGIN PRIVATE KEY-----\nAAAA", 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "",
        lambda text: text[: len(text) // 2],
        lambda text: text + "x" * limits.IDENTITY_FILE_BYTES_MAX,
        lambda _: "\0\xff" * 100,
        _flip_in_certificate,
        _break_key,
    ],
    ids=["empty", "cut", "oversize", "binary", "certificate bit", "key"],
)
def test_a_damaged_file_is_named_with_the_way_out(
    identity: Identity, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    path = identity.key_path
    path.write_text(damage(path.read_text()), encoding="latin-1")
    with pytest.raises(IdentityError, match=r"device\.pem.*(restore it from a backup)") as caught:
        load_or_create(tmp_path, "laptop")
    assert str(path) in str(caught.value)


def test_a_certificate_of_another_key_is_refused(identity: Identity, tmp_path: Path) -> None:
    other = load_or_create(tmp_path / "other", "laptop").key_path.read_text()
    ours = identity.key_path.read_text()
    cut = "-----BEGIN PRIVATE KEY-----"
    identity.key_path.write_text(ours[: ours.index(cut)] + other[other.index(cut) :])
    with pytest.raises(IdentityError, match="does not hold a certificate and its key"):
        load_or_create(tmp_path, "laptop")


@POSIX
@pytest.mark.parametrize(("part", "mode"), [("device.pem", 0o640), ("device.pem", 0o604), (".", 0o750)])
def test_what_others_may_read_is_refused_with_the_chmod_to_run(
    identity: Identity, tmp_path: Path, part: str, mode: int
) -> None:
    (identity.key_path.parent / part).chmod(mode)
    with pytest.raises(IdentityError, match=r"chmod [67]00"):
        load_or_create(tmp_path, "laptop")


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="--data-dir"):
        load_or_create(tmp_path / "file" / "data", "laptop")


@POSIX
@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="modes do not bind root")
def test_folders_and_files_closed_to_the_daemon_are_named(identity: Identity, tmp_path: Path) -> None:
    identity.key_path.chmod(0)
    with pytest.raises(IdentityError, match="mode 600"):
        load_or_create(tmp_path, "laptop")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(IdentityError, match="--data-dir"):
        load_or_create(closed, "laptop")


def test_links_and_folders_in_the_file_s_place_are_refused(identity: Identity, tmp_path: Path) -> None:
    moved = tmp_path / "moved.pem"
    identity.key_path.rename(moved)
    identity.key_path.symlink_to(moved)
    with pytest.raises(IdentityError, match="is not a file"):
        load_or_create(tmp_path, "laptop")
    identity.key_path.unlink()
    identity.key_path.mkdir()
    with pytest.raises(IdentityError, match="is not a file"):
        load_or_create(tmp_path, "laptop")


@pytest.mark.parametrize("name", ["", "x" * (limits.NAME_CHARS_MAX + 1)])
def test_names_have_a_length(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="characters"):
        load_or_create(tmp_path, name)


def _foreign_certificate(ca: bool) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1)
    now = datetime.datetime.now(datetime.UTC)
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.BasicConstraints(ca, None), critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def test_only_device_certificates_are_accepted_from_others(identity: Identity) -> None:
    der = identity.certificate_der
    tampered = der[:-1] + bytes([der[-1] ^ 1])
    for bad in (b"", b"\0" * 64, der[:-1], der + b"\0", der + der, tampered, _foreign_certificate(ca=True)):
        with pytest.raises(CertificateError):
            check_certificate(bad)
    with pytest.raises(CertificateError, match="exceeds"):
        check_certificate(b"\0" * (limits.CERTIFICATE_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("known", "unknown"), [(b"\x2b\x65\x70", b"\x2b\x65\x7f"), (b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x42")]
)
def test_a_key_or_version_that_nobody_knows_is_refused(identity: Identity, known: bytes, unknown: bytes) -> None:
    with pytest.raises(CertificateError, match="not a device certificate"):
        check_certificate(identity.certificate_der.replace(known, unknown))
