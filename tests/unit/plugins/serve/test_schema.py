"""Whatever is sent, the door answers, in its own words and never with a 500.

Bodies are drawn from the schema that the application itself publishes, near it and beyond it.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from rooms.serving.schema_setup import ROUTES

from cartridge_forge.plugins.chat.wire.anthropic_messages import MessagesRequest
from cartridge_forge.plugins.chat.wire.openai_chat import ChatRequest, CompletionRequest
from cartridge_forge.plugins.chat.wire.openai_responses import ResponsesRequest
from cartridge_forge.plugins.serve.app import Server


def test_the_schema_names_every_route(door: Server) -> None:
    paths = door.api.openapi()["paths"]
    assert set(ROUTES) < set(paths)
    assert {"/v1/models", "/health", "/ready", "/metrics", "/admin/cartridges/{name}"} < set(paths)
    for route in ROUTES:
        answers = paths[route]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "429", "503", "504"} <= set(answers)


@pytest.mark.parametrize(
    ("request_type", "body"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
        (CompletionRequest, {"prompt": "a"}),
        (ResponsesRequest, {"input": "a"}),
        (MessagesRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ],
)
def test_a_field_that_is_null_is_as_one_that_was_not_sent(
    request_type: type[BaseModel], body: dict[str, Any]
) -> None:
    """Known or not, as clients that send all their fields write them."""
    sent = {"model": "clinic-reader", **body}
    plain = request_type.model_validate(sent)
    nulls = {"prediction": None, "stream": None, "temperature": None, "tools": None}
    assert request_type.model_validate({**sent, **nulls}) == plain
    with pytest.raises(ValidationError, match="prediction"):
        request_type.model_validate({**sent, "prediction": {}})
