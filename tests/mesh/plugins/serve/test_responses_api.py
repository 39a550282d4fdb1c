"""The Responses API, as OpenAI's own client speaks it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from openai.types.responses import Response
from serving_setup import MODEL, QUESTION, WARD, Served, raw, refused

TOOLS: list[Any] = [{"type": "function", "name": "ward_of", "parameters": WARD, "strict": True}]
ASKED: dict[str, Any] = {"model": f"{MODEL}+p1", "max_output_tokens": 100}
# The official order of a text's and of a call's events.
TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done"]  # fmt: skip
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done"]  # fmt: skip


def seeded(seed: int, **more: Any) -> Any:
    return {**ASKED, **more, "extra_body": {"seed": seed}}


def test_a_text_is_answered_as_a_chat_is(client: OpenAI) -> None:
    reply = client.responses.create(**seeded(4), input=QUESTION, instructions="be brief.")
    Response.model_validate(reply.model_dump(), strict=False)
    chat: Any = [{"role": "system", "content": "be brief."}, {"role": "user", "content": QUESTION}]
    same = client.chat.completions.create(
        model=ASKED["model"], max_tokens=100, messages=chat, seed=4
    )
    assert reply.output_text == same.choices[0].message.content
    assert reply.status == "completed"
    assert reply.usage is not None
    assert same.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (
        same.usage.prompt_tokens, same.usage.completion_tokens, same.usage.total_tokens,
    )  # fmt: skip
    assert reply.id.startswith("resp_")
    assert reply.instructions == "be brief."
    cut = client.responses.create(**{**seeded(4), "max_output_tokens": 2}, input=QUESTION)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def events_of(client: OpenAI, asked: Any) -> tuple[list[str], Any]:
    """The kinds of a stream's events, equal ones in a row once, and the last response."""
    kinds: list[str] = []
    with client.responses.stream(**asked) as stream:
        for number, event in enumerate(stream):
            assert event.sequence_number == number
            if not kinds or kinds[-1] != event.type:
                kinds.append(event.type)
        return [kind.removeprefix("response.") for kind in kinds], stream.get_final_response()


def test_a_stream_has_the_official_events(client: OpenAI) -> None:
    asked = seeded(4, input=[{"role": "user", "content": QUESTION}])
    kinds, last = events_of(client, asked)
    assert kinds == ["created", "in_progress", *TEXT, "completed"]
    assert last.output_text == client.responses.create(**asked).output_text
    required = seeded(2, input=QUESTION, tools=TOOLS, tool_choice="required")
    kinds, last = events_of(client, required | {"parallel_tool_calls": False})
    assert kinds == ["created", "in_progress", *CALL, "completed"]
    (call,) = last.output
    jsonschema.validate(json.loads(call.arguments), WARD)
    short = seeded(4, input=QUESTION) | {"max_output_tokens": 2}
    assert [e.type for e in client.responses.create(**short, stream=True)][-1] == (
        "response.incomplete"
    )


def test_calls_and_their_results_go_back_as_items(client: OpenAI) -> None:
    asked = seeded(3, tools=TOOLS, tool_choice={"type": "function", "name": "ward_of"})
    first = client.responses.create(**asked, input=QUESTION)
    (call,) = first.output
    assert call.type == "function_call"
    assert call.name == "ward_of"
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "in cardiology."},
    ]
    again = client.responses.create(**seeded(3), input=history)
    chat: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": call.call_id, "type": "function",
             "function": {"name": "ward_of", "arguments": call.arguments}}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "in cardiology."},
    ]  # fmt: skip
    same = client.chat.completions.create(
        model=ASKED["model"], max_tokens=100, messages=chat, seed=3
    )
    assert again.output_text == same.choices[0].message.content
    further = client.responses.create(
        **seeded(5), input=[*history, *again.output, {"role": "user", "content": "And who else?"}]
    )
    assert further.usage is not None
    assert again.usage is not None
    assert further.usage.input_tokens > again.usage.input_tokens


def test_a_text_matches_its_schema(client: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "ward", "schema": WARD}}
    for seed in range(2):
        reply = client.responses.create(**seeded(seed), input=QUESTION, text=form)
        jsonschema.validate(json.loads(reply.output_text), WARD)


@pytest.mark.parametrize(
    ("more", "param", "why"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"store": True}, "store", "nothing is kept"),
        ({"background": True}, "background", "not served"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "reasoning"}]}, "input[0]", "function_call_output"),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "input_text",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "x"}]},
            "input[0].arguments",
            "no JSON object",
        ),
        (
            {"input": [
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "b", "output": ""}]},
            "input[1].call_id",
            "input[1].call_id is",
        ),
        ({"tools": [{"type": "web_search", "name": "a"}]}, "tools[0].type", "function"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1].name", "twice"),
        (
            {"tools": [{**TOOLS[0], "parameters": {"properties": {"a": {"type": "x"}}}}]},
            "tools[0].parameters.properties.a",
            "Invalid type",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"items": {"type": "x"}}}}},
            "text.format.schema.items",
            "Invalid type",
        ),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "lower max_output_tokens"),
        ({"stop": ["a"]}, "stop", "no field"),
        ({"metadata": {"a": float("nan")}}, None, "cannot repeat"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(
    served: Served, more: dict[str, Any], param: str | None, why: str
) -> None:
    body = {"model": MODEL, "input": "who?", "max_output_tokens": 9, **more}
    status, at, message = refused(served, "/v1/responses", body)
    assert (status, at) == (400, param)
    assert why in message


def test_a_stream_that_fails_says_so_in_its_last_event(served: Served) -> None:
    keys = {"type": "object", "properties": {f"{i}": {} for i in range(2_200)}}
    wide = {"type": "array", "prefixItems": [{"type": "string", "maxLength": 3}, keys],
            "minItems": 2}  # fmt: skip
    body = {"model": MODEL, "input": "who?", "stream": True,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": wide}}}  # fmt: skip
    status, _, content = raw(served, "/v1/responses", body)
    assert status == 200
    *_, last = content.decode().strip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "grammar_too_costly"
