"""Test more families of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reference_pages.models import FILE, models_page, verdict_of
from reference_pages.tiny_models import MODELS
from rooms.learning.model_families import (
    EXPERTS,
    LATENT,
    LONGROPE,
    SCALES,
    TWO_KINDS,
    YARN,
    family_pair,
)

SHARED = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97,
    "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
ALTERNATING = {"hidden_size_per_layer_input": 8, "laurel_rank": 4,
               "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [96] * 4}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
          "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": 4096}),
    "gemma3n, shared": ("gemma3n_text", {**SHARED, **ALTERNATING}),
    "gemma4, shared": ("gemma4_text", {**SHARED, "global_head_dim": 32}),
    "gemma": ("gemma", {}),
    "vaultgemma": ("vaultgemma", {"sliding_window": 8, "attn_logit_softcapping": 5.0}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "phimoe": ("phimoe", EXPERTS),
    "nemotron": ("nemotron", {}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128}),
    "biogpt": ("biogpt", {}),
    "cohere": ("cohere", {"logit_scale": 0.2, "use_qk_norm": True}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", EXPERTS),
    "flex_olmo": ("flex_olmo", EXPERTS),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", ROUTED),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "granitemoe": ("granitemoe", {**SCALES, **EXPERTS}),
    "granitemoeshared": ("granitemoeshared", {**SCALES, **EXPERTS, "shared_intermediate_size": 32}),
    "granite_swa": ("granite_swa", {"sliding_window": 8}),
    "mixtral": ("mixtral", {**EXPERTS, "sliding_window": 8}),
    "ministral": ("ministral", TWO_KINDS),
    "ministral3": ("ministral3", {}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "youtu": ("youtu", LATENT),
    "exaone4": ("exaone4", TWO_KINDS),
    "exaone_moe": ("exaone_moe", EXPERTS),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"moe_topk": [2, 2], "num_experts": 4}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1,
    }),
    "helium": ("helium", {}),
    "bitnet": ("bitnet", {}),
    "arcee": ("arcee", {}),
    "seed_oss": ("seed_oss", {}),
    "apertus": ("apertus", {}),
    "persimmon": ("persimmon", {}),
    "jetmoe": ("jetmoe", {**EXPERTS, "kv_channels": 16}),
    "cwm": ("cwm", TWO_KINDS),
    "afmoe": ("afmoe", {**EXPERTS, "sliding_window": 8}),
    "minimax_m2": ("minimax_m2", EXPERTS),
    "mimo_v2_flash": ("mimo_v2_flash", {**EXPERTS, "sliding_window": 8}),
    "nanochat": ("nanochat", {}),
    "solar_open": ("solar_open", ROUTED),
    "jais2": ("jais2", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_computed_as_its_own_forward_pass(name: str, tmp_path: Path) -> None:
    pair = family_pair(tmp_path, *FAMILIES[name])
    assert max(pair.differences().values()) < 1e-4
    assert max(pair.drawn()) < 1e-4
    ours, theirs = pair.gradients()
    bound = 1e-2 if ours.dim() == 0 else 1e-4
    assert float((ours - theirs).abs().max()) < bound * float(theirs.abs().max())


def test_the_page_is_what_the_check_says() -> None:
    assert FILE.read_text() == models_page(), (
        "docs/reference/models.md is old: run `make reference-models`, commit it"
    )


@pytest.mark.parametrize("name", MODELS)
def test_each_family_is_right_or_refused_by_name(name: str) -> None:
    verdict = verdict_of(name)
    assert verdict.family == MODELS[name][0]
    if verdict.refusal:
        assert repr(verdict.family) in verdict.refusal
    else:
        assert max(verdict.nats.values()) <= 1e-4
