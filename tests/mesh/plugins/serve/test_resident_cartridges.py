"""What the generators hold: loaded once, dropped when it is long unused, never while it is read."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from rooms.serving.resident_setup import RecordingBackend

from cartridge_forge.learning.checkpoint import sha256_of
from cartridge_forge.plugins.library.store import CartridgeVersion
from cartridge_forge.plugins.serve.engine.resident_cartridges import ResidentCartridges


def test_versions_reach_the_generators_in_their_order(
    entries: dict[str, CartridgeVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly_first(path: Path) -> str:
        time.sleep(0.2 if path == entries["a"].path else 0.0)
        return sha256_of(path)

    monkeypatch.setattr(
        "cartridge_forge.plugins.serve.engine.resident_cartridges.sha256_of", slowly_first
    )

    async def use() -> list[tuple[str, int]]:
        backend = RecordingBackend()
        shelf = ResidentCartridges(backend, 2)

        async def one(name: str) -> None:
            async with shelf.using(entries[name]):
                pass

        await asyncio.gather(one("a"), one("b"))
        return backend.told

    assert asyncio.run(use()) == [("load b", 1), ("load a", 2)]
