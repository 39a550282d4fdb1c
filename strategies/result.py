"""What every strategy returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strategies.samplers.token_budget import TokenSpend


@dataclass(frozen=True)
class StrategyResult:
    """The chosen response, the answer found in it (None: none), what was spent, and how it came.

    `details` are plain JSON values: votes, steps with their scores, populations. `finish_reason`
    is that of the chosen response, or "budget" where the token budget ended the strategy.
    `token_ids` are exact where the backend tells them.
    """

    text: str
    answer: str | None
    spent: TokenSpend
    finish_reason: str
    token_ids: tuple[int, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
