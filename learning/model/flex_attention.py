"""Compute attention over a shared prefix by FlexAttention, for GPUs and large scores.

    over the prefix    the rows of a group one after the other, against its keys, held once
    over the row       each row against its own keys, under the mask of the forward pass
    joined             by the log of each part's sum of exponentials

The kernel is compiled for each shape, which takes seconds. Sizes are therefore padded up to
buckets, which keeps shapes few and adds little computation. No GPU has run this; tests compare it
with the explicit form, using the same functions uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

TOKENS = 128  # queries and keys of one block of the kernel
SHAPES = 256  # most shapes that are compiled in a process

# By "prefix" and "row"; the first layer of a forward pass writes them, the others read them.
Blocks = dict[str, "BlockMask | None"]


def bucket(count: int, unit: int = 1) -> int:
    """Return `count` rounded up to a multiple of `unit`, with eight sizes between two powers of
    two. At most an eighth is added, or less than `unit`."""
    step = max(unit, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // step) * step


def flex_attention_over(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    kv: Tensor | None,
    lengths: Tensor | None,
    blocks: Blocks,
) -> Tensor:
    """Return the attention of `learning.model.attention`, [B, T, H_q, D]: query [B, H_q, T, D];
    key, value [B, H_kv, S, D]; mask bool [B or 1, 1, T, S]; kv [C, 2, H_kv, P, D] with `lengths`
    [C] valid."""
    rows, heads, length, size = query.shape
    if "row" not in blocks:
        blocks["row"] = _row_blocks(mask, rows, length, key)
    out, lse = _attend(query, key, value, blocks["row"], scaling)
    if kv is not None:
        count = len(kv)
        folded = query.view(count, rows // count, heads, length, size).transpose(1, 2)
        folded = folded.reshape(count, heads, -1, size)
        if "prefix" not in blocks:
            blocks["prefix"] = _prefix_blocks(folded.shape[2], kv, lengths)
        read, read_lse = _attend(folded, kv[:, 0], kv[:, 1], blocks["prefix"], scaling)
        shape = (count, heads, rows // count, length)
        read = read.view(*shape, size).transpose(1, 2).reshape(out.shape)
        read_lse = read_lse.view(shape).transpose(1, 2).reshape(lse.shape)
        both = torch.logaddexp(lse, read_lse)
        out = (lse - both).exp()[..., None] * out + (read_lse - both).exp()[..., None] * read
    return out.to(value.dtype).transpose(1, 2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the values read and the log of the sum of exponentials, computed in buckets."""
    rows, _, length, _ = query.shape
    kernel: Any = _compiled() if query.device.type == "cuda" else flex_attention
    out, aux = kernel(
        _padded(query), _padded(key), _padded(value),
        block_mask=blocks, scale=scaling, enable_gqa=True, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out[:rows, :, :length], aux.lse[:rows, :, :length]


@cache
def _compiled() -> Callable[..., Any]:
    """Compile the kernel. Beyond torch's default limit of shapes it would form all scores
    instead."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, SHAPES)
    return torch.compile(flex_attention, dynamic=False)


def _padded(x: Tensor) -> Tensor:
    """Pad rows and tokens of [B, H, T, D] with zeros up to their buckets."""
    rows, _, tokens, _ = x.shape
    more = (0, 0, 0, bucket(tokens, TOKENS) - tokens, 0, 0, 0, bucket(rows) - rows)
    return F.pad(x, more) if any(more) else x


def _row_blocks(mask: Tensor | None, rows: int, length: int, key: Tensor) -> BlockMask:
    """Return which keys of its row a query attends to; a query that is padding attends to the
    first."""
    seen, device = key.shape[2], key.device
    wide = (bucket(rows), bucket(length, TOKENS), bucket(seen, TOKENS))
    sees = torch.zeros(wide, dtype=torch.bool, device=device)
    sees[:rows, :length, :seen] = True if mask is None else mask[:, 0]
    sees[rows:, :, 0] = sees[:, length:, 0] = True

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees[b, q, k]

    return create_block_mask(visible, wide[0], None, *wide[1:], device=device)


def _prefix_blocks(queries: int, kv: Tensor, lengths: Tensor | None) -> BlockMask | None:
    """Return which keys of its prefix a query attends to: all but padding. None: all keys."""
    count, tokens = kv.shape[0], kv.shape[3]
    wide = (bucket(count), bucket(queries, TOKENS), bucket(tokens, TOKENS))
    if lengths is None and wide[2] == tokens:
        return None
    valid = torch.full((wide[0],), tokens, device=kv.device)
    if lengths is not None:
        valid[:count] = lengths

    def visible(c: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < valid[c]

    return create_block_mask(visible, wide[0], None, *wide[1:], device=kv.device)
