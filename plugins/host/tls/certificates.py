"""Make a mesh's own certificate authority, and a certificate for each of its hosts.

certificates(Path("certs"), [("10.0.0.2", "w2.lan")])

certs/ca.crt, certs/ca.key          the authority; the key makes further hosts, and stays here
certs/10.0.0.2/ca.crt, tls.crt, tls.key     the files of the host (services.tls.identity)
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cartridge_forge.plugins.host.tls.identity import CA, CERT, KEY
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import write_atomically

CA_KEY = "ca.key"
CA_DAYS = 3650
CLOCKS = timedelta(hours=1)  # that hosts' clocks may differ by
# So that a host's own commands reach its listeners: a probe, `forge status`.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)*")
USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def certificates(
    directory: Path, hosts: Sequence[Sequence[str]], days: int = 365
) -> tuple[Path, ...]:
    """Make the authority in `directory`, unless it exists, and a certificate of `days` days for
    every host: its names and addresses, the first of which names its folder. Returns the folders.

    Keys have the mode 0600. A host that has a certificate gets a new one. Raises SpecError for a
    name that no certificate can hold, for days beyond the authority's, and for a directory that
    cannot be used.
    """
    names = [_alternative_names(host) for host in hosts]  # before anything is written
    folders = tuple(directory / host[0].strip("[]").replace("*", "any") for host in hosts)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority, authority_key = _authority(directory)
        most = (authority.not_valid_after_utc - datetime.now(UTC)).days
        if not 1 <= days <= most:
            raise SpecError(
                f"--days must be from 1 to {most}, what is left of {directory / CA}: got {days}; "
                "choose fewer, or start another directory"
            )
        for folder, host, alternatives in zip(folders, hosts, names, strict=True):
            folder.mkdir(mode=0o700, exist_ok=True)
            key = generate_private_key(SECP256R1())
            builder = _builder(host[0].strip("[]")[:64], authority.subject, key, days)
            usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            builder = builder.add_extension(issuer, critical=False)
            builder = builder.add_extension(
                x509.SubjectAlternativeName(alternatives), critical=False
            )
            _write_key(folder / KEY, key)
            _write(folder / CERT, builder.sign(authority_key, SHA256()))
            _write(folder / CA, authority)
    except OSError as error:
        raise SpecError(
            f"cannot make certificates in {directory}: {error.strerror}; name a directory that "
            "you may write to"
        ) from error
    return folders


def _authority(directory: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    """Return the directory's authority and its key, made where both files are missing."""
    cert_path, key_path = directory / CA, directory / CA_KEY
    if cert_path.exists() != key_path.exists():
        present, missing = (CA, CA_KEY) if cert_path.exists() else (CA_KEY, CA)
        raise SpecError(
            f"{directory} has {present} and no {missing}; make certificates where the authority's "
            "key is, or start another directory"
        )
    if not cert_path.exists():
        key = generate_private_key(SECP256R1())
        builder = _builder("Cartridge Forge mesh", None, key, CA_DAYS)
        authority = builder.sign(key, SHA256())
        _write_key(key_path, key)
        _write(cert_path, authority)
        return authority, key
    try:
        authority = x509.load_pem_x509_certificate(cert_path.read_bytes())
        loaded = load_pem_private_key(key_path.read_bytes(), None)
    except (ValueError, TypeError):
        raise SpecError(
            f"{cert_path} and {key_path} must be PEM, a key without a password: got something "
            "else; start another directory"
        ) from None
    if (
        not isinstance(loaded, EllipticCurvePrivateKey)
        or loaded.public_key() != authority.public_key()
    ):
        raise SpecError(
            f"{key_path} is not the key that `forge certs` made for {cert_path}; start another "
            "directory"
        )
    return authority, loaded


def _builder(
    name: str, issuer: x509.Name | None, key: EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    """Return a certificate of a key before it is signed; an authority's where `issuer` is None."""
    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
    usages = ("digital_signature",) if issuer else ("key_cert_sign", "crl_sign")
    usage = x509.KeyUsage(**{usage_name: usage_name in usages for usage_name in USAGES})
    limits = x509.BasicConstraints(ca=issuer is None, path_length=None if issuer else 0)
    builder = x509.CertificateBuilder(issuer or subject, subject, key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - CLOCKS).not_valid_after(now + timedelta(days=days))
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    return builder.add_extension(limits, critical=True).add_extension(usage, critical=True)


def _alternative_names(names: Sequence[str]) -> list[x509.GeneralName]:
    """Return a host's names, and those of its loopback, each once."""
    alternatives: dict[x509.GeneralName, None] = {}
    for name in (*(name.strip("[]") for name in names), *LOOPBACK_NAMES):
        try:
            alternatives[x509.IPAddress(ipaddress.ip_address(name))] = None
        except ValueError:
            if not HOST_NAME.fullmatch(name) or len(name) > 253:
                raise SpecError(
                    f"--host must be a host's names or addresses, with commas between them: got "
                    f"{name!r}; write it as 10.0.0.2 or 10.0.0.2,w2.lan"
                ) from None
            alternatives[x509.DNSName(name)] = None
    return list(alternatives)


def _write(path: Path, certificate: x509.Certificate) -> None:
    write_atomically(path, certificate.public_bytes(Encoding.PEM).decode())


def _write_key(path: Path, key: EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(path, pem.decode(), mode=0o600)
