"""Track which cartridge versions the generators hold, and evict the least recently used ones.

A version is loaded by its first request and is never dropped while a request reads it. On loading
it gets a number for the generators, which only grows.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cartridge_forge.plugins.chat.wire.errors import ApiError
from cartridge_forge.plugins.library.store import CartridgeVersion
from cartridge_forge.plugins.serve.backend import Backend
from cartridge_forge.protocols.files import sha256_of
from cartridge_forge.protocols.step import PrefixRef

Key = tuple[str, int]


@dataclass
class ResidentCartridge:
    """Track one version: the task that loads it, and the number of requests that use it."""

    loading: asyncio.Task[int]
    users: int = 0
    dropped: bool = False


class ResidentCartridges:
    """Hold at most `most` versions, and more only while requests use them."""

    def __init__(self, backend: Backend, most: int) -> None:
        self._backend, self._most = backend, most
        self._held: OrderedDict[Key, ResidentCartridge] = OrderedDict()
        self._versions = itertools.count(1)
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> list[Key]:
        return list(self._held)

    @asynccontextmanager
    async def using(self, entry: CartridgeVersion) -> AsyncIterator[PrefixRef]:
        """Yield the prefix for the generators, which hold it while the block runs. Raises ApiError
        for a damaged file, and the generators' error where they refuse it."""
        resident = self._held.get(entry.key)
        if resident is None:
            # One shared task, shielded below: the first request's cancellation must not end it.
            resident = self._held[entry.key] = ResidentCartridge(
                asyncio.create_task(self._load(entry))
            )
        self._held.move_to_end(entry.key)
        resident.users += 1
        try:
            version = await asyncio.shield(resident.loading)
            yield PrefixRef(f"cartridge/{entry.manifest.name}", version)
        finally:
            resident.users -= 1
            failed = resident.loading.done() and (
                resident.loading.cancelled() or resident.loading.exception() is not None
            )
            if failed and self._held.get(entry.key) is resident:
                del self._held[entry.key]
            self._tidy()

    def drop(self, key: Key) -> None:
        """Drop a version that the cartridge store has deleted, once its last request has ended."""
        if key in self._held:
            self._held[key].dropped = True
            self._tidy()

    async def close(self) -> None:
        """Wait until the versions being dropped are freed."""
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _load(self, entry: CartridgeVersion) -> int:
        if await asyncio.to_thread(sha256_of, entry.path) != entry.manifest.sha256:
            name, number = entry.key
            raise ApiError(
                503,
                f"the file of cartridge {name}@{number} is damaged: it does not match its "
                "checksum; drop it and add it again",
                param="cartridge",
                code="cartridge_damaged",
            )
        # Numbered after the checksum: generators need versions in increasing order.
        version = next(self._versions)
        await self._backend.load(version, entry.manifest.name, entry.path)
        return version

    def _tidy(self) -> None:
        for key, resident in list(self._held.items()):
            count = sum(not h.dropped for h in self._held.values())
            spare = resident.dropped or count > self._most
            if spare and not resident.users and resident.loading.done():
                del self._held[key]
                task = asyncio.create_task(self._backend.drop(resident.loading.result()))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
