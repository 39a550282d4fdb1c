"""Define the result of every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strategies.samplers.token_budget import TokenSpend


@dataclass(frozen=True)
class StrategyResult:
    """Hold the chosen response, the answer in it (None: none), the spend and the details.

    `details` are plain JSON values: votes, steps with their scores, populations. `finish_reason` is
    that of the chosen response, or "budget" if the token budget ended the strategy. `token_ids` are
    exact where the backend returns them, else empty.
    """

    text: str
    answer: str | None
    spent: TokenSpend
    finish_reason: str
    token_ids: tuple[int, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
