"""What is not served names the field; what asks for nothing is taken."""

from __future__ import annotations

from typing import Any

import pytest
from serving_setup import (
    CHAT,
    MODEL,
    Served,
    refused,
)


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "field required"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "is not served"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "leave it out, or send 0"),
        ({"temprature": 1}, "temprature", "is no field of this request"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 65}, "n", "may ask for 64 responses"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 600}, "max_tokens", "may have 512 tokens"),
        ({"max_tokens": 5000}, "max_tokens", "4096 positions: 12 are read"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"stop": [""]}, "stop[0]", "at least 1 character"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"forge": {"cartridge": "../x"}}, "forge.cartridge", "is no cartridge"),
        ({"forge": {"cartridge": "p9"}}, "forge.cartridge", "the library has p1"),
        ({"forge": {"strategy": "none"}}, "forge.strategy", "none there is"),
        ({"forge": {"options": {}}}, "forge.strategy", "belong to a strategy"),
        ({"forge": {"strategy": "twice"}, "n": 2}, "n", "not served with a strategy"),
        ({"forge": {"strategy": "twice", "options": {"x": 1}}}, "forge.options", "no option x"),
        ({"model": f"{MODEL}+p1@1", "forge": {"cartridge": "p1@2"}}, "forge.cartridge", "name one"),
        ({"forge": {"cartridges": ["p1"] * 9}}, "forge.cartridges", "at most 8 items"),
        ({"forge": {"cartridges": ["../x"]}}, "forge.cartridges", "is no cartridge"),
        ({"forge": {"cartridges": ["p1", "p9"]}}, "forge.cartridge", "the library has p1"),
        (
            {"forge": {"cartridge": "p1", "cartridges": ["p1"]}},
            "forge.cartridges",
            "put it into that list",
        ),
        ({"model": "gpt-4"}, "model", "ask for clinic-reader"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
    ],
)
def test_what_is_not_served_names_the_field(
    served: Served, more: dict[str, Any], param: str, said: str
) -> None:
    body = {"model": MODEL, "messages": CHAT, **more}
    status, at, message = refused(served, "/v1/chat/completions", body)
    assert status == (404 if param == "model" or "p9" in str(more) else 400)
    assert at == param
    assert said in message
