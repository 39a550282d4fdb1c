"""Read and check the certificate by which a host is known to the others of its mesh.

    DIR/ca.crt    certificates of the authorities that others' certificates must come from
    DIR/tls.crt   this host's certificate, then its intermediates
    DIR/tls.key   its private key, without a password

These are the file names of cert-manager's Secrets, and of `forge certs`. Monarch reads the files at
every connection, so a renewed certificate is used without a restart.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from cartridge_forge.protocols.errors import SpecError

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
