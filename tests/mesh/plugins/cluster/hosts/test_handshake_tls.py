"""The handshake between members of a mesh, and with strangers."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from cartridge_forge.plugins.cluster.hosts.handshake import (
    WorkerInfo,
    WorkerInfoServer,
    WorkerUnreachable,
    ask_hello,
)
from cartridge_forge.plugins.cluster.tls.certificates import certificates
from cartridge_forge.plugins.cluster.tls.identity import TlsIdentity, read_identity
from cartridge_forge.protocols.errors import RunError

TOLD = WorkerInfo({"python": "3.11"}, "5b1f", False, "tls://127.0.0.1:41235")
GET = b"GET /hello HTTP/1.0\r\n\r\n"


@pytest.fixture
def own(tmp_path: Path) -> TlsIdentity:
    [folder] = certificates(tmp_path / "mesh", [("w2.lan",)])
    return read_identity(folder, "own")


@pytest.fixture
def foreign(tmp_path: Path) -> TlsIdentity:
    [folder] = certificates(tmp_path / "foreign", [("w2.lan",)])
    return read_identity(folder, "foreign")


@pytest.fixture
def server(own: TlsIdentity) -> Iterator[WorkerInfoServer]:
    with WorkerInfoServer("127.0.0.1", 0, lambda: TOLD, own.server_context) as server:
        yield server


def as_member(identity: TlsIdentity | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HYPERACTOR_TLS_")]:
        monkeypatch.delenv(name)
    for name, path in (identity.environment() if identity else {}).items():
        monkeypatch.setenv(name, path)


def test_a_member_is_answered(
    server: WorkerInfoServer, own: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_member(own, monkeypatch)
    assert asyncio.run(ask_hello(f"tls://127.0.0.1:{server.port - 1}")) == TOLD


def test_one_without_a_certificate_is_told_where_to_get_one(
    server: WorkerInfoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_member(None, monkeypatch)
    with pytest.raises(RunError, match=r"asks for a certificate, and this process has none; set h"):
        asyncio.run(ask_hello(f"tls://127.0.0.1:{server.port - 1}"))


def test_a_worker_of_another_authority_is_not_believed(
    server: WorkerInfoServer, foreign: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_member(foreign, monkeypatch)
    address = f"tls://127.0.0.1:{server.port - 1}"
    with pytest.raises(WorkerUnreachable, match="certificate verify failed") as error:
        asyncio.run(ask_hello(address))
    assert f"start it with `forge worker --address {address} --tls DIR`" in str(error.value)


def test_a_worker_with_the_certificate_of_another_host_is_not_believed(
    own: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_member(own, monkeypatch)
    with (
        WorkerInfoServer("127.0.0.2", 0, lambda: TOLD, own.server_context) as server,
        pytest.raises(WorkerUnreachable, match=r"IP address mismatch.*127\.0\.0\.2"),
    ):
        asyncio.run(ask_hello(f"tls://127.0.0.2:{server.port - 1}"))


@pytest.mark.parametrize("shows", ["nothing", "foreign"])
def test_a_stranger_gets_no_answer(
    server: WorkerInfoServer, foreign: TlsIdentity, shows: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if shows == "foreign":
        context.load_cert_chain(foreign.cert, foreign.key)
    got = b""
    with (
        socket.create_connection(("127.0.0.1", server.port), 5) as raw,
        contextlib.suppress(ssl.SSLError, ConnectionError),
        context.wrap_socket(raw) as link,
    ):
        link.sendall(GET)
        got = link.recv(4096)
    assert got == b""


def test_plain_http_gets_an_alert_at_most(server: WorkerInfoServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as link:
        link.sendall(GET)
        got = b""
        with contextlib.suppress(ConnectionError):
            while more := link.recv(4096):
                got += more
    assert len(got) in (0, 7)
    assert got[:1] in (b"", b"\x15")


def test_renewed_files_count_from_the_next_connection_on(
    server: WorkerInfoServer,
    own: TlsIdentity,
    foreign: TlsIdentity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_member(foreign, monkeypatch)
    address = f"tls://127.0.0.1:{server.port - 1}"
    with pytest.raises(WorkerUnreachable):
        asyncio.run(ask_hello(address))
    for mine, new in zip(astuple(own), astuple(foreign), strict=True):
        mine.write_bytes(new.read_bytes())
    assert asyncio.run(ask_hello(address)) == TOLD


def test_a_silent_client_keeps_nobody_waiting(
    server: WorkerInfoServer, own: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_member(own, monkeypatch)
    with socket.create_connection(("127.0.0.1", server.port)):
        assert asyncio.run(ask_hello(f"tls://127.0.0.1:{server.port - 1}")) == TOLD
