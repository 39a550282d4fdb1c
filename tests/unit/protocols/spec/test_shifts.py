"""Shifts of several cases: what is refused."""

from pathlib import Path

import pytest

from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.loading import load_spec

MESH = Path(__file__).resolve().parents[4] / "meshes" / "three_channels.yaml"


def test_a_case_takes_three_turns_and_a_field_of_its_own() -> None:
    sets = ("episodes.cases=4", "episodes.max_turns=12")
    episodes = load_spec(str(MESH), sets=sets).spec.learn.episodes
    assert episodes is not None
    assert episodes.cases == 4


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("episodes.cases=2",), r"max_turns must be >= 3 x episodes\.cases"),
        (("episodes.cases=25", "episodes.max_turns=75"), r"cases must be <= data\.facts \(24\)"),
        (("episodes.cases=0",), "greater than or equal to 1|>= 1"),
    ],
)
def test_a_broken_rule_is_named(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_spec(str(MESH), sets=sets)
