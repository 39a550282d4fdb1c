"""Write a step's scores of tokens as text for token_scores.jsonl, and read them.

A row has doc_kl at every trained token, in a byte each, and what the teacher held likeliest there,
in five bytes for each of TOP tokens.

    {"arm": "on_policy", "step": 12, "id": "on_policy/12/0", "kl": "AACzQP8=", "top": "BQAAAAo..."}

Both are base64. A byte of 0 is at most LEAST nats, 1 to 254 are spaced evenly in the logarithm from
LEAST to MOST, so that a value is off by 3% at most; 255 is a token that bears no loss. `top` has,
for each token that bears a loss, the teacher's likeliest tokens in order: four bytes of the token,
the least first, and -log p as such a byte. It is "" where the teacher was not asked.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator, Sequence

LEAST = 1e-5  # nats
MOST = 50.0
NONE = 255
TOP = 3  # tokens of the teacher's
_STEPS = 254
_SCALE = _STEPS / math.log(MOST / LEAST)
_ENTRY = struct.Struct("<IB")

Likely = list[tuple[int, float]]  # tokens with their log-probability, the likeliest first


def encoded(values: Sequence[float | None]) -> str:
    """Return values in nats as text; None for a token without a score."""
    return base64.b64encode(bytes(map(_byte, values))).decode()


def decoded(text: str) -> list[float | None]:
    """Return the values of `encoded`, 0 for those of at most LEAST. Raises ValueError for a text
    that is no base64."""
    return [_value(byte) for byte in base64.b64decode(text, validate=True)]


def encoded_top(tokens: Sequence[Likely]) -> str:
    """Return the teacher's likeliest at each token with a score, as text; as many at each."""
    packed = (_ENTRY.pack(token, _byte(-p)) for likely in tokens for token, p in likely)
    return base64.b64encode(b"".join(packed)).decode()


def decoded_top(text: str, scores: Sequence[float | None]) -> list[Likely | None]:
    """Return the values of `encoded_top` at each of the `scores`, None for a token without one.
    Raises ValueError for a text that is not of as many tokens."""
    scored = sum(score is not None for score in scores)
    data = base64.b64decode(text, validate=True)
    count = len(data) // (scored * _ENTRY.size) if scored else 0
    if not count or len(data) != scored * count * _ENTRY.size:
        if data:
            raise ValueError(f"{len(data)} bytes are not the likeliest of {scored} tokens")
        return [None] * len(scores)
    entries: Iterator[tuple[int, int]] = _ENTRY.iter_unpack(data)
    likely = ([next(entries) for _ in range(count)] for _ in range(scored))
    return [
        None if score is None else [(token, -(_value(byte) or 0.0)) for token, byte in next(likely)]
        for score in scores
    ]


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
