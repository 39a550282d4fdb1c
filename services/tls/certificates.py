"""Make a mesh's own certificate authority, and a certificate for each of its hosts.

certificates(Path("certs"), [("10.0.0.2", "w2.lan")])

certs/ca.crt, certs/ca.key          the authority; the key makes further hosts, and stays here
certs/10.0.0.2/ca.crt, tls.crt, tls.key     what the host is given (services.tls.identity)
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocols.errors import SpecError
from protocols.files import write_atomically
from services.tls.identity import CA, CERT, KEY

CA_KEY = "ca.key"
CA_DAYS = 3650
CLOCKS = timedelta(hours=1)  # that hosts' clocks may differ by
# So that a host's own commands reach its listeners: a probe, `forge status`.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)*")


@dataclass(frozen=True)
class CertificateAuthority:
    """Hold an authority's certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def certificates(
    directory: Path, hosts: Sequence[Sequence[str]], days: int = 365
) -> tuple[Path, ...]:
    """Make the authority in `directory`, unless it is there, and a certificate of `days` days for
    every host: its names and addresses, the first of which names its folder. Returns the folders.

    Keys have the mode 0600. A host that has a certificate gets a new one. Raises SpecError for a
    name that no certificate can hold, for days beyond the authority's, and for a directory that
    cannot be used.
    """
    names = [_alternative_names(host) for host in hosts]  # before anything is written
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(directory)
        left = authority.certificate.not_valid_after_utc - datetime.now(UTC)
        if not 1 <= days <= left.days:
            raise SpecError(
                f"--days must be from 1 to {left.days}, what is left of {directory / CA}: got "
                f"{days}; choose fewer, or start another directory"
            )
        folders = tuple(directory / host[0].strip("[]").replace("*", "any") for host in hosts)
        for folder, host, found in zip(folders, hosts, names, strict=True):
            folder.mkdir(mode=0o700, exist_ok=True)
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _host_certificate(authority, key, host[0].strip("[]"), found, days)
            write_atomically(folder / KEY, _key_text(key), mode=0o600)
            write_atomically(folder / CERT, _text(certificate))
            write_atomically(folder / CA, _text(authority.certificate))
    except OSError as error:
        raise SpecError(
            f"cannot make certificates in {directory}: {error.strerror}; name a directory that "
            "you may write to"
        ) from error
    return folders


def _authority(directory: Path) -> CertificateAuthority:
    """Return the directory's authority, made there when both of its files are missing."""
    cert_path, key_path = directory / CA, directory / CA_KEY
    if cert_path.exists() != key_path.exists():
        there, lacks = (CA, CA_KEY) if cert_path.exists() else (CA_KEY, CA)
        raise SpecError(
            f"{directory} has {there} and no {lacks}; make certificates where the authority's "
            "key is, or start another directory"
        )
    if cert_path.exists():
        try:
            certificate = x509.load_pem_x509_certificate(cert_path.read_bytes())
            key = load_pem_private_key(key_path.read_bytes(), None)
        except (ValueError, TypeError):
            raise SpecError(
                f"{cert_path} and {key_path} must be PEM, a key without a password: got something "
                "else; start another directory"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or (
            key.public_key() != certificate.public_key()
        ):
            raise SpecError(
                f"{key_path} is not the key that `forge certs` made for {cert_path}; start "
                "another directory"
            )
        return CertificateAuthority(certificate, key)
    made = _new_authority()
    write_atomically(key_path, _key_text(made.key), mode=0o600)
    write_atomically(cert_path, _text(made.certificate))
    return made


def _new_authority() -> CertificateAuthority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _subject("Cartridge Forge mesh")
    made = (
        _builder(name, name, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, SHA256())
    )
    return CertificateAuthority(made, key)


def _host_certificate(
    authority: CertificateAuthority,
    key: ec.EllipticCurvePrivateKey,
    called: str,
    names: Sequence[x509.GeneralName],
    days: int,
) -> x509.Certificate:
    """Return a certificate that the host shows both as a server and as a client."""
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        _builder(_subject(called[:64]), authority.certificate.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(issuer, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority.key, SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative_names(names: Sequence[str]) -> list[x509.GeneralName]:
    """Return a host's names, and those of its loopback, each once."""
    found: list[x509.GeneralName] = []
    for name in (*(n.strip("[]") for n in names), *LOOPBACK_NAMES):
        try:
            one: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            if not HOST_NAME.fullmatch(name) or len(name) > 253:
                raise SpecError(
                    f"--host must be a host's names or addresses, with commas between them: got "
                    f"{name!r}; write it as 10.0.0.2 or 10.0.0.2,w2.lan"
                ) from None
            one = x509.DNSName(name)
        if one not in found:
            found.append(one)
    return found


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _key_text(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
