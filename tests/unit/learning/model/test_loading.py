"""The frozen base model: what is loaded, its shape, its hash."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from cartridge_forge.learning.model.loading import base_hash, load_model, load_tokenizer, read_ahead
from cartridge_forge.protocols.errors import DataError

if TYPE_CHECKING:
    from twins import Twin


def test_the_model_is_loaded_frozen_in_the_asked_dtype(llama: Twin) -> None:
    model = load_model(str(llama.path), "bfloat16")
    assert not model.training
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False)}


def test_shape_of_the_keys_and_values(llama: Twin, qwen3: Twin) -> None:
    assert llama.model.kv_shape == (2, 2, 16)
    assert qwen3.model.kv_shape == (2, 2, 32)  # its head size is not hidden / heads = 16


def test_a_missing_model_is_named_with_the_remedy(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no model at '.*nowhere'.*set model.path to a directory"):
        load_model(missing)


def test_a_missing_tokenizer_is_named_with_the_remedy(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    told = r"no tokenizer at '.*nowhere': the folder is gone; put the model's files back there, or"
    with pytest.raises(DataError, match=told):
        load_tokenizer(missing)


def test_the_hash_sees_a_single_bit_of_a_single_weight(llama: Twin) -> None:
    model = load_model(str(llama.path))
    before = base_hash(model)
    assert before == base_hash(llama.model)
    weight = model.base_model.layers[1].gate_up
    bits = weight.view(torch.int32)
    bits[3, 5] ^= 1
    assert base_hash(model) != before
    bits[3, 5] ^= 1
    assert base_hash(model) == before


def test_a_model_that_was_read_ahead_is_the_next_one_loaded_once(llama: Twin) -> None:
    read_ahead(str(llama.path), "float32")
    ahead, again = load_model(str(llama.path)), load_model(str(llama.path))
    assert ahead.weight.data_ptr() != again.weight.data_ptr()
    assert base_hash(ahead) == base_hash(again) == base_hash(llama.model)


def test_what_cannot_be_read_ahead_is_left_to_the_load(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    read_ahead(missing, "float32")
    with pytest.raises(DataError, match="no model at"):
        load_model(missing)
