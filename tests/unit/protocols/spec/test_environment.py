"""Environments' specs: what is refused, and that no secret is repeated."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocols.spec.environment import EnvironmentSpec


def test_the_desk_needs_nothing_and_another_its_url() -> None:
    assert EnvironmentSpec() == EnvironmentSpec(kind="desk", url=None)
    spec = EnvironmentSpec(kind="openenv", url="https://echo.example.org/")
    assert spec.url == "https://echo.example.org"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "openenv"}, "must be given with kind openenv"),
        ({"url": "http://127.0.0.1:8000"}, "belongs to kind openenv alone"),
        ({"kind": "openenv", "url": "127.0.0.1:8000"}, "must be an http"),
        ({"kind": "openenv", "url": "https://u:p@x.org"}, "must hold no user, password or query"),
        ({"kind": "openenv", "url": "https://x.org?key=1"}, "must hold no user, password or query"),
        ({"timeout_s": 0.0}, "greater than 0"),
        ({"action_key": ""}, "at least 1 character"),
        ({"max_turns": 4}, "Extra inputs"),
    ],
)
def test_a_broken_rule_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EnvironmentSpec(**given)
