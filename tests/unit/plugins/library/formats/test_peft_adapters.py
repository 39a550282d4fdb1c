"""Adapters as PEFT 0.21.2 writes them, made by hand, and read number by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cartridge_forge.plugins.library.formats.peft import read
from cartridge_forge.protocols.errors import DataError

LAYERS, SIZE = 3, 4


def written(
    folder: Path, kind: str, tokens: int, heads: int, dtype: torch.dtype, **more: Any
) -> torch.Tensor:
    """Write an adapter, and return its rows [P, L * 2 * H_kv * D]."""
    width = heads * SIZE
    config = {
        "peft_type": kind, "num_virtual_tokens": tokens, "num_layers": LAYERS, "token_dim": width,
        "num_attention_heads": heads, "num_transformer_submodules": 1, **more,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rows = torch.arange(tokens * LAYERS * 2 * width).reshape(tokens, -1).to(dtype)
    save_file({"prompt_embeddings": rows}, folder / "adapter_model.safetensors")
    return rows


@pytest.mark.parametrize(
    ("kind", "tokens", "heads", "dtype", "more", "frozen"),
    [
        ("PREFIX_TUNING", 1, 1, torch.float32, {}, 0),
        ("PREFIX_TUNING", 7, 2, torch.float32, {"prefix_projection": False}, 0),
        ("PREFIX_TUNING", 7, 2, torch.float32, {"prefix_projection": True}, 0),
        ("PREFIX_TUNING", 8, 3, torch.bfloat16, {"encoder_hidden_size": 48}, 0),
        ("PREFIX_TUNING", 16, 4, torch.float16, {"inference_mode": True}, 0),
        ("PREFIX_TUNING", 5, 2, torch.float32, {"num_transformer_submodules": None}, 0),
        ("PREFIX_TUNING", 5, 2, torch.float32, {"num_frozen_tokens": 3}, 0),
        ("CARTRIDGE", 5, 2, torch.float32, {"num_frozen_tokens": 0}, 0),
        ("CARTRIDGE", 5, 2, torch.bfloat16, {"num_frozen_tokens": 1}, 1),
        ("CARTRIDGE", 6, 1, torch.float16, {"num_frozen_tokens": 2}, 2),
    ],
)
def test_keys_and_values_are_read_where_they_stand(
    tmp_path: Path, kind: str, tokens: int, heads: int, dtype: torch.dtype, more: dict[str, Any],
    frozen: int,
) -> None:  # fmt: skip
    rows = written(tmp_path, kind, tokens, heads, dtype, **more)
    cartridge = read(tmp_path)
    assert (cartridge.tokens, cartridge.frozen, cartridge.kv.dtype) == (tokens, frozen, dtype)
    assert cartridge.kv.shape == (LAYERS, 2, heads, tokens, SIZE)
    # In a row: for each layer the key of every head, then the value of every head.
    for layer, side, head, token in ((0, 0, 0, 0), (1, 1, heads - 1, tokens - 1), (2, 0, 0, 0)):
        begin = ((layer * 2 + side) * heads + head) * SIZE
        expected = rows[token, begin : begin + SIZE]
        assert torch.equal(cartridge.kv[layer, side, head, token], expected)


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("LORA", {}, "an adapter of type LORA"),
        ("PROMPT_TUNING", {}, "an adapter of type PROMPT_TUNING"),
        ("P_TUNING", {}, "an adapter of type P_TUNING"),
        ("ADAPTION_PROMPT", {}, "others change the model's own layers or its input"),
        ("PREFIX_TUNING", {"num_layers": None}, "num_layers: None, and a number is needed"),
        ("PREFIX_TUNING", {"num_virtual_tokens": 9}, "they are of two adapters, or one is damaged"),
        ("PREFIX_TUNING", {"token_dim": 9}, "they are of two adapters, or one is damaged"),
        ("PREFIX_TUNING", {"num_attention_heads": 0}, "num_attention_heads: 0"),
        ("PREFIX_TUNING", {"num_transformer_submodules": 2}, "an adapter for 2 transformers"),
        ("CARTRIDGE", {}, "num_frozen_tokens: None"),
    ],
)
def test_other_adapters_are_refused_by_what_they_are(
    tmp_path: Path, kind: str, more: dict[str, Any], said: str
) -> None:
    written(tmp_path, kind, 5, 2, torch.float32, **more)
    with pytest.raises(DataError) as refused:
        read(tmp_path)
    assert said in str(refused.value)
