"""Tools of a chat, as OpenAI's own client offers and calls them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI, OpenAI
from serving_setup import CHAT, MODEL, READER, Served, raw, refused, serving

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.clinic.desk import TOOLS
from cartridge_forge.plugins.serve.tokenization import Tokenization

FIND = {
    "type": "object",
    "properties": {
        "field": {"$ref": "#/$defs/field"},
        "note": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["field", "note"],
    "additionalProperties": False,
    "$defs": {"field": {"enum": ["surgeon", "sodium"]}},
}
WARD = {
    "type": "object",
    "properties": {"ward": {"type": "string", "maxLength": 6}},
    "required": ["ward"],
    "additionalProperties": False,
}
SCHEMAS = {"find": FIND, "ward_of": WARD}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


OFFERED: list[Any] = [tool("find", FIND, description="a note's value"), tool("ward_of", WARD)]
ASKED: dict[str, Any] = {
    "model": f"{MODEL}+p1", "messages": CHAT, "max_tokens": 120, "tools": OFFERED,
    "tool_choice": "required", "parallel_tool_calls": False,
}  # fmt: skip


def made(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def test_a_call_that_is_required_comes_and_matches_its_schema(client: OpenAI) -> None:
    names = set()
    for seed in range(6):
        answer = client.chat.completions.create(**ASKED, seed=seed)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        ((name, arguments),) = made(choice.message)
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        (call,) = choice.message.tool_calls or ()
        assert (call.type, call.id.startswith("call_")) == ("function", True)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 5
        names.add(name)
    assert names == {"find", "ward_of"}, "the model still chooses"


def test_streams_of_both_clients_tell_the_same_calls(served: Served, client: OpenAI) -> None:
    asked = {**ASKED, "parallel_tool_calls": True, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    wanted = [(made(c.message), c.finish_reason) for c in whole.choices]
    with client.chat.completions.stream(**{**asked, "n": 1}) as stream:
        (choice,) = stream.get_final_completion().choices
    assert (made(choice.message), choice.finish_reason) == wanted[0]

    async def streamed() -> tuple[list[dict[int, list[str]]], list[Any], int]:
        told: list[dict[int, list[str]]] = [{}, {}]
        ends, chunks = [None, None], 0
        url = f"{served.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as other:
            async for chunk in await other.chat.completions.create(**asked, stream=True):
                (one,) = chunk.choices
                ends[one.index] = one.finish_reason or ends[one.index]
                assert not one.delta.content
                for call in one.delta.tool_calls or ():
                    function = call.function
                    if call.index not in told[one.index]:
                        assert call.id
                        assert call.type == "function"
                        told[one.index][call.index] = [function.name, ""]
                    else:
                        assert (call.id, function.name) == (None, None)
                    told[one.index][call.index][1] += function.arguments
                    chunks += 1
        return told, ends, chunks

    told, ends, chunks = asyncio.run(streamed())
    assert [
        ([tuple(c) for c in calls.values()], end) for calls, end in zip(told, ends, strict=True)
    ] == wanted
    assert chunks > 2 * sum(len(calls) for calls, _ in wanted), "arguments come in pieces"


def test_a_named_tool_is_called_once(client: OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "ward_of"}}
    asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": True}
    for seed in range(3):
        answer = client.chat.completions.create(**asked, seed=seed)
        ((name, arguments),) = made(answer.choices[0].message)
        assert name == "ward_of"
        jsonschema.validate(json.loads(arguments), WARD)


def test_a_call_that_is_cut_keeps_its_reason(client: OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "find"}}
    asked = {**ASKED, "tool_choice": choice, "seed": 1}
    used = client.chat.completions.create(**asked).usage
    assert used is not None
    (cut,) = client.chat.completions.create(
        **{**asked, "max_tokens": used.completion_tokens - 12}
    ).choices
    assert cut.finish_reason == "length"


def test_without_a_choice_the_model_decides(client: OpenAI) -> None:
    """The reader knows no tools: it answers in text, also where a call would follow its schema."""
    plain = {k: v for k, v in ASKED.items() if k not in ("tool_choice", "parallel_tool_calls")}
    strict = [tool("find", FIND, strict=True)]
    for more in ({}, {"tool_choice": "none"}, {"tools": strict}):
        (choice,) = client.chat.completions.create(**{**plain, **more}, seed=2).choices
        assert choice.message.tool_calls is None
        assert choice.message.content is not None
    told = client.chat.completions.create(**plain, seed=2)
    untold = client.chat.completions.create(**plain | {"tool_choice": "none"}, seed=2)
    assert told.usage is not None
    assert untold.usage is not None
    assert told.usage.prompt_tokens > untold.usage.prompt_tokens


def test_results_go_back_as_messages(client: OpenAI) -> None:
    first = client.chat.completions.create(**ASKED, seed=5).choices[0].message
    assert first.tool_calls
    history: Any = [
        *CHAT,
        first,
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "note 17."},
    ]
    again = client.chat.completions.create(**{**ASKED, "messages": history}, seed=5)
    assert again.choices[0].finish_reason == "tool_calls"


def changed(**function: Any) -> dict[str, Any]:
    return {"tools": [tool("find", FIND), tool("other", WARD, **function)]}


ASSISTANT: dict[str, Any] = {
    "role": "assistant", "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "param", "why"),
    [
        ({"tools": [{**tool("a"), "type": "web"}]}, "tools[0].type", "function"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "pattern"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name", "twice"),
        ({"tools": [tool(f"t{i}") for i in range(65)]}, "tools", "at most 64"),
        ({"tools": [tool("a", {"type": "array"})]}, "tools[0].function.parameters.type", "object"),
        (
            {"tools": [*OFFERED, tool("a", {"properties": {"x": {"type": "strin"}}})]},
            "tools[2].function.parameters.properties.x",
            "Invalid type: strin",
        ),
        (
            {"tools": [tool("a", {"properties": {"x": {"enum": ["x" * 40_000]}}})]},
            "tools",
            "32768 are allowed",
        ),
        ({"tools": None}, "tool_choice", "no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "none of the tools",
        ),
        ({"tool_choice": "any"}, "tool_choice", "required"),
        ({"functions": []}, "functions", "send tools"),
        ({"response_format": {"type": "json_object"}}, "tools", "no room"),
        ({"forge": {"strategy": "twice"}}, "tools", "not served with a strategy"),
        ({"messages": [{**ASSISTANT, "role": "user"}]}, "messages[0].tool_calls", "assistant"),
        (
            {"messages": [*CHAT, ASSISTANT, {"role": "tool", "tool_call_id": "b", "content": ""}]},
            "messages[2].tool_call_id",
            "no call before it",
        ),
        (
            {"messages": [*CHAT, {"role": "assistant", "tool_calls": [
                {"id": "a", "function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages[1].tool_calls[0].function.arguments",
            "no JSON object",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(
    served: Served, more: dict[str, Any], param: str, why: str
) -> None:
    body = {**ASKED, "model": MODEL, **more}
    status, at, message = refused(served, "/v1/chat/completions", body)
    assert (status, at) == (400, param)
    assert why in message


def test_calls_are_counted_without_their_names(served: Served, client: OpenAI) -> None:
    client.chat.completions.create(**ASKED, seed=1)
    page = raw(served, "/metrics", method="GET")[2].decode()
    (line,) = [row for row in page.splitlines() if row.startswith("forge_serve_tool_calls_total")]
    assert float(line.split()[1]) >= 1
    assert "ward_of" not in page


DESK = [tool(t.name, dict(t.parameters), description=t.description) for t in TOOLS]
CLERK = READER.with_name("clinic-clerk")


@pytest.fixture(scope="module")
def clerk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    texts = Tokenization(load_tokenizer(str(CLERK)), "desk")
    with serving(tmp_path_factory.mktemp("clerk"), home=CLERK, texts=texts) as one:
        yield one


def test_the_clerk_calls_the_tools_of_its_desk(clerk: Served) -> None:
    """It asks where a field is, reads the note that it is told, and answers with the value."""
    chat: list[Any] = [{"role": "user", "content": "what is the surgeon?"}]
    asked: Any = {"model": MODEL, "max_tokens": 20, "temperature": 0, "tools": DESK}
    with OpenAI(base_url=f"{clerk.url}/v1", api_key="none", max_retries=0) as client:
        said = []
        for reply in ("note 17.", "surgeon weber.", None):
            (choice,) = client.chat.completions.create(messages=chat, **asked).choices
            assert choice.finish_reason == "tool_calls"
            ((name, arguments),) = made(choice.message)
            said.append((name, json.loads(arguments)))
            (call,) = choice.message.tool_calls or ()
            chat += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": reply}]
        assert [name for name, _ in said] == ["find", "read", "answer"]
        assert said[0][1]["field"] == "surgeon"
        assert said[1:] == [("read", {"note": 17}), ("answer", {"value": "weber"})]
        department: Any = dict(TOOLS[0].parameters)
        department["properties"] = {
            "field": {"type": "string"}, "department": {"enum": ["urology", "cardiology"]},
        }  # fmt: skip
        asked["tools"] = [tool("find", department), *DESK[1:]]
        asked["tool_choice"] = {"type": "function", "function": {"name": "find"}}
        for seed in range(4):
            answer = client.chat.completions.create(
                **{**asked, "messages": chat[:1], "temperature": 2, "seed": seed}
            )
            ((name, arguments),) = made(answer.choices[0].message)
            assert name == "find"
            jsonschema.validate(json.loads(arguments), department)


def test_the_desk_has_no_other_tools(clerk: Served) -> None:
    for wrong, why in (
        (tool("search", WARD), "find, read, answer"),
        (tool("read", {"properties": 5}), "has the arguments note"),
    ):
        body = {"model": MODEL, "messages": CHAT, "tools": [wrong]}
        status, at, message = refused(clerk, "/v1/chat/completions", body)
        assert (status, at) == (400, "tools[0].function")
        assert why in message
