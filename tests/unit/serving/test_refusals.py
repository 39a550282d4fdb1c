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

from protocols.wire.openai_chat import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True}, "echo"),
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
        parallel_tool_calls=True, store=False,
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
