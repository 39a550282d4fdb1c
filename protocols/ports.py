"""Define the interfaces between rooms as `typing.Protocol`s, which actors, HTTP clients and plain
functions in tests satisfy alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import PoolStatus, RunStatus
from cartridge_forge.protocols.step import Completion, GenerateRequest, TensorRef
from cartridge_forge.protocols.streams import TraceSpan

if TYPE_CHECKING:
    import torch


class Generate(Protocol):
    """Sample in batches: token ids in, token ids out, completions in the order of the requests.

    A prefix that the generator does not hold fails its own request alone: a completion with
    `finish_reason` "error". Raises DataError for a malformed request.
    """

    async def __call__(self, requests: Sequence[GenerateRequest]) -> Sequence[Completion]: ...


class TensorPlane(Protocol):
    """Carry named tensors between processes. Values are snapshots: a reader never sees a
    half-written or later-modified tensor. An instance can be pickled into an actor.

    `put` raises PlaneError for a key that exists: versions are never overwritten. `get` raises
    PlaneError for a key that does not exist, and so does `delete`, once it has deleted the others.
    All methods bound their waiting.
    """

    async def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> TensorRef: ...

    async def get(self, packet: TensorRef) -> dict[str, torch.Tensor]: ...

    async def delete(self, *keys: str) -> None: ...

    async def keys(self, prefix: str = "") -> list[str]: ...


class TelemetrySink(Protocol):
    """Receive a run's telemetry. The controller's event loop calls it, so no method may wait.

    `event` gets the rows of events.jsonl and `metric` those of metrics.jsonl; `status` is called
    about once a second.
    """

    def event(self, event: Mapping[str, Any]) -> None: ...

    def metric(self, row: MetricRow) -> None: ...

    def span(self, span: TraceSpan) -> None: ...

    def status(self, status: RunStatus) -> None: ...

    def close(self) -> None:
        """Write out buffered data, within a few seconds."""
        ...


class RunControl(Protocol):
    """Control a run from outside. Every method raises ForgeError with a remedy for a request that
    cannot be met, and then leaves the run unchanged."""

    async def status(self) -> RunStatus: ...

    async def scale(self, role: str, replicas: int) -> PoolStatus:
        """Set a pool's target size and return at once, while replicas start or drain."""
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
        """Yield the last `replay` events of the run, then each new event until the run ends."""
        ...
