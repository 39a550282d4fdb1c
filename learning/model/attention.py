"""Compute attention over a shared key/value prefix, for students, teachers and sampling alike.

It is registered with transformers as the attention implementation "cartridge", so that any model
family whose layers call the attention interface (Llama, Qwen3, ...) runs unmodified. A batch of C*R
rows is read as C prefixes with R rows each. Each prefix's keys and values exist once and are not
repeated per row. Query heads that share a key/value head are folded into the query axis, so
key/value heads are not repeated either.

A query attends to every valid token of its prefix and, through `attention_mask`, to its own row.

    scores up to SCORE_BYTES    formed at once, in float32, and kept for the backward pass; without
                                a backward pass, on a CPU, up to CACHED_SCORE_BYTES
    more, on CUDA               FlexAttention (`learning.model.flex_attention`), which never forms
                                the scores
    more, otherwise             formed for a chunk of queries at a time, and again in the backward
                                pass: at most a few times SCORE_BYTES, whatever the lengths

A layer's scores take rows x heads x T x (P + S) x 4 bytes. `hidden_states` runs the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learning.model.flex_attention import Blocks, flex_attention_over

if TYPE_CHECKING:  # importing it takes seconds, which only code that loads a model should pay
    from transformers import PreTrainedModel

IMPLEMENTATION = "cartridge"
SCORE_BYTES = 256 * 2**20
# Without a backward pass chunks cost nothing extra, and scores that fit a CPU's caches cost half.
CACHED_SCORE_BYTES = 8 * 2**20


@dataclass
class DecodeCache:
    """Hold keys and values of the rows being decoded, [L, B, H_kv, S, D], filled up to `used`
    columns. Rows are left-padded, so that every row writes the same columns."""

    keys: Tensor
    values: Tensor
    used: int = 0

    @classmethod
    def empty(cls, like: Tensor, layers: int, rows: int, heads: int, size: int) -> DecodeCache:
        shape = (layers, rows, heads, size, like.shape[-1])
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new columns; the caller advances `used` after the last layer."""
        stop = self.used + keys.shape[2]
        self.keys[layer, :, :, self.used : stop] = keys
        self.values[layer, :, :, self.used : stop] = values
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]

    def keep(self, rows: Tensor, trim: int = 0) -> None:
        """Keep only these rows, without their first `trim` columns."""
        self.keys, self.values = self.keys[:, rows, :, trim:], self.values[:, rows, :, trim:]
        self.used -= trim

    def join(self, other: DecodeCache, size: int) -> None:
        """Append another cache's rows, both right-aligned at the larger `used`, with room for
        `size` columns in all."""
        mine, used = self.keys.shape[1], max(self.used, other.used)
        layers, rows, heads, _, width = self.keys.shape
        shape = (layers, rows + other.keys.shape[1], heads, size, width)
        for name in ("keys", "values"):
            whole = getattr(self, name).new_zeros(shape)
            whole[:, :mine, :, used - self.used : used] = getattr(self, name)[..., : self.used, :]
            whole[:, mine:, :, used - other.used : used] = getattr(other, name)[
                ..., : other.used, :
            ]
            setattr(self, name, whole)
        self.used = used


@dataclass
class PrefixContext:
    """Hold the inputs of one forward pass besides its tokens.

    kv       [C, L, 2, H_kv, P, D] post-RoPE keys and values, or None for no prefix
    lengths  [C] valid tokens of each prefix when they differ (the rest is padding), else None
    cache    where to keep this pass's keys and values while decoding
    captured filled with [B, 2, H_kv, T, D] per layer when `capture` is set
    queries  filled with [B, H_q, T, D] per layer, times its scale, when `capture` is set
    blocks   FlexAttention's block masks, shared by all layers
    """

    kv: Tensor | None = None
    lengths: Tensor | None = None
    cache: DecodeCache | None = None
    capture: bool = False
    captured: list[Tensor] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)
    blocks: Blocks = field(default_factory=dict)


def cartridge_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    prefix: PrefixContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return softmax([q k_prefix ; q k_row]) [v_prefix ; v_row], prefix shared by the rows of its
    group. query [B, H_q, T, D]; key, value [B, H_kv, T, D]; attention_mask bool [B or 1, 1, T, S]
    (True = may attend), None = every token of the row. The result is [B, T, H_q, D]."""
    context = prefix or PrefixContext()
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int, typed as Tensor | Module
    if context.capture:
        context.captured.append(torch.stack([key, value], dim=1))
        context.queries.append(query * scaling)
    if context.cache is not None:
        key, value = context.cache.write(layer, key, value)
    kv, lengths = None if context.kv is None else context.kv[:, layer], context.lengths

    rows, heads, length = query.shape[:3]
    cached = query.device.type == "cpu" and not torch.is_grad_enabled()
    most = min(SCORE_BYTES, CACHED_SCORE_BYTES) if cached else SCORE_BYTES
    chunk = query_chunk(rows * heads, key.shape[2] + (0 if kv is None else kv.shape[3]), most)
    if length <= chunk:
        return _explicit(query, key, value, attention_mask, scaling, kv, lengths), None
    if query.device.type == "cuda":
        return flex_attention_over(
            query, key, value, attention_mask, scaling, kv, lengths, context.blocks
        ), None
    parts = []
    for start in range(0, length, chunk):
        of = slice(start, start + chunk)
        mask = None if attention_mask is None else attention_mask[:, :, of]
        part: Tensor = checkpoint(
            _explicit, query[:, :, of], key, value, mask, scaling, kv, lengths,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        parts.append(part)
    return torch.cat(parts, dim=1), None


def query_chunk(rows_heads: int, seen: int, most: int) -> int:
    """Return how many queries of a row have float32 scores over `seen` keys within `most` bytes; at
    least 1."""
    return max(1, most // (4 * rows_heads * seen))


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    kv: Tensor | None,
    lengths: Tensor | None,
) -> Tensor:
    """Form all scores of these queries; kv [C, 2, H_kv, P, D] of one layer."""
    rows, query_heads, length, size = query.shape
    heads = key.shape[1]
    grouped = query_heads // heads
    q = (query * scaling).reshape(rows, heads, grouped * length, size)

    own = (q @ key.transpose(-1, -2)).float()
    if attention_mask is not None:
        seen = attention_mask[:, :, None].expand(-1, 1, grouped, -1, -1)
        own = own.masked_fill(~seen.flatten(2, 3), float("-inf"))
    if kv is None:
        weights = own.softmax(-1).to(value.dtype)
        out = weights @ value
    else:
        count, prefix_tokens = kv.shape[0], kv.shape[3]
        per = rows // count
        # [C*R, H, G*T, D] -> [C, H, R*G*T, D]: one product for each prefix, whatever R is.
        folded = q.view(count, per, heads, -1, size).transpose(1, 2)
        folded = folded.reshape(count, heads, -1, size)
        shared = (folded @ kv[:, 0].transpose(-1, -2)).float()
        if lengths is not None:
            padding = torch.arange(prefix_tokens, device=q.device) >= lengths[:, None]
            shared = shared.masked_fill(padding[:, None, None], float("-inf"))
        shared = shared.view(count, heads, per, -1, prefix_tokens).transpose(1, 2)
        scores = torch.cat([shared.reshape(rows, heads, -1, prefix_tokens), own], dim=-1)
        weights = scores.softmax(-1).to(value.dtype)
        on_prefix, on_own = weights[..., :prefix_tokens], weights[..., prefix_tokens:]
        folded = on_prefix.reshape(count, per, heads, -1, prefix_tokens).transpose(1, 2)
        read = folded.reshape(count, heads, -1, prefix_tokens) @ kv[:, 1]
        read = read.view(count, heads, per, -1, size).transpose(1, 2).reshape(q.shape)
        out = read + on_own @ value
    return out.reshape(rows, query_heads, length, size).transpose(1, 2)


def register() -> str:
    """Register the implementation with transformers, at any number of calls; return its name, for
    `attn_implementation`."""
    from transformers import AttentionInterface  # takes seconds: only when a model is loaded

    AttentionInterface.register(IMPLEMENTATION, cartridge_attention)
    return IMPLEMENTATION


def kv_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return (layers L, key/value heads H_kv, head size D)."""
    config = model.config
    head_dim = getattr(config, "head_dim", None)
    return (
        config.num_hidden_layers,
        config.num_key_value_heads,
        head_dim or config.hidden_size // config.num_attention_heads,
    )


def hidden_states(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, mask: Tensor, context: PrefixContext
) -> Tensor:
    """Return final hidden states [B, T, width] for ids, positions [B, T] and a bool mask
    [B, 1, T, S]."""
    out = model.base_model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        use_cache=False,
        prefix=context,
    )
    hidden: Tensor = out.last_hidden_state
    return hidden


@contextmanager
def recomputing(model: PreTrainedModel) -> Iterator[None]:
    """Checkpoint each layer in forward passes run inside: a layer keeps only its input and runs
    again in the backward pass. Activations take the memory of one layer, at the cost of one more
    forward."""
    layers: Any = model.base_model.layers
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the class's method
