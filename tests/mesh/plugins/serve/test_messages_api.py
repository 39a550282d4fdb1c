"""The Messages API, as Anthropic's own client speaks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import OpenAI
from serving_setup import MODEL, QUESTION, WARD, Served, an_api_key, raw, serving

TOOLS: list[Any] = [{"name": "ward_of", "description": "where", "input_schema": WARD}]
ASKED: dict[str, Any] = {
    "model": f"{MODEL}+p1", "max_tokens": 100, "messages": [{"role": "user", "content": QUESTION}],
}  # fmt: skip


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[Anthropic]:
    with Anthropic(base_url=served.url, api_key="none", max_retries=0) as one:
        yield one


def test_a_message_is_answered_as_a_chat_is(claude: Anthropic, client: OpenAI) -> None:
    reply = claude.messages.create(**ASKED, system="be brief.", extra_body={"seed": 4})
    chat: Any = [{"role": "system", "content": "be brief."}, *ASKED["messages"]]
    same = client.chat.completions.create(
        model=ASKED["model"], max_tokens=100, messages=chat, seed=4
    )
    (block,) = reply.content
    assert block.type == "text"
    assert block.text == same.choices[0].message.content
    assert (reply.role, reply.stop_reason, reply.stop_sequence) == ("assistant", "end_turn", None)
    assert same.usage is not None
    assert reply.usage.input_tokens == same.usage.prompt_tokens
    assert reply.usage.output_tokens == same.usage.completion_tokens
    word = block.text.split()[-1]
    cut = claude.messages.create(**ASKED, stop_sequences=[word], system="be brief.",
                                 extra_body={"seed": 4})  # fmt: skip
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    short = claude.messages.create(**{**ASKED, "max_tokens": 2}, extra_body={"seed": 4})
    assert short.stop_reason == "max_tokens"


def test_streams_of_both_clients_add_up_to_the_whole(served: Served, claude: Anthropic) -> None:
    calling = {
        **ASKED,
        "tools": TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "extra_body": {"seed": 2},
    }
    whole = claude.messages.create(**calling)
    assert whole.stop_reason == "tool_use"
    for block in whole.content:
        assert block.type == "tool_use"
        assert block.name == "ward_of"
        jsonschema.validate(block.input, WARD)
    with claude.messages.stream(**calling) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    assert [b.input for b in last.content if b.type == "tool_use"] == [
        b.input for b in whole.content if b.type == "tool_use"
    ]
    assert (last.stop_reason, last.usage) == (whole.stop_reason, whole.usage)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"

    async def streamed() -> str:
        async with (
            AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as other,
            other.messages.stream(**ASKED, extra_body={"seed": 4}) as one,
        ):
            return "".join([text async for text in one.text_stream])

    (block,) = claude.messages.create(**ASKED, extra_body={"seed": 4}).content
    assert block.type == "text"
    assert asyncio.run(streamed()) == block.text


def test_calls_and_their_results_go_back_as_blocks(claude: Anthropic, client: OpenAI) -> None:
    choice: Any = {"type": "tool", "name": "ward_of", "disable_parallel_tool_use": True}
    first = claude.messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
    (call,) = first.content
    assert call.type == "tool_use"
    chat: Any = [
        *ASKED["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": "no such ward",
             "is_error": True},
            {"type": "text", "text": "And now?"}]},
    ]  # fmt: skip
    again = claude.messages.create(**{**ASKED, "messages": chat}, extra_body={"seed": 3})
    same: Any = [
        *ASKED["messages"],
        {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": {
            "name": call.name, "arguments": json.dumps(call.input)}}]},
        {"role": "tool", "tool_call_id": call.id, "content": "error: no such ward"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    told = client.chat.completions.create(
        model=ASKED["model"], max_tokens=100, messages=same, seed=3
    )
    (block,) = again.content
    assert block.type == "text"
    assert block.text == told.choices[0].message.content


def test_a_text_matches_its_schema(claude: Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": WARD}}
    (block,) = claude.messages.create(**ASKED, extra_body={"output_config": form}).content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), WARD)


@pytest.mark.parametrize(
    ("more", "param", "why"),
    [
        ({"max_tokens": None}, "max_tokens", "field required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking", "not served"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role", "user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
            "tool_result",
        ),
        (
            {"messages": [*ASKED["messages"], {"role": "assistant", "content": "so"}]},
            "messages[1].role",
            "end with the user's",
        ),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "messages[0].content[0].type",
            "role assistant",
        ),
        (
            {"messages": [
                *ASKED["messages"],
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b"}]}]},
            "messages[2].content[0].tool_use_id",
            "no call before it",
        ),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1].name", "twice"),
        (
            {"tools": [{"name": "a", "input_schema": {"properties": {"a": {"type": "x"}}}}],
             "tool_choice": {"type": "any"}},
            "tools[0].input_schema.properties.a",
            "Invalid type",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "needs it"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(
    served: Served, more: dict[str, Any], param: str, why: str
) -> None:
    status, _, content = raw(served, "/v1/messages", {**ASKED, "model": MODEL, **more})
    body = json.loads(content)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["param"] == param
    assert why in body["error"]["message"]


def test_keys_quotas_and_the_audit_log_hold_on_every_route(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    keys = (
        an_api_key("ward", "s3cret", tokens_per_minute=200, cartridges=("p1",)),
        an_api_key("librarian", "other", rights=("admin",)),
    )
    with serving(tmp_path, api_keys=keys, audit=str(audit), max_pending_tokens=400) as one:
        asked = {**ASKED, "model": MODEL, "max_tokens": 4}
        for wrong, kind in (("none", anthropic.AuthenticationError),
                            ("other", anthropic.PermissionDeniedError)):  # fmt: skip
            with (
                Anthropic(base_url=one.url, api_key=wrong, max_retries=0) as claude,
                pytest.raises(kind),
            ):
                claude.messages.create(**asked)
        with Anthropic(base_url=one.url, api_key="s3cret", max_retries=0) as claude:
            message = claude.messages.create(**asked)
            with pytest.raises(anthropic.PermissionDeniedError, match="not for the cartridge"):
                claude.messages.create(**{**asked, "model": f"{MODEL}+p2"})
            with pytest.raises(anthropic.RateLimitError):
                claude.messages.create(**{**asked, "max_tokens": 185})
        with OpenAI(base_url=f"{one.url}/v1", api_key="s3cret", max_retries=0) as client:
            reply = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=4)
            with pytest.raises(Exception, match="may cost"):
                client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=380)
    rows = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [row["request"] for row in rows if row["event"] == "asked"] == [message.id, reply.id]
    assert {row.get("path") for row in rows if row["event"] == "refused"} == {"/v1/messages"}


def test_tokens_are_counted_as_a_reply_counts_them(claude: Anthropic, served: Served) -> None:
    tools = {"tools": TOOLS, "system": "be brief."}
    for model in (MODEL, f"{MODEL}+p1", f"{MODEL}+p1@1"):
        for more in ({}, tools):
            asked: Any = {**ASKED, "model": model, **more}
            reply = claude.messages.create(**{**asked, "max_tokens": 1})
            del asked["max_tokens"]
            assert claude.messages.count_tokens(**asked).input_tokens == reply.usage.input_tokens
    path = "/v1/messages/count_tokens"
    counted = {"model": MODEL, "messages": ASKED["messages"]}
    assert json.loads(raw(served, path, counted)[2]) == {"input_tokens": 12}
    status, _, content = raw(served, path, {**counted, "model": f"{MODEL}+p9"})
    error = json.loads(content)
    assert (status, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
    assert (error["error"]["param"], error["error"]["code"]) == ("model", "cartridge_not_found")
    status, _, content = raw(served, path, {**counted, "max_tokens": 1})
    assert (status, json.loads(content)["error"]["param"]) == (400, "max_tokens")
