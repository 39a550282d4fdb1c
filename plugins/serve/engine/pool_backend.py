"""Implement `Backend` over a pool of generators, with routing, retries and streamed tokens; open
a pool for cartridges to measure."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from monarch.actor import Channel
from safetensors.torch import save_file
from torch import Tensor

from cartridge_forge.plugins.serve.backend import OnTokens
from cartridge_forge.protocols.errors import PublishError, RunError
from cartridge_forge.protocols.ports import TokenPort
from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.step import Completion, GenerateOutput, GenerateRequest
from cartridge_forge.services.clients import CARTRIDGE_TOPIC, RoleClient
from cartridge_forge.services.mesh import open_generators
from cartridge_forge.services.pool.pool import Pool, PoolUpdate

CANCEL_SECONDS = 5.0
ONGOING = 4096  # concurrent calls of one generator: its engine queues the rest


class StreamingClient(RoleClient):
    """Call generators for responses whose tokens are passed on while they are sampled."""

    role = "generator"

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        super().__init__(pools)
        self._told: dict[str, OnTokens] = {}  # by request
        self._hearing: tuple[TokenPort, asyncio.Task[None]] | None = None

    async def stream(
        self,
        requests: Sequence[GenerateRequest],
        on_tokens: OnTokens | None,
        timeout_s: float,
    ) -> list[Completion]:
        """Return completions in the order of the requests. `on_tokens` receives their tokens while
        one replica samples them; when that replica dies, another one passes the same tokens again.
        Calls at the same time share a port: their requests' ids must differ.

        Cancelling this call ends the decoding.
        """
        port = None if on_tokens is None else self._listen({r.id: on_tokens for r in requests})
        try:
            generated: GenerateOutput = await self.pool.route(
                "generate", requests, port, timeout_s=timeout_s
            )
            return list(generated.completions)
        except (asyncio.CancelledError, RunError):  # the responses have no reader any more
            await asyncio.shield(self.cancel([r.id for r in requests]))
            raise
        finally:
            for request in requests:
                self._told.pop(request.id, None)

    def _listen(self, listeners: Mapping[str, OnTokens]) -> TokenPort:
        """Return the port whose tokens of these requests are passed on while they are in `_told`.
        It stays open: in Monarch a cancelled receive keeps 9 kB as long as the process lives."""
        self._told |= listeners
        if self._hearing is None or self._hearing[1].done():
            port, receiver = Channel[Any].open()
            task = asyncio.create_task(_hear(receiver, self._told))
            self._hearing = TokenPort(uuid.uuid4().hex, port), task
        return self._hearing[0]

    async def cancel(self, ids: Collection[str]) -> None:
        """End requests on whichever replicas decode them. A dead replica counts as done."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.pool.fanout("cancel", tuple(ids)), CANCEL_SECONDS)

    async def drop(self, version: int) -> None:
        """Make every replica stop serving a version."""
        await self.pool.fanout("drop", version)


async def _hear(receiver: Any, listeners: Mapping[str, OnTokens]) -> None:
    while True:
        for chunk in await receiver.recv():
            if chunk.request_id in listeners:  # else its call has ended
                listeners[chunk.request_id](chunk)


class PoolBackend:
    """Generate on a pool. `deadline_s` bounds one call, its retries included."""

    def __init__(self, pool: Pool, deadline_s: float) -> None:
        self._pool, self._deadline_s = pool, deadline_s
        self._generator = StreamingClient({"generator": pool})
        self._held: dict[int, tuple[str, str]] = {}  # version -> (name, path)
        self._changing = asyncio.Lock()  # serialises changes to `_held`

    async def generate(
        self, requests: Sequence[GenerateRequest], on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        """Split the requests over the replicas; one request's tokens arrive while others still
        wait."""

        async def share(requests_share: Sequence[GenerateRequest]) -> list[Completion]:
            return await self._generator.stream(requests_share, on_tokens, self._deadline_s)

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
        """Set the files that a replica loads at its start, or with its next update."""
        files = sorted(self._held.items())
        updates = [PoolUpdate(CARTRIDGE_TOPIC, v, "load_file", (v, *file)) for v, file in files]
        self._pool.remember(CARTRIDGE_TOPIC, updates)


@asynccontextmanager
async def cartridge_pool(
    spec: RunSpec,
    documents: Mapping[str, tuple[int, ...]],
    end_ids: frozenset[int],
    cartridges: Mapping[int, tuple[str, Tensor]],
) -> AsyncIterator[PoolBackend]:
    """Yield a pool of generators configured as a run's own, for commands that measure its
    cartridges; they stop at the end of the block. `documents` (name -> token ids) and `cartridges`
    (version -> name and KV [L, 2, H_kv, P, D]) are loaded."""
    mesh = spec.mesh
    role = mesh.roles["generator"].model_copy(update={"max_ongoing": ONGOING})
    service, pool = await open_generators(
        spec.learn.model, spec.learn.generator, role, documents, end_ids,
        health=mesh.health, spawn_timeout_s=mesh.spawn_timeout_s,
        call_timeout_s=mesh.call_timeout_s,
    )  # fmt: skip
    try:
        await service.ready()
        backend = PoolBackend(pool, mesh.call_timeout_s)
        with tempfile.TemporaryDirectory(prefix="forge-cartridges-") as folder:
            for version, (name, kv) in cartridges.items():
                file = Path(folder) / f"{version}.safetensors"
                save_file({"kv": kv.contiguous()}, file)
                await backend.load(version, name, file)
            yield backend
    finally:
        await service.stop()
