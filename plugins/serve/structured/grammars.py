"""Read what a response must match from a request's fields, and compile it before it is sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cartridge_forge.plugins.chat.wire.errors import bad_request
from cartridge_forge.plugins.chat.wire.openai_chat import ChatRequest, SamplingFields
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.response_rules import ResponseGrammar

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
PARTS_TRIED = 64  # to name the part of a schema that is at fault
NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties")


def grammar_of(body: SamplingFields, grammars: Grammars) -> ResponseGrammar | None:
    """Return what every response to `body` must match, None for any text. Raises ApiError 400 with
    the field, and within a schema the part, that is at fault."""
    requested = [*_structured(body), *(_formatted(body) if isinstance(body, ChatRequest) else ())]
    if not requested:
        return None
    if len(requested) > 1:
        raise bad_request(
            f"{requested[0][0]} and {requested[1][0]} both say what a response must match; "
            "give one",
            requested[1][0],
        )
    (param, grammar) = requested[0]
    check(grammars, grammar, param)
    return grammar


def schema_grammar(schema: Mapping[str, Any]) -> ResponseGrammar:
    return ResponseGrammar("json_schema", json.dumps(schema))


def check(grammars: Grammars, grammar: ResponseGrammar, param: str) -> None:
    """Compile a grammar. Raises ApiError 400 that names `param`, and the part of its schema."""
    try:
        grammars.matcher(grammar)
    except DataError as error:
        path = param
        if grammar.kind == "json_schema":
            path += _faulty_part(grammars, json.loads(grammar.text), str(error))
        raise bad_request(f"{path}: {error}", path, "invalid_grammar") from error


def _structured(body: SamplingFields) -> Iterator[tuple[str, ResponseGrammar]]:
    options = body.structured_outputs
    if options is None:
        return
    if options.json_ is not None:
        yield "structured_outputs.json", schema_grammar(options.json_)
    if options.regex is not None:
        yield "structured_outputs.regex", ResponseGrammar("regex", options.regex)
    if options.choice is not None:
        either = " | ".join(map(json.dumps, options.choice))
        yield "structured_outputs.choice", ResponseGrammar("lark", f"start: {either}")


def _formatted(body: ChatRequest) -> Iterator[tuple[str, ResponseGrammar]]:
    response_format = body.response_format
    if response_format is None:
        return
    if (response_format.type == "json_schema") != (response_format.json_schema is not None):
        raise bad_request(
            "response_format.json_schema belongs to the type json_schema, which needs it",
            "response_format.json_schema",
        )
    if response_format.json_schema is not None:
        yield (
            "response_format.json_schema.schema",
            schema_grammar(response_format.json_schema.schema_),
        )
    elif response_format.type == "json_object":
        yield "response_format", schema_grammar(ANY_OBJECT)


def _faulty_part(grammars: Grammars, schema: Mapping[str, Any], fault: str) -> str:
    """Return the path, such as ".properties.age", of the innermost part that has the same fault
    when it stands alone; "" for the whole."""
    path, part, tried = "", schema, 0
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    while True:
        for name, inner in _parts(part):
            tried += 1
            if tried > PARTS_TRIED:
                return path
            try:
                grammars.matcher(schema_grammar({**shared, **inner}))
            except DataError as error:
                if str(error) == fault:
                    path, part = path + name, inner
                    break
        else:
            return path


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the schemas directly inside one, with their places."""
    for key, value in schema.items():
        inner: list[tuple[str, Any]] = []
        if key in NAMED and isinstance(value, dict):
            inner = [(f".{key}.{_shown(name)}", one) for name, one in value.items()]
        elif key in LISTED and isinstance(value, list):
            inner = [(f".{key}[{i}]", one) for i, one in enumerate(value)]
        elif key in SINGLE:
            inner = [(f".{key}", value)]
        yield from ((name, one) for name, one in inner if isinstance(one, dict))


def _shown(name: str) -> str:
    return name if re.fullmatch(r"[\w-]{1,64}", name) else json.dumps(name[:64])
