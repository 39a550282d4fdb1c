"""A backend that keeps what it is told, and versions of cartridges for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.step import Completion, GenerateRequest


class RecordingBackend:
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
    """Return one version of each of a, b and c."""
    library = CartridgeStore(tmp_path, BaseModelInfo(1, 1, 2, 16, "c"))
    added = {}
    for name in "abc":
        with library.incoming() as file:
            save_file({"kv": torch.zeros(1, 2, 1, 3, 2)}, file)
            added[name] = library.add(name, file, {})
    return added
