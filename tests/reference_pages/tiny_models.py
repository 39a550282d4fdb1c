"""Make tiny random models of many families, for the check of models.

Each has what makes its family unlike Llama's, at sizes that show it: scales and caps that a random
model's logits reach, a window of 8, several kinds of layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SPREAD = 0.15  # of the weights: logits are far from uniform, and a skipped scale shows
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CAPS = {"sliding_window": 8, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0}
ROPE = {"rope_theta": 1e4}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **ROPE, **more}}


LONG = {
    "short_factor": [1.0] * 8,
    "long_factor": [1.5] * 8,
    "original_max_position_embeddings": 512,
}
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", HEADS),
    "llama, rope linear": ("llama", _rope("linear", factor=2.0)),
    "llama, rope llama3": ("llama", _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64)),
    "llama, rope yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama, rope dynamic": ("llama", _rope("dynamic", factor=4.0)),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "mistral": ("mistral", {**HEADS, "sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2, sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 8,
                                 "max_window_layers": 1}),
    "qwen3": ("qwen3", HEADS),
    "gemma": ("gemma", HEADS),
    "gemma2": ("gemma2", {**HEADS, **CAPS, "attn_logit_softcapping": 5.0}),
    "gemma3_text": ("gemma3_text", {**HEADS, **CAPS, "layer_types":
                                    ["sliding_attention", "full_attention"]}),
    "gemma3n_text": ("gemma3n_text", {**HEADS, "vocab_size_per_layer_input": 97,
                                      "hidden_size_per_layer_input": 16, "laurel_rank": 8,
                                      "num_kv_shared_layers": 0, "altup_num_inputs": 2,
                                      "layer_types": ["sliding_attention", "full_attention"],
                                      "activation_sparsity_pattern": [0.0, 0.0],
                                      "sliding_window": 8, "intermediate_size": [96, 96]}),
    "gemma4_text": ("gemma4_text", HEADS),
    "granite": ("granite", {"logits_scaling": 8.0, "attention_multiplier": 0.1,
                            "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2,
                                  "logits_scaling": 8.0, "attention_multiplier": 0.1}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {**HEADS, "logit_scale": 0.25, "sliding_window": 8, "layer_types":
                            ["sliding_attention", "full_attention"]}),
    "olmo": ("olmo", {"clip_qkv": 1.0}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 8, "layer_types":
                        ["sliding_attention", "full_attention"]}),
    "olmoe": ("olmoe", EXPERTS),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "phi3, rope longrope": ("phi3", {**_rope("longrope", **LONG)}),
    "glm": ("glm", HEADS),
    "glm4": ("glm4", HEADS),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "exaone4": ("exaone4", {**HEADS, "sliding_window": 8, "layer_types":
                            ["sliding_attention", "full_attention"]}),
    "helium": ("helium", HEADS),
    "nemotron": ("nemotron", {}),
    "stablelm": ("stablelm", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", {**HEADS, **EXPERTS}),
    "qwen3_next": ("qwen3_next", {
        **HEADS, **EXPERTS, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}),
    "gpt_oss": ("gpt_oss", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2,
                            "sliding_window": 8, **_rope("default")}),
    "deepseek_v3": ("deepseek_v3", {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "num_key_value_heads": 4}),
    "llama4_text": ("llama4_text", {**HEADS, "num_local_experts": 2, "intermediate_size_mlp": 96,
                                    "attention_chunk_size": 8, "num_experts_per_tok": 1}),
    "diffllama": ("diffllama", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "falcon": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "mamba": ("mamba", {}),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
                                "mamba_d_state": 16}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]}),
    "recurrent_gemma": ("recurrent_gemma", {"attention_window_size": 8, "num_hidden_layers": 3,
                                            "lru_width": 64}),
    "seed_oss": ("seed_oss", HEADS),
    "arcee": ("arcee", {}),
    "apertus": ("apertus", {}),
    "ministral": ("ministral", {**HEADS, "sliding_window": 8}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", HEADS),
    "ernie4_5": ("ernie4_5", HEADS),
    "minimax": ("minimax", {**HEADS, "num_local_experts": 2, "num_experts_per_tok": 1,
                            "layer_types": ["linear_attention", "full_attention"]}),
}  # fmt: skip


def make_model(name: str, folder: Path) -> None:
    """Write the tiny random model of MODELS to a folder."""
    family, more = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SIZES, **more})
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=SPREAD)
        model.save_pretrained(folder)
