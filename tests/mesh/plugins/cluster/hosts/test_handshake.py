"""The handshake before a worker is attached to."""

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

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
