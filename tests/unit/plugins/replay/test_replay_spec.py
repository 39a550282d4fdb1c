"""Teachers' specs: what is refused, and that no secret is repeated."""

from typing import Any

import pytest
from pydantic import ValidationError

from cartridge_forge.plugins.replay.spec import PriceSpec, ReplaySpec, ReplayTeacherSpec

GOOD: dict[str, Any] = {
    "name": "a",
    "provider": "openai",
    "model": "m",
    "prices": PriceSpec(input=1.0, output=2.0),
}


def test_official_servers_and_keys_are_known() -> None:
    spec = ReplayTeacherSpec(**GOOD)
    assert (spec.base_url, spec.key_env) == ("https://api.openai.com/v1", "OPENAI_API_KEY")
    other = ReplayTeacherSpec(**GOOD | {"provider": "anthropic"})
    assert (other.base_url, other.key_env) == ("https://api.anthropic.com", "ANTHROPIC_API_KEY")
    router = ReplayTeacherSpec(**GOOD | {"base_url": "https://openrouter.ai/api/v1/"})
    assert router.base_url == "https://openrouter.ai/api/v1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_url": "openrouter.ai"}, "must be an http"),
        ({"base_url": "https://u:p@x.org"}, "must hold no user, password or query"),
        ({"base_url": "https://x.org?key=1"}, "must hold no user, password or query"),
        ({"key_env": "sk-secret"}, "must be the name of an environment variable"),
        ({"prices": {"input": 0.0001, "output": 1.0}}, "must be a multiple of 0.001"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_a_broken_rule_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ReplayTeacherSpec(**GOOD | change)


def test_teachers_have_names_and_quorums_can_be_met() -> None:
    a = ReplayTeacherSpec(**GOOD)
    with pytest.raises(ValidationError, match="rename the second a"):
        ReplaySpec(teachers=(a, a), cap=1.0)
    with pytest.raises(ValidationError, match="the number of teachers"):
        ReplaySpec(teachers=(a,), cap=1.0, quorum=2)
