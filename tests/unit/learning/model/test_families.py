"""Families that run through transformers: each as its own forward pass, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rooms.learning.model_families import (
    PREFIX,
    REFUSED,
    RIGHT,
    SHAPE,
    TOKENS,
    FamilyPair,
    family_pair,
    make_family,
)
from safetensors.torch import load_file, save_file
from torch import nn

from cartridge_forge.learning.cartridge import shifted
from cartridge_forge.learning.decode import COPIED
from cartridge_forge.learning.model.loading import frequencies_of, load_model
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.plugins.library.models.adapter import flat_attention
from cartridge_forge.protocols.errors import DataError

NATS = 1e-4


@pytest.fixture(scope="module", params=RIGHT)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyPair:
    return family_pair(tmp_path_factory.mktemp("model"), *RIGHT[request.param])


def test_log_probabilities_are_those_of_transformers(pair: FamilyPair) -> None:
    """In one pass, behind a document, and as the second of two texts."""
    assert max(pair.differences().values()) < NATS


@pytest.mark.parametrize("copied", [COPIED, 0])
def test_drawn_tokens_are_the_likeliest(
    pair: FamilyPair, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the prefix, which is copied to each row, or read apart."""
    monkeypatch.setattr("cartridge_forge.learning.decode.COPIED", copied)
    told, best = pair.drawn()
    assert told < NATS
    assert best < NATS


def test_the_gradient_into_the_prefix_is_that_of_transformers(pair: FamilyPair) -> None:
    ours, theirs = pair.gradients()
    bound = 5e-3 if ours.dim() == 0 else 1e-4  # a slope by two passes is a gradient up to its steps
    assert float((ours - theirs).abs().max()) < bound * float(theirs.abs().max())
    assert float(theirs.abs().max()) > 0.01


def test_moved_keys_are_those_read_there(pair: FamilyPair) -> None:
    """40 positions on, which is a whole number of Llama 4's chunks."""
    read, there = pair.keys(0), pair.keys(40)
    for frequencies in (pair.ours.frequencies(), frequencies_of(str(pair.path))):
        torch.testing.assert_close(shifted(read, 40, frequencies), there, rtol=0, atol=2e-5)
    assert not torch.allclose(read, there, atol=0.05)


def test_a_cartridge_of_all_tokens_is_the_document_and_fewer_are_near(pair: FamilyPair) -> None:
    """In closed form, by a pass that fits each layer when it attends: with caps, sinks, windows,
    chunks, and heads that are widened with zeros."""
    ids, behind = tuple(pair.ids[:PREFIX].tolist()), pair.ids[PREFIX:]
    length = TOKENS - PREFIX

    def read(kv: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return pair.found(behind, [length], kv.shape[3], kv)

    whole = read(pair.kv)
    made = attention_matched(pair.ours, ids, pair.kv, PREFIX, 1)
    assert float((read(made) - whole).abs().max()) < 10 * NATS
    fewer = attention_matched(pair.ours, ids, pair.kv, 8, 1)
    assert fewer.shape[3] == 8
    assert fewer.isfinite().all()


def test_keys_that_hold_learned_positions_are_not_moved(tmp_path: Path) -> None:
    """They are in the hidden states, and so in all of a key."""
    pair = family_pair(tmp_path, "opt", {"ffn_dim": 96, "word_embed_proj_dim": 64})
    assert max(pair.differences().values()) < NATS
    assert max(pair.drawn()) < NATS
    with pytest.raises(DataError, match=r"'opt'\) cannot be moved .* layers \[0, 1\] do more than"):
        frequencies_of(str(tmp_path))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, more, why = REFUSED[name]
    make_family(tmp_path, family, more)
    with pytest.raises(DataError, match=why) as error:
        load_model(str(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert "; use a model" in str(error.value)


def test_positions_beyond_a_fixed_rotation_are_refused(tmp_path: Path) -> None:
    """Dynamic frequencies are the default ones up to the config's number of positions."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    pair = family_pair(tmp_path, "llama", {"rope_parameters": rope})
    assert max(pair.differences().values()) < NATS
    assert pair.ours.longest == 512
    with pytest.raises(DataError, match="position 512 is beyond 511: from there the rotary"):
        pair.found(pair.ids, [24], 489, None)


class Layer(nn.Module):
    layer_idx = 0


@pytest.mark.parametrize(
    ("argument", "name"),
    [({"position_bias": torch.ones(1)}, "position_bias"), ({"is_causal": False}, "is_causal")],
)
def test_an_argument_of_attention_that_is_not_computed_is_named(
    argument: dict[str, Any], name: str
) -> None:
    one = torch.ones(1, 1, 1, 4)
    with pytest.raises(DataError, match=f"its attention takes {name}.*, which is not computed"):
        flat_attention(Layer(), one, one, one, None, 1.0, **argument)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantised_weights_are_refused_by_their_method(method: str, tmp_path: Path) -> None:
    config = {**SHAPE, "model_type": "llama", "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=rf"quantised \({method}\).* model.dequantize\(\)"):
        load_model(str(tmp_path))


def test_weights_of_blocks_in_eight_bits_are_made_whole(tmp_path: Path) -> None:
    """Each block of 128 x 128 numbers with its own scale, against the same numbers in float32."""
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
    make_family(tmp_path, "llama", sizes)
    small: dict[str, torch.Tensor] = {}
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        rows, columns = weights[name].shape
        blocks = weights[name].view(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        narrow = (blocks / scale).to(torch.float8_e4m3fn)
        small[name] = narrow.view(rows, columns)
        small[name.replace("weight", "weight_scale_inv")] = scale[:, 0, :, 0].contiguous()
        weights[name] = (narrow.float() * scale).view(rows, columns)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    whole = load_model(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({**weights, **small}, tmp_path / "model.safetensors", {"format": "pt"})
    found = {name: tensor for name, tensor, _ in load_model(str(tmp_path)).weights()}
    for name, tensor, of in whole.weights():
        torch.testing.assert_close(found[name], tensor[of], rtol=1e-6, atol=0)
