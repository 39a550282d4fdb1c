"""Say how llama.cpp stores each model family in a GGUF file: names of weights, order of rows, and
the config that transformers wants. No torch.

A weight's name in a GGUF file is `blk.LAYER.NAME` within a layer. `LAYERS` and a family's `layers`
map NAME to the name that transformers has below `model.layers.LAYER`.

Source: llama.cpp's convert_hf_to_gguf.py, release b6700.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYERS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
HEAD_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
# Fields that an architecture may have. Each other one might change what the model computes.
FIELDS = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "attention.value_length", "block_count", "context_length",
    "embedding_length", "expert_count", "feed_forward_length", "rope.dimension_count",
    "rope.freq_base", "rope.scale_linear", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "vocab_size",
}  # fmt: skip
WINDOW = "attention.sliding_window"


@dataclass(frozen=True)
class GgufFamily:
    """Describe one architecture: `model_type` and `causal` class of transformers, names of weights
    in a layer beside `LAYERS`, constant entries of config.json, and `fields` beside `FIELDS`.

    `interleaved`: rows of q and k lie as neighbouring pairs, for llama.cpp's rotation, where
    transformers rotates the two halves of a head. `shifted`: norms are stored plus one.
    """

    model_type: str
    causal: str
    layers: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    fields: frozenset[str] = frozenset()
    interleaved: bool = False
    shifted: bool = False


SILU = {"hidden_act": "silu"}
GGUF_FAMILIES = {
    "llama": GgufFamily(
        "llama", "LlamaForCausalLM", interleaved=True,
        constants={**SILU, "attention_bias": False, "mlp_bias": False}, fields=frozenset({WINDOW}),
    ),
    "qwen2": GgufFamily(
        "qwen2", "Qwen2ForCausalLM",
        {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
        {**SILU, "use_sliding_window": False},
    ),
    "qwen3": GgufFamily(
        "qwen3", "Qwen3ForCausalLM", HEAD_NORMS,
        {**SILU, "attention_bias": False, "use_sliding_window": False},
    ),
    "gemma3": GgufFamily(
        "gemma3_text", "Gemma3ForCausalLM",
        {
            **HEAD_NORMS,
            "post_attention_norm.weight": "post_attention_layernorm.weight",
            "ffn_norm.weight": "pre_feedforward_layernorm.weight",
            "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        },
        {
            "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
            "attn_logit_softcapping": None,
        },
        frozenset({
            WINDOW, "attention.sliding_window_pattern", "rope.freq_base_swa",
            "final_logit_softcapping",
        }),
        shifted=True,
    ),
}  # fmt: skip
