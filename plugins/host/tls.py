"""Make the certificates of a run's hosts, and read who holds one."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
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


CA, CERT, KEY = "ca.crt", "tls.crt", "tls.key"
VARIABLES = {"ca": "HYPERACTOR_TLS_CA", "cert": "HYPERACTOR_TLS_CERT", "key": "HYPERACTOR_TLS_KEY"}
REMEDY = "make it with `forge certs`, or mount cert-manager's Secret there"

T = TypeVar("T")


@dataclass(frozen=True)
class TlsIdentity:
    """Name the PEM files of a host's certificate, its key, and the authorities that it trusts."""

    ca: Path
    cert: Path
    key: Path

    def environment(self) -> dict[str, str]:
        """Return the variables by which Monarch finds the files, in every process of the mesh."""
        return {name: str(getattr(self, field)) for field, name in VARIABLES.items()}

    def server_context(self) -> ssl.SSLContext:
        """Return the settings of a listener that admits the holders of a certificate alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def client_context(self) -> ssl.SSLContext:
        """Return the settings of a connection that checks the other side, and its name."""
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def names(self) -> tuple[str, ...]:
        """Return the host names and addresses that the certificate is valid for."""
        try:
            extension = _certificates(self.cert)[0].extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            )
        except x509.ExtensionNotFound:
            return ()
        named: list[Any] = [n.value for n in extension.value]
        return tuple(str(name) for name in named)

    def require_name(self, host: str, who: str) -> None:
        """Raise SpecError where the certificate is not valid for `host`, a name or an address (IPv6
        with or without brackets): others would refuse the connection. `who` begins the message."""
        names = self.names()
        if not any(_is_for(name, host.strip("[]")) for name in names):
            raise SpecError(
                f"{who}: the certificate {self.cert} is for {', '.join(names) or 'no host'}, not "
                f"for {host}; make another with `forge certs DIR --host {host}`"
            )

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.cert, self.key)
        return context


def read_identity(directory: Path, who: str) -> TlsIdentity:
    """Return the identity in a directory. `who` is the key or option that names it.

    Raises SpecError that names the file and the remedy: one that is missing or cannot be read, a
    certificate that is not valid now, or is not of its key or of its authority.
    """
    folder = directory.absolute()
    identity = TlsIdentity(folder / CA, folder / CERT, folder / KEY)
    authorities = _read(identity.ca, who, lambda: _certificates(identity.ca))
    chain = _read(identity.cert, who, lambda: _certificates(identity.cert))
    key = _read(identity.key, who, lambda: load_pem_private_key(identity.key.read_bytes(), None))
    leaf, now = chain[0], datetime.now(UTC)
    for path, certificate in ((identity.ca, authorities[0]), (identity.cert, leaf)):
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise SpecError(
                f"{who}: {path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} to "
                f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and it is "
                f"{now:%Y-%m-%d %H:%M}; renew it with `forge certs`, or set this host's clock"
            )
    if key.public_key() != leaf.public_key():
        raise SpecError(f"{who}: {identity.key} is not the key of {identity.cert}; {REMEDY}")
    if not any(_issued(leaf, issuer) for issuer in (*authorities, *chain[1:])):
        raise SpecError(
            f"{who}: {identity.cert} was not issued by {identity.ca}; copy both from one mesh"
        )
    return identity


def environment_identity(environment: Mapping[str, str] = os.environ) -> TlsIdentity | None:
    """Return the identity that this process was started with; None for one without."""
    paths = [environment.get(name) for name in VARIABLES.values()]
    return TlsIdentity(*map(Path, paths)) if all(paths) else None  # type: ignore[arg-type]


def _certificates(path: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(path.read_bytes())


def _read(path: Path, who: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except OSError as error:
        raise SpecError(f"{who}: cannot read {path}: {error.strerror}; {REMEDY}") from None
    except (ValueError, TypeError):  # TypeError: the key has a password
        raise SpecError(
            f"{who}: {path} must be PEM, a key without a password: got something else; {REMEDY}"
        ) from None


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_for(name: str, host: str) -> bool:
    """Return whether a certificate's name is that host's; `*` stands for one label."""
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(host)
    except ValueError:
        name, host = name.lower(), host.lower().rstrip(".")
        if name.startswith("*."):
            return bool(host.partition(".")[0]) and host.partition(".")[2] == name[2:]
        return name == host
