"""Whatever is sent, the door answers, in its own words and never with a 500.

Bodies are drawn from the schema that the application itself publishes, near it and beyond it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms.serving.resident_setup import ROUTES
from serving_setup import MODEL

from cartridge_forge.plugins.chat.wire.errors import ErrorAnswer
from cartridge_forge.plugins.serve.app import Server

WORDS = st.text(st.characters(), max_size=6)  # halves of surrogate pairs, too

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)

PLAIN = {"model": MODEL, "max_tokens": 1}

CHAT = {**PLAIN, "messages": [{"role": "user", "content": "x"}]}
RIGHT = {
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": MODEL, "messages": CHAT["messages"]},
    "/v1/responses": {"model": MODEL, "input": "x", "max_output_tokens": 1},
}
FEW = {"/v1/responses": {"max_output_tokens": 2}, "/v1/messages/count_tokens": {}}


def drawn(schema: dict[str, Any], parts: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a JSON schema, as far as this application's own schemas go."""
    if "$ref" in schema:
        return drawn(parts[schema["$ref"].rpartition("/")[2]], parts)
    if "anyOf" in schema or "oneOf" in schema:
        either = schema.get("anyOf", []) + schema.get("oneOf", [])
        return st.one_of([drawn(s, parts) for s in either])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    low, high = schema.get("minimum", -3), schema.get("maximum", 40)
    match schema.get("type"):
        case "string":
            return st.text(st.characters(), min_size=schema.get("minLength", 0), max_size=8)
        case "integer":
            return st.integers(low, min(high, schema.get("exclusiveMaximum", high)))
        case "number":
            return st.floats(low, high)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            items = drawn(schema.get("items", {}), parts)
            least, most = schema.get("minItems", 0), min(schema.get("maxItems", 3), 3)
            return st.lists(items, min_size=least, max_size=most)
        case "object":
            needed = schema.get("required", [])
            fields = {k: drawn(v, parts) for k, v in schema.get("properties", {}).items()}
            return st.fixed_dictionaries(
                {k: v for k, v in fields.items() if k in needed},
                optional={k: v for k, v in fields.items() if k not in needed},
            )
    return ANYTHING


def bodies(door: Server, route: str) -> st.SearchStrategy[bytes]:
    schema = door.api.openapi()
    parts = schema["components"]["schemas"]
    content = schema["paths"][route]["post"]["requestBody"]["content"]
    body = drawn(content["application/json"]["schema"], parts)
    known = st.sampled_from([MODEL, f"{MODEL}:twice", f"{MODEL}+p1"])
    named = st.builds(
        lambda b, m: {**b, "model": m, **FEW.get(route, {"max_tokens": 2})}, body, known
    )
    right = st.just(RIGHT.get(route, CHAT if "chat" in route else {**PLAIN, "prompt": "x"}))
    field = st.sampled_from(sorted({k for p in parts.values() for k in p.get("properties", {})}))
    spoilt = st.builds(lambda b, k, v: {**b, k: v}, named | right, field, ANYTHING)
    plain = st.one_of(right, named, spoilt, body, ANYTHING)
    return plain.map(lambda b: json.dumps(b).encode()) | st.binary(max_size=40)


async def ask(door: Server, route: str, body: bytes) -> tuple[int, bytes]:
    """One request straight into the application."""
    sent: list[Any] = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": route, "raw_path": route.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "server": ("localhost", 80), "client": ("127.0.0.1", 1),
    }  # fmt: skip
    await asyncio.wait_for(door.app(scope, receive, send), 30)
    start = next(m for m in sent if m["type"] == "http.response.start")
    return start["status"], b"".join(m.get("body", b"") for m in sent)


@pytest.mark.parametrize("route", ROUTES)
def test_no_body_is_the_servers_own_error(door: Server, route: str) -> None:
    seen: set[int] = set()

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(door, route))
    def every(body: bytes) -> None:
        status, content = asyncio.run(ask(door, route, body))
        seen.add(status)
        assert status in (200, 400, 404, 413), content
        if status != 200:
            ErrorAnswer.model_validate_json(content)

    every()
    assert seen >= {200, 400}
