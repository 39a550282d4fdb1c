"""Test the handshake of hosts, plain and by TLS."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from cartridge_forge.plugins.cluster.hosts.handshake import (
    WorkerInfo,
    WorkerInfoServer,
    WorkerUnreachable,
    ask_hello,
    host_and_port,
    parse_hello,
    require_same,
)
from cartridge_forge.plugins.host.tls import TlsIdentity, certificates, read_identity
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.pool.hosts import versions

TOLD = WorkerInfo(
    {"torchmonarch": "0.7.0", "python": "3.11"}, "5b1f", False, "tcp://10.0.0.2:41235"
)


@pytest.fixture
def server() -> Iterator[WorkerInfoServer]:
    with WorkerInfoServer("127.0.0.1", 0, lambda: TOLD) as server:
        yield server


def test_what_a_worker_says_is_heard(server: WorkerInfoServer) -> None:
    assert asyncio.run(ask_hello(f"tcp://127.0.0.1:{server.port - 1}")) == TOLD


def test_there_is_nothing_else_to_ask(server: WorkerInfoServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as error:
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/")
    error.value.close()


def test_one_that_does_not_run_is_named_with_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        address = f"tcp://127.0.0.1:{port - 1}"
        with pytest.raises(WorkerUnreachable) as error:
            asyncio.run(ask_hello(address))
    said = str(error.value)
    assert said.startswith(f"the worker at {address} said no hello on port {port} (")
    assert f"start it with `forge worker --address {address}`" in said


def test_one_that_never_answers_is_given_up() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"tcp://127.0.0.1:{mute.getsockname()[1] - 1}"
        with pytest.raises(WorkerUnreachable, match=r"no answer within 0\.05 s"):
            asyncio.run(ask_hello(address, timeout_s=0.05))


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"versions": 1}', b'{"versions": {}, "incarnation": "a"}', b"\xff"],
)
def test_anything_else_is_no_hello(body: bytes) -> None:
    with pytest.raises(ValueError, match="not a worker's hello"):
        parse_hello(body)


def test_the_same_versions_pass_and_more_are_ignored() -> None:
    require_same("tcp://w:1", {**versions(), "numpy": "9"}, versions())


def test_every_other_version_is_named_with_both_and_the_remedy() -> None:
    theirs = {**versions(), "torchmonarch": "0.6.9"}
    del theirs["torchstore"]
    with pytest.raises(RunError) as error:
        require_same("tcp://w:1", theirs, {**versions(), "torchstore": "0.1.2"})
    ours = versions()["torchmonarch"]
    assert str(error.value).startswith(
        f"the worker at tcp://w:1 has torchmonarch 0.6.9 where this side has {ours}; torchstore "
        "none where this side has 0.1.2; install the same versions on both"
    )


def test_torchstore_counts_where_it_is_the_plane() -> None:
    assert set(versions(torchstore=True)) - set(versions(torchstore=False)) == {"torchstore"}
    assert not any("+" in version for version in versions().values()), "the build does not count"


def test_addresses() -> None:
    assert host_and_port("tcp://10.0.0.2:26600") == ("10.0.0.2", 26600)
    assert host_and_port("tls://w2.lan:26600") == ("w2.lan", 26600)
    assert host_and_port("tcp://[fd00::2]:1") == ("[fd00::2]", 1)
    for wrong in ("10.0.0.2:26600", "tcp://10.0.0.2", "tcp://10.0.0.2:65535", "tcp://a:0", ""):
        with pytest.raises(RunError, match="must be tls://host:port or tcp://host:port"):
            host_and_port(wrong)


def test_a_taken_port_is_refused_with_the_remedy(server: WorkerInfoServer) -> None:
    with (
        pytest.raises(RunError, match=r"cannot say hello .* Choose another address"),
        WorkerInfoServer("127.0.0.1", server.port, lambda: TOLD),
    ):
        pass


def test_the_answer_is_plain_json(server: WorkerInfoServer) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/hello") as answer:
        assert json.loads(answer.read()) == {
            "versions": {"torchmonarch": "0.7.0", "python": "3.11"}, "incarnation": "5b1f",
            "draining": False, "address": "tcp://10.0.0.2:41235", "gpus": None,
        }  # fmt: skip


TLS_TOLD = WorkerInfo({"python": "3.11"}, "5b1f", False, "tls://127.0.0.1:41235")
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
def tls_server(own: TlsIdentity) -> Iterator[WorkerInfoServer]:
    with WorkerInfoServer("127.0.0.1", 0, lambda: TLS_TOLD, own.server_context) as tls_server:
        yield tls_server


def as_member(identity: TlsIdentity | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HYPERACTOR_TLS_")]:
        monkeypatch.delenv(name)
    for name, path in (identity.environment() if identity else {}).items():
        monkeypatch.setenv(name, path)


def test_a_member_is_answered(
    tls_server: WorkerInfoServer, own: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_member(own, monkeypatch)
    assert asyncio.run(ask_hello(f"tls://127.0.0.1:{tls_server.port - 1}")) == TLS_TOLD


def test_one_without_a_certificate_is_told_where_to_get_one(
    tls_server: WorkerInfoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_member(None, monkeypatch)
    with pytest.raises(RunError, match=r"asks for a certificate, and this process has none; set h"):
        asyncio.run(ask_hello(f"tls://127.0.0.1:{tls_server.port - 1}"))


def test_a_worker_of_another_authority_is_not_believed(
    tls_server: WorkerInfoServer, foreign: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_member(foreign, monkeypatch)
    address = f"tls://127.0.0.1:{tls_server.port - 1}"
    with pytest.raises(WorkerUnreachable, match="certificate verify failed") as error:
        asyncio.run(ask_hello(address))
    assert f"start it with `forge worker --address {address} --tls DIR`" in str(error.value)


def test_a_worker_with_the_certificate_of_another_host_is_not_believed(
    own: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_member(own, monkeypatch)
    with (
        WorkerInfoServer("127.0.0.2", 0, lambda: TLS_TOLD, own.server_context) as tls_server,
        pytest.raises(WorkerUnreachable, match=r"IP address mismatch.*127\.0\.0\.2"),
    ):
        asyncio.run(ask_hello(f"tls://127.0.0.2:{tls_server.port - 1}"))


@pytest.mark.parametrize("shows", ["nothing", "foreign"])
def test_a_stranger_gets_no_answer(
    tls_server: WorkerInfoServer, foreign: TlsIdentity, shows: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if shows == "foreign":
        context.load_cert_chain(foreign.cert, foreign.key)
    got = b""
    with (
        socket.create_connection(("127.0.0.1", tls_server.port), 5) as raw,
        contextlib.suppress(ssl.SSLError, ConnectionError),
        context.wrap_socket(raw) as link,
    ):
        link.sendall(GET)
        got = link.recv(4096)
    assert got == b""


def test_plain_http_gets_an_alert_at_most(tls_server: WorkerInfoServer) -> None:
    with socket.create_connection(("127.0.0.1", tls_server.port), 5) as link:
        link.sendall(GET)
        got = b""
        with contextlib.suppress(ConnectionError):
            while more := link.recv(4096):
                got += more
    assert len(got) in (0, 7)
    assert got[:1] in (b"", b"\x15")


def test_renewed_files_count_from_the_next_connection_on(
    tls_server: WorkerInfoServer,
    own: TlsIdentity,
    foreign: TlsIdentity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_member(foreign, monkeypatch)
    address = f"tls://127.0.0.1:{tls_server.port - 1}"
    with pytest.raises(WorkerUnreachable):
        asyncio.run(ask_hello(address))
    for mine, new in zip(astuple(own), astuple(foreign), strict=True):
        mine.write_bytes(new.read_bytes())
    assert asyncio.run(ask_hello(address)) == TLS_TOLD


def test_a_silent_client_keeps_nobody_waiting(
    tls_server: WorkerInfoServer, own: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_member(own, monkeypatch)
    with socket.create_connection(("127.0.0.1", tls_server.port)):
        assert asyncio.run(ask_hello(f"tls://127.0.0.1:{tls_server.port - 1}")) == TLS_TOLD
