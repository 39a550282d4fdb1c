"""Start a pool of generators with a run's cartridges, for commands that measure them."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from protocols.spec.mesh import RunSpec

if TYPE_CHECKING:
    from torch import Tensor

    from serving.pool_backend import PoolBackend

ONGOING = 4096  # concurrent calls of one generator: its engine queues the rest


@asynccontextmanager
async def cartridge_pool(
    spec: RunSpec,
    documents: Mapping[str, tuple[int, ...]],
    end_ids: frozenset[int],
    cartridges: Mapping[int, tuple[str, Tensor]],
) -> AsyncIterator[PoolBackend]:
    """Yield a pool of generators configured as the run's own; they stop at the end of the block.
    `documents` (name -> token ids) and `cartridges` (version -> name and KV [L, 2, H_kv, P, D]) are
    loaded."""
    # Imported here: commands that only print do without torch.
    from safetensors.torch import save_file

    from services.mesh import open_generators
    from serving.pool_backend import PoolBackend

    mesh = spec.mesh
    role = mesh.roles.generator.model_copy(update={"max_ongoing": ONGOING})
    service, pool = await open_generators(
        spec.learn.model, spec.learn.generator, role, documents, end_ids,
        health=mesh.health, spawn_timeout_s=mesh.spawn_timeout_s,
        call_timeout_s=mesh.call_timeout_s,
    )  # fmt: skip
    try:
        await service.ready()
        backend = PoolBackend(pool, mesh.call_timeout_s)
        with tempfile.TemporaryDirectory(prefix="forge-cartridges-") as made:
            for version, (name, kv) in cartridges.items():
                file = Path(made) / f"{version}.safetensors"
                save_file({"kv": kv.contiguous()}, file)
                await backend.load(version, name, file)
            yield backend
    finally:
        await service.stop()
