"""Define the rows of a run's token_scores.jsonl: doc_kl at every trained token, in a byte each.

    {"arm": "on_policy", "step": 12, "id": "on_policy/12/0", "kl": "AACzQP8="}

`kl` is base64. A byte of 0 is at most LEAST nats, 1 to 254 are spaced evenly in the logarithm from
LEAST to MOST, so that a value is off by 3% at most; 255 is a token that bears no loss.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import TypedDict

LEAST = 1e-5  # nats
MOST = 50.0
NONE = 255
_STEPS = 254
_SCALE = _STEPS / math.log(MOST / LEAST)


class TokenScoreRow(TypedDict):
    """Hold a row: the scores of the response tokens of one sample of a step."""

    arm: str
    step: int
    id: str
    kl: str


def encoded(values: Sequence[float | None]) -> str:
    """Return values in nats as text; None for a token without a score."""
    return base64.b64encode(bytes(map(_byte, values))).decode()


def decoded(text: str) -> list[float | None]:
    """Return the values of `encoded`, 0 for those of at most LEAST. Raises ValueError for a text
    that is no base64."""
    return [_value(byte) for byte in base64.b64decode(text, validate=True)]


def _byte(value: float | None) -> int:
    if value is None or math.isnan(value):
        return NONE
    if value <= LEAST:  # also the rounding error below 0 of equal distributions
        return 0
    return min(_STEPS, max(1, round(_SCALE * math.log(min(value, MOST) / LEAST))))


def _value(byte: int) -> float | None:
    if byte == NONE:
        return None
    return LEAST * math.exp(byte / _SCALE) if byte else 0.0
