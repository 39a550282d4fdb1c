"""Compute attention of a flat list of tokens: over shared prefixes, and causally over themselves.

    layout      which tokens each query attends to: made once for all layers
    own         sequences of like length are padded into blocks, and a block is one product
    prefix      the queries of all sequences over one prefix, which exists once, are one product
    joined      by the log of each part's sum of exponentials

Sequences over one prefix lie side by side, so their queries are a slice. Prefixes may be of any
lengths: none is stacked, padded or copied.

A kernel computes one part, forward and backward, and keeps no scores. Its backward pass is given
the outputs and sums of all parts together, so what it returns is its share of the whole gradient.

    FLASH       torch's blocked softmax for CPUs
    CUDA_FLASH  FlashAttention-2, which torch brings for CUDA; CHUNKED where it has no kernel
    CHUNKED     any device: scores of a chunk of queries at a time, in float32, formed again in the
                backward pass

Dimensions: N tokens, M queries, H_q query heads, H_kv key/value heads, D numbers of a head, P_c
tokens of prefix c; of a block B sequences of Q queries and T keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

LIKE = 0.75  # a block's shortest sequence has more than this part of its longest's tokens
# Is given a layer's number, its queries [M, H_q, D], keys and values [N, H_kv, D], and outputs.
Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class AttentionOptions:
    """Describe how one layer attends. `scale` multiplies the scores; with a `cap` c a score s is
    c tanh(s / c). A query sees the `window` last positions up to its own, or those of its own block
    of `chunk` positions; with neither, all. `sinks` [H_q] are the scores of one more key of each
    head, whose value is zero."""

    scale: float
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def limit(self) -> int | None:
        """Return below how many positions a query sees all that is before it; None: always."""
        return self.window or self.chunk

    def unseen(self, distances: Tensor, positions: Tensor) -> Tensor:
        """Return which keys, so many positions `behind` their queries at `positions`, lie further
        back than those see."""
        if self.window:
            return distances >= self.window
        assert self.chunk
        return distances > positions % self.chunk


@dataclass(frozen=True)
class Block:
    """Hold B sequences padded to T keys and Q queries. `keys` [B*T] are tokens and `queries`
    [B*Q] are queries; padding repeats the last. `sources` is `queries` with M for padding.
    `begins` [B, 1, 1] is each sequence's first token."""

    size: tuple[int, int, int]
    keys: Tensor
    queries: Tensor
    sources: Tensor
    begins: Tensor


@dataclass(frozen=True)
class Layout:
    """Describe which of N tokens each of M queries attends to.

    tokens       [M] the token of each query, ascending
    positions    [M] its position, which a sliding window counts from
    spans        the queries (first, last + 1) over each prefix
    places       [M] where the blocks, one after another, hold each query
    key_places   [N] where they hold each token; for one that no query needs, behind the last
    every        whether the queries are all tokens
    masks        what was hidden in a layer before, by its kind
    """

    tokens: Tensor
    positions: Tensor
    spans: Sequence[tuple[int, int]]
    blocks: Sequence[Block]
    places: Tensor
    key_places: Tensor
    every: bool
    masks: dict[Any, Tensor | None] = field(default_factory=dict)


def layout_of(
    lengths: Sequence[int], counts: Sequence[int], positions: Tensor, read: Tensor | None = None
) -> Layout:
    """Return the layout of sequences of these lengths, `counts` of them over each prefix in turn,
    with `positions` [N]. `read` [M] are the tokens that are queries, ascending; None: all."""
    device, tokens = positions.device, len(positions)
    starts = torch.tensor([0, *accumulate(lengths)])
    queries = torch.arange(tokens) if read is None else read.cpu()
    edges = torch.searchsorted(queries, starts)
    firsts, query_counts = edges[:-1].tolist(), edges.diff().tolist()
    places = torch.zeros(len(queries), dtype=torch.long)
    key_places = torch.full((tokens,), -1)
    blocks: list[Block] = []
    at = keys_at = 0
    for members in _alike(lengths, query_counts):
        longest = max(lengths[s] for s in members)
        most = max(query_counts[s] for s in members)
        begins = starts[members][:, None]
        first = torch.tensor([firsts[s] for s in members])[:, None]
        last = torch.tensor([[lengths[s] - 1, query_counts[s] - 1] for s in members])
        column = torch.arange(max(longest, most))
        keys = begins + torch.minimum(column[:longest], last[:, :1])
        asking = first + torch.minimum(column[:most], last[:, 1:])
        real = column[:most] <= last[:, 1:]
        places[asking[real]] = at + real.flatten().nonzero()[:, 0]
        real_keys = column[:longest] <= last[:, :1]
        key_places[keys[real_keys]] = keys_at + real_keys.flatten().nonzero()[:, 0]
        at, keys_at = at + real.numel(), keys_at + real_keys.numel()
        sources = asking.masked_fill(~real, len(queries))
        indices = [x.flatten().to(device) for x in (keys, asking, sources)]
        size = (len(members), most, longest)
        blocks.append(Block(size, indices[0], indices[1], indices[2], begins[..., None].to(device)))
    key_places[key_places < 0] = keys_at
    firsts.append(len(queries))
    spans = [(firsts[a], firsts[b]) for a, b in pairwise([0, *accumulate(counts)])]
    tokens_read = queries.to(device)
    return Layout(
        tokens_read, positions[tokens_read], spans, blocks, places.to(device),
        key_places.to(device), read is None,
    )  # fmt: skip


def _alike(lengths: Sequence[int], query_counts: Sequence[int]) -> list[list[int]]:
    """Return the sequences that have queries, in groups of like length."""
    groups: list[list[int]] = []
    for s in sorted((s for s, n in enumerate(query_counts) if n), key=lambda s: (-lengths[s], s)):
        if not groups or lengths[s] <= LIKE * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(s)
    return groups


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, prefixes: Sequence[Tensor],
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """Return the attention [M, H_q, D] of queries q [M, H_q, D] over the prefixes, each
    [2, H_kv, P_c, D] or of length 0, and over keys and values [N, H_kv, D]."""
    if not q.shape[0]:
        return q
    out: Tensor = _PartedAttention.apply(q, k, v, layout, options, *prefixes)  # type: ignore[no-untyped-call]  # torch's
    return out


def over_own(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return the attention [M, H_q, D] of queries q [M, H_q, D] over keys and values [N, H_kv, D]
    of their own sequences alone, and the log of its sums of exponentials [M, H_q], without the
    sinks."""
    kernel, parts = kernel_for(q), []
    for block in layout.blocks:
        queries, keys, values = _padded(block, q, k, v)
        mask, causal = _own_mask(layout, block, options, q.dtype)
        part = kernel.forward(queries, keys, values, mask, causal, options.scale, options.cap)
        parts.append([x.transpose(1, 2).flatten(0, 1) for x in part])
    out, sums = (_joined(x, layout.places) for x in zip(*parts, strict=True))
    return out, sums


def over_prefixes(
    kernel: Kernel, q: Tensor, out: Tensor, sums: Tensor, spans: Sequence[tuple[int, int]],
    prefixes: Sequence[Tensor], options: AttentionOptions,
    mask: Callable[[int, Tensor], Tensor | None], grouped: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Join attention `out` [M, H_q, D], with the log of its sums of exponentials [M, H_q], with
    the sinks and with that of the queries over their prefixes; `mask` gives what is added to a
    prefix's scores. With `grouped` the heads that read one key stand as queries of one head, so
    that few queries read a long prefix once and not H_q / H_kv times."""
    if options.sinks is not None:
        total = torch.logaddexp(sums, options.sinks.to(sums))
        out, sums = wide(out) * (sums - total).exp()[..., None], total
    if not any(kv.shape[2] for kv in prefixes):
        return out.to(q.dtype), sums
    parts, queries = [], q.transpose(0, 1)[None]
    for c, ((first, stop), kv) in enumerate(zip(spans, prefixes, strict=True)):
        if not kv.shape[2] or first == stop:
            parts.append((out[first:stop], torch.full_like(sums[first:stop], UNSEEN)))
            continue
        keys, values = kv[:, None].unbind()
        part, hidden = queries[:, :, first:stop], mask(c, kv)
        shared = _grouped(part, keys) if grouped else part  # [1, H_kv, H_q / H_kv x n, D], or part
        if hidden is not None and grouped:
            hidden = hidden.repeat(1, 1, shared.shape[2] // part.shape[2], 1)
        read, part_sums = kernel.forward(
            shared, keys, values, hidden, False, options.scale, options.cap
        )
        read, part_sums = _as_heads(read, part), part_sums.reshape(part.shape[:3])
        parts.append((read[0].transpose(0, 1), part_sums[0].transpose(0, 1)))
    read, read_sums = (torch.cat(x) for x in zip(*parts, strict=True))
    total = torch.logaddexp(sums, read_sums)
    share = (read_sums - total).exp()[..., None]
    return torch.lerp(wide(out), wide(read), share).to(q.dtype), total  # rounded once


def _padded(block: Block, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return a block's queries [B, H_q, Q, D], and its keys and values [B, H_kv, T, D]."""
    rows, most, longest = block.size
    return [
        _gathered(q, block.queries, rows, most),
        _gathered(k, block.keys, rows, longest),
        _gathered(v, block.keys, rows, longest),
    ]


def _gathered(x: Tensor, at: Tensor, rows: int, columns: int) -> Tensor:
    """Return x[at] [B * T, H, ...] as [B, H, T, ...]."""
    return x.index_select(0, at).view(rows, columns, *x.shape[1:]).transpose(1, 2)


def _joined(parts: Sequence[Tensor], places: Tensor) -> Tensor:
    """Return the rows `places` of parts that lie one behind another."""
    return (torch.cat([*parts]) if len(parts) > 1 else parts[0]).index_select(0, places)


def _own_mask(
    layout: Layout, block: Block, options: AttentionOptions, dtype: torch.dtype
) -> tuple[Tensor | None, bool]:
    """Return what is added to a block's own scores, and whether they are causal instead."""
    rows, most, longest = block.size
    window, chunk = options.window, options.chunk
    if layout.every and not chunk and (window is None or longest <= window):
        return None, True
    kind = (id(block), window, chunk)
    if kind not in layout.masks:
        keys = block.begins + torch.arange(longest, device=block.begins.device)
        distances = layout.tokens[block.queries].view(rows, most, 1) - keys
        hidden = distances < 0
        if options.limit:
            at = layout.positions[block.queries].view(rows, most, 1)
            hidden |= options.unseen(distances, at)
        layout.masks[kind] = _added(hidden, dtype)[:, None]
    return layout.masks[kind], False


def _prefix_mask(
    layout: Layout, c: int, kv: Tensor, options: AttentionOptions, dtype: torch.dtype
) -> Tensor | None:
    """Return what is added to the scores of prefix c's queries, None where they see all of it."""
    kind = (c, options.window, options.chunk)
    if kind not in layout.masks:
        first, stop = layout.spans[c]
        layout.masks[kind] = window_mask(layout.positions[first:stop], kv.shape[2], options, dtype)
    return layout.masks[kind]


def window_mask(
    positions: Tensor, keys: int, options: AttentionOptions, dtype: torch.dtype
) -> Tensor | None:
    """Return what a window or chunk adds to the scores of queries at `positions` [n] over keys 0 to
    `keys`, [1, 1, n, keys]; None where it hides none."""
    if options.limit is None or int(positions.max()) < options.limit:
        return None
    distances = positions[:, None] - torch.arange(keys, device=positions.device)
    return _added(options.unseen(distances, positions[:, None]), dtype)[None, None]


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, UNSEEN)


class _PartedAttention(torch.autograd.Function):
    """Compute attention and its gradient part by part: that of one part, given the outputs and sums
    of all parts together, is its share of the whole gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: AttentionOptions,
        *prefixes: Tensor,
    ) -> Tensor:  # fmt: skip
        out, sums = over_own(q, k, v, layout, options)
        out, sums = over_prefixes(
            kernel_for(q), q, out, sums, layout.spans, prefixes, options,
            lambda c, kv: _prefix_mask(layout, c, kv, options, q.dtype),
        )  # fmt: skip  # [M, H_q, D], [M, H_q]
        ctx.save_for_backward(q, k, v, out, sums, *prefixes)
        ctx.inputs = layout, options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, *prefixes = ctx.saved_tensors
        layout, options = ctx.inputs
        grads: list[Tensor | None] = [None, None, None]
        if any(ctx.needs_input_grad[:3]):
            grads = [*_own_gradients(grad, q, k, v, out, sums, layout, options)]
        of_prefixes: list[Tensor | None] = []
        for c, ((first, stop), kv) in enumerate(zip(layout.spans, prefixes, strict=True)):
            trained = ctx.needs_input_grad[5 + c]
            if first == stop or not kv.shape[2] or (grads[0] is None and not trained):
                of_prefixes.append(torch.zeros_like(kv) if trained else None)
                continue
            span = slice(first, stop)
            queries, part_grad, read, total = (
                x[span].transpose(0, 1)[None] for x in (q, grad, out, sums)
            )
            mask = _prefix_mask(layout, c, kv, options, q.dtype)
            by_query, by_key, by_value = kernel_for(q).backward(
                part_grad, queries, kv[None, 0], kv[None, 1], read, total, mask, False,
                options.scale, options.cap,
            )  # fmt: skip
            if grads[0] is not None:
                grads[0][span] += by_query[0].transpose(0, 1)
            of_prefixes.append(torch.cat([by_key, by_value]))
        return (*grads, None, None, *of_prefixes)


def _own_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, layout: Layout,
    options: AttentionOptions,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients by queries [M, H_q, D], keys and values [N, H_kv, D] of what the
    queries read of their own sequences."""
    padded_grad = torch.cat([grad, torch.zeros_like(grad[:1])])  # padding has no gradient
    parts: list[list[Tensor]] = []
    for block in layout.blocks:
        rows, most, _ = block.size
        block_grad = _gathered(padded_grad, block.sources, rows, most)
        read = _gathered(out, block.queries, rows, most)
        total = _gathered(sums, block.queries, rows, most)
        mask, causal = _own_mask(layout, block, options, q.dtype)
        queries, keys, values = _padded(block, q, k, v)
        gradients = kernel_for(q).backward(
            block_grad, queries, keys, values, read, total, mask, causal, options.scale, options.cap
        )
        parts.append([x.transpose(1, 2).flatten(0, 1) for x in gradients])
    by_query, by_key, by_value = zip(*parts, strict=True)
    nothing = torch.zeros_like(k[:1])
    return [
        _joined(by_query, layout.places),
        _joined([*by_key, nothing], layout.key_places),
        _joined([*by_value, nothing], layout.key_places),
    ]


class FlatAttention:
    """Attend within one forward pass over flat sequences: the queries of all layers but the last
    are all tokens, those of the last the tokens that are `read`."""

    def __init__(
        self,
        lengths: Sequence[int],
        counts: Sequence[int],
        positions: Tensor,
        prefixes: Sequence[Tensor],
        read: Tensor | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Take sequences as in `layout_of`, and prefixes [L, 2, H_kv, P_c, D]; `observer` is given
        every layer's queries, keys, values and outputs."""
        self._all = layout_of(lengths, counts, positions)
        self._read = self._all if read is None else layout_of(lengths, counts, positions, read)
        self._layers = [kv.unbind(0) for kv in prefixes]
        self._observer = observer
        self.scales: dict[int, float] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention of queries [M, H_q, D] over their prefix, and keys and values
        [N, H_kv, D]; note the layer's scale in `scales`."""
        self.scales[layer] = options.scale
        layout = self._all if q.shape[0] == self._all.tokens.shape[0] else self._read
        out = attend(q, k, v, layout, [kv[layer] for kv in self._layers], options)
        if self._observer is not None:
            self._observer(layer, q, k, v, out)
        return out


SCORE_BYTES = 256 * 2**20  # of the scores that CHUNKED forms at a time, float32
CACHED_BYTES = 4 * 2**20  # on a CPU, whose caches hold them: benchmarks/kernels.json
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

    def stored_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which keys and values of `dtype` are kept that are read many times."""
        return dtype

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


class _Flash(Kernel):
    """Computes narrow numbers in float32: the kernel rounds each part's outputs to theirs, before
    parts are joined, which moved single log-probabilities by up to 0.18 nats in bfloat16."""

    def stored_type(self, dtype: torch.dtype) -> torch.dtype:
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


class _Chunked(Kernel):
    """Outputs are float32, so that parts are joined before they are rounded."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
        cap: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        outs, all_sums = [], []
        for span in _chunks(q, k):
            scores = _scores(q, k, mask, causal, scale, cap, span)
            sums = scores.logsumexp(-1)
            weights = (scores - sums[..., None]).exp_().to(v.dtype)
            outs.append(_as_heads(_product(_grouped(weights, k), v), q[:, :, span]))
            all_sums.append(sums)
        return torch.cat(outs, 2), torch.cat(all_sums, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
        mask: Tensor | None, causal: bool, scale: float, cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        by_query = []
        by_key, by_value = (torch.zeros_like(x, dtype=sums.dtype) for x in (k, v))
        for span in _chunks(q, k):
            part_grad, queries = grad[:, :, span], q[:, :, span]
            scores = _scores(q, k, mask, causal, scale, cap, span)
            weights = (scores - sums[:, :, span, None]).exp_()
            mean = (part_grad.to(sums.dtype) * out[:, :, span]).sum(-1, keepdim=True)
            by_weight = _as_heads(_product(_grouped(part_grad, k), v.mT), queries)
            by_score = weights * (by_weight - mean) * scale
            if cap is not None:  # the slope of the cap; hidden scores lie beyond it
                by_score *= 1 - (scores / cap).clamp_(-1, 1).square_()
            by_score = _grouped(by_score.to(q.dtype), k)
            by_query.append(_as_heads(_product(by_score, k), queries).to(q.dtype))
            by_key += _product(by_score.mT, _grouped(queries, k))
            by_value += _product(_grouped(weights.to(v.dtype), k).mT, _grouped(part_grad, k))
        return torch.cat(by_query, 2), by_key.to(k.dtype), by_value.to(v.dtype)


class _CudaFlash(Kernel):
    """Rounds each part's outputs to the numbers' type before parts are joined. It has no masks and
    no cap, so a window, and the last layer's own part, are CHUNKED's."""

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
    fits = q.shape[3] <= CUDA_SIZE and q.shape[3] % 8 == 0
    return mask is None and cap is None and q.dtype in NARROW and fits


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let torch choose operations that give the same bits each time."""
    enabled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)


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
    size = min(SCORE_BYTES, CACHED_BYTES) if q.device.type == "cpu" else SCORE_BYTES
    most = max(1, size // (4 * rows * heads * max(1, k.shape[2])))
    yield from (slice(a, min(a + most, queries)) for a in range(0, queries, most))


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, cap: float | None,
    span: slice,
) -> Tensor:  # fmt: skip
    """Return the scores [B, H_q, n, T] of the queries `of`, in float32 or wider."""
    queries = q[:, :, span]
    scores = _as_heads(_product(_grouped(queries, k), k.mT), queries).mul_(scale)
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    if causal:
        rows, columns = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        scores.masked_fill_(columns > rows[span, None], UNSEEN)
    if mask is not None:
        scores += mask[:, :, span]
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
