"""Test tensor planes: codec, opening, what is swept, a store that dies."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from second_device import elsewhere

from cartridge_forge.plugins.host.plane import SharedMemoryPlane
from cartridge_forge.plugins.host.torchstore import StoreWatch, TorchStorePlane
from cartridge_forge.protocols.errors import PlaneError, SpecError
from cartridge_forge.protocols.step import TensorLayout, check_key
from cartridge_forge.services.planes.codec import (
    layout_of,
    pack,
    packed_bytes,
    packed_chunks,
    staged,
    unpack,
)
from cartridge_forge.services.planes.open import open_plane
from cartridge_forge.services.proc_info import began

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(bits(left), bits(right))
    )


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any shape up to three dimensions (0 allowed), any dtype, random bits (NaNs among them)."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    elements = torch.Size(shape).numel()
    raw = torch.randint(
        0, 256, (elements * dtype.itemsize,), generator=generator, dtype=torch.uint8
    )
    return raw.view(dtype).view(shape)


@given(st.dictionaries(st.text(max_size=8), tensors(), max_size=6))
def test_a_round_trip_is_bit_identical(named: dict[str, torch.Tensor]) -> None:
    buffer, layout = pack(named)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (packed_bytes(layout),)
    assert layout == layout_of(named)
    assert b"".join(packed_chunks(named)) == bytes(buffer.numpy())
    out = unpack(buffer.clone(), layout)
    assert list(out) == list(named)
    assert all(same(out[name], tensor) for name, tensor in named.items())


def test_entries_lie_on_64_byte_boundaries_in_order() -> None:
    named = {"a": torch.tensor([1, 2, 3], dtype=torch.uint8), "b": torch.tensor([7.0])}
    buffer, layout = pack(named)
    assert layout == TensorLayout((("a", (3,), "uint8"), ("b", (1,), "float32")))
    assert buffer.shape == (128,)
    assert buffer[:3].tolist() == [1, 2, 3]
    assert buffer[64:68].tolist() == [0, 0, 224, 64]  # 7.0 little-endian: 0x40e00000
    assert buffer[3:64].sum() == 0  # gaps are zero, so equal tensors pack to equal bytes
    assert buffer[68:].sum() == 0


@pytest.mark.parametrize(
    ("shape", "expected"), [((), 64), ((16,), 64), ((17,), 128), ((0, 3), 64), ((1000,), 4032)]
)
def test_sizes_of_float32(shape: tuple[int, ...], expected: int) -> None:
    assert packed_bytes(TensorLayout((("x", shape, "float32"),))) == expected


def test_no_tensors_still_make_a_buffer() -> None:
    buffer, layout = pack({})
    assert buffer.shape == (64,)  # mmap and RDMA refuse zero bytes
    assert unpack(buffer, layout) == {}


def test_the_packed_copy_is_a_snapshot() -> None:
    source = torch.ones(8, requires_grad=True)
    buffer, layout = pack({"x": source})
    with torch.no_grad():
        source.zero_()
    assert unpack(buffer, layout)["x"].tolist() == [1.0] * 8


def test_strided_and_expanded_sources_are_packed_by_value() -> None:
    grid = torch.arange(6).view(2, 3)
    named = {"t": grid.t(), "e": torch.tensor([5]).expand(4), "c": torch.tensor([1 + 2j]).conj()}
    buffer, layout = pack(named)
    assert b"".join(packed_chunks(named)) == bytes(buffer.numpy())
    out = unpack(buffer, layout)
    assert out["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert out["e"].tolist() == [5, 5, 5, 5]
    assert out["c"].tolist() == [1 - 2j]


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(64, dtype=torch.uint8),
        torch.zeros(192, dtype=torch.uint8),
        torch.zeros(128, dtype=torch.int8),
        torch.zeros(2, 64, dtype=torch.uint8),
        torch.zeros(256, dtype=torch.uint8)[::2],
    ],
    ids=["short", "long", "dtype", "two-dimensional", "strided"],
)
def test_a_buffer_of_another_layout_is_refused(buffer: torch.Tensor) -> None:
    with pytest.raises(PlaneError, match=r"needs a contiguous uint8 buffer of 128 bytes"):
        unpack(buffer, TensorLayout((("x", (20,), "float32"),)))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(PlaneError, match="'float3', which this torch does not know"):
        unpack(torch.zeros(64, dtype=torch.uint8), TensorLayout((("x", (1,), "float3"),)))


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(PlaneError, match="tensor 's' must be dense"):
        pack({"s": torch.eye(2).to_sparse()})


@pytest.mark.parametrize("key", ["", "..", "../x", "a/../b", "a\nb", "a\0b", "ü" * 60])
def test_bad_keys_are_refused(key: str) -> None:
    with pytest.raises(PlaneError, match="a key must"):
        check_key(key)


@pytest.mark.parametrize("key", ["a", "cartridge/patient_01@7", "a.b..c", "/a", "ü 1"])
def test_good_keys_pass(key: str) -> None:
    assert check_key(key) == key


def test_the_next_copy_is_under_way_while_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device whose copies take their time: begun and awaited by hand."""
    log: list[str] = []

    def begin(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        name = str(int(tensor))
        log.append(f"begin {name}")
        return tensor, lambda: log.append(f"wait {name}")

    monkeypatch.setattr("cartridge_forge.services.planes.codec._begin_copy", begin)
    for copy in staged([torch.tensor(i) for i in range(3)]):
        log.append(f"use {int(copy)}")
    assert log == [
        "begin 0", "begin 1", "wait 0", "use 0", "begin 2", "wait 1", "use 1", "wait 2", "use 2",
    ]  # fmt: skip


def test_what_lies_on_another_device_is_packed_by_value() -> None:
    named = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5).bfloat16()}
    expected = b"".join(packed_chunks(named))
    with elsewhere():
        there = {name: tensor.to("elsewhere") for name, tensor in named.items()}
        assert b"".join(packed_chunks(there)) == expected


def test_planes_pickle_as_handles() -> None:
    from cartridge_forge.plugins.host.torchstore import TorchStorePlane

    watch = StoreWatch(7, "1/2/3")
    store = pickle.loads(pickle.dumps(TorchStorePlane("handle", 3.0, watch)))  # noqa: S301  our own
    assert (store._controller, store.timeout_s) == ("handle", 3.0)
    assert store._watch is not None
    assert store._watch.__reduce__() == watch.__reduce__()
    shared = pickle.loads(pickle.dumps(SharedMemoryPlane("/dev/shm/x")))  # noqa: S301  our own bytes
    assert shared.root == Path("/dev/shm/x")


def test_an_unknown_plane_is_refused() -> None:
    with pytest.raises(
        SpecError,
        match="no tensor plane 'carrier_pigeon'",
    ):
        asyncio.run(open_plane("carrier_pigeon"))  # type: ignore[arg-type]


def test_a_missing_torchstore_is_an_error_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("torchstore.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchstore", None)
    monkeypatch.delitem(sys.modules, "cartridge_forge.plugins.host.torchstore", raising=False)
    with pytest.raises(PlaneError, match=r"run `pip install --no-deps torchstore==0\.1\.2`"):
        importlib.import_module("cartridge_forge.plugins.host.torchstore")


def test_directories_of_dead_runs_are_removed_and_of_living_ones_kept(tmp_path: Path) -> None:
    async def run() -> None:
        living = await SharedMemoryPlane.start(str(tmp_path))
        dead = await SharedMemoryPlane.start(str(tmp_path))
        await dead.put("x", {"x": torch.zeros(3)})
        assert dead._owned is not None
        os.close(dead._owned._lock)  # what the kernel does when a process dies
        dead._owned.janitor.kill()  # a whole container ends with its janitors
        dead._owned.janitor.communicate()
        newest = await SharedMemoryPlane.start(str(tmp_path))
        assert set(os.listdir(tmp_path)) == {living.root.name, newest.root.name}
        await living.stop()
        await newest.stop()
        assert os.listdir(tmp_path) == []

    asyncio.run(run())


def test_a_full_file_system_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        plane = await SharedMemoryPlane.start(str(tmp_path))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(PlaneError, match=r"put of 'big' \(8192 bytes\) failed"):
                await plane.put("big", {"x": torch.ones(2048)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.listdir(plane.root) == []
        await plane.stop()

    asyncio.run(run())


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_stopped_plane_leaves_no_janitor(tmp_path: Path) -> None:
    async def run() -> int:
        plane = await SharedMemoryPlane.start(str(tmp_path))
        assert plane._owned is not None
        janitor = plane._owned.janitor.pid
        await plane.put("x", {"x": torch.zeros(3)})
        await plane.stop()
        return janitor

    assert has_ended(asyncio.run(run()))
    assert os.listdir(tmp_path) == []


LONG = 60.0  # seconds that no test waits


@pytest.fixture
def store() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def watch_of(process: subprocess.Popen[bytes]) -> StoreWatch:
    return StoreWatch(process.pid, began(process.pid))


async def wait(watch: StoreWatch, seconds: float = LONG) -> None:
    async with watch.bounded(seconds):
        await asyncio.sleep(2 * LONG)


def test_all_waits_end_with_the_process(store: subprocess.Popen[bytes]) -> None:
    watch = watch_of(store)

    async def run() -> None:
        waits = [asyncio.create_task(wait(watch)) for _ in range(3)]
        await asyncio.sleep(0.01)
        async with watch.bounded(LONG):
            pass  # one that is answered ends no other
        assert not any(one.done() for one in waits)
        store.kill()
        for one in waits:
            with pytest.raises(TimeoutError):
                await one

    asyncio.run(run())
    assert watch.ended
    with pytest.raises(TimeoutError):
        asyncio.run(wait(watch))


def test_a_wait_has_its_own_limit_and_any_loop_may_wait(store: subprocess.Popen[bytes]) -> None:
    watch = watch_of(store)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            asyncio.run(wait(watch, 0.01))
    assert not watch.ended
    store.kill()
    with pytest.raises(TimeoutError):
        asyncio.run(wait(watch))
    assert watch.ended


def test_another_process_notices_too(store: subprocess.Popen[bytes]) -> None:
    watch = pickle.loads(pickle.dumps(watch_of(store)))  # noqa: S301  our own bytes
    store.kill()
    store.wait()  # its id is free
    with pytest.raises(TimeoutError):
        asyncio.run(wait(watch))
    assert watch.ended


def test_another_process_with_its_id_is_not_the_store(store: subprocess.Popen[bytes]) -> None:
    ticks, _, host = began(store.pid).partition("/")
    watch = StoreWatch(store.pid, f"{int(ticks) - 1}/{host}")
    with pytest.raises(TimeoutError):
        asyncio.run(wait(watch))
    assert watch.ended


def test_a_process_of_another_host_is_not_watched(store: subprocess.Popen[bytes]) -> None:
    watch = StoreWatch(store.pid, began(store.pid) + "elsewhere")
    store.kill()
    store.wait()
    with pytest.raises(TimeoutError):
        asyncio.run(wait(watch, 0.05))
    assert not watch.ended, "its wait ended by its limit"


def test_a_wait_that_has_run_out_is_left_alone_when_the_process_ends(
    store: subprocess.Popen[bytes],
) -> None:
    watch = watch_of(store)
    faults: list[object] = []

    async def wait_out() -> None:
        async with watch.bounded(0.01):
            try:
                await asyncio.sleep(LONG)
            except asyncio.CancelledError:
                store.kill()
                store.wait()
                await asyncio.sleep(0.01)  # the loop's reader sees it
                raise

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        for _ in range(2):  # the second begins after the end
            with pytest.raises(TimeoutError):
                await wait_out()

    asyncio.run(run())
    assert not faults


def test_an_error_of_a_store_that_has_ended_says_so(store: subprocess.Popen[bytes]) -> None:
    """Monarch's report of the ended process may come before the loop has looked at the process."""

    async def run() -> None:
        watch = watch_of(store)
        plane = TorchStorePlane(None, LONG, watch)

        async def work() -> None:
            raise RuntimeError("timeout waiting for message from proc mesh agent")

        with pytest.raises(PlaneError, match=r"put of 'b' failed: .*timeout waiting"):
            await plane._bounded("put", "b", work())
        store.kill()
        store.wait()
        with pytest.raises(PlaneError, match=r"put of 'b' failed: the store's process has ended"):
            await plane._bounded("put", "b", work())

    asyncio.run(run())
