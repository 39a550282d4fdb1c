"""Test tensor planes in processes."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from monarch.actor import Actor, ProcMesh, endpoint, this_host
from rooms.services.planes_setup import KINDS

from cartridge_forge.plugins.host.plane import SharedMemoryPlane
from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.ports import TensorPlane
from cartridge_forge.protocols.step import TensorLayout, TensorRef
from cartridge_forge.services.planes.open import OwnedPlane, open_plane

MB = 1 << 20


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {
        name: (
            str(tensor.dtype),
            tuple(tensor.shape),
            hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest(),
        )
        for name, tensor in tensors.items()
    }


def resident_mb() -> float:
    """Return this process's memory that no file backs: pages of files come and go with the system's
    need for memory. The heap's free memory is given back first: how much of it stands between two
    of a plane's own trims is chance.
    """
    ctypes.CDLL(None).malloc_trim(0)
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(w[1]) for w in lines if w[0] in ("RssAnon:", "RssShmem:")) * 1024 / MB


class Peer(Actor):
    """A process that uses planes handed to it, or opens its own."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def resident_mb(self) -> float:
        return resident_mb()

    @endpoint
    async def digest(self, plane: TensorPlane, packet: TensorRef) -> Any:
        return digest(await plane.get(packet))

    @endpoint
    async def put(self, plane: TensorPlane, keys: list[str], value: float) -> list[str]:
        """Put a tensor of that value under each key; the keys that were accepted."""
        accepted = []
        for key in keys:
            try:
                await plane.put(key, {"x": torch.full((4,), value)})
            except PlaneError:
                continue
            accepted.append(key)
        return accepted

    @endpoint
    async def publish(self, plane: TensorPlane, prefix: str, versions: int) -> None:
        """Publish 1 MB of zeros that often; as a version comes, the last but one goes, and every
        fourth is read.
        """
        source = {"x": torch.zeros(MB // 4)}
        packets: list[TensorRef] = []
        for version in range(versions):
            work: list[Any] = [plane.put(f"{prefix}@{version}", source)]
            if version >= 2:
                work.append(plane.delete(packets[-2].key))
            if version % 4 == 3:
                work.append(plane.get(packets[-1]))
            packets.append((await asyncio.gather(*work))[0])

    @endpoint
    async def publish_while_writing(self, plane: TensorPlane, versions: int) -> int:
        """Publish version v as a tensor of all v, rewriting it in place while the put is under
        way, as an optimiser would; the number of rewrites that fell within a put.
        """
        source = torch.zeros(MB // 8, dtype=torch.int64)
        rewrites = 0
        for version in range(versions):
            source.fill_(version)
            put = asyncio.ensure_future(plane.put(f"live@{version}", {"x": source}))
            await asyncio.sleep(0)  # the put has begun, and with it the snapshot been taken
            while not put.done():
                source.add_(1000)
                rewrites += 1
                await asyncio.sleep(0)
            await put
            if version >= 3:
                await plane.delete(f"live@{version - 3}")
        await plane.put("live-done", {})
        return rewrites

    @endpoint
    async def open(self, kind: Any, mesh: ProcMesh) -> OwnedPlane:
        return await open_plane(kind, mesh)


async def read_until_done(plane: TensorPlane) -> tuple[int, list[str]]:
    """How many versions were read, and what was wrong with any of them."""
    layout = TensorLayout((("x", (MB // 8,), "int64"),))
    reads, torn, held = 0, [], {}
    while not await plane.keys("live-done"):
        keys = await plane.keys("live@")
        for key in sorted(keys, key=lambda key: int(key.split("@")[1]))[-1:]:
            try:
                held[key] = (await plane.get(TensorRef(key, layout)))["x"]
            except PlaneError:  # evicted since it was listed
                continue
            reads += 1
    # Compared at the end: what was read stays what it was, evicted and overwritten or not.
    for key, tensor in held.items():
        if not bool((tensor == int(key.split("@")[1])).all()):
            torn.append(key)
    return reads, torn


@pytest.fixture(scope="module")
def peer() -> Iterator[Any]:
    mesh = this_host().spawn_procs(per_host={"gpus": 1}, name="peer")
    yield mesh.spawn("peer", Peer)
    mesh.stop().get(timeout=30)


def test_what_one_process_puts_another_gets_bit_for_bit(plane: OwnedPlane, peer: Any) -> None:
    tensors = {
        "kv": torch.randn(3, 5, 2).to(torch.bfloat16),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "empty": torch.zeros(0, 7, dtype=torch.int32),
        "scalar": torch.tensor(-3, dtype=torch.int64),
    }

    async def run() -> None:
        packet = await plane.put("bits/a.b c", tensors)
        assert packet.key == "bits/a.b c"
        assert await peer.digest.call_one(plane, packet) == digest(tensors)
        await plane.delete(packet.key)

    asyncio.run(run())


def test_an_existing_key_is_refused_and_keeps_its_value(plane: OwnedPlane, peer: Any) -> None:
    async def run() -> None:
        packet = await plane.put("once", {"x": torch.full((4,), 1.0)})
        with pytest.raises(PlaneError, match=r"put: key 'once' exists"):
            await plane.put("once", {"x": torch.full((4,), 2.0)})
        assert await peer.put.call_one(plane, ["once"], 3.0) == []
        assert (await plane.get(packet))["x"].tolist() == [1.0] * 4
        await plane.delete("once")

    asyncio.run(run())


def test_of_two_writers_of_one_key_exactly_one_wins(plane: OwnedPlane, peer: Any) -> None:
    keys = [f"race/{i}" for i in range(20)]

    async def ours() -> list[str]:
        accepted = []
        for key in keys:
            try:
                await plane.put(key, {"x": torch.full((4,), 1.0)})
            except PlaneError:
                continue
            accepted.append(key)
        return accepted

    async def run() -> None:
        theirs = peer.put.call_one(plane, keys, 2.0)
        won = await ours()
        lost = await theirs
        assert sorted(won + lost) == sorted(keys)
        layout = TensorLayout((("x", (4,), "float32"),))
        for key in keys:
            value = (await plane.get(TensorRef(key, layout)))["x"].tolist()
            assert value == [1.0 if key in won else 2.0] * 4
            await plane.delete(key)

    asyncio.run(run())


def test_a_missing_key_is_named(plane: OwnedPlane) -> None:
    with pytest.raises(PlaneError, match=r"get: no key 'never/put'"):
        asyncio.run(plane.get(TensorRef("never/put", TensorLayout(()))))
    with pytest.raises(PlaneError, match=r"delete: no key 'never/put'"):
        asyncio.run(plane.delete("never/put"))


def test_keys_are_listed_by_prefix_and_gone_once_deleted(plane: OwnedPlane) -> None:
    async def run() -> None:
        packets = [await plane.put(key, {}) for key in ("k/1", "k/10", "k.2", "other")]
        assert await plane.keys() == ["k.2", "k/1", "k/10", "other"]
        assert await plane.keys("k/1") == ["k/1", "k/10"]
        assert await plane.keys("missing") == []
        for packet in packets:
            await plane.delete(packet.key)
        assert await plane.keys() == []
        with pytest.raises(PlaneError, match="no key 'k/1'"):
            await plane.get(packets[0])
        for key in ("k/1", "k/2"):
            await plane.put(key, {})  # a deleted key is free again
        with pytest.raises(PlaneError, match=r"delete: no key 'never/put', 'nor/this'; never put"):
            await plane.delete("never/put", "k/1", "nor/this", "k/2")
        assert await plane.keys() == [], "those that were there are deleted all the same"

    asyncio.run(run())


def test_a_layout_of_another_packet_is_refused(plane: OwnedPlane) -> None:
    async def run() -> None:
        await plane.put("sized", {"x": torch.zeros(128)})
        with pytest.raises(PlaneError, match=r"layout .* needs a contiguous uint8 buffer of 448"):
            await plane.get(TensorRef("sized", TensorLayout((("x", (112,), "float32"),))))
        await plane.delete("sized")

    asyncio.run(run())


def test_a_reader_may_write_into_what_it_got(plane: OwnedPlane) -> None:
    async def run() -> None:
        packet = await plane.put("private", {"x": torch.ones(4)})
        (await plane.get(packet))["x"].zero_()
        assert (await plane.get(packet))["x"].tolist() == [1.0] * 4
        await plane.delete("private")

    asyncio.run(run())


def test_publishes_are_never_torn(plane: OwnedPlane, peer: Any) -> None:
    async def run() -> None:
        writer = peer.publish_while_writing.call_one(plane, 40)
        reads, torn = await read_until_done(plane)
        rewrites = await writer
        assert torn == []
        assert reads >= 5
        if not isinstance(plane, SharedMemoryPlane):  # whose put is over before it yields
            assert rewrites >= 40
        for key in await plane.keys("live"):
            await plane.delete(key)

    asyncio.run(run())


def test_memory_stays_flat_over_a_thousand_publishes(
    plane: OwnedPlane, peer: Any, storage: ProcMesh
) -> None:
    """1,000 MB pass through and at most 4 MB are alive. Growth is measured after 50 publishes, and
    48 MB are allowed, as Monarch's queue of traces takes up to 34 in every process: losing one
    publish in twenty would show.
    """

    async def run() -> None:
        holder = storage.spawn("probe", Peer)

        async def resident() -> list[float]:
            others = [await actor.resident_mb.call_one() for actor in (peer, holder)]
            return [resident_mb(), *others]

        await peer.publish.call_one(plane, "warm", 50)
        before = await resident()
        await peer.publish.call_one(plane, "flat", 950)
        deadline = time.monotonic() + 60  # for messages that Monarch has yet to see acknowledged
        while True:
            growth = [now - old for now, old in zip(await resident(), before, strict=True)]
            if max(growth) < 48 or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.2)
        assert max(growth) < 48, f"root, writer, storage grew by {growth} MB"
        if isinstance(plane, SharedMemoryPlane):
            stored = sum(file.stat().st_size for file in plane.root.iterdir())
            assert stored == 4 * MB  # two versions of each series
        left = await plane.keys()
        assert left == ["flat@948", "flat@949", "warm@48", "warm@49"]
        for key in left:
            await plane.delete(key)

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
def test_a_plane_opened_inside_an_actor_serves_others_until_stopped(
    kind: str, peer: Any, storage: ProcMesh
) -> None:
    async def run() -> None:
        plane = await peer.open.call_one(kind, storage)
        packet = await plane.put("x", {"x": torch.arange(3)})
        assert (await plane.get(packet))["x"].tolist() == [0, 1, 2]
        await plane.stop()
        with pytest.raises(PlaneError, match=r"put of 'y': the plane .*has been stopped"):
            await plane.put("y", {})
        with pytest.raises(PlaneError, match=r"get of 'x': the plane .*has been stopped"):
            await plane.get(packet)
        with pytest.raises(PlaneError, match=r"delete of 'x': the plane .*has been stopped"):
            await plane.delete("x")
        with pytest.raises(PlaneError, match=r"keys.*: the plane .*has been stopped"):
            await plane.keys()

    asyncio.run(run())


def test_a_stuck_or_dead_storage_process_raises_in_bounded_time(storage: ProcMesh) -> None:
    """The last test to use `storage`, which does not survive it: a new process costs seconds."""

    async def run() -> None:
        plane = await open_plane("torchstore", storage, timeout_s=4.0)
        pid = await storage.spawn("victim", Peer).pid.call_one()
        packet = await plane.put("a", {"x": torch.ones(3)})

        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PlaneError, match=r"get of 'a' (failed|took longer than 4 s)"):
            await plane.get(packet)
        os.kill(pid, signal.SIGCONT)

        process = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([process], [], [])
        os.close(process)
        with pytest.raises(PlaneError, match=r"put of 'b' failed: the store's process has ended"):
            await plane.put("b", {"x": torch.ones(3)})
        with pytest.raises(PlaneError, match=r"get of 'a' failed: the store's process has ended"):
            await plane.get(packet)

    asyncio.run(run())


def test_torchstore_asks_for_the_kind_and_place_of_a_value_where_we_answer() -> None:
    """Should a release name it otherwise, every get would ask twice again, and nothing fail."""
    from torchstore.client import LocalClient

    from cartridge_forge.plugins.host.torchstore import TensorClient

    answered = {"_get_stored_object_type", "_locate_volumes"}
    assert set(vars(TensorClient)) & set(vars(LocalClient)) >= answered


OWNER = """
import asyncio, os, signal, sys, time, torch
from cartridge_forge.plugins.host.plane import SharedMemoryPlane

async def own(home):
    plane = await SharedMemoryPlane.start(home)
    await plane.put("x", {"x": torch.zeros(3)})
    print(os.getpid(), plane.root, plane._owned.janitor.pid, flush=True)
    time.sleep(600)

for home in sys.stdin:
    if os.fork() == 0:
        os.setsid()
        asyncio.run(own(home.strip()))
os.wait()
"""


@pytest.fixture(scope="module")
def owners() -> Iterator[subprocess.Popen[str]]:
    """Begins an owner, in a session of its own, for every directory that it is told."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    yield process
    process.communicate(timeout=60)


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def wait_for(condition: object, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)
    return bool(condition())  # type: ignore[operator]


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_owner_held_is_removed(
    tmp_path: Path, death: signal.Signals, owners: subprocess.Popen[str]
) -> None:
    assert owners.stdin is not None
    assert owners.stdout is not None
    owners.stdin.write(f"{tmp_path}\n")
    owners.stdin.flush()
    owner, root, janitor = owners.stdout.readline().split()
    assert list(Path(root).iterdir())
    # As a terminal does, to the whole group: the janitor is not in it, and shrugs it off besides.
    os.kill(int(janitor), signal.SIGINT)
    os.kill(int(janitor), signal.SIGTERM)
    os.killpg(int(owner), death)
    assert wait_for(lambda: os.listdir(tmp_path) == [])
    assert wait_for(lambda: has_ended(int(janitor)))
