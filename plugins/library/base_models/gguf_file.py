"""Read a base model out of a GGUF file: its config, and its weights as Hugging Face names them.

llama.cpp rotates neighbouring numbers of a head and Llama the two halves of it, so the rows of q
and k lie interleaved in a GGUF file; they are put back. Quantised weights become float32.

Source: the GGUF specification of ggml, version 3.

A weight's name in a GGUF file is `blk.LAYER.NAME` within a layer. `LAYERS` and a family's `layers`
map NAME to the name that transformers has below `model.layers.LAYER`.

Source of the families: llama.cpp's convert_hf_to_gguf.py, release b6700.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.packages import extra_command

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

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


GEMMA_PATTERN = 6  # every sixth layer of Gemma 3 sees the whole text
GEMMA_LOCAL_THETA = 10_000.0
GEMMA_27B_LAYERS = 62  # the size of Gemma 3 that scales attention by the root of hidden / heads
FACTORS = "rope_freqs.weight"  # Llama 3's scaling: what each frequency is divided by
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufFile:
    """Hold an open GGUF file of an architecture of `GGUF_FAMILIES`.

    Raises DataError for a damaged file, another architecture, and what is missing in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self.architecture = str(self.required("general.architecture"))
        if self.architecture not in GGUF_FAMILIES:
            raise DataError(
                f"{path} holds a model of architecture {self.architecture!r}, and GGUF files are "
                f"read of {', '.join(GGUF_FAMILIES)}; give the model's own directory or hub id"
            )
        self.family = GGUF_FAMILIES[self.architecture]
        self.layers = int(self.fact("block_count"))
        self.heads = int(self.fact("attention.head_count"))
        self.kv_heads = int(self.fact("attention.head_count_kv", self.heads))
        hidden = int(self.fact("embedding_length"))
        self.head_dim = int(self.fact("attention.key_length", hidden // self.heads))
        self._tensors = {t.name: t for t in self._reader.tensors}
        self._require_known_fields()

    def field(self, key: str, default: Any = None) -> Any:
        """Return a metadata field's value, or `default` where it is not there."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def required(self, key: str) -> Any:
        """Return a metadata field's value. Raises DataError where it is not there."""
        value = self.field(key)
        if value is None:
            raise DataError(f"{self.path} lacks the field {key}: it is no whole model")
        return value

    def fact(self, name: str, default: Any = None) -> Any:
        """Return a field of the file's architecture, such as `block_count`, or `default`. Raises
        DataError where it is not there and has no default."""
        key = f"{self.architecture}.{name}"
        return self.required(key) if default is None else self.field(key, default)

    def config(self, special: Mapping[str, int]) -> dict[str, Any]:
        """Return the model's config.json; `special` has `bos_token_id` and the like."""
        config = {
            "architectures": [self.family.causal],
            "model_type": self.family.model_type,
            "vocab_size": int(self._tensor("token_embd.weight").shape[1]),
            "hidden_size": int(self.fact("embedding_length")),
            "intermediate_size": int(self.fact("feed_forward_length")),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": int(self.fact("context_length")),
            "rms_norm_eps": float(self.fact("attention.layer_norm_rms_epsilon")),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            **self.family.constants,
            **special,
        }
        if self.family.shifted:
            return {**config, **self._gemma3()}
        if (window := self.field(f"{self.architecture}.{WINDOW}")) is not None:
            return {
                **config, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
                "sliding_window": int(window),
            }  # fmt: skip
        return config

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every weight in float32, by its name in a Hugging Face file."""
        named = {**OUTER}
        for layer in range(self.layers):
            for source, target in {**LAYERS, **self.family.layers}.items():
                named[f"blk.{layer}.{source}"] = f"model.layers.{layer}.{target}"
        missing = sorted(set(named) - set(self._tensors) - {"output.weight"})
        extra = sorted(set(self._tensors) - set(named) - {FACTORS})
        kind = f"has, unknown in a model of {self.architecture},"
        for names, what in ((missing, "lacks"), (extra, kind)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise DataError(f"{self.path} {what} the weight {names[0]}{more}")
        for name, tensor in self._tensors.items():
            if name != FACTORS:
                yield named[name], self._as_transformers(name, self._numbers(tensor))

    def _gemma3(self) -> dict[str, Any]:
        """Return what config.json says of Gemma 3 alone: windows, two rotations, and scales."""
        period = self.fact("attention.sliding_window_pattern", GEMMA_PATTERN)
        slides = (
            [bool(one) for one in period] if isinstance(period, list)
            else [(layer + 1) % int(period) != 0 for layer in range(self.layers)]
        )  # fmt: skip
        local = float(self.fact("rope.freq_base_swa", GEMMA_LOCAL_THETA))
        hidden = int(self.fact("embedding_length"))
        return {
            "sliding_window": int(self.fact(WINDOW)),
            "layer_types": [
                "sliding_attention" if sliding else "full_attention" for sliding in slides
            ],
            "rope_parameters": {
                "full_attention": self._rope(),
                "sliding_attention": {"rope_theta": local, "rope_type": "default"},
            },
            "query_pre_attn_scalar": (
                hidden // self.heads if self.layers == GEMMA_27B_LAYERS else self.head_dim
            ),
            "final_logit_softcapping": self.field(f"{self.architecture}.final_logit_softcapping"),
        }

    def _require_known_fields(self) -> None:
        """Raise DataError for a field of the architecture that might change what it computes."""
        prefix = f"{self.architecture}."
        names = {key.removeprefix(prefix) for key in self._reader.fields if key.startswith(prefix)}
        only = {
            "rope.dimension_count": self.head_dim,
            "attention.value_length": self.head_dim,
            "expert_count": 0,
        }
        unknown = names - FIELDS - self.family.fields
        unknown |= {
            name for name, expected in only.items() if self.fact(name, expected) != expected
        }
        if unknown:
            key = prefix + min(unknown)
            raise DataError(
                f"{self.path} has {key} = {self.field(key)!r}, which is not computed for "
                f"{self.architecture} models; give the model's own directory or hub id"
            )

    def _tensor(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise DataError(f"{self.path} lacks the weight {name}")
        return self._tensors[name]

    def _numbers(self, tensor: ReaderTensor) -> np.ndarray:
        from gguf.quants import dequantize

        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            raise DataError(
                f"{self.path} stores {tensor.name} as {tensor.tensor_type.name}, which cannot be "
                "read; take another quantisation of the model"
            ) from error

    def _as_transformers(self, name: str, weight: np.ndarray) -> np.ndarray:
        """Return a weight as transformers stores it: q's and k's rows [H * D, E] with the halves of
        each head apart, and norms without the one that is added to them."""
        if self.family.shifted and name.endswith("norm.weight"):
            return weight - np.float32(1)
        heads = {"attn_q": self.heads, "attn_k": self.kv_heads}.get(name.split(".")[-2])
        if heads is None or not self.family.interleaved:
            return weight
        rows, width = weight.shape
        apart = weight.reshape(heads, rows // heads // 2, 2, width)
        return np.ascontiguousarray(apart.swapaxes(1, 2).reshape(rows, width))

    def _rope(self) -> dict[str, Any]:
        theta = float(self.fact("rope.freq_base", 10_000.0))
        kind = self.fact("rope.scaling.type", "linear")
        if FACTORS in self._tensors:
            factors = self._numbers(self._tensors[FACTORS])
            rope = {"rope_theta": theta, "rope_type": "llama3", **LLAMA3}
            rope["factor"] = round(float(factors.max()), 6)
            if not np.allclose(factors, _llama3_factors(rope, self.head_dim), rtol=1e-4):
                raise DataError(
                    f"{self.path} scales its rotation in another way than Llama 3 does "
                    f"({FACTORS}); give the model's own directory or hub id"
                )
            return rope
        factor = float(self.fact("rope.scaling.factor", self.fact("rope.scale_linear", 1.0)))
        if kind == "linear" and factor not in (0.0, 1.0):
            return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
        if kind not in ("none", "linear"):
            raise DataError(
                f"{self.path} scales its rotation by {kind!r}, and none, linear and Llama 3's are "
                "known; give the model's own directory or hub id"
            )
        return {"rope_theta": theta, "rope_type": "default"}


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Return what Llama 3 divides each of the D / 2 frequencies by."""
    long, positions = rope["low_freq_factor"], rope["original_max_position_embeddings"]
    short, factor = rope["high_freq_factor"], rope["factor"]
    factors = []
    for i in range(0, head_dim, 2):
        turns = positions / (2 * math.pi * rope["rope_theta"] ** (i / head_dim))
        smooth = min(1.0, max(0.0, (turns - long) / (short - long)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise DataError(
            "a GGUF file is read with the package gguf, which is not installed: run "
            f"`{extra_command('models')}`"
        ) from error
    if not path.is_file():
        raise DataError(f"there is no file {path}; name a GGUF file")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, OverflowError, struct.error) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} is no whole GGUF file ({first}); fetch it again") from error
