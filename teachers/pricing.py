"""Money in whole nanodollars: what a call may cost at most, and what it did cost."""

from __future__ import annotations

import math

from protocols.spec.teacher_replay import PriceSpec
from protocols.teacher_replay import NANO, TeacherUsage

# Tokens that a provider may add to what we send: its chat template, and the words by which it
# asks the model for JSON.
OVERHEAD_TOKENS = 1024


def per_token(dollars_per_million: float) -> int:
    """Nanodollars of one token: 1.25 dollars per million are 1250."""
    return round(dollars_per_million * 1000)


def cost(usage: TeacherUsage, prices: PriceSpec) -> int:
    """Nanodollars of a call by its usage."""
    cached = prices.input if prices.cached is None else prices.cached
    return (
        usage.input_tokens * per_token(prices.input)
        + usage.cached_tokens * per_token(cached)
        + usage.output_tokens * per_token(prices.output)
    )


def worst_case(sent_bytes: int, max_tokens: int, prices: PriceSpec) -> int:
    """Nanodollars that a call cannot exceed, whatever the tokenizer: no token is shorter than a
    byte, and no answer longer than `max_tokens`."""
    dearest = max(prices.input, prices.cached or 0.0)
    return (sent_bytes + OVERHEAD_TOKENS) * per_token(dearest) + max_tokens * per_token(
        prices.output
    )


def nanodollars(dollars: float) -> int:
    """A cap, rounded down; what a provider says that a call cost is rounded up: see `reported`."""
    return math.floor(round(dollars * NANO, 3))


def reported(dollars: float) -> int:
    return math.ceil(round(dollars * NANO, 3))
