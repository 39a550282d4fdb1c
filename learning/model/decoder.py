"""Decode by models of the Llama family: Llama, SmolLM2, Qwen2, Qwen3 and Mistral.

The weights are frozen. Tokens are one flat list, whose sequences and prefixes are known to the
attention that a caller hands in (`learning.model.attention`), so that rollout, scoring and training
run the same code. Projections of the same input are one matrix. The last layer computes its queries
and what follows them only for tokens whose hidden state is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from learning.model.attention import AttentionOptions
from learning.model.decoder_config import DecoderConfig
from learning.model.key_frequencies import KeyFrequencies, half_split
from learning.model.linear import linear, packed
from learning.model.tensor_parallel import TensorRanks, embedded
from protocols.errors import DataError
from protocols.spec.model import PACKED_BYTES
from protocols.work import count

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PROJECTIONS = ("qkv", "out", "gate_up", "down")  # of a layer


class Attention(Protocol):
    """Attend for the layers of one forward pass."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return [M, H_q, D] for queries [M, H_q, D], keys and values [N, H_kv, D] of the pass's
        tokens."""
        ...


class LanguageModel(nn.Module):
    """Hold a frozen causal language model: its layers `base_model`, and the projection `lm_head`.
    `kv_shape` is (layers L, key/value heads H_kv, head size D), `vocabulary` the logits' width V,
    of which the tokenizer names the first `tokens`, None: all; `longest` the most positions that it
    was made for, None where its config has none; `tensor` the ranks that divide it
    (`learning.model.tensor_parallel`); `unmoved` why its keys cannot be moved to other positions,
    "" where they can (`learning.model.parity`)."""

    tensor: TensorRanks = TensorRanks()
    base_model: Any
    lm_head: Any
    kv_shape: tuple[int, int, int]
    vocabulary: int
    tokens: int | None = None
    longest: int | None
    packed_head: Tensor | None = None
    unmoved: str = ""

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def weight(self) -> Tensor:
        """Return the token embeddings [V, width]."""
        weight: Tensor = self.embeddings.weight
        return weight

    @property
    def layers(self) -> Any:
        """Return the list of layers."""
        return self.base_model.layers

    @property
    def embeddings(self) -> Any:
        """Return the module of the token embeddings."""
        return self.base_model.embed_tokens

    def forward(
        self, ids: Tensor, positions: Tensor, attention: Attention, read: Tensor | None = None
    ) -> Tensor:
        """Return final hidden states [M, width] of the tokens `read` [M], ascending, of ids and
        positions [N]; None: of all."""
        raise NotImplementedError

    def head(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits [n, V] of hidden states [n, width], where `project` multiplies by the
        weight of `lm_head`: a model may scale or cap around it."""
        return project(hidden)

    def own_heads(self, kv: Tensor) -> Tensor:
        """Return a prefix [L, 2, H_kv, P, D] by the heads that this rank computes; one that has
        those alone as it is."""
        heads = self.kv_shape[1]
        if self.tensor.size == 1 or kv.shape[2] != heads:
            return kv
        return kv[:, :, self.tensor.share(heads)]

    def pack(self) -> None:
        """Keep the weights a second time as `learning.model.linear` reads them fastest in few rows:
        for a model that decodes. Where that does not help, or takes more than PACKED_BYTES, nothing
        is kept."""

    def frequencies(self) -> KeyFrequencies:
        """Return how keys turn with their position. Raises DataError for a model whose keys do more
        than turn, or turn otherwise in longer texts."""
        if self.unmoved:
            raise DataError(self.unmoved)
        return self._rotation()

    def _rotation(self) -> KeyFrequencies:
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, Tensor, slice]]:
        """Return the weights by their names in the files: a parameter, and which of its rows."""
        raise NotImplementedError


@contextmanager
def recomputing(model: LanguageModel) -> Iterator[None]:
    """Checkpoint each layer in forward passes run inside: a layer keeps only its input and runs
    again in the backward pass. Activations take the memory of one layer, at the cost of one more
    forward."""
    for layer in model.layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in model.layers:
            del layer.forward  # restores the class's method


class DecoderLayer(nn.Module):
    """Compute one layer. `qkv` [(H_q + 2 H_kv) D, width] and `gate_up` [2 x inner, width] each
    stack the projections of one input."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config, self._index = config, index
        self._options = AttentionOptions(config.head_dim**-0.5, config.windows[index])
        self.tensor = TensorRanks()  # whose parts these are
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        inner = config.heads * config.head_dim

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape), requires_grad=False)

        self.input_norm, self.post_norm = empty(config.hidden), empty(config.hidden)
        self.qkv, self.out = empty(rows, config.hidden), empty(config.hidden, inner)
        self.qkv_bias = empty(rows) if config.qkv_bias else None
        self.out_bias = empty(config.hidden) if config.out_bias else None
        self.q_norm = empty(config.head_dim) if config.head_norms else None
        self.k_norm = empty(config.head_dim) if config.head_norms else None
        self.gate_up = empty(2 * config.intermediate, config.hidden)
        self.down = empty(config.hidden, config.intermediate)
        self.packed: dict[str, Tensor | None] = {}

    def pack(self) -> None:
        """Keep the projections packed for few rows as well."""
        for name in PROJECTIONS:
            self.packed[name] = packed(getattr(self, name))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, read: Tensor | None
    ) -> Tensor:
        """Return the layer's output [M, width] of the tokens `read` of x [N, width]; None: of all.
        `cos` and `sin` [N, 1, D] are of the tokens' positions."""
        config, size = self.config, self.config.head_dim
        heads, kv_heads = config.heads // self.tensor.size, config.kv_heads // self.tensor.size
        normed = F.rms_norm(x, (config.hidden,), self.input_norm, config.eps)
        normed = self.tensor.enter(normed)
        if read is None:
            projected = self._product("qkv", normed, self.qkv_bias).view(x.shape[0], -1, size)
            q, k, v = torch.split(projected, [heads, kv_heads, kv_heads], dim=1)
            if self.q_norm is None:  # queries and keys lie side by side, and turn alike
                turned = rotated(projected[:, : heads + kv_heads], cos, sin)
                q, k = turned[:, :heads], turned[:, heads:]
            else:
                q = rotated(self._normed(q, self.q_norm), cos, sin)
                k = rotated(self._normed(k, self.k_norm), cos, sin)
        else:
            asked = heads * size
            bias = self.qkv_bias
            of_q, of_kv = (None, None) if bias is None else (bias[:asked], bias[asked:])
            q = linear(normed[read], self.qkv[:asked], of_q).view(len(read), heads, size)
            k, v = (
                linear(normed, self.qkv[asked:], of_kv)
                .view(len(x), 2 * kv_heads, size)
                .chunk(2, dim=1)
            )
            q = rotated(self._normed(q, self.q_norm), cos[read], sin[read])
            k = rotated(self._normed(k, self.k_norm), cos, sin)
            x = x[read]
        count(k.shape[0])
        seen = attention.attend(self._index, q, k, v, self._options)
        x = x + self._summed("out", seen.flatten(1), self.out_bias)
        normed = F.rms_norm(x, (config.hidden,), self.post_norm, config.eps)
        gate, up = self._product("gate_up", self.tensor.enter(normed)).chunk(2, dim=-1)
        return x + self._summed("down", F.silu(gate) * up)

    def _product(self, name: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, getattr(self, name), bias, self.packed.get(name))

    def _summed(self, name: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product with a weight that is divided by columns; the bias is added once."""
        if self.tensor.size == 1:
            return self._product(name, x, bias)
        found = self.tensor.total(self._product(name, x))
        return found if bias is None else found + bias

    def _normed(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return heads
        return F.rms_norm(heads, (self.config.head_dim,), weight, self.config.eps)

    def weights(self) -> Iterator[tuple[str, Tensor, slice]]:
        """Return the layer's weights by their names in the files: of a divided base, its parts."""
        config, parts = self.config, self.tensor.size
        asked = config.heads * config.head_dim // parts
        held = config.kv_heads * config.head_dim // parts
        cuts = {
            "q_proj": slice(asked),
            "k_proj": slice(asked, asked + held),
            "v_proj": slice(asked + held, None),
        }
        whole, inner = slice(None), config.intermediate // parts
        for name, rows in cuts.items():
            yield f"self_attn.{name}.weight", self.qkv, rows
            if self.qkv_bias is not None:
                yield f"self_attn.{name}.bias", self.qkv_bias, rows
        for name, parameter, rows in (
            ("self_attn.o_proj.weight", self.out, whole),
            ("self_attn.o_proj.bias", self.out_bias, whole),
            ("self_attn.q_norm.weight", self.q_norm, whole),
            ("self_attn.k_norm.weight", self.k_norm, whole),
            ("mlp.gate_proj.weight", self.gate_up, slice(inner)),
            ("mlp.up_proj.weight", self.gate_up, slice(inner, None)),
            ("mlp.down_proj.weight", self.down, whole),
            ("input_layernorm.weight", self.input_norm, whole),
            ("post_attention_layernorm.weight", self.post_norm, whole),
        ):
            if parameter is not None:
                yield name, parameter, rows


def rope_frequencies(rope: Mapping[str, Any], size: int) -> Tensor:
    """Return the radians per position of each pair of a head of `size`, [size/2] float32."""
    of_pair = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    frequencies: Tensor = 1.0 / (rope["rope_theta"] ** of_pair)
    if rope["rope_type"] == "linear":
        return frequencies / float(rope["factor"])
    if rope["rope_type"] == "llama3":
        # Long waves turn `factor` times slower, short ones as before, those between in between.
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        slower = frequencies / float(rope["factor"])
        turns = float(rope["original_max_position_embeddings"]) / (2 * math.pi / frequencies)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - kept) * slower + kept * frequencies
    return frequencies


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads [N, H, D] by the angles of cos and sin [N, 1, D]; sin's first half is negative."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class DecoderLayers(nn.Module):
    """Compute the final hidden states of tokens."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tensor = TensorRanks()
        # Given its weights: drawing them on the meta device imports sympy and torch's compiler, a
        # second and 76 MB in every process.
        shape = config.vocabulary, config.hidden
        self.embed_tokens = nn.Embedding(*shape, _weight=torch.empty(shape))
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(len(config.windows)))
        self.norm = nn.Parameter(torch.empty(config.hidden), requires_grad=False)

    @cached_property
    def _frequencies(self) -> Tensor:
        return rope_frequencies(self.config.rope, self.config.head_dim)

    def forward(
        self, ids: Tensor, positions: Tensor, attention: Attention, read: Tensor | None
    ) -> Tensor:
        x = embedded(self.embed_tokens, ids, self.config.vocabulary, self.tensor)
        angles = positions[:, None].float() * self._frequencies.to(x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        cos, sin = torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]
        *others, last = self.layers
        for layer in others:
            x = layer(x, cos, sin, attention, None)
        x = last(x, cos, sin, attention, read)
        return F.rms_norm(x, (self.config.hidden,), self.norm, self.config.eps)


class Decoder(LanguageModel):
    """Run a model of the Llama family."""

    def __init__(self, config: DecoderConfig) -> None:
        """Allocate the weights; `load_decoder` reads them."""
        super().__init__()
        self.kv_shape = (len(config.windows), config.kv_heads, config.head_dim)
        self.vocabulary, self.longest = config.vocabulary, config.longest
        self.base_model = DecoderLayers(config)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.base_model.embed_tokens.weight
        self.requires_grad_(False)
        self.eval()

    def forward(
        self, ids: Tensor, positions: Tensor, attention: Attention, read: Tensor | None = None
    ) -> Tensor:
        hidden: Tensor = self.base_model(ids, positions, attention, read)
        return hidden

    def pack(self) -> None:
        layers = self.base_model.layers
        copied = [getattr(layer, name).nbytes for layer in layers for name in PROJECTIONS]
        if sum(copied) + self.lm_head.weight.nbytes > PACKED_BYTES:
            return
        for layer in layers:
            layer.pack()
        self.packed_head = packed(self.lm_head.weight)

    def _rotation(self) -> KeyFrequencies:
        config = self.base_model.config
        return half_split(rope_frequencies(config.rope, config.head_dim), config.head_dim)

    def weights(self) -> Iterator[tuple[str, Tensor, slice]]:
        yield "model.embed_tokens.weight", self.weight, slice(None)
        yield "model.norm.weight", self.base_model.norm, slice(None)
        yield "lm_head.weight", self.lm_head.weight, slice(None)
        for i, layer in enumerate(self.base_model.layers):
            for name, parameter, rows in layer.weights():
                yield f"model.layers.{i}.{name}", parameter, rows


def load_decoder(directory: Path, config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    """Return the decoder with the weights of a directory's safetensors files, on the host. Weights
    that are stored as they are used stay mapped to the file. Raises DataError for one that is
    missing or of another shape."""
    with torch.device("meta"):
        model = Decoder(config)
    index = directory / INDEX
    of_name = json.loads(index.read_bytes())["weight_map"] if index.is_file() else {}
    files: dict[str, Any] = {}
    parts: dict[int, list[Tensor]] = {}
    held: dict[int, Tensor] = {}
    for name, parameter, _ in sorted(model.weights(), key=lambda one: one[2].start or 0):
        held[id(parameter)] = parameter
        if name == "lm_head.weight" and config.tied:
            continue
        file = of_name.get(name, WEIGHTS)
        if file not in files:
            files[file] = safe_open(directory / file, framework="pt")
        if name not in files[file].keys():  # noqa: SIM118  # not a mapping
            raise DataError(
                f"{directory / file} has no weight {name!r}, which its config.json asks for; "
                "set model.path to a whole model"
            )
        parts.setdefault(id(parameter), []).append(files[file].get_tensor(name).to(dtype))
    found = {key: tensors[0] if len(tensors) == 1 else torch.cat(tensors)
             for key, tensors in parts.items()}  # fmt: skip
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            tensor = found[id(parameter)]
            if tensor.shape != parameter.shape:
                raise DataError(
                    f"{directory} holds a weight of shape {tuple(tensor.shape)}, and its "
                    f"config.json asks for {tuple(parameter.shape)}; set model.path to a whole "
                    "model"
                )
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    if config.tied:
        model.lm_head.weight = model.base_model.embed_tokens.weight
    return model
