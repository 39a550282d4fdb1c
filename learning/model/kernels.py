"""Compute one part of attention, forward and backward, without keeping its scores.

    FLASH       torch's blocked softmax for CPUs
    CUDA_FLASH  FlashAttention-2, which torch brings for CUDA; CHUNKED where it has no kernel
    CHUNKED     any device: scores of a chunk of queries at a time, in float32, formed again in the
                backward pass

A part is what queries read of their own sequences, or of one prefix. Its backward pass is given the
outputs and sums of all parts together, so what it returns is its share of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

SCORE_BYTES = 256 * 2**20  # of the scores that CHUNKED forms at a time, float32
UNSEEN = -1e30  # added to a hidden score; finite, so that a query may see nothing of one part
_FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA: Any = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
NARROW = (torch.bfloat16, torch.float16)
CUDA_SIZE = 256  # of a head, at most, and a multiple of 8


class Kernel(Protocol):
    """Compute attention of queries [B, H_q, Q, D] over keys and values [B, H_kv, T, D]. With a
    `cap` c a score s is c tanh(s / c). `mask` [B or 1, 1, Q, T] is added to the scores, 0 or
    UNSEEN; `causal` hides later keys where Q is T."""

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which keys and values of `dtype` are kept that are read many times."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
        cap: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the outputs [B, H_q, Q, D], and the log of the sums of exponentials
        [B, H_q, Q]."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
        mask: Tensor | None, causal: bool, scale: float, cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients by q, k and v, given that by the outputs of all parts together, and
        those outputs and sums."""
        ...


class _Flash:
    """Computes narrow numbers in float32: the kernel rounds each part's outputs to theirs, before
    parts are joined, which moved single log-probabilities by up to 0.18 nats in bfloat16."""

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)  # converted once and not in each call

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
        cap: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if cap is not None:
            return CHUNKED.forward(q, k, v, mask, causal, scale, cap)
        mask = None if mask is None else wide(mask)
        out, sums = _FLASH(wide(q), wide(k), wide(v), 0.0, causal, attn_mask=mask, scale=scale)
        return out, sums

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
        mask: Tensor | None, causal: bool, scale: float, cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if cap is not None:
            return CHUNKED.backward(grad, q, k, v, out, sums, mask, causal, scale, cap)
        mask = None if mask is None else wide(mask)
        by_query, by_key, by_value = _FLASH_BACKWARD(
            wide(grad), wide(q), wide(k), wide(v), wide(out), sums.contiguous(), 0.0, causal,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
        return by_query.to(q.dtype), by_key.to(k.dtype), by_value.to(v.dtype)


class _Chunked:
    """Outputs are float32, so that parts are joined before they are rounded."""

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
        cap: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        outs, all_sums = [], []
        for of in _chunks(q, k):
            scores = _scores(q, k, mask, causal, scale, cap, of)
            sums = scores.logsumexp(-1)
            weights = (scores - sums[..., None]).exp_().to(v.dtype)
            outs.append(_as_heads(_product(_grouped(weights, k), v), q[:, :, of]))
            all_sums.append(sums)
        return torch.cat(outs, 2), torch.cat(all_sums, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
        mask: Tensor | None, causal: bool, scale: float, cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        by_query = []
        by_key, by_value = (torch.zeros_like(x, dtype=sums.dtype) for x in (k, v))
        for of in _chunks(q, k):
            there, asked = grad[:, :, of], q[:, :, of]
            scores = _scores(q, k, mask, causal, scale, cap, of)
            weights = (scores - sums[:, :, of, None]).exp_()
            mean = (there.to(sums.dtype) * out[:, :, of]).sum(-1, keepdim=True)
            by_weight = _as_heads(_product(_grouped(there, k), v.mT), asked)
            by_score = weights * (by_weight - mean) * scale
            if cap is not None:  # the slope of the cap; hidden scores lie beyond it
                by_score *= 1 - (scores / cap).clamp_(-1, 1).square_()
            by_score = _grouped(by_score.to(q.dtype), k)
            by_query.append(_as_heads(_product(by_score, k), asked).to(q.dtype))
            by_key += _product(by_score.mT, _grouped(asked, k))
            by_value += _product(_grouped(weights.to(v.dtype), k).mT, _grouped(there, k))
        return torch.cat(by_query, 2), by_key.to(k.dtype), by_value.to(v.dtype)


class _CudaFlash:
    """Rounds each part's outputs to the numbers' type before parts are joined. It has no masks and
    no cap, so a window, and the last layer's own part, are CHUNKED's."""

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
        cap: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not _is_for_cuda(q, mask, cap):
            return CHUNKED.forward(q, k, v, mask, causal, scale, cap)
        out, sums, *_ = _CUDA(q, k, v, 0.0, causal, False, scale=scale)
        return out, sums

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
        mask: Tensor | None, causal: bool, scale: float, cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if not _is_for_cuda(q, mask, cap):
            return CHUNKED.backward(grad, q, k, v, out, sums, mask, causal, scale, cap)
        drawn = q.new_empty(0, dtype=torch.long)  # nothing: there is no dropout
        with _deterministic():  # its sums over keys are atomic otherwise, in any order
            by_query, by_key, by_value = _CUDA_BACKWARD(
                grad, q, k, v, out, sums.contiguous(), None, None, q.shape[2], k.shape[2], 0.0,
                causal, drawn, drawn, scale=scale,
            )  # fmt: skip
        return by_query, by_key, by_value


def _is_for_cuda(q: Tensor, mask: Tensor | None, cap: float | None) -> bool:
    size = q.shape[3]
    return (
        mask is None and cap is None and q.dtype in NARROW and size <= CUDA_SIZE and size % 8 == 0
    )


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let torch choose operations that give the same bits each time."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


FLASH: Kernel = _Flash()
CUDA_FLASH: Kernel = _CudaFlash()
CHUNKED: Kernel = _Chunked()


_KERNELS = {"cpu": FLASH, "cuda": CUDA_FLASH}


def kernel_for(q: Tensor) -> Kernel:
    """Return the kernel for queries on this device."""
    return _KERNELS.get(q.device.type, CHUNKED)


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Yield slices of the queries whose scores take at most SCORE_BYTES together."""
    rows, heads, queries, _ = q.shape
    most = max(1, SCORE_BYTES // (4 * rows * heads * max(1, k.shape[2])))
    for start in range(0, queries, most):
        yield slice(start, min(start + most, queries))


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, cap: float | None,
    of: slice,
) -> Tensor:  # fmt: skip
    """Return the scores [B, H_q, n, T] of the queries `of`, in float32 or wider."""
    asked = q[:, :, of]
    scores = _as_heads(_product(_grouped(asked, k), k.mT), asked).mul_(scale)
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    if causal:
        rows, columns = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        scores.masked_fill_(columns > rows[of, None], UNSEEN)
    if mask is not None:
        scores += mask[:, :, of]
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return [B, H_q, n, ...] as [B, H_kv, H_q / H_kv x n, ...]: the heads that share keys
    together."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[3])


def _as_heads(x: Tensor, like: Tensor) -> Tensor:
    """Return [B, H_kv, H_q / H_kv x n, ...] as [B, H_q, n, ...], the shape of `like`."""
    return x.reshape(*like.shape[:3], x.shape[3])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [B, H, M, K] @ b [B, H, K, N] in float32 or wider: a product of bfloat16 would be
    rounded to bfloat16, a score of 8 by 0.03. CUDA multiplies narrow numbers into float32."""
    if a.device.type == "cuda" and a.dtype in (torch.bfloat16, torch.float16):
        flat: Tensor = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return flat.view(*a.shape[:2], *flat.shape[1:])
    return wide(a) @ wide(b)


def wide(x: Tensor) -> Tensor:
    """Return x in float32 or wider."""
    # Asked of Python first: passes that run beside each other wait at every call into torch.
    return x.float() if x.dtype in NARROW else x
