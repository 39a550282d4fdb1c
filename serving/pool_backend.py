"""Implement `Backend` over a pool of generators, with routing, retries and streamed tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from protocols.errors import PublishError, RunError
from protocols.records.status import ReplicaState
from protocols.types import Completion, GenerateRequest
from services.clients import GeneratorClient, remember_files
from services.pool.pool import Pool
from serving.backend import OnTokens


class PoolBackend:
    """Generate on a pool. `deadline_s` bounds one call, its retries included."""

    def __init__(self, pool: Pool, deadline_s: float) -> None:
        self._pool, self._deadline_s = pool, deadline_s
        self._generator = GeneratorClient({"generator": pool})
        self._held: dict[int, tuple[str, str]] = {}  # version -> (name, path)
        self._changing = asyncio.Lock()  # serialises changes to `_held`

    async def generate(
        self, requests: Sequence[GenerateRequest], on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        """Split the requests over the replicas; one request's tokens arrive while others still
        wait."""

        async def share(some: Sequence[GenerateRequest]) -> list[Completion]:
            return await self._generator.stream(some, on_tokens, self._deadline_s)

        return await self._pool.split(requests, share)

    async def load(self, version: int, name: str, path: Path) -> None:
        async with self._changing:
            self._held[version] = (name, str(path))
            try:
                self._remember()
                await self._pool.tell()
            except BaseException:
                # Forget it: a cartridge that cannot be loaded must not keep a new replica out.
                del self._held[version]
                self._remember()
                raise

    async def drop(self, version: int) -> None:
        async with self._changing:
            self._held.pop(version, None)
            self._remember()
            # A replica that never held it, or is lost, holds it no more.
            with contextlib.suppress(PublishError, RunError):
                await self._generator.drop(version)

    def depth(self) -> int:
        return len(self._pool.in_flight)

    def healthy(self) -> int:
        return sum(r.state is ReplicaState.HEALTHY for r in self._pool.replicas)

    def _remember(self) -> None:
        remember_files(self._pool, self._held)
