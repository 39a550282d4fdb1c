"""A worker that knows its version, and a pool of them."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_mesh import House

from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.services.pool.pool import Pool


class Worker:
    """Works for the seconds that it is asked to, and knows the version that it was told."""

    load_seconds = 0.05

    def __init__(self, done: list[Any] | None = None) -> None:
        self.done = done if done is not None else []
        self.version = -1
        self.loads: list[int] = []

    async def ready(self) -> int:
        return 1

    async def work(self, item: Any, seconds: float) -> tuple[Any, int]:
        await asyncio.sleep(seconds)
        self.done.append(item)
        return item, self.version

    async def load(self, version: int) -> None:
        assert version > self.version, "told twice, or out of order"
        await asyncio.sleep(self.load_seconds)
        self.version = version
        self.loads.append(version)

    async def refuse(self) -> None:
        raise ValueError("bad prompt")


async def settled(h: House, role: str = "worker", n: int = 2, **spec: Any) -> Pool:
    """Return a pool of `n` workers, once all are ready."""
    pool = h.service.spawn(
        Worker, role=role, spec=RoleSpec(**{"replicas": n, "restarts": 100, **spec})
    )
    await h.service.ready()
    return pool
