"""Answers that match a schema, an expression or a choice, as OpenAI's own client asks for them."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field
from serving_setup import CHAT, MODEL, Served, refused

AGE = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "ward": {"type": "string", "maxLength": 8},
    },
    "required": ["age", "ward"],
    "additionalProperties": False,
}


def formatted(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "patient", "schema": schema}}


def test_a_schema_is_satisfied_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": f"{MODEL}+p1", "messages": CHAT, "max_tokens": 100, "seed": 4, "n": 4}
    asked["response_format"] = formatted(AGE)
    whole = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in whole.choices]
    for choice, text in zip(whole.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(text or ""), AGE)
    assert len(set(texts)) > 1, "the model still draws"
    told = [""] * 4
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        told[choice.index] += choice.delta.content or ""
    assert told == texts
    cut = client.chat.completions.create(**{**asked, "max_tokens": 3, "n": 1})
    assert cut.choices[0].finish_reason == "length"


class Visit(BaseModel):
    ward: Literal["cardiology", "neurology"]
    hours: list[int] = Field(max_length=2)
    urgent: bool


def test_a_class_is_parsed_by_the_client(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=CHAT, max_tokens=400, seed=1, response_format=Visit
    )
    assert isinstance(answer.choices[0].message.parsed, Visit)


def test_any_object(client: OpenAI) -> None:
    """A hot model writes any object; at temperature 0 it is the same again."""
    for seed in range(4):
        answer = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=200, seed=seed, temperature=2,
            response_format={"type": "json_object"},
        )  # fmt: skip
        (choice,) = answer.choices
        assert (choice.message.content or "").startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_expressions_and_choices(client: OpenAI, route: str) -> None:
    def say(seed: int, **wanted: Any) -> str:
        extra: Any = {"model": MODEL, "max_tokens": 60, "seed": seed}
        extra["extra_body"] = {"structured_outputs": wanted}
        if route == "chat":
            answered = client.chat.completions.create(messages=CHAT, **extra)
            return answered.choices[0].message.content or ""
        return client.completions.create(prompt="Who?", **extra).choices[0].text

    choices = ['a "quoted" one', "two\nlines", "größe", "|"]
    seen = {say(seed, choice=choices) for seed in range(12)}
    assert len(seen) > 1
    assert seen <= set(choices)
    assert re.fullmatch("[0-9]{2}:[0-9]{2}", say(1, regex="[0-9]{2}:[0-9]{2}"))
    jsonschema.validate(json.loads(say(2, json=AGE)), AGE)


@pytest.mark.parametrize(
    ("more", "param", "why"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs it"),
        (
            {"response_format": {**formatted(AGE), "type": "json_object"}},
            "response_format.json_schema",
            "belongs to the type json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": formatted({"properties": {"a": {"items": {"type": "strin"}}}})},
            "response_format.json_schema.schema.properties.a.items",
            "Invalid type: strin",
        ),
        (
            {"response_format": formatted({"$defs": {"a": {"not": {}}}, "anyOf": [
                {"type": "null"}, {"$ref": "#/$defs/a"}]})},
            "response_format.json_schema.schema.$defs.a",
            "not",
        ),
        (
            {"response_format": formatted({"enum": ["x" * 40_000]})},
            "response_format.json_schema.schema",
            "32768 are allowed",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "no field"),
        (
            {"structured_outputs": {"regex": "x"}, "response_format": {"type": "json_object"}},
            "response_format",
            "give one",
        ),
        (
            {"response_format": {"type": "json_object"}, "forge": {"strategy": "twice"}},
            "response_format",
            "not served with a strategy",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(
    served: Served, more: dict[str, Any], param: str, why: str
) -> None:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 9, **more}
    status, at, message = refused(served, "/v1/chat/completions", body)
    assert (status, at) == (400, param)
    assert why in message


def test_one_that_grows_too_costly_is_the_clients_fault(served: Served) -> None:
    keys = {"type": "object", "properties": {f"{i}": {} for i in range(2_200)}}
    wide = {"type": "array", "prefixItems": [{"type": "string", "maxLength": 3}, keys],
            "minItems": 2}  # fmt: skip
    body = {"model": MODEL, "messages": CHAT, "response_format": formatted(wide)}
    status, at, message = refused(served, "/v1/chat/completions", body)
    assert (status, at) == (400, "response_format")
    assert "ask for something simpler" in message
