"""Read a base model out of a GGUF file: its config, and its weights as Hugging Face names them.

llama.cpp rotates neighbouring numbers of a head and Llama the two halves of it, so the rows of q
and k lie interleaved in a GGUF file; they are put back. Quantised weights become float32.

Source: the GGUF specification of ggml, version 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from protocols.errors import DataError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FACTORS = "rope_freqs.weight"  # Llama 3's scaling: what each frequency is divided by
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufFile:
    """Hold an open GGUF file of the Llama architecture.

    Raises DataError for a damaged file, another architecture, and what is missing in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        architecture = self.required("general.architecture")
        if architecture != "llama":
            raise DataError(
                f"{path} holds a model of architecture {architecture!r}, and GGUF files are read "
                "of llama alone; give the model's own directory or hub id"
            )
        self.heads = int(self.required("llama.attention.head_count"))
        self.kv_heads = int(self.field("llama.attention.head_count_kv", self.heads))
        self.layers = int(self.required("llama.block_count"))
        self._tensors = {t.name: t for t in self._reader.tensors}

    def field(self, key: str, default: Any = None) -> Any:
        """Return a metadata field's value, or `default` where it is not there."""
        found = self._reader.fields.get(key)
        return default if found is None else found.contents()

    def required(self, key: str) -> Any:
        """Return a metadata field's value. Raises DataError where it is not there."""
        value = self.field(key)
        if value is None:
            raise DataError(f"{self.path} lacks the field {key}: it is no whole model")
        return value

    def config(self, vocabulary: int, special: Mapping[str, int]) -> dict[str, Any]:
        """Return the config.json of a model with a vocabulary of so many tokens; `special` has
        `bos_token_id` and the like."""
        hidden = int(self.required("llama.embedding_length"))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": int(self.required("llama.feed_forward_length")),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": int(self.field("llama.attention.key_length", hidden // self.heads)),
            "hidden_act": "silu",
            "max_position_embeddings": int(self.required("llama.context_length")),
            "rms_norm_eps": float(self.required("llama.attention.layer_norm_rms_epsilon")),
            "rope_parameters": self._rope(hidden // self.heads),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": False,
            "mlp_bias": False,
            **special,
        }

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every weight in float32, by its name in a Hugging Face file."""
        named = {**OUTER}
        for layer in range(self.layers):
            for there, here in INNER.items():
                named[f"blk.{layer}.{there}.weight"] = f"model.layers.{layer}.{here}.weight"
        missing = sorted(set(named) - set(self._tensors) - {"output.weight"})
        extra = sorted(set(self._tensors) - set(named) - {FACTORS})
        for names, what in ((missing, "lacks"), (extra, "has, unknown in a Llama model,")):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise DataError(f"{self.path} {what} the weight {names[0]}{more}")
        for name, tensor in self._tensors.items():
            if name != FACTORS:
                yield named[name], self._rows_back(name, self._numbers(tensor))

    def _numbers(self, tensor: ReaderTensor) -> np.ndarray:
        from gguf.quants import dequantize

        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            raise DataError(
                f"{self.path} stores {tensor.name} as {tensor.tensor_type.name}, which cannot be "
                "read; take another quantisation of the model"
            ) from error

    def _rows_back(self, name: str, weight: np.ndarray) -> np.ndarray:
        """Return q's and k's rows [H * D, E] in Llama's order: the halves of each head apart."""
        heads = {"attn_q": self.heads, "attn_k": self.kv_heads}.get(name.split(".")[-2])
        if heads is None:
            return weight
        rows, width = weight.shape
        apart = weight.reshape(heads, rows // heads // 2, 2, width)
        return np.ascontiguousarray(apart.swapaxes(1, 2).reshape(rows, width))

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = float(self.field("llama.rope.freq_base", 10_000.0))
        kind = self.field("llama.rope.scaling.type", "none")
        if FACTORS in self._tensors:
            factors = self._numbers(self._tensors[FACTORS])
            rope = {"rope_theta": theta, "rope_type": "llama3", **LLAMA3}
            rope["factor"] = round(float(factors.max()), 6)
            if not np.allclose(factors, _llama3_factors(rope, head_dim), rtol=1e-4):
                raise DataError(
                    f"{self.path} scales its rotation in another way than Llama 3 does "
                    f"({FACTORS}); give the model's own directory or hub id"
                )
            return rope
        if kind == "linear":
            factor = float(self.required("llama.rope.scaling.factor"))
            return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
        if kind != "none":
            raise DataError(
                f"{self.path} scales its rotation by {kind!r}, and none, linear and Llama 3's are "
                "known; give the model's own directory or hub id"
            )
        return {"rope_theta": theta, "rope_type": "default"}


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Return what Llama 3 divides each of the D / 2 frequencies by."""
    long, whole = rope["low_freq_factor"], rope["original_max_position_embeddings"]
    short, factor = rope["high_freq_factor"], rope["factor"]
    found = []
    for i in range(0, head_dim, 2):
        turns = whole / (2 * math.pi * rope["rope_theta"] ** (i / head_dim))
        kept = min(1.0, max(0.0, (turns - long) / (short - long)))
        found.append(1 / ((1 - kept) / factor + kept))
    return np.array(found, np.float32)


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise DataError(
            "a GGUF file is read with the package gguf, which is not installed; install the extra "
            "`models`: pip install 'cartridge-forge[models]'"
        ) from error
    if not path.is_file():
        raise DataError(f"there is no file {path}; name a GGUF file")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, OverflowError, struct.error) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} is no whole GGUF file ({first}); fetch it again") from error
