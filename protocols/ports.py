"""Define the interfaces between rooms as `typing.Protocol`s, which actors, HTTP clients and plain
functions in tests satisfy alike; and what an engine streams and reports while it serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.step import Completion, GenerateRequest, TensorRef

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TokenChunk:
    """Carry tokens of a response in progress, from index `first` on, as in `Completion`.

    With `StopCondition(before=True)` the response may end before tokens that were already sent.
    """

    request_id: str
    first: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class TokenPort:
    """Name a Monarch port that gets lists of `TokenChunk`. What a replica has for the requests of
    one `key` goes there together."""

    key: str
    port: Any


def refused(request: GenerateRequest, why: str) -> Completion:
    """Return the completion of a request that could not be served: no tokens, and the reason."""
    return Completion(request.id, (), (), (), "error", error=why)


@dataclass(frozen=True)
class EngineReport:
    """Report an engine's times in seconds, and how often it loaded cartridges.

    `start_seconds` is the time to start it, `first_token_seconds` from the first request to its
    first token (None before), `stop_seconds` of the shutdown (None while it runs). A *load* writes
    `loaded_tokens` of one cartridge version into the paged memory of one request; requests that
    share the filled blocks need none.
    """

    start_seconds: float
    first_token_seconds: float | None
    loads: int
    loaded_tokens: int
    stop_seconds: float | None = None


class TraceSpan(NamedTuple):
    """Record one time span of a run, for the trace and latencies. Seconds since the epoch. One is
    made for each request; a tuple is the fastest to make.

    `TraceSpan("generator[1]", "generate", 1785060942.10, 1785060942.24, {"request": "generator/17",
    "step": 12, "version": 11, "waited": 0.003, "attempt": 1, "outcome": "ok"})` is a request as its
    replica served it; `waited` is how long it had no replica. `lane` is the row of the trace: the
    replica's name or, for a phase of the run, "controller" with the phase as `name` ("score") and
    the facts "arm", "step" and "version".
    """

    lane: str
    name: str
    begin: float
    end: float
    facts: Mapping[str, str | int | float]


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
