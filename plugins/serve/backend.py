"""Define what a server is made of: the generators, strategies by name, limits, and the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cartridge_forge.plugins.decoding.verified.cost import DraftGain, ServedLoad
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.serve.access.keys import ApiKey
from cartridge_forge.plugins.serve.request import ServingRequest, StrategyRequest
from cartridge_forge.plugins.serve.spec import HttpSpec, HubSpec, VerifySpec
from cartridge_forge.plugins.serve.tokenization import Tokenization
from cartridge_forge.plugins.strategies.problem import StrategyCost, StrategyResult
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef

# Receives tokens as they are sampled. A token may be reported twice: the replica that replaces a
# lost one decodes the response again from its start, with the same tokens.
OnTokens = Callable[[TokenChunk], None]


class Backend(Protocol):
    """Generate responses and hold cartridges, on any number of replicas."""

    async def generate(
        self, requests: Sequence[GenerateRequest], on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        """Return completions in the order of the requests; `on_tokens` gets their tokens as
        sampled. Cancelling ends the decoding. Raises DataError for a malformed request, RunError
        when no replica answers."""
        ...

    async def load(self, version: int, name: str, path: Path) -> None:
        """Load the file as `PrefixRef("cartridge/<name>", version)` on all current and future
        replicas. Versions only grow. Raises PublishError when the cartridge does not fit the model.
        """
        ...

    async def drop(self, version: int) -> None:
        """Free a version that no request names any more."""
        ...

    def depth(self) -> int:
        """Return the number of requests that wait or run."""
        ...

    def healthy(self) -> int:
        """Return the number of healthy replicas."""
        ...


class StrategyCatalog(Protocol):
    """Run test-time strategies by name."""

    def names(self) -> list[str]: ...

    def cost(self, strategy: StrategyRequest) -> StrategyCost:
        """Return the bound of what the strategy samples, without running it. Raises DataError for
        options that the strategy does not take, or an unknown form."""
        ...

    async def run(self, request: ServingRequest, prefix: PrefixRef) -> StrategyResult:
        """Return the strategy's result for `request.messages`. Raises DataError or RunError."""
        ...


@dataclass(frozen=True)
class RequestLimits:
    """Limit a request. `context` counts the positions of cartridges, prompt and response."""

    max_tokens: int
    context: int
    max_choices: int


@dataclass(frozen=True)
class ServerConfig:
    """Hold the parts of a server. Without `api_keys` requests need no API key. `drafts` tells
    whether the generators verify drafts, `draft_gain` what one gains of these rows and this share
    accepted (`verification_cost`), None where nothing is known of the model's shape."""

    model: str
    backend: Backend
    texts: Tokenization
    library: CartridgeStore
    strategies: StrategyCatalog
    limits: RequestLimits
    end_ids: frozenset[int]
    http: HttpSpec
    held_cartridges: int = 16
    api_keys: tuple[ApiKey, ...] = ()
    draining: Callable[[], bool] = lambda: False
    hub: HubSpec | None = None
    hub_token: str | None = field(default=None, repr=False)
    verify: VerifySpec = field(default_factory=VerifySpec)
    drafts: bool = True
    draft_gain: Callable[[ServedLoad, float], DraftGain] | None = None
