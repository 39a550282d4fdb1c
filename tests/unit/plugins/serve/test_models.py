"""The names of the models that a library makes of a base model."""

from __future__ import annotations

from cartridge_forge.plugins.serve.routes.models import cartridge_models


def test_every_version_is_a_model_and_the_name_alone_is_the_newest() -> None:
    cartridges = {"p1": [1, 3], "p2": [2]}
    assert cartridge_models("org/base", cartridges) == [
        "org/base+p1", "org/base+p1@3", "org/base+p1@1", "org/base+p2", "org/base+p2@2",
    ]  # fmt: skip
    assert cartridge_models("base", {}) == []
