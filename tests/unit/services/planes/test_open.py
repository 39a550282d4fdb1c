"""The promises of protocols.ports.TensorPlane, kept by both planes between real processes."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import resource
import sys
from pathlib import Path

import pytest
import torch

from cartridge_forge.protocols.errors import PlaneError, SpecError
from cartridge_forge.services.planes.open import open_plane
from cartridge_forge.services.planes.shared_memory import SharedMemoryPlane
from cartridge_forge.services.planes.torchstore import StoreWatch


def test_planes_pickle_as_handles() -> None:
    from cartridge_forge.services.planes.torchstore import TorchStorePlane

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
    monkeypatch.delitem(sys.modules, "cartridge_forge.services.planes.torchstore", raising=False)
    with pytest.raises(PlaneError, match=r"run `pip install --no-deps torchstore==0\.1\.2`"):
        importlib.import_module("cartridge_forge.services.planes.torchstore")


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
