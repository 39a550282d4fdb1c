"""What answers requests, as ports: the generators, and strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from protocols.types import Completion, GenerateRequest, PrefixRef, TokenChunk
from serving.request import ServingRequest, StrategyRequest
from strategies.result import StrategyResult

# Tokens as they are sampled. The same may come twice: a replica that takes over for a dead one
# begins again, and says the same.
OnTokens = Callable[[TokenChunk], None]


class Backend(Protocol):
    """Generators, whoever runs them."""

    async def generate(
        self, requests: Sequence[GenerateRequest], on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; `on_tokens` is told before. Cancelling this
        ends the decoding. Raises DataError for a malformed request, RunError when nobody answers.
        """
        ...

    async def load(self, version: int, name: str, path: Path) -> None:
        """Hold the cartridge file as `PrefixRef("cartridge/<name>", version)`, on every replica
        there is and will be. Versions only grow. Raises PublishError when it does not fit."""
        ...

    async def drop(self, version: int) -> None:
        """Let go of a version that no request names any more."""
        ...

    def depth(self) -> int:
        """Requests that wait or run."""
        ...

    def healthy(self) -> int:
        """Replicas in service."""
        ...


class StrategyCatalog(Protocol):
    """Test-time strategies by name."""

    def names(self) -> list[str]: ...

    def check(self, strategy: StrategyRequest) -> None:
        """Raise DataError for options that the strategy does not take, or an unknown form."""
        ...

    async def run(self, asked: ServingRequest, prefix: PrefixRef) -> StrategyResult:
        """The answer to `asked.messages`. Raises DataError or RunError."""
        ...
