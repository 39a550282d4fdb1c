"""How often a cartridge is drawn."""

from __future__ import annotations

import pytest

from cartridge_forge.training.recipe import drawn_steps


@pytest.mark.parametrize(
    ("names", "each", "steps", "expected"),
    [
        ("ab", 2, 7, {"a": 7, "b": 7}),
        ("ab", 5, 3, {"a": 3, "b": 3}),
        # a, b, c, a, ...
        ("abc", 1, 7, {"a": 3, "b": 2, "c": 2}),
        # (a b) (c a) (b c) (a b)
        ("abc", 2, 4, {"a": 3, "b": 3, "c": 2}),
        ("abcd", 1, 2, {"a": 1, "b": 1, "c": 0, "d": 0}),
    ],
)
def test_steps_of_names_that_take_turns(
    names: str, each: int, steps: int, expected: dict[str, int]
) -> None:
    assert drawn_steps(names, each, steps) == expected
