"""Scores of tokens in a byte each: known bytes, and how far off a value may be."""

from __future__ import annotations

import base64
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.protocols.records.token_scores import (
    LEAST,
    MOST,
    decoded,
    decoded_top,
    encoded,
    encoded_top,
)


def test_known_values_are_these_bytes() -> None:
    # Half way in the logarithm is sqrt(1e-5 * 50) = 0.02236.
    values = [0.0, LEAST, -1e-9, 0.02236068, MOST, 900.0, None, math.nan]
    assert base64.b64decode(encoded(values)) == bytes([0, 0, 0, 127, 254, 254, 255, 255])


def test_what_was_written_is_read() -> None:
    read = decoded("AH/+/w==")
    assert read[0] == 0.0
    assert read[1:3] == pytest.approx([0.02236068, 50.0])
    assert read[3] is None
    with pytest.raises(ValueError, match=r"padding|base64"):
        decoded("A")


@given(st.floats(min_value=1.1 * LEAST, max_value=MOST))
def test_a_value_is_off_by_three_percent_at_most(value: float) -> None:
    (read,) = decoded(encoded([value]))
    assert read == pytest.approx(value, rel=0.0309)


def test_likely_tokens_are_five_bytes_each() -> None:
    # -log p of 0 is byte 0, and of sqrt(1e-5 * 50) byte 127.
    text = encoded_top([[(258, 0.0), (7, -0.02236068)]])
    assert base64.b64decode(text) == bytes([2, 1, 0, 0, 0, 7, 0, 0, 0, 127])
    assert decoded_top(text, [None, 0.5]) == [None, [(258, 0.0), (7, pytest.approx(-0.02236068))]]
    assert decoded_top("", [None, 0.5]) == [None, None]
    with pytest.raises(ValueError, match="10 bytes are not the likeliest of 3 tokens"):
        decoded_top(text, [0.5, 0.5, 0.5])
