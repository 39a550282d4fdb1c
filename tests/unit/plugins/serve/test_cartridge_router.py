"""What `auto` reads of the library at each request: nothing that has not changed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion
from cartridge_forge.plugins.serve.routing import CartridgeRouter
from cartridge_forge.protocols.errors import DataError

BASE = BaseModelInfo(layers=2, kv_heads=1, head_dim=4, context=64, config_sha256="c" * 64)


class CountingStore(CartridgeStore):
    """Count what is read of it."""

    reads = 0

    def get(self, wanted: CartridgeName) -> CartridgeVersion:
        self.reads += 1
        return super().get(wanted)

    def passages(self, entry: CartridgeVersion) -> Any:
        self.reads += 1
        return super().passages(entry)


def add(library: CartridgeStore, name: str, words: dict[str, int]) -> None:
    with library.incoming() as file:
        save_file({"kv": torch.ones(2, 2, 1, 3, 4)}, file)
        library.add(name, file, {"by": "test"}, [words])


def long_ago(library: CartridgeStore) -> None:
    """Set the times of all cartridges' directories back, as hours would."""
    then = time.time() - 3600
    for folder in library.directory.iterdir():
        os.utime(folder, (then, then))


@pytest.fixture
def library(tmp_path: Path) -> CountingStore:
    library = CountingStore(tmp_path / "library", BASE)
    for name, word in (("p1", "salt"), ("p2", "iron"), ("p3", "zinc")):
        add(library, name, {word: 3})
    long_ago(library)
    return library


def test_nothing_is_read_twice_that_has_not_changed(library: CountingStore) -> None:
    router = CartridgeRouter(library)
    assert router.names() == ("p1", "p2", "p3")
    library.reads = 0
    for _ in range(50):
        assert router.names() == ("p1", "p2", "p3")
    assert library.reads == 0
    assert router.choose("how much iron?").entry.key == ("p2", 1)
    assert library.reads == 1  # of the one that was chosen


def test_what_changed_is_seen_at_the_next_call(library: CountingStore) -> None:
    router = CartridgeRouter(library)
    assert router.choose("iron").entry.key == ("p2", 1)
    add(library, "p2", {"gold": 3})
    assert router.choose("gold").entry.key == ("p2", 2)
    with pytest.raises(DataError):
        router.choose("iron")
    library.describe(library.get(CartridgeName("p1")), [{"iron": 2}])
    assert router.choose("iron").entry.key == ("p1", 1)
    library.drop("p1")
    with pytest.raises(DataError):
        router.choose("iron")
    for number in range(5):  # within a tick of the clock
        add(library, "p9", {f"word{number}": 1})
        assert router.choose(f"word{number}").entry.key == ("p9", number + 1)
    assert CartridgeRouter(library, lambda name: name == "p3").names() == ("p3",)
