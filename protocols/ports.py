"""The ports: what one room needs of another, as Protocols. Actors, HTTP clients and plain
functions in tests all satisfy them alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from protocols.types import Completion, GenerateRequest, Packet

if TYPE_CHECKING:
    import torch


class Generate(Protocol):
    """Batched sampling: token ids in, token ids out, answers in the order of the requests.

    A prefix that this generator does not hold fails its own request alone: a completion with
    `finish_reason` "error". Raises DataError for a malformed request.
    """

    async def __call__(self, requests: Sequence[GenerateRequest]) -> Sequence[Completion]: ...


class TensorPlane(Protocol):
    """Named tensors between processes. Values are snapshots: a reader never sees a half-written
    or later-modified tensor. An instance can be pickled into an actor.

    `put` refuses a key that exists (PlaneError): versions are never overwritten. `get` and
    `delete` raise PlaneError for a key that does not exist. All bound their waiting.
    """

    async def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> Packet: ...

    async def get(self, packet: Packet) -> dict[str, torch.Tensor]: ...

    async def delete(self, key: str) -> None: ...

    async def keys(self, prefix: str = "") -> list[str]: ...
