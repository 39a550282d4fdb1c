"""Compute attention by FlexAttention, for GPUs and large scores.

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

TOKENS = 128  # queries and keys of one block of the kernel
SHAPES = 256  # most shapes that are compiled in a process


def bucket(count: int, unit: int = 1) -> int:
    """Return `count` rounded up to a multiple of `unit`, with eight sizes between two powers of
    two. At most an eighth is added, or less than `unit`."""
    step = max(unit, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // step) * step


def flex_attention_over(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return what the kernels of `learning.model.attention` return: attention [B, H_q, Q, D], and
    the log of the sum of exponentials [B, H_q, Q]."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    rows, _, length, _ = q.shape
    kernel: Any = _compiled() if q.device.type == "cuda" else flex_attention
    out, aux = kernel(
        _padded(q), _padded(k), _padded(v),
        block_mask=_blocks(mask, causal, rows, length, k),
        scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out[:rows, :, :length], aux.lse[:rows, :, :length]


@cache
def _compiled() -> Callable[..., Any]:
    """Compile the kernel. Beyond torch's default limit of shapes it would form all scores
    instead."""
    from torch.nn.attention.flex_attention import flex_attention

    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, SHAPES)
    return torch.compile(flex_attention, dynamic=False)


def _padded(x: Tensor) -> Tensor:
    """Pad rows and tokens of [B, H, T, D] with zeros up to their buckets."""
    rows, _, tokens, _ = x.shape
    more = (0, 0, 0, bucket(tokens, TOKENS) - tokens, 0, 0, 0, bucket(rows) - rows)
    return F.pad(x, more) if any(more) else x


def _blocks(mask: Tensor | None, causal: bool, rows: int, length: int, key: Tensor) -> Any:
    """Return which keys a query attends to: those that the added mask leaves, not later ones if
    causal, and no padding. A query that is padding attends to the first."""
    from torch.nn.attention.flex_attention import create_block_mask

    seen, device = key.shape[2], key.device
    wide = (bucket(rows), bucket(length, TOKENS), bucket(seen, TOKENS))
    if mask is None:

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k < seen) & (k <= q) if causal else k < seen
    else:
        sees = torch.zeros(wide, dtype=torch.bool, device=device)
        sees[:rows, :length, :seen] = mask[:, 0] == 0
        sees[rows:, :, 0] = sees[:, length:, 0] = True

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return sees[b, q, k]

    return create_block_mask(visible, wide[0], None, *wide[1:], device=device)
