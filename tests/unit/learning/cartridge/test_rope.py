"""Keys moved to other positions are those that the model itself makes there; prefixes composed of
them are texts read side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from twins import NEAR

from learning.attention import FlatAttention
from learning.cartridge import composed, shifted
from learning.decoder import half_split
from learning.model.loading import frequencies_of
from protocols.errors import DataError

if TYPE_CHECKING:
    from twins import Twin


def read_alone(twin: Twin, texts: list[tuple[int, ...]], start: int) -> torch.Tensor:
    """[L, 2, H_kv, T, D] of texts at consecutive positions from `start` on, each read alone."""
    ids = torch.tensor([i for text in texts for i in text])
    positions = torch.arange(start, start + len(ids))
    layers, heads, size = twin.model.kv_shape
    none = torch.zeros(layers, 2, heads, 0, size)
    found = []

    def keep(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        found.append(torch.stack([k, v]).transpose(1, 2))

    lengths = [len(text) for text in texts]
    attention = FlatAttention(lengths, [len(texts)], positions, [none], observer=keep)
    twin.model(ids, positions, attention)
    return torch.stack(found)


def read_at(twin: Twin, start: int) -> torch.Tensor:
    """[L, 2, H_kv, T, D] of document b read alone, from position `start` on."""
    return read_alone(twin, [twin.documents["b"]], start)


@pytest.mark.parametrize("by", [40, -7])
def test_moved_keys_are_those_read_at_the_other_positions(twin: Twin, by: int) -> None:
    kv = read_at(twin, 9)
    moved = shifted(kv, by, twin.model.frequencies())
    torch.testing.assert_close(moved, read_at(twin, 9 + by), rtol=0, atol=NEAR)
    assert not torch.allclose(moved[:, 0], kv[:, 0], atol=0.1)


def test_a_quarter_turn_by_hand() -> None:
    """One pair of frequency pi/2, and a number that is not rotated."""
    kv = torch.tensor([[1.0, 2.0, 5.0], [7.0, 8.0, 9.0]]).view(1, 2, 1, 1, 3)
    moved = shifted(kv, 1, half_split(torch.tensor([math.pi / 2]), 3))
    assert torch.allclose(moved[0, 0].flatten(), torch.tensor([-2.0, 1.0, 5.0]), atol=1e-6)
    assert torch.equal(moved[:, 1], kv[:, 1])
    assert shifted(kv, 0, half_split(torch.tensor([1.0]), 3)) is kv


def config_with(**rope: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8, hidden_size=64, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, rope_parameters={"rope_theta": 1e4, **rope},
    )  # fmt: skip


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3])
def test_frequencies_of_a_path_are_those_of_the_model(
    rope: dict[str, object], tmp_path: Path
) -> None:
    """From the config alone: there are no weights beside it."""
    config = config_with(**rope)
    config.save_pretrained(tmp_path)
    found = frequencies_of(str(tmp_path)).values
    expected = LlamaForCausalLM(config).model.rotary_emb.inv_freq.double()
    assert torch.equal(found, torch.cat([-expected, expected])[None])


def test_frequencies_that_depend_on_the_length_are_refused(tmp_path: Path) -> None:
    config = config_with(rope_type="dynamic", factor=2.0)
    config.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="rotary embedding is dynamic, which is not the same at"):
        frequencies_of(str(tmp_path))


def test_a_path_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    with pytest.raises(DataError, match=r"cannot be moved .* for transformers does not know it: "):
        frequencies_of(str(tmp_path))


def test_a_composition_is_the_texts_read_behind_one_another_unseen(twin: Twin) -> None:
    """One pass over c, a and b at consecutive positions, each seeing itself alone."""
    order = "cab"
    read = read_alone(twin, [twin.documents[name] for name in order], 0)
    made = composed(twin.model, [twin.kv[name] for name in order])
    torch.testing.assert_close(made, read, rtol=0, atol=5e-5)


def test_a_composition_of_one_is_itself(llama: Twin) -> None:
    assert composed(llama.model, [llama.kv["a"]]) is llama.kv["a"]
