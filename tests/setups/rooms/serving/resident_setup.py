"""A backend that keeps what it is told, and versions of cartridges for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from serving_setup import InProcess, new_house

from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion
from cartridge_forge.plugins.serve.app import Server, create_server
from cartridge_forge.plugins.serve.backend import RequestLimits
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


ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/custom/cartridge/chat/completions",
    "/custom/cartridge/completions",
)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a door that takes 4096 bytes and answers with 4 tokens."""
    backend = InProcess()
    directory = tmp_path_factory.mktemp("schema")
    limits = RequestLimits(max_tokens=4, context=256, max_choices=4)
    yield create_server(new_house(directory, backend, max_body_bytes=4096, limits=limits))
    backend.close()
