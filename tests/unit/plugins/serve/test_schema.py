"""Whatever is sent, the door answers, in its own words and never with a 500.

Bodies are drawn from the schema that the application itself publishes, near it and beyond it.
"""

from __future__ import annotations

from rooms.serving.schema_setup import ROUTES

from cartridge_forge.plugins.serve.app import Server


def test_the_schema_names_every_route(door: Server) -> None:
    paths = door.api.openapi()["paths"]
    assert set(ROUTES) < set(paths)
    assert {"/v1/models", "/health", "/ready", "/metrics", "/admin/cartridges/{name}"} < set(paths)
    for route in ROUTES:
        answers = paths[route]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "429", "503", "504"} <= set(answers)
