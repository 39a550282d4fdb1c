"""What the generators hold: loaded once, dropped when it is long unused, never while it is read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from learning.checkpoint import sha256_of
from protocols.errors import PublishError
from protocols.types import Completion, GenerateRequest
from registry.formats.base_model import BaseModelInfo
from registry.store import CartridgeStore, CartridgeVersion
from serving.resident_cartridges import ResidentCartridges


class Recorder:
    """A backend that keeps what it is told, slowly."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.fails = 0

    async def generate(
        self, requests: Sequence[GenerateRequest], on_tokens: Any = None
    ) -> list[Completion]:
        return []

    async def load(self, version: int, name: str, path: Path) -> None:
        await asyncio.sleep(0.01)
        if self.fails:
            self.fails -= 1
            raise PublishError("it does not fit")
        self.told.append((f"load {name}", version))

    async def drop(self, version: int) -> None:
        self.told.append(("drop", version))

    def depth(self) -> int:
        return 0

    def healthy(self) -> int:
        return 1


@pytest.fixture
def entries(tmp_path: Path) -> dict[str, CartridgeVersion]:
    library = CartridgeStore(tmp_path, BaseModelInfo(1, 1, 2, 16, "c"))
    added = {}
    for name in "abc":
        with library.incoming() as file:
            save_file({"kv": torch.zeros(1, 2, 1, 3, 2)}, file)
            added[name] = library.add(name, file, {})
    return added


def test_versions_reach_the_generators_in_their_order(
    entries: dict[str, CartridgeVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly_first(path: Path) -> str:
        time.sleep(0.2 if path == entries["a"].path else 0.0)
        return sha256_of(path)

    monkeypatch.setattr("serving.resident_cartridges.sha256_of", slowly_first)

    async def use() -> list[tuple[str, int]]:
        backend = Recorder()
        shelf = ResidentCartridges(backend, 2)

        async def one(name: str) -> None:
            async with shelf.using(entries[name]):
                pass

        await asyncio.gather(one("a"), one("b"))
        return backend.told

    assert asyncio.run(use()) == [("load b", 1), ("load a", 2)]
