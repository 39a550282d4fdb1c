"""Serve and query worker info: versions and state that a run checks before it attaches to a worker.

    GET https://10.0.0.2:26601/hello
    {"versions": {"torchmonarch": "0.7.0", "python": "3.11", ...}, "incarnation": "5b1f...",
     "draining": false, "address": "tls://10.0.0.2:41235", "gpus": 8}

It is plain JSON over HTTP, on the port after Monarch's, since another version of Monarch may not
even decode our messages. Of a worker with TLS, both sides show a certificate of the mesh.

`reached_at` finds the address by which the other hosts of a mesh reach this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Self

from pydantic import TypeAdapter, ValidationError

from cartridge_forge.plugins.cluster.spec import pod_host
from cartridge_forge.plugins.host.tls_listener import POLL_SECONDS, MutualTlsRequests
from cartridge_forge.protocols.errors import RunError, SpecError
from cartridge_forge.protocols.spec.mesh import ADDRESS, HostsSpec, is_tls

ANSWER_SECONDS = 3.0  # an answer takes a millisecond
ANSWER_BYTES = 16 * 1024


@dataclass(frozen=True)
class WorkerInfo:
    """Describe a worker. `incarnation` differs for each start; `address` is to attach to; `gpus` is
    how many its processes may use, None from a worker that does not tell."""

    versions: Mapping[str, str]
    incarnation: str
    draining: bool
    address: str
    gpus: int | None = None


class WorkerUnreachable(RunError):
    """Report that a worker did not answer; it may start or return later."""


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port: `"tls://10.0.0.2:26600"` -> `("10.0.0.2", 26600)`; IPv6 keeps its
    brackets."""
    match = ADDRESS.fullmatch(address)
    # Worker info is on the next port, so Monarch cannot have the last one.
    if match is None or not 1 <= int(match[2]) < 65535:
        raise RunError(
            f"a worker's address must be tls://host:port or tcp://host:port: got {address!r}"
        )
    return match[1], int(match[2])


def parse_hello(body: bytes) -> WorkerInfo:
    """Parse worker info. Raises ValueError for anything else."""
    try:
        return TypeAdapter(WorkerInfo).validate_json(body)
    except ValidationError as error:
        raise ValueError(f"not a worker's hello: {body[:80]!r}") from error


async def ask_hello(address: str, timeout_s: float = ANSWER_SECONDS) -> WorkerInfo:
    """Return the info of the worker at that address. Raises WorkerUnreachable with the remedy, and
    RunError for a `tls://` address where this process has no certificate."""
    host, port = host_and_port(address)
    secured = client_context(address)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port + 1, ssl=secured)
            try:
                writer.write(f"GET /hello HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                answer = await reader.read(ANSWER_BYTES)
                while more := await reader.read(ANSWER_BYTES):
                    answer += more
                    if len(answer) > ANSWER_BYTES:
                        raise ValueError("it says too much")
            finally:
                writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise ValueError(f"not a worker's hello: {answer[:80]!r}")
        return parse_hello(body)
    except (OSError, ValueError, TimeoutError) as error:
        why = f"{error}" or f"no answer within {timeout_s:g} s"
        raise WorkerUnreachable(
            f"the worker at {address} said no hello on port {port + 1} ({why}); start it with "
            f"`forge worker --address {address}{' --tls DIR' if secured else ''}`, and let this "
            "host reach both ports there"
        ) from error


def client_context(address: str) -> ssl.SSLContext | None:
    """Return the settings of a connection to this address; None for plain TCP."""
    if not is_tls(address):
        return None
    from cartridge_forge.plugins.host.tls import (
        environment_identity,  # a tenth of a second, for TLS alone
    )

    identity = environment_identity()
    if identity is None:
        raise RunError(
            f"the worker at {address} asks for a certificate, and this process has none; set "
            "hosts.tls to a directory that `forge certs` made"
        )
    return identity.client_context()


def require_same(address: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise RunError that names every version in which the worker and this side differ."""
    other = [
        f"{name} {theirs.get(name, 'none')} where this side has {version}"
        for name, version in ours.items()
        if theirs.get(name, "none") != version
    ]
    if other:
        raise RunError(
            f"the worker at {address} has {'; '.join(other)}; install the same versions on both "
            "(the same image, or the same `make install`), and start the worker again"
        )


class WorkerInfoServer:
    """Serve worker info on `host`:`port` from a thread: `with WorkerInfoServer("10.0.0.2", 26601,
    tell): ...`. `tell` is called for each request. With `context` it admits TLS alone, by the
    context's rules. Raises RunError where it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        tell: Callable[[], WorkerInfo],
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        class WorkerInfoHandler(BaseHTTPRequestHandler):
            timeout = ANSWER_SECONDS

            def do_GET(self) -> None:
                if self.path != "/hello":
                    return self.send_error(404)
                body = json.dumps(asdict(tell())).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass  # once a second, from every controller

        class WorkerInfoListener(MutualTlsRequests, TCPServer):  # HTTPServer asks DNS for its name
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_address = True

        try:
            self._server = WorkerInfoListener((host.strip("[]"), port), WorkerInfoHandler)
        except OSError as error:
            raise RunError(
                f"a worker cannot say hello on {host}:{port}: {error.strerror}; is another worker "
                "there? Choose another address with --address"
            ) from error
        self._server.context = context
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


ANYWHERE = ("192.0.2.1", 9)  # a documentation network: reached over the default route


def reached_at(hosts: HostsSpec) -> str:
    """Return this host's address: `hosts.reached_at`, else that of the route to the first worker,
    else of the default route. IPv6 addresses are in brackets. With TLS a name stays a name, which
    the certificate is for, and a pod goes by the name that its address has. Raises SpecError for a
    name without an address, and where there is no such route."""
    named = hosts.reached_at
    try:
        if named is not None:
            address = _address_of(named)
            return _bracketed(address if hosts.tls is None else named)
        if hosts.addresses:
            host, port = host_and_port(hosts.addresses[0])
            return _bracketed(_local_address(_address_of(host.strip("[]")), port))
        local, namespace = _local_address(*ANYWHERE), os.environ.get("POD_NAMESPACE")
        if hosts.tls is not None and hosts.kind == "kubernetes" and namespace:
            return pod_host(local, namespace)
        return _bracketed(local)
    except OSError as error:
        to = named or (hosts.addresses[0] if hosts.addresses else "anywhere")
        raise SpecError(
            f"hosts.reached_at: this host found no address for the workers ({to}: "
            f"{error.strerror}); set it to this host's address as the workers reach it"
        ) from error


def _address_of(name: str) -> str:
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0][4][0])


def _local_address(address: str, port: int) -> str:
    """Return the route's local address. Connecting a datagram socket sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
