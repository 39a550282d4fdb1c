"""A door with small limits, and its routes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving_setup import InProcess, new_house

from cartridge_forge.plugins.serve.app import Server, create_server
from cartridge_forge.plugins.serve.backend import RequestLimits

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/custom/cartridge/chat/completions",
    "/custom/cartridge/completions",
)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a door that takes 4096 bytes and answers with 4 tokens."""
    backend = InProcess()
    directory = tmp_path_factory.mktemp("schema")
    limits = RequestLimits(max_tokens=4, context=256, max_choices=4)
    yield create_server(new_house(directory, backend, max_body_bytes=4096, limits=limits))
    backend.close()
