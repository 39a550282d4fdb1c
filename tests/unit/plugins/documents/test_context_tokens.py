"""The positions of a model's config: read as they stand, or as transformers completes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cartridge_forge.plugins.documents.corpus import context_tokens
from cartridge_forge.protocols.errors import DataError


def test_the_config_states_its_positions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    assert context_tokens(str(tmp_path)) == 2048  # of no type that transformers would know


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"model_type": "llama"}, 2048),  # transformers' default for Llama
        ({"model_type": "gpt2", "n_positions": 512}, 512),  # its name there
        ({"model_type": "mamba"}, None),  # it has none
    ],
)
def test_transformers_completes_a_config(
    tmp_path: Path, config: dict[str, object], positions: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_tokens(str(tmp_path)) == positions


def test_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no model at .*config\.json"):
        context_tokens(str(tmp_path / "gone"))
