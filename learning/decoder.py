"""Compute models of the Llama family: Llama, SmolLM2, Qwen2, Qwen3 and Mistral.

The weights are frozen. Tokens are one flat list, whose sequences and prefixes are known to the
attention that a caller hands in (`learning.attention`), so that rollout, scoring and training run
the same code. Projections of the same input are one matrix. The last layer computes its queries and
what follows them only for tokens whose hidden state is read.

On a CPU large weights are multiplied through oneDNN: torch multiplies float32 by MKL, which takes
1.0 to 2 times as long on AMD processors (docs/log.md, 2026-11-28). oneDNN rearranges a weight in
each call; one that is `packed` before is read in less than half the time by few rows, as in
decoding. Small weights in float32 stay with MKL. It is as fast there, and oneDNN would keep a
compiled product for each number of rows: 50 to 120 MB in every process of a tiny model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cartridge_forge.learning.attention import AttentionOptions
from cartridge_forge.learning.decoder_config import DecoderConfig
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.model import PACKED_BYTES
from cartridge_forge.protocols.step import count_work

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


class TensorRanks(Protocol):
    """Compute one rank's part of a base that `size` ranks divide (`plugins.host.ranks`)."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def share(self, count_work: int) -> slice:
        """Return this rank's part of `count` rows."""
        ...

    def enter(self, x: Tensor) -> Tensor:
        """Return x. In the backward pass the gradients of all ranks are added."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x."""
        ...

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Return all ranks' parts of a tensor, joined along `dim`."""
        ...

    def embedded(self, embedding: nn.Module, ids: Tensor, vocabulary: int) -> Tensor:
        """Return the embeddings [N, width] of ids [N] < `vocabulary`."""
        ...

    def projected(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int
    ) -> Tensor:
        """Return logits [n, V] in float32 of hidden states [n, width], whole on every rank."""
        ...


class LanguageModel(nn.Module):
    """Hold a frozen causal language model: its layers `base_model`, and the projection `lm_head`.
    `kv_shape` is (layers L, key/value heads H_kv, head size D), `vocabulary` the logits' width V,
    of which the tokenizer names the first `tokens`, None: all; `longest` the most positions that it
    was made for, None where its config has none; `tensor` the ranks that divide it, None: it is
    whole; `sharded` whether its weights are gathered in each pass (`plugins.host.ranks`);
    `unmoved` why its keys cannot be moved to other positions, "" where they can
    (`plugins.library.models.parity`)."""

    tensor: TensorRanks | None = None
    sharded: bool = False
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

    def projection(self) -> Callable[[Tensor], Tensor]:
        """Return the projection of hidden states [n, width] to logits [n, V] in float32. The head
        of a sharded base is gathered now (all ranks must call this), and freed with the result."""
        weight, bias = self.lm_head.weight, self.lm_head.bias
        if self.sharded:
            weight = gathered(weight)

        def project(hidden: Tensor) -> Tensor:
            if self.tensor is not None:
                return self.tensor.projected(hidden, weight, bias, self.vocabulary)
            return linear(hidden, weight, bias).float()

        return lambda hidden: self.head(hidden, project)

    def own_heads(self, kv: Tensor) -> Tensor:
        """Return a prefix [L, 2, H_kv, P, D] by the heads that this rank computes; one that has
        those alone as it is."""
        heads = self.kv_shape[1]
        if self.tensor is None or kv.shape[2] != heads:
            return kv
        return kv[:, :, self.tensor.share(heads)]

    def pack(self) -> None:
        """Keep the weights a second time as `linear` reads them fastest in few rows:
        for a model that decodes. Where that does not help, or takes more than PACKED_BYTES, nothing
        is kept."""

    def out_weight(self, layer: int) -> Tensor | None:
        """Return the weight [width, H_q D] by which a layer adds its attention to the tokens'
        states, by the heads that this rank computes; None where it adds something else. Call it
        within the layer's pass: a sharded base has the weight there alone."""
        return None

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


def gathered(weight: Tensor) -> Tensor:
    """Return a sharded weight gathered (all ranks must call this); any other as it is."""
    from torch.distributed.tensor import DTensor

    return weight.full_tensor() if isinstance(weight, DTensor) else weight


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
        self.tensor: TensorRanks | None = None  # whose parts these are
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
        self.packed = {name: packed(getattr(self, name)) for name in PROJECTIONS}

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, read: Tensor | None
    ) -> Tensor:
        """Return the layer's output [M, width] of the tokens `read` of x [N, width]; None: of all.
        `cos` and `sin` [N, 1, D] are of the tokens' positions."""
        config, size, ranks = self.config, self.config.head_dim, self.tensor
        parts = 1 if ranks is None else ranks.size
        heads, kv_heads = config.heads // parts, config.kv_heads // parts
        normed = F.rms_norm(x, (config.hidden,), self.input_norm, config.eps)
        if ranks is not None:
            normed = ranks.enter(normed)
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
            query_rows = heads * size
            bias = self.qkv_bias
            of_q, of_kv = (None, None) if bias is None else (bias[:query_rows], bias[query_rows:])
            q = linear(normed[read], self.qkv[:query_rows], of_q).view(len(read), heads, size)
            k, v = (
                linear(normed, self.qkv[query_rows:], of_kv)
                .view(len(x), 2 * kv_heads, size)
                .chunk(2, dim=1)
            )
            q = rotated(self._normed(q, self.q_norm), cos[read], sin[read])
            k = rotated(self._normed(k, self.k_norm), cos, sin)
            x = x[read]
        count_work(k.shape[0])
        attended = attention.attend(self._index, q, k, v, self._options)
        x = x + self._summed("out", attended.flatten(1), self.out_bias)
        normed = F.rms_norm(x, (config.hidden,), self.post_norm, config.eps)
        if ranks is not None:
            normed = ranks.enter(normed)
        gate, up = self._product("gate_up", normed).chunk(2, dim=-1)
        return x + self._summed("down", F.silu(gate) * up)

    def _product(self, name: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, getattr(self, name), bias, self.packed.get(name))

    def _summed(self, name: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product with a weight that is divided by columns; the bias is added once."""
        if self.tensor is None:
            return self._product(name, x, bias)
        total = self.tensor.total(self._product(name, x))
        return total if bias is None else total + bias

    def _normed(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return heads
        return F.rms_norm(heads, (self.config.head_dim,), weight, self.config.eps)

    def weights(self) -> Iterator[tuple[str, Tensor, slice]]:
        """Return the layer's weights by their names in the files: of a divided base, its parts."""
        config, parts = self.config, 1 if self.tensor is None else self.tensor.size
        query_rows = config.heads * config.head_dim // parts
        key_rows = config.kv_heads * config.head_dim // parts
        cuts = {
            "q_proj": slice(query_rows),
            "k_proj": slice(query_rows, query_rows + key_rows),
            "v_proj": slice(query_rows + key_rows, None),
        }
        every, inner = slice(None), config.intermediate // parts
        for name, rows in cuts.items():
            yield f"self_attn.{name}.weight", self.qkv, rows
            if self.qkv_bias is not None:
                yield f"self_attn.{name}.bias", self.qkv_bias, rows
        for name, parameter, rows in (
            ("self_attn.o_proj.weight", self.out, every),
            ("self_attn.o_proj.bias", self.out_bias, every),
            ("self_attn.q_norm.weight", self.q_norm, every),
            ("self_attn.k_norm.weight", self.k_norm, every),
            ("mlp.gate_proj.weight", self.gate_up, slice(inner)),
            ("mlp.up_proj.weight", self.gate_up, slice(inner, None)),
            ("mlp.down_proj.weight", self.down, every),
            ("input_layernorm.weight", self.input_norm, every),
            ("post_attention_layernorm.weight", self.post_norm, every),
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
        unscaled = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - unscaled) * slower + unscaled * frequencies
    return frequencies


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads [N, H, D] by the angles of cos and sin [N, 1, D]; sin's first half is negative."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class DecoderLayers(nn.Module):
    """Compute the final hidden states of tokens."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tensor: TensorRanks | None = None
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
        if self.tensor is None:
            x = self.embed_tokens(ids)
        else:
            x = self.tensor.embedded(self.embed_tokens, ids, self.config.vocabulary)
        angles = positions[:, None].float() * self._frequencies.to(x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        cos, sin = torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]
        *inner, last = self.layers
        for layer in inner:
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

    def out_weight(self, layer: int) -> Tensor | None:
        weight: Tensor = self.base_model.layers[layer].out
        return weight

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
    parameters: dict[int, Tensor] = {}
    for name, parameter, _ in sorted(model.weights(), key=lambda one: one[2].start or 0):
        parameters[id(parameter)] = parameter
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
    weights = {key: tensors[0] if len(tensors) == 1 else torch.cat(tensors)
             for key, tensors in parts.items()}  # fmt: skip
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            tensor = weights[id(parameter)]
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


@dataclass(frozen=True)
class KeyFrequencies:
    """Hold the radians per position `values` [L or 1, D], float64, by which each number of a key
    turns with its partner, number `partners` [L or 1, D]; the first of a pair has a negative
    one. A number that does not turn has 0."""

    values: Tensor
    partners: Tensor

    def of_layer(self, layer: int) -> KeyFrequencies:
        """Return those of one layer."""
        at = min(layer, len(self.values) - 1)
        return KeyFrequencies(self.values[at : at + 1], self.partners[at : at + 1])

    def turned(self, keys: Tensor, by: int) -> Tensor:
        """Return keys [L, H_kv, P, D] moved by `by` positions."""
        angle = (self.values.to(keys.device) * by)[:, None, None]
        partners = self.partners.to(keys.device)[:, None, None].expand(keys.shape)
        return keys * angle.cos() + keys.gather(-1, partners) * angle.sin()


def half_split(frequencies: Tensor, size: int) -> KeyFrequencies:
    """Return n `frequencies` of keys of `size`, whose pairs are the numbers (i, i + n), as in
    Llama's family."""
    return pair_frequencies(frequencies, size, 0, interleaved=False)


def pair_frequencies(
    frequencies: Tensor, size: int, begin: int, interleaved: bool
) -> KeyFrequencies:
    """Return n `frequencies` of keys of `size`, whose pairs lie among 2n numbers from `begin` on:
    neighbours where they are `interleaved`, else (i, i + n)."""
    n = len(frequencies)
    pairs = torch.arange(begin, begin + 2 * n)
    first, second = (pairs[::2], pairs[1::2]) if interleaved else (pairs[:n], pairs[n:])
    values, partners = torch.zeros(1, size, dtype=torch.float64), torch.arange(size)[None].clone()
    values[0, first], values[0, second] = -frequencies.double(), frequencies.double()
    partners[0, first], partners[0, second] = second, first
    return KeyFrequencies(values, partners)


# oneDNN compiles a product for each number of rows, 0.65 MB in 1 ms, and keeps 1,024 of them: a
# trainer whose batches differ in length grew by 60 MB a step (docs/log.md, 2026-11-27).
PADDED_TO = 32
PACKED_FOR = 16  # rows
# Of gradients in float32, kept with a run: with AVX2 MKL is faster (benchmarks/kernels.json).
BACKWARD = {"float32": "mkl" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "onednn"}
# Its products have no autograd of their own.
_ONEDNN: Any = torch.ops.mkldnn if torch._C._has_mkldnn else None
SMALLEST = {torch.float32: 1 << 19}  # numbers of a weight for oneDNN
if _ONEDNN is not None and _ONEDNN._is_mkldnn_bf16_supported():
    SMALLEST[torch.bfloat16] = 0  # it refuses bfloat16 where the processor has no AVX-512


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """Return x [n, in] @ weight.T + bias, [n, out], as `torch.nn.functional.linear` does. Without
    a gradient it reads the weight as `packed`, where that is given. The weight has no gradient."""
    if not _is_multiplied(weight) or not x.shape[0]:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        product: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch's
        return product
    return _product(x, weight if packed is None else packed, bias)


def packed(weight: Tensor) -> Tensor | None:
    """Return a copy of a weight [out, in] that `linear` reads faster in few rows, None where that
    does not multiply by oneDNN."""
    if not _is_multiplied(weight):
        return None
    copy: Tensor = _ONEDNN._reorder_linear_weight(weight, PACKED_FOR)
    return copy


def _is_multiplied(weight: Tensor) -> bool:
    """Return whether oneDNN multiplies by the weight [out, in]."""
    smallest = SMALLEST.get(weight.dtype)  # asked first: it is soon answered
    if smallest is None or weight.numel() < smallest:
        return False
    return _ONEDNN is not None and weight.device.type == "cpu"


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if (rows := x.shape[0]) > PADDED_TO and rows % PADDED_TO:
        x = F.pad(x, (0, 0, 0, -rows % PADDED_TO))
    product: Tensor = _ONEDNN._linear_pointwise(x, weight, bias, "none", [], "")
    return product[:rows]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        if grad.dtype == torch.float32 and BACKWARD["float32"] == "mkl":
            return grad @ weight, None, None
        return _product(grad.contiguous(), weight.t(), None), None, None
