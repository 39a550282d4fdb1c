"""What the generators hold: loaded once, dropped when it is long unused, never while it is read."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from rooms.serving.resident_setup import RecordingBackend

from cartridge_forge.plugins.chat.wire.errors import ApiError
from cartridge_forge.plugins.library.store import CartridgeVersion
from cartridge_forge.plugins.serve.engine.resident_cartridges import ResidentCartridges
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.step import PrefixRef


def test_the_least_recently_used_goes_first(entries: dict[str, CartridgeVersion]) -> None:
    async def use() -> list[tuple[str, int]]:
        backend = RecordingBackend()
        shelf = ResidentCartridges(backend, 2)
        for name in "abacb":
            async with shelf.using(entries[name]) as prefix:
                assert prefix.name == f"cartridge/{name}"
            await shelf.close()
        return backend.told

    assert asyncio.run(use()) == [
        ("load a", 1), ("load b", 2), ("load c", 3), ("drop", 2), ("load b", 4), ("drop", 1),
    ]  # fmt: skip


def test_many_who_ask_at_once_load_once_and_one_who_leaves_takes_nothing(
    entries: dict[str, CartridgeVersion],
) -> None:
    async def use() -> tuple[list[Any], list[tuple[str, int]]]:
        backend = RecordingBackend()
        shelf = ResidentCartridges(backend, 2)

        async def one() -> PrefixRef:
            async with shelf.using(entries["a"]) as prefix:
                return prefix

        asking = [asyncio.create_task(one()) for _ in range(4)]
        await asyncio.sleep(0)
        asking[0].cancel()
        return await asyncio.gather(*asking, return_exceptions=True), backend.told

    got, told = asyncio.run(use())
    assert isinstance(got[0], asyncio.CancelledError)
    assert got[1:] == [PrefixRef("cartridge/a", 1)] * 3
    assert told == [("load a", 1)]


def test_nothing_goes_while_it_is_read(entries: dict[str, CartridgeVersion]) -> None:
    async def use() -> list[list[tuple[str, int]]]:
        backend, seen = RecordingBackend(), []
        shelf = ResidentCartridges(backend, 1)
        async with AsyncExitStack() as reading:
            await reading.enter_async_context(shelf.using(entries["a"]))
            await reading.enter_async_context(shelf.using(entries["b"]))
            shelf.drop(entries["a"].key)
            await shelf.close()
            seen.append(list(backend.told))
        await shelf.close()
        return [*seen, backend.told]

    before, after = asyncio.run(use())
    assert before == [("load a", 1), ("load b", 2)]
    assert after == [*before, ("drop", 1)]


def test_what_failed_to_load_is_tried_again_under_another_number(
    entries: dict[str, CartridgeVersion],
) -> None:
    async def use() -> list[tuple[str, int]]:
        backend = RecordingBackend()
        backend.fails = 1
        shelf = ResidentCartridges(backend, 2)
        with pytest.raises(PublishError):
            async with shelf.using(entries["a"]):
                pass
        async with shelf.using(entries["a"]) as prefix:
            assert prefix.version == 2
        return backend.told

    assert asyncio.run(use()) == [("load a", 2)]


def test_a_damaged_file_is_never_loaded(entries: dict[str, CartridgeVersion]) -> None:
    entries["a"].path.write_bytes(entries["b"].path.read_bytes()[:-1])

    async def use() -> None:
        backend = RecordingBackend()
        with pytest.raises(ApiError, match="a@1 is damaged"):
            async with ResidentCartridges(backend, 2).using(entries["a"]):
                pass
        assert backend.told == []

    asyncio.run(use())
