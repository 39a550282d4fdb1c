"""Whatever is sent, the door answers, in its own words and never with a 500.

Bodies are drawn from the schema that the application itself publishes, near it and beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving_setup import InProcess, new_house

from serving.app import Server, create_server
from serving.backend import RequestLimits

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/custom/cartridge/chat/completions",
    "/custom/cartridge/completions",
)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    backend = InProcess()
    directory = tmp_path_factory.mktemp("schema")
    limits = RequestLimits(max_tokens=4, context=256, max_choices=4)
    yield create_server(new_house(directory, backend, max_body_bytes=4096, limits=limits))
    backend.close()


def test_the_schema_names_every_route(door: Server) -> None:
    paths = door.api.openapi()["paths"]
    assert set(ROUTES) < set(paths)
    assert {"/v1/models", "/health", "/ready", "/metrics", "/admin/cartridges/{name}"} < set(paths)
    for route in ROUTES:
        answers = paths[route]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "429", "503", "504"} <= set(answers)
