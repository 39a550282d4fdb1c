"""Provide the workers of `hosts.addresses`, which somebody else starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.pool.hosts import HostWorker


class AddressedHosts:
    """Provide workers started elsewhere: always the same, for any role. A worker that was drained
    or lost is used again once it is restarted at its address."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._workers = tuple(HostWorker(a.partition("://")[2], a) for a in addresses)

    async def workers(self) -> AsyncGenerator[tuple[HostWorker, ...]]:
        yield self._workers
        await asyncio.Event().wait()  # until it is closed

    async def want(self, role: str, replicas: int) -> None:
        pass

    def lacking(self) -> Sequence[str]:
        return ()

    async def close(self) -> None:
        pass


def open_hosts(spec: RunSpec) -> AddressedHosts:
    """Return the workers that a mesh file names."""
    return AddressedHosts(spec.mesh.hosts.addresses)
