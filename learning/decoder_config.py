"""Read what our decoder needs of a model's config.json, and say which models it knows. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class DecoderConfig:
    """Hold the facts of a config.json that the decoder needs. `windows` has each layer's sliding
    window, None for none; `rope` its rotary embedding's parameters; `longest` is the most positions
    that it was made for, None where it says none."""

    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    head_norms: bool
    windows: tuple[int | None, ...]
    rope: Mapping[str, Any]
    longest: int | None


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig | None:
    """Return the facts of a config.json; None for a model that the decoder does not know."""
    family = config.get("model_type")
    rope = rope_of(config)
    is_known = (
        family in FAMILIES
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("mlp_bias")
        and "quantization_config" not in config
        and rope["rope_type"] in ROPES
        and rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) == 1.0
        and (family != "qwen3" or config.get("head_dim"))
        and (family == "llama" or config.get("num_key_value_heads"))
        and (family != "mistral" or "sliding_window" in config)
    )
    if not is_known:
        return None
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    bias = bool(config.get("attention_bias"))
    return DecoderConfig(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings")),
        qkv_bias=family == "qwen2" or (bias and family != "mistral"),
        out_bias=bias and family in ("llama", "qwen3"),
        head_norms=family == "qwen3",
        windows=tuple(_window(config, layer) for layer in range(layers)),
        rope=rope,
        longest=config.get("max_position_embeddings"),
    )


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rotary embedding's parameters, in the newer form and the older alike."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] == "llama3":
        rope.setdefault(
            "original_max_position_embeddings", config.get("original_max_position_embeddings")
        )
    return rope


def _window(config: Mapping[str, Any], layer: int) -> int | None:
    """Return how many positions a layer sees back."""
    window: int | None = config.get("sliding_window")
    if config["model_type"] == "llama" or not window:
        return None
    if config["model_type"] == "mistral":
        return window
    if not config.get("use_sliding_window"):
        return None
    kinds = config.get("layer_types")
    slides = kinds[layer] == "sliding_attention" if kinds else layer >= config["max_window_layers"]
    return window if slides else None
