"""Tiny random models and their GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "initializer_range": 0.2,
}  # fmt: skip
THETA = {"rope_type": "default", "rope_theta": 5000.0}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
TEXTS = (
    "it's 1234 apples", "  two  spaces\n\nand lines\n        1", "naïve café “x”", "日本 😀",
    "def f(x):\n    return x1\n", "", " ", "   a b  ",
)  # fmt: skip
CHAT = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=THETA))


def untied_llama() -> PreTrainedModel:
    shape = {**SHAPE, "tie_word_embeddings": False}
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    return LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=rope))


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, rope_parameters=THETA, sliding_window=8))


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(**{**SHAPE, "head_dim": 16}, rope_parameters=THETA, use_sliding_window=False)
    )


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, rope_parameters=THETA, use_sliding_window=False))


def gemma3() -> PreTrainedModel:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            rope_parameters=GEMMA_ROPES,
            sliding_window=8,
            query_pre_attn_scalar=32,
            layer_types=[*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2],
        )
    )


ARCHITECTURES: Mapping[str, tuple[str, Callable[[], PreTrainedModel]]] = {
    "llama": ("llama", llama), "untied_llama": ("llama", untied_llama),
    "mistral": ("llama", mistral), "qwen2": ("qwen2", qwen2), "qwen3": ("qwen3", qwen3),
    "gemma3": ("gemma3", gemma3),
}  # fmt: skip


SCALING: Mapping[str, dict[str, Any]] = {
    "untied_llama": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    "gemma3": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
}


@cache
def trained_pieces() -> sentencepiece.SentencePieceProcessor:
    """A BPE model of 400 pieces with bytes, and none of SentencePiece's own rewriting."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*filter(str.strip, TEXTS), "the apples of the cafe"] * 8),
        model_writer=written, vocab_size=400, model_type="bpe", byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", hard_vocab_limit=False,
        remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def drawn(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A model whose norms and biases are numbers that bfloat16 has: nothing is lost plus one."""
    torch.manual_seed(0)
    model = make().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data = (torch.rand_like(parameter) - 0.5).bfloat16().float()
            if "norm" in name and model.config.model_type != "gemma3_text":
                parameter.data += 1
    return model


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp has them: row 2i of a head is i, row 2i + 1 is D/2 + i."""
    size = weight.shape[0] // heads
    order = [
        h * size + half * size // 2 + i
        for h in range(heads) for i in range(size // 2) for half in (0, 1)
    ]  # fmt: skip
    return weight[order]


def write_gguf(
    path: Path, architecture: str, model: PreTrainedModel,
    pieces: sentencepiece.SentencePieceProcessor, **changes: Any,
) -> Path:  # fmt: skip
    """Write a model and a SentencePiece tokenizer; `changes` replace fields, None drops one."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(getattr(config, "head_dim", 16))
    writer.add_value_length(getattr(config, "head_dim", 16))
    writer.add_rope_freq_base(5000.0)
    if model.config.model_type in ("mistral", "gemma3_text"):
        writer.add_sliding_window(8)
    count = pieces.get_piece_size()
    tokens = [pieces.id_to_piece(i) for i in range(count)]
    kinds = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
        for i in range(count)
    ]
    extra: dict[str, int] = changes.pop("extra", {})
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": CHAT, **changes,
    }  # fmt: skip
    for key, value in fields.items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
            str: writer.add_string, type(None): lambda *_: None,
        }[type(value)]  # fmt: skip
        add(key, value)
    writer.add_array("tokenizer.ggml.tokens", [*tokens, *extra])
    writer.add_array(
        "tokenizer.ggml.scores",
        [*(pieces.get_score(i) for i in range(count)), *[-1e3] * len(extra)],
    )
    writer.add_array("tokenizer.ggml.token_type", [*kinds, *extra.values()])
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {
            "q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads,
        }.get(name.split(".")[-2])  # fmt: skip
        if architecture == "llama" and heads:
            weight = interleaved(weight, heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        writer.add_tensor(there, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
