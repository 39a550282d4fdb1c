"""Keys of the spec: others' names for them, the likeliest for a mistyped one, and their types."""

from __future__ import annotations

import pytest

from cartridge_forge.protocols.spec.keys import (
    CONFIG_FILE,
    FILES,
    MESH_FILE,
    OTHER_NAMES,
    near_keys,
    spec_keys,
)


def test_every_other_name_leads_to_a_key() -> None:
    known = {key.key for file in FILES for key in spec_keys(file)}
    assert set(OTHER_NAMES.values()) <= known
    assert not {name for name in OTHER_NAMES if name in {k.rpartition(".")[2] for k in known}}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lr", ["train.lr"]),
        ("train.lr", ["train.lr"]),
        ("learning_rate", ["train.lr"]),  # another trainer's name
        ("clipp", ["train.clip"]),  # spelt alike
        ("gradient_norm", ["train.clip"]),  # by the words of "most gradient norm"
        ("no_such_thing", []),
    ],
)
def test_a_name_leads_to_the_likeliest_keys(name: str, found: list[str]) -> None:
    near = near_keys(name, [*spec_keys(MESH_FILE), *spec_keys(CONFIG_FILE)])
    assert near[: max(1, len(found))] == found


def test_every_key_has_a_meaning_and_a_type_in_words() -> None:
    for file in FILES:
        for key in spec_keys(file):
            assert key.field.description, key.key
            assert "a value" not in key.type, key.key
