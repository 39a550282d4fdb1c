"""Calls to a pool's generators whose tokens are told while they are sampled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from monarch.actor import Channel

from protocols.errors import RunError
from protocols.types import Came, Completion, GenerateRequest
from services.pool import Pool

CANCEL_SECONDS = 5.0


async def generate(
    pool: Pool,
    requests: Sequence[GenerateRequest],
    told: Callable[[Came], None] | None,
    timeout_s: float,
) -> list[Completion]:
    """Completions in the order of the requests, which one replica decodes: again another, when
    that one dies, which tells the same tokens anew. Cancelling this ends the decoding.

    Raises what `Pool.route` raises.
    """
    port, hearing = None, None
    if told is not None:
        port, receiver = Channel[Any].open()
        hearing = asyncio.create_task(_hear(receiver, told))
    try:
        generated = await pool.route("generate", requests, port, timeout_s=timeout_s)
        return list(generated.completions)
    except (asyncio.CancelledError, RunError):  # nobody waits for it any more
        await asyncio.shield(end(pool, [r.id for r in requests]))
        raise
    finally:
        if hearing is not None:
            hearing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hearing


async def end(pool: Pool, ids: Collection[str]) -> None:
    """End requests, whichever replicas decode them. One that dies meanwhile has ended them."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(pool.fanout("cancel", tuple(ids)), CANCEL_SECONDS)


async def _hear(receiver: Any, told: Callable[[Came], None]) -> None:
    while True:
        for came in await receiver.recv():
            told(came)
