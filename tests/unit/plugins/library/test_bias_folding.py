"""Test that a compacted cache of another program attends from its cartridge as it did, by plain
transformers and by attention written here in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import DOCUMENT, READER, ours, same, write
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from cartridge_forge.learning.attention import AttentionOptions
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.plugins.library.formats.base_model import made_for, read_base
from cartridge_forge.plugins.library.formats.bias_folding import FoldingAttention, read_compacted
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.convert import read
from cartridge_forge.plugins.library.reference_rows import document_rows
from cartridge_forge.protocols.errors import DataError

T, P, ROUNDING = 300, 24, 2e-4  # of logits of a few units, in float32
PROMPT = torch.tensor([[10, 41, 33, 77, 5, 90]])
TEXT = (Path(__file__).parents[4] / "docs/explanation/on_policy.md").read_text()[:6000]
SHAPE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2,
    "max_position_embeddings": 1024,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}  # fmt: skip


def llama(folder: Path, rope: str = "default") -> PreTrainedModel:
    torch.manual_seed(1)
    parameters = {"rope_theta": 10_000.0, **ROPES[rope]}
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=parameters))
    return saved(model, folder)


def saved(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    return model.float().eval()


def cache_of(pairs: list[tuple[Tensor, Tensor]]) -> DynamicCache:
    made = DynamicCache()
    for layer, (keys, values) in enumerate(pairs):
        made.update(keys, values, layer)
    return made


@torch.no_grad()
def document_pairs(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
    """P of a document's T entries, others in each layer and head, as a press leaves them."""
    draws = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 101, (1, T), generator=draws)
    pairs = []
    for keys, values, *_ in model(ids, past_key_values=DynamicCache()).past_key_values:
        order = torch.stack([torch.randperm(T, generator=draws)[:P] for _ in keys[0]])
        index = order[None, :, :, None].expand(-1, -1, -1, keys.shape[3])
        pairs.append((keys.gather(2, index), values.gather(2, index)))
    return pairs


@torch.no_grad()
def logits(
    model: PreTrainedModel, pairs: list[tuple[Tensor, Tensor]], position: int, bias: Tensor | None
) -> Tensor:
    """transformers' logits of PROMPT from `position` on, over entries with a bias [P] each."""
    tokens, entries = PROMPT.shape[1], pairs[0][0].shape[2]
    mask = torch.full((tokens, entries + tokens), -torch.inf).triu(entries + 1)
    if bias is not None:
        mask[:, :entries] += bias
    at = torch.arange(position, position + tokens)[None]
    out = model(
        PROMPT, past_key_values=cache_of(pairs), position_ids=at, attention_mask=mask[None, None]
    )
    whole: Tensor = out.logits[0]
    return whole


def pairs_of(cartridge: CartridgeFile) -> list[tuple[Tensor, Tensor]]:
    return [(keys[None], values[None]) for keys, values in cartridge.kv]


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_a_cache_without_biases_answers_at_p_as_it_did_at_t(tmp_path: Path, rope: str) -> None:
    model = llama(tmp_path / "model", rope)
    pairs = document_pairs(model)
    torch.save(cache_of(pairs), tmp_path / "press.pt")
    cartridge, folding = read_compacted(tmp_path / "press.pt", tmp_path / "model", T, None)
    assert folding == []
    assert (cartridge.tokens, cartridge.frozen) == (P, 0)
    expected = logits(model, pairs, T, None)
    torch.testing.assert_close(
        logits(model, pairs_of(cartridge), P, None), expected, rtol=0, atol=ROUNDING
    )
    assert not torch.allclose(logits(model, pairs, P, None), expected, atol=100 * ROUNDING)
    same_place, _ = read_compacted(tmp_path / "press.pt", tmp_path / "model", P, None)
    assert pairs_of(same_place)[1][0].equal(pairs[1][0]), "keys that were turned anew by the press"


def constant_queries(folder: Path) -> PreTrainedModel:
    """A model in which one number of each query is 3 but for how far the slowest pair turns."""
    torch.manual_seed(3)
    rope = {"rope_type": "default", "rope_theta": 1e9}
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_parameters=rope))
    for layer in model.model.layers:
        projection = layer.self_attn.q_proj
        for head in range(4):
            pair = [head * 16 + 7, head * 16 + 15]
            projection.weight.data[pair] = 0
            projection.bias.data[pair] = torch.tensor([3.0, 0.0])
    return saved(model, folder)


def word_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@pytest.mark.parametrize("has_text", [True, False])
def test_biases_are_exact_where_queries_share_a_direction(tmp_path: Path, has_text: bool) -> None:
    """Logits by transformers: over C1 and biases in the mask at T, and over the cartridge at P. The
    ridge of the direction leaves (q.u - 1)^2 below 1e-6."""
    model = constant_queries(tmp_path / "model")
    word_tokenizer(tmp_path / "model")
    bias = torch.linspace(-3, 4, P)
    pairs = document_pairs(model)
    whole = bias.expand(1, 2, P).contiguous()
    torch.save([(keys, whole.clone(), values) for keys, values in pairs], tmp_path / "am.pt")
    draws = torch.Generator().manual_seed(5)
    words = torch.randint(3, 101, (700,), generator=draws).tolist()
    text = " ".join(f"w{i}" for i in words) if has_text else None
    cartridge, folding = read_compacted(tmp_path / "am.pt", tmp_path / "model", T, text)
    expected = logits(model, pairs, T, bias)
    actual = logits(model, pairs_of(cartridge), P, None)
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-3)
    assert not torch.allclose(logits(model, pairs, T, None), expected, atol=0.5)
    assert [layer.bias for layer in folding] == [4.0, 4.0]
    for layer in folding:
        assert layer.miss < 1e-6
        assert layer.largest_difference < 2e-2


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate [n, D] by Llama's embedding for these positions, in float64."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half).double() / half)
    first, second = x.double().split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float
) -> Tensor:
    """Attention of one row's queries [n, D] over its own keys and values, and over entries."""
    hidden = torch.full((len(q), len(q)), -torch.inf, dtype=torch.float64).triu(1)
    scores = torch.cat([q @ keys.T * scale + bias, q @ k.T * scale + hidden], -1)
    return scores.softmax(-1) @ torch.cat([values, v])


class Recorder(FoldingAttention):
    """Keep what each layer is given and returns."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        out = super().attend(layer, q, k, v, options)
        passes = self.__dict__.setdefault("passes", [])
        passes.append((q.double(), k.double(), v.double(), options.scale, out.double()))
        return out


@cache
def reader_cache() -> tuple[Tensor, Tensor, int]:
    """Entries of the shipped reader [L, 2, H_kv, P, D] at their document's positions, biases, T."""
    from cartridge_forge.learning.model.loading import tokenizer_of

    ids = tokenizer_of(str(READER)).encode(TEXT, add_special_tokens=False)[:T]
    kv = document_kv(ours(), [1, *ids])
    draws = torch.Generator().manual_seed(7)
    rows = torch.randperm(kv.shape[3], generator=draws)[:P]
    return kv[:, :, :, rows].clone(), 2 * torch.rand(*kv.shape[:1], 2, P, generator=draws), T + 1


def test_differences_are_those_of_attention_in_float64() -> None:
    """Over C1 and biases with the queries at T + i, and over the cartridge at P + i, a row, head
    and layer at a time."""
    from cartridge_forge.learning.cartridge import shifted
    from cartridge_forge.learning.model.loading import tokenizer_of

    entries, biases, length = reader_cache()
    ids = tokenizer_of(str(READER)).encode(TEXT, add_special_tokens=False)
    rows = document_rows(ids[T : T + 256], 4)
    assert [len(row.ids) for row in rows] == [64, 64, 64, 64]
    moved = shifted(entries.double(), P - length, ours().frequencies())
    recorder = Recorder(ours(), moved, biases.double(), torch.float32, rows)
    kv, folding = recorder.run()
    apart, none = torch.full((64,), length - P), torch.zeros(P, dtype=torch.float64)
    for layer, (q, k, v, scale, out) in enumerate(recorder.__dict__["passes"]):
        differences = []
        for row in range(4):
            at = slice(64 * row, 64 * row + 64)
            for head in range(6):
                shared = head // 3
                own = (k[at, shared], v[at, shared])
                query, key = (turned(x, apart, 500_000.0) for x in (q[at, head], own[0]))
                keys, values = entries[layer, :, shared].double()
                bias = biases[layer, shared].double()
                expected = attention(query, key, own[1], keys, values, bias, scale)
                torch.testing.assert_close(out[at, head], expected, rtol=0, atol=1e-3)
                if row % 2:
                    keys, values = kv[layer, :, shared].double()
                    read = attention(q[at, head], *own, keys, values, none, scale)
                    differences.append((read - expected).abs())
        stated = folding[layer]
        whole = torch.stack(differences)
        assert stated.largest_difference == pytest.approx(float(whole.max()), abs=2e-3)
        assert stated.mean_difference == pytest.approx(float(whole.mean()), abs=1e-4)
        assert stated.bias == pytest.approx(float(biases[layer].max()))


def test_the_shipped_reader_is_nearer_with_its_biases_folded_than_without(tmp_path: Path) -> None:
    """By the logits of plain transformers over C1 with biases that are one for all heads."""
    entries, _, length = reader_cache()
    bias = torch.linspace(0, 3, P)
    named: dict[str, Tensor] = {}
    for layer, (keys, values) in enumerate(entries):
        named |= {f"keys.{layer}": keys[None].clone(), f"values.{layer}": values[None].clone(),
                  f"biases.{layer}": bias.expand(1, 2, P).contiguous()}  # fmt: skip
    save_file(named, tmp_path / "am.safetensors")
    plain, _ = read_compacted_without_biases(tmp_path, named, length)
    cartridge, folding = read_compacted(tmp_path / "am.safetensors", READER, length, TEXT)
    model = AutoModelForCausalLM.from_pretrained(READER, dtype=torch.float32)
    pairs = [(k[None], v[None]) for k, v in entries]
    expected = logits(model, pairs, length, bias)
    off = [(logits(model, pairs_of(c), P, None) - expected).square().mean().sqrt()
           for c in (cartridge, plain)]  # fmt: skip
    assert off[0] < off[1] / 2
    assert all(layer.relative < 0.1 for layer in folding)
    stated = cartridge.facts.source["folding"]
    assert stated["3"]["mean_difference"] == pytest.approx(folding[3].mean_difference, rel=1e-3)
    assert cartridge.facts.source["document_tokens"] == length


def read_compacted_without_biases(
    folder: Path, named: dict[str, Tensor], length: int
) -> tuple[CartridgeFile, Any]:
    pairs = {key: part for key, part in named.items() if not key.startswith("biases")}
    save_file(pairs, folder / "plain.safetensors")
    return read_compacted(folder / "plain.safetensors", READER, length, None)


def test_models_whose_keys_cannot_be_moved_are_refused_by_name(tmp_path: Path) -> None:
    pairs = document_pairs(llama(tmp_path / "model", "dynamic"))
    torch.save(pairs, tmp_path / "press.pt")
    with pytest.raises(DataError, match="dynamic, which is not the same at every length"):
        read_compacted(tmp_path / "press.pt", tmp_path / "model", T, None)
    torch.manual_seed(1)
    saved(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=64)), tmp_path / "sliding")
    with pytest.raises(DataError, match=r"layer 0 of .*sliding keeps a DynamicSlidingWindowLayer"):
        read_compacted(tmp_path / "press.pt", tmp_path / "sliding", T, None)


def test_caches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    entries, biases, length = reader_cache()
    rows = [(k[None].clone(), b[None].clone(), v[None].clone())
            for (k, v), b in zip(entries, biases, strict=True)]  # fmt: skip
    torch.save(rows, tmp_path / "am.pt")
    with pytest.raises(DataError, match=r"has 24 entries.*of 23 tokens.*--document-tokens"):
        read_compacted(tmp_path / "am.pt", READER, P - 1, None)
    with pytest.raises(DataError, match=r"the text has . tokens, and 128 are needed"):
        read_compacted(tmp_path / "am.pt", READER, length, "Who?")
    torch.save(rows[:3], tmp_path / "three.pt")
    with pytest.raises(DataError, match=r"has the shape \[4, 2, 2, P, 32\]: got \[3, 2, 2, 24, 32"):
        read_compacted(tmp_path / "three.pt", READER, length, None)


@pytest.mark.parametrize("name", ["hazy", "peft", "forge", "tokasaurus"])
def test_a_cartridge_of_attention_matching_keeps_its_bytes(tmp_path: Path, name: str) -> None:
    """Its biases are in its keys: no format needs a field for them."""
    made = made_for(CartridgeFile(matched(), 1), read_base(READER))
    assert same(read(write(made, tmp_path, name)), made)


@cache
def matched() -> Tensor:
    kv = document_kv(ours(), DOCUMENT)
    return attention_matched(ours(), DOCUMENT, kv, 16, 1)
