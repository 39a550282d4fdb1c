"""What the door needs of whatever decodes: one port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protocols.types import Completion, GenerateRequest


@dataclass(frozen=True)
class TokensCame:
    """Tokens of one request, as they are sampled: those from `first_index` of its response on.

    The same indices may come twice, with the same tokens: a replica that takes over for a dead one
    begins again. `logprobs` and `top_logprobs` are one a token, as in `protocols.types.Completion`.
    """

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


OnTokens = Callable[[TokensCame], None]


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
