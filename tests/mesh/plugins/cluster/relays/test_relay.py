"""Relays hand keys on along a chain, and go round what is gone."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from cartridge_forge.actors.base import HOST
from cartridge_forge.plugins.cluster.relays import relay as relay_module
from cartridge_forge.plugins.cluster.relays.relay import (
    KeyRequest,
    Relay,
    RelayPlace,
    RelayServer,
    receive,
)
from cartridge_forge.plugins.cluster.relays.relay_wire import ask, connected, data_frames
from cartridge_forge.plugins.cluster.relays.relayed import RelayedPlane
from cartridge_forge.plugins.host.directories import file_of
from cartridge_forge.plugins.host.plane import SharedMemoryPlane
from cartridge_forge.plugins.host.tls import certificates, read_identity
from cartridge_forge.protocols.errors import PlaneError, RunError
from cartridge_forge.protocols.step import TensorRef
from cartridge_forge.services.planes.codec import layout_of

KEY = "cartridges/3/ab@h0"
BODY = bytes(range(256)) * 4096  # 1 MiB: four chunks
NOWHERE = "tcp://127.0.0.1:1"


class Host:
    """A relay of its own directory, which counts the bytes that it sent."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.relay = Relay(root)
        self.address = f"tcp://127.0.0.1:{RelayServer(self.relay, '127.0.0.1').port}"

    @property
    def file(self) -> Path:
        return file_of(self.relay.root, KEY)


@pytest.fixture
def hosts(tmp_path: Path) -> list[Host]:
    return [Host(tmp_path / f"h{i}") for i in range(4)]


def got(
    host: Host, place: int, route: Sequence[str] = (), behind: Sequence[str] = (), offset: int = 0
) -> bytes:
    chunks: list[bytes] = []
    asked = KeyRequest(KEY, len(BODY), offset, place, tuple(route), tuple(behind), 20.0)
    receive(host.address, asked, lambda chunk: chunks.append(bytes(chunk)))
    return b"".join(chunks)


def test_the_last_of_a_chain_gets_the_bytes_through_every_host(hosts: list[Host]) -> None:
    hosts[0].file.write_bytes(BODY)
    addresses = [host.address for host in hosts]
    assert got(hosts[3], 4, addresses[:3]) == BODY
    assert [host.file.read_bytes() == BODY for host in hosts] == [True] * 4
    assert [len(list(host.relay.root.iterdir())) for host in hosts] == [1] * 4, "no temporary files"
    assert got(hosts[3], 4, offset=len(BODY) - 3) == BODY[-3:]


def test_a_reader_that_wants_no_bytes_waits_for_the_whole(hosts: list[Host]) -> None:
    hosts[0].file.write_bytes(BODY)
    assert got(hosts[1], 2, [hosts[0].address], offset=len(BODY)) == b""
    assert hosts[1].file.read_bytes() == BODY


def test_an_asker_that_has_more_than_the_asked_one_waits(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "WAITING_SECONDS", 0.02)
    path = hosts[1].relay.root / "under-way"
    path.write_bytes(BODY)
    transfer = hosts[1].relay._transfers[KEY] = relay_module.RelayTransfer(path, 1, len(BODY), 1000)
    timer = threading.Timer(0.2, lambda: (transfer.arrived(len(BODY) - 1000), transfer.ended()))
    timer.start()
    assert got(hosts[1], 2, offset=5000) == BODY[5000:]


def test_a_relay_that_is_gone_is_passed_over(hosts: list[Host]) -> None:
    """In front of the asked one, and then all in front: one behind has the whole."""
    hosts[0].file.write_bytes(BODY)
    assert got(hosts[2], 3, [hosts[0].address, NOWHERE]) == BODY
    assert got(hosts[1], 2, [NOWHERE], [NOWHERE, hosts[2].address]) == BODY
    assert not hosts[3].file.exists()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[int]]]:
    """The address of a relay that sends 1,000 bytes of an answer and then nothing more, and the
    offsets that it was asked for."""
    monkeypatch.setattr("cartridge_forge.plugins.cluster.relays.relay_wire.SILENT_SECONDS", 0.5)
    monkeypatch.setattr(relay_module, "WAITING_SECONDS", 0.05)
    offsets: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))
    held = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            connection.recv(4096)
            connection.sendall((1000).to_bytes(4, "big") + BODY[:1000])
            offsets.append(1000)

    threading.Thread(target=serve, daemon=True).start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", offsets
    listener.close()
    for connection in held:
        connection.close()


def test_a_silent_relay_is_replaced_from_the_byte_where_it_ended(
    hosts: list[Host], broken: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, sent = broken
    offsets: list[int] = []
    real = relay_module._send

    def watched(relay: Relay, asked: KeyRequest, to: socket.socket) -> None:
        if relay is hosts[0].relay:
            offsets.append(asked.offset)
        real(relay, asked, to)

    monkeypatch.setattr(relay_module, "_send", watched)
    hosts[0].file.write_bytes(BODY)
    assert got(hosts[1], 3, [hosts[0].address, address]) == BODY
    assert sent == [1000]
    assert offsets == [1000]


def test_a_key_that_nobody_has_says_so(hosts: list[Host]) -> None:
    with pytest.raises(PlaneError, match=r"'cartridges/3/ab@h0' was got from no host \(tcp:"):
        got(hosts[1], 2, [hosts[0].address], [NOWHERE])
    with pytest.raises(PlaneError, match="is not here"):
        got(hosts[1], 2)
    assert list(hosts[1].relay.root.iterdir()) == []


def test_no_two_relays_wait_for_each_other(hosts: list[Host]) -> None:
    """With lists in other orders, each in front of the other: one refuses, and both end."""
    a, b = hosts[0], hosts[1]
    failures: list[str] = []

    def one(host: Host, other: Host) -> None:
        try:
            got(host, 2, [other.address])
        except PlaneError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=one, args=pair) for pair in ((a, b), (b, a))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15.0)
    assert not any(thread.is_alive() for thread in threads)
    assert len(failures) == 2


def test_other_bytes_under_the_key_are_refused(hosts: list[Host]) -> None:
    hosts[0].file.write_bytes(BODY[:-1])
    with pytest.raises(PlaneError, match=f"has {len(BODY) - 1} bytes, not {len(BODY)}"):
        got(hosts[0], 1)


@pytest.mark.parametrize(
    "line", [b"\x80\x04K\x01.\n", b"[]\n", b'{"get": {"key": "x"}}\n', b'{"run": "x"}\n']
)
def test_what_is_no_question_is_answered_and_nothing_else(hosts: list[Host], line: bytes) -> None:
    """Among them a pickle: what comes from outside is read as JSON alone."""
    host, port = hosts[0].address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), 5.0) as link:
        link.sendall(line)
        with pytest.raises(PlaneError):
            list(data_frames(link))


@pytest.mark.parametrize("key", ["../x", "/../x", ""])
def test_no_key_leads_out_of_the_directory(hosts: list[Host], key: str) -> None:
    with pytest.raises(PlaneError, match="a key must be"):
        ask(hosts[0].address, {"delete": key})
    asked = KeyRequest(key, 1, 0, 1)
    with (
        pytest.raises(PlaneError, match="a key must be"),
        connected(hosts[0].address, {"get": asked._asdict()}) as link,
    ):
        list(data_frames(link))


# -- the plane over them --------------------------------------------------------------------------


class OneStore:
    """A plane that holds tensors in this process."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, torch.Tensor]] = {}

    async def put(self, key: str, tensors: dict[str, torch.Tensor]) -> TensorRef:
        self.held[key] = dict(tensors)
        return TensorRef(key, layout_of(tensors))

    async def get(self, packet: TensorRef) -> dict[str, torch.Tensor]:
        if packet.key not in self.held:
            raise PlaneError(f"get: no key {packet.key!r}")
        return self.held[packet.key]

    async def delete(self, *keys: str) -> None:
        for key in keys:
            del self.held[key]

    async def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.held if key.startswith(prefix))

    async def stop(self) -> None: ...


X = {"x": torch.arange(1000, dtype=torch.float32)}


def planes(hosts: list[Host]) -> RelayedPlane:
    places = [RelayPlace(f"h{i}", h.address, str(h.relay.root)) for i, h in enumerate(hosts)]
    return RelayedPlane(OneStore(), places, 20.0)


def test_what_is_published_is_on_every_host_that_read_it(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        plane = planes(hosts)
        monkeypatch.setenv(HOST, "h2")
        packet = await plane.put("cartridges/1/ab", X)
        other = await plane.put("scores/1/ab", X)
        assert (packet.key, other.key) == ("cartridges/1/ab@h2", "scores/1/ab")
        with pytest.raises(PlaneError, match="exists"):
            await plane.put("cartridges/1/ab", X)
        # The chain begins at h2: h2, h3, h0.
        monkeypatch.setenv(HOST, "h0")
        assert torch.equal((await plane.get(packet))["x"], X["x"])
        have = [file_of(h.relay.root, packet.key).exists() for h in hosts]
        assert have == [True, False, True, True]
        assert await plane.keys("c") == [packet.key]
        assert await plane.keys() == [packet.key, other.key]
        await plane.delete(packet.key)
        await plane.delete(other.key)
        assert await plane.keys() == []
        with pytest.raises(PlaneError, match="delete: no key"):
            await plane.delete(packet.key)

    asyncio.run(scenario())


def test_a_host_without_a_relay_reads_from_the_others_and_puts_into_the_store(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        plane = planes(hosts)
        monkeypatch.setenv(HOST, "h1")
        packet = await plane.put("cartridges/1/ab", X)
        monkeypatch.setenv(HOST, "new")
        assert torch.equal((await plane.get(packet))["x"], X["x"])
        own = await plane.put("cartridges/2/ab", X)
        assert own.key == "cartridges/2/ab"
        assert torch.equal((await plane.get(own))["x"], X["x"])
        with pytest.raises(PlaneError, match="no host has 'cartridges/9/ab@h1'"):
            await plane.get(TensorRef("cartridges/9/ab@h1", packet.layout))

    asyncio.run(scenario())


def test_a_host_whose_relay_died_reads_from_the_others(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        plane = planes(hosts)
        monkeypatch.setenv(HOST, "h1")
        packet = await plane.put("cartridges/1/ab", X)
        gone = RelayPlace("h3", NOWHERE, "/nowhere")
        left = RelayedPlane(plane.store, (*plane.places[:3], gone), 20.0)
        monkeypatch.setenv(HOST, "h3")
        assert torch.equal((await left.get(packet))["x"], X["x"])
        assert (await left.put("cartridges/2/ab", X)).key == "cartridges/2/ab"

    asyncio.run(scenario())


def test_a_deleted_key_that_is_on_its_way_is_not_kept(
    hosts: list[Host], broken: tuple[str, list[int]]
) -> None:
    address, _ = broken

    def read() -> None:
        with pytest.raises(PlaneError):
            got(hosts[1], 2, [address])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while KEY not in hosts[1].relay._transfers:
        time.sleep(0.001)
    assert ask(hosts[1].address, {"delete": KEY}) is True
    reader.join(15.0)
    assert not reader.is_alive()
    assert list(hosts[1].relay.root.iterdir()) == []


def test_a_relays_file_is_what_a_host_itself_puts(tmp_path: Path, hosts: list[Host]) -> None:
    async def scenario() -> None:
        packet = await SharedMemoryPlane(str(hosts[0].relay.root)).put(KEY, X)
        asked = KeyRequest(KEY, 4032, 4032, 2, (hosts[0].address,))
        receive(hosts[1].address, asked, lambda chunk: None)
        read = await SharedMemoryPlane(str(hosts[1].relay.root)).get(packet)
        assert torch.equal(read["x"], X["x"])

    asyncio.run(scenario())


def test_over_tls_the_holders_of_a_certificate_alone_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mesh,) = certificates(tmp_path / "mesh", [("127.0.0.1",)])
    (others,) = certificates(tmp_path / "others", [("127.0.0.1",)])
    own = read_identity(mesh, "own")
    relays = []
    for name in ("h0", "h1"):
        (tmp_path / name).mkdir()
        relay = Relay(tmp_path / name)
        port = RelayServer(relay, "127.0.0.1", own.server_context).port
        relays.append((relay, f"tls://127.0.0.1:{port}"))
    (first, origin), (second, address) = relays
    file_of(first.root, KEY).write_bytes(BODY)
    asked = KeyRequest(KEY, len(BODY), len(BODY) - 4, 2, (origin,), (), 20.0)
    chunks: list[bytes] = []
    for name, value in own.environment().items():
        monkeypatch.setenv(name, value)
    receive(address, asked, lambda chunk: chunks.append(bytes(chunk)))
    assert b"".join(chunks) == BODY[-4:]
    assert file_of(second.root, KEY).read_bytes() == BODY

    for name, value in read_identity(others, "foreign").environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match="certificate verify failed"):
        receive(address, asked, chunks.append)  # type: ignore[arg-type]
    for name in own.environment():
        monkeypatch.delenv(name)
    with pytest.raises(RunError, match="asks for a certificate, and this process has none"):
        receive(address, asked, chunks.append)  # type: ignore[arg-type]
    plain = address.replace("tls://", "tcp://")
    with pytest.raises((OSError, PlaneError)):
        receive(plain, asked, chunks.append)  # type: ignore[arg-type]
    assert len(chunks) == 1
