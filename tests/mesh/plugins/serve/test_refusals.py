"""What is not served names the field; what asks for nothing is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from pydantic import ValidationError
from serving_setup import (
    CHAT,
    MODEL,
    Served,
    raw,
    refused,
)

from cartridge_forge.plugins.chat.wire.openai_chat import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "field required"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "its keys are token ids"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "its keys are token ids"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "its keys are token ids"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias", "finite number"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
        ({"min_tokens": 3}, "min_tokens", "leave it out"),
        ({"use_beam_search": True}, "use_beam_search", "forge.strategy"),
        ({"forge": {"strategy": "twice"}, "min_p": 0.1}, "min_p", "not served with a strategy"),
        (
            {"forge": {"strategy": "twice"}, "logit_bias": {"5": 1}},
            "logit_bias",
            "not served with a strategy",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "reads it"),
        ({"temprature": 1}, "temprature", "is no field of this request"),
        ({"Temperature": 1}, "Temperature", "is no field of this request"),
        ({"TOP_P": 1}, "TOP_P", "is no field of this request"),
        ({"max-tokens": 1}, "max-tokens", "is no field of this request"),
        ({"int": 1}, "int", "is no field of this request"),
        ({"": 1}, "", "the empty name is no field of this request"),
        ({"forge": {"Strategy": "x"}}, "forge.Strategy", "is no field of this request"),
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


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [99_999]}, "prompt"),
        ({"prompt": [[1, 2], ["x"]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"forge": {"strategy": "twice"}}, "forge.strategy"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_completions_refuse_by_name(served: Served, more: dict[str, Any], param: str) -> None:
    status, at, _ = refused(served, "/v1/completions", {"model": MODEL, "prompt": "x", **more})
    assert status == 400
    assert at.startswith(param)


def test_what_asks_for_nothing_is_taken(client: OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=2, frequency_penalty=0,
        presence_penalty=0, logit_bias={}, user="u", response_format={"type": "text"}, tools=[],
        parallel_tool_calls=True, store=False, reasoning_effort="low",
        extra_body={
            "chat_template_kwargs": {"enable_thinking": False}, "min_p": 0, "min_tokens": 0,
            "repetition_penalty": 1, "stop_token_ids": [], "skip_special_tokens": True, "top_k": -1,
            "priority": 3, "cache_salt": "x", "use_beam_search": False, "length_penalty": 1.0,
            "ignore_eos": False, "add_generation_prompt": True, "bad_words": [], "echo": False,
        },
    )  # fmt: skip
    client.completions.create(
        model=MODEL, prompt="x", max_tokens=1, echo=False, best_of=1, suffix=None
    )


def test_routes_that_there_are_not(served: Served) -> None:
    assert refused(served, "/v1/embeddings", {})[0] == 404
    assert raw(served, "/v1/chat/completions", method="GET")[0] == 405


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": [-1] * 1_000_000}),
        ("/v1/completions", {"model": MODEL, "prompt": [[-1]] * 500_000}),
        ("/v1/completions", {"model": MODEL, "prompt": [1] * 131_073}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"a": 1}] * 400_000}),
        ("/v1/chat/completions", {"model": MODEL, "messages": CHAT * 4097}),
    ],
)
def test_the_check_of_a_big_body_ends_at_its_first_fault(
    served: Served, route: str, body: Any
) -> None:
    kind = CompletionRequest if route == "/v1/completions" else ChatRequest
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() <= 16, "a few for each form that a prompt may have"
    assert refused(served, route, body)[0] == 400


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_that_cannot_fit_is_not_tokenised(
    served: Served, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of this model has 17 characters at most, and a context 4,096 tokens."""
    called: list[str] = []
    texts = type(served.house.texts)
    monkeypatch.setattr(texts, "_prompt", lambda *_: called.append("tokenised"))
    text = "x" * (17 * 4096 + 1)
    body = {"prompt": ["x", text]} if route == "/v1/completions" else {
        "messages": [{"role": "user", "content": text}]
    }  # fmt: skip
    status, _, message = refused(served, route, {"model": MODEL, "max_tokens": 1, **body})
    assert status == 400
    assert "at least 4097 tokens" in message
    assert called == []


@pytest.mark.parametrize("depth", [400, 900, 3000, 100_000])
def test_what_nests_too_deeply_is_no_error_of_the_server(served: Served, depth: int) -> None:
    chat = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 1, "metadata": {"a": 7}})
    body = chat.replace("7", "[" * depth + "]" * depth).encode()
    assert raw(served, "/v1/chat/completions", body)[0] in ((200,) if depth < 1000 else (400,))


def test_an_error_repeats_little_of_what_was_sent(served: Served) -> None:
    body = {"model": MODEL, "prompt": "x", "y" * 100_000: 1}
    _, param, message = refused(served, "/v1/completions", body)
    assert (len(param), len(message)) == (200, 1000)
