"""The ports: what one room needs of another, as Protocols. Actors, HTTP clients and plain
functions in tests all satisfy them alike.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from protocols.records.run_files import MetricRow
from protocols.records.status import PoolStatus, RunStatus
from protocols.types import Completion, GenerateRequest, TensorRef, TraceSpan

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

    async def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> TensorRef: ...

    async def get(self, packet: TensorRef) -> dict[str, torch.Tensor]: ...

    async def delete(self, key: str) -> None: ...

    async def keys(self, prefix: str = "") -> list[str]: ...


class TelemetrySink(Protocol):
    """Takes what a run tells of itself while it runs. Called from the controller's event loop: no
    call may wait for anything. What `event` gets is what events.jsonl gets, `metric` what
    metrics.jsonl gets; `status` comes about once a second.
    """

    def event(self, event: Mapping[str, Any]) -> None: ...

    def metric(self, row: MetricRow) -> None: ...

    def span(self, span: TraceSpan) -> None: ...

    def status(self, status: RunStatus) -> None: ...

    def close(self) -> None:
        """Write out what is held back. Bounded to a few seconds."""
        ...


class RunControl(Protocol):
    """What can be asked of a run from outside. Every method raises ForgeError with a remedy for
    what cannot be done, and leaves the run as it was.
    """

    async def status(self) -> RunStatus: ...

    async def scale(self, role: str, replicas: int) -> PoolStatus:
        """Set a pool's target; returns at once, while replicas start or drain."""
        ...

    async def pause(self) -> None:
        """Hold the run after the step in progress, until `resume` or `stop`."""
        ...

    async def resume(self) -> None: ...

    async def checkpoint(self) -> str:
        """Write a checkpoint after the step in progress; returns its name once it is on disk."""
        ...

    async def stop(self) -> None:
        """End after the step in progress, with a checkpoint and results; returns at once."""
        ...

    def events(self, replay: int) -> AsyncIterator[Mapping[str, Any]]:
        """The last `replay` events of the run, then every event as it happens, until it ends."""
        ...
