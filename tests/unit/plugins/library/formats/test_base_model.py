"""Which models a cartridge fits, and why it fits no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import READER, ROPE, cartridge, trained, write

from cartridge_forge.learning.model.loading import base_hash, load_model
from cartridge_forge.plugins.library.formats.base_model import (
    BaseModelInfo,
    made_for,
    misfits,
    model_name,
    other_weights,
    require_fit,
    rope_of,
)
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile, Provenance
from cartridge_forge.plugins.library.formats.convert import changes, differences, norms, read
from cartridge_forge.protocols.errors import DataError

BASE = BaseModelInfo(2, 2, 4, 64, "c" * 64, ROPE, "models/some")


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_type": "default"}),
        ({"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
         {"rope_theta": 10000.0, "rope_type": "default"}),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
         {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}}, ROPE),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ROPE),
        ({"rope_parameters": {"full": {"rope_theta": 1.0}}}, {"full": {"rope_theta": 1.0}}),
        ({"n_positions": 1024}, {}),
    ],
)  # fmt: skip
def test_old_and_new_configs_say_one_rope(config: Any, rope: Any) -> None:
    assert rope_of(config) == rope


def test_a_cartridge_fits_its_base() -> None:
    assert misfits(cartridge(), BASE) == []
    assert misfits(cartridge(facts=Provenance()), BASE) == []  # which does not say


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (cartridge(3), r"shape \[2, 2, 2, P, 4\]: got \[3, 2, 2, 16, 4\]"),
        (cartridge(heads=1), r"got \[2, 2, 1, 16, 4\]"),
        (cartridge(head_dim=8), r"got \[2, 2, 2, 16, 8\]"),
        (cartridge(tokens=63), "63 tokens leaves none of the model's 64 positions"),
        (cartridge(facts=Provenance(config_sha256="d" * 64)), r"another base model \(config ddd"),
        (cartridge(facts=Provenance(rope={"rope_theta": 1e4, "rope_type": "default"})),
         "rotated by rope_theta 10000.0, rope_type default, and the model's by factor 8.0, "),
        (cartridge(facts=Provenance(first_position=5)), "it begins at position 5, and prompts"),
        (cartridge(facts=Provenance(keys="pre-rope")), "are pre-rope, and they are read as post"),
    ],
)  # fmt: skip
def test_another_base_is_refused_with_the_reason(made: CartridgeFile, said: str) -> None:
    with pytest.raises(DataError, match=said):
        require_fit(made, BASE)


def test_every_reason_is_told() -> None:
    made = cartridge(3, facts=Provenance(first_position=5, keys="pre-rope"))
    assert len(misfits(made, BASE)) == 3


def test_what_a_cartridge_does_not_say_it_gets_from_the_base() -> None:
    facts = made_for(cartridge(facts=Provenance(base="org/other")), BASE).facts
    assert (facts.base, facts.config_sha256, facts.rope) == ("org/other", "c" * 64, ROPE)
    assert made_for(cartridge(), BASE).facts == cartridge().facts


def test_two_models_of_one_config_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    """The shipped reader and panel have one config.json."""
    panel = READER.parent / "clinic-panel"
    assert (panel / "config.json").read_bytes() == (READER / "config.json").read_bytes()
    weights = base_hash(load_model(str(READER)))
    facts = replace(trained().facts, weights_sha256=weights, weights_dtype="float32")
    made = read(write(replace(trained(), facts=facts), tmp_path, "peft"))
    assert other_weights(made, READER) == []
    assert "was trained with other weights" in other_weights(made, panel)[0]
    assert other_weights(trained(), panel) == []  # which does not know


def test_a_model_is_named_without_this_machines_paths(tmp_path: Path) -> None:
    (tmp_path / "reader").mkdir()
    assert model_name(str(tmp_path / "reader")) == "reader"
    assert model_name("/gone/models/reader") == "reader"
    assert model_name("meta-llama/Llama-3.2-3B-Instruct") == "meta-llama/Llama-3.2-3B-Instruct"


def test_norms_and_changes_by_hand() -> None:
    kv = torch.zeros(1, 2, 1, 2, 2)
    kv[0, 0, 0] = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
    kv[0, 1] = 2.0
    (layer,) = norms(CartridgeFile(kv))
    assert (layer.keys, layer.values) == (2.5, 2.0)  # sqrt(25 / 4)
    assert (layer.largest_key, layer.largest_value) == (4.0, 2.0)
    other = kv.clone()
    other[0, 0, 0, 1, 1] = 4.0  # 8 away from -4, of a norm of 5
    (change,) = changes(CartridgeFile(kv), CartridgeFile(other))
    assert (change.keys, change.values, change.values_cosine) == (1.6, 0.0, 1.0)
    assert change.keys_cosine == pytest.approx((9 - 16) / 25)
    with pytest.raises(DataError, match="cannot be compared"):
        changes(CartridgeFile(kv), cartridge())


def test_differences_are_those_of_what_is_known() -> None:
    facts = replace(cartridge().facts, source={"run": "r2", "metrics": {"kl": 0.5}})
    other = cartridge(tokens=32, dtype="bfloat16", facts=facts)
    assert differences(cartridge(), other) == [
        ("dtype", "float32", "bfloat16"),
        ("shape", "[2, 2, 2, 16, 4]", "[2, 2, 2, 32, 4]"),
        ("source.run", "r1", "r2"),
    ]
    assert differences(cartridge(), cartridge(seed=1)) == []
