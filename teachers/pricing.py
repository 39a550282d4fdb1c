"""Compute the cost and the worst-case cost of a call, in whole nanodollars."""

from __future__ import annotations

import math

from protocols.spec.teacher_replay import PriceSpec
from protocols.teacher_replay import NANO, TeacherUsage

# Tokens that a provider may add to a request: its chat template, and its instructions for JSON.
OVERHEAD_TOKENS = 1024


def per_token(dollars_per_million: float) -> int:
    """Return the nanodollars of one token: 1.25 dollars per million are 1250."""
    return round(dollars_per_million * 1000)


def cost(usage: TeacherUsage, prices: PriceSpec) -> int:
    """Return the nanodollars of a call by its usage."""
    cached = prices.input if prices.cached is None else prices.cached
    return (
        usage.input_tokens * per_token(prices.input)
        + usage.cached_tokens * per_token(cached)
        + usage.output_tokens * per_token(prices.output)
    )


def worst_case(sent_bytes: int, max_tokens: int, prices: PriceSpec) -> int:
    """Return the nanodollars that a call cannot exceed with any tokenizer: no token is shorter than
    a byte, and no answer longer than `max_tokens`."""
    dearest = max(prices.input, prices.cached or 0.0)
    return (sent_bytes + OVERHEAD_TOKENS) * per_token(dearest) + max_tokens * per_token(
        prices.output
    )


def nanodollars(dollars: float) -> int:
    """Return a cap in nanodollars, rounded down."""
    return math.floor(round(dollars * NANO, 3))


def reported(dollars: float) -> int:
    """Return a cost that a provider reported in nanodollars, rounded up."""
    return math.ceil(round(dollars * NANO, 3))
