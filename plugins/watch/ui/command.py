"""Serve pages about runs to a browser: `forge ui [RUN|FOLDER]`."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from cartridge_forge.plugins.chat.wire.foreign import listen
from cartridge_forge.plugins.serve.access.connections import (
    MOST_SHAKING,
    LimitedServer,
    TlsListener,
    limited,
)
from cartridge_forge.plugins.serve.spec import HttpSpec
from cartridge_forge.plugins.watch.control.endpoints import is_loopback
from cartridge_forge.plugins.watch.ui.served_runs import ServedRuns
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.secrets import read_secret
from cartridge_forge.protocols.spec.services import host_and_port

GRACE_SECONDS = 2  # for replies in flight, after Ctrl-C


def command(
    *, where: Path, address: str, token_env: str | None, tls_cert: Path | None, tls_key: Path | None
) -> int:
    """Serve until Ctrl-C. Raises ForgeError for a place without runs, and an address that cannot be
    listened on."""
    _check(address, tls_cert, tls_key)
    runs = ServedRuns(where)
    token = secrets.token_urlsafe(24)
    if token_env is not None:
        token = read_secret("--token-env", token_env, "the token of the pages").get_secret_value()
    listening = listen(address, "--listen")
    # These take most of a second, and a mistake is answered without them.
    import uvicorn

    from cartridge_forge.plugins.watch.ui.access import PageAccess
    from cartridge_forge.plugins.watch.ui.app import RunPages

    host, port = address.rpartition(":")[0], listening.getsockname()[1]
    app = PageAccess(
        RunPages(runs).application(), token, host.strip("[]"), secure=tls_cert is not None
    )
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    # Who has no token may connect all the same: silent clients must not keep the others out.
    bounds = limited(HttpSpec(), 0 if tls_cert is None else MOST_SHAKING)
    if tls_cert is not None:
        listening = TlsListener(listening, bounds["http"].connections_open)
    server = LimitedServer(
        uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS, ssl_certfile=tls_cert, ssl_keyfile=tls_key,
            loop="auto" if tls_cert is None else "asyncio", **bounds,
        )
    )  # fmt: skip
    listening.listen()  # who reads the next line may connect at once
    scheme = "http" if tls_cert is None else "https"
    query = "" if token_env is not None else f"?token={token}"
    print(f"open {scheme}://{host}:{port}/{query}", flush=True)
    print(f"it shows {runs.root}; Ctrl-C ends it", flush=True)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
    return 0


def _check(address: str, tls_cert: Path | None, tls_key: Path | None) -> None:
    try:
        host_and_port(address)
    except ValueError:
        raise SpecError(
            f"--listen must be host:port: got {address}; write it as 127.0.0.1:8420"
        ) from None
    if (tls_cert is None) != (tls_key is None):
        raise SpecError("--tls-cert and --tls-key go together; give both, or none on loopback")
    if tls_cert is None and not is_loopback(address):
        raise SpecError(
            f"--tls-cert and --tls-key must be given for {address}, which is not loopback: no "
            "token goes out unencrypted"
        )
