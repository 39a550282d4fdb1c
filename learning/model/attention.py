"""Compute attention of a flat list of tokens: over shared prefixes, and causally over themselves.

    layout      which tokens each query attends to: made once for all layers
    own         sequences of like length are padded into blocks, and a block is one product
    prefix      the queries of all sequences over one prefix, which exists once, are one product
    joined      by the log of each part's sum of exponentials

Sequences over one prefix lie side by side, so their queries are a slice. Prefixes may be of any
lengths: none is stacked, padded or copied. `learning.model.kernels` computes each part and keeps no
scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from learning.model.kernels import UNSEEN, Kernel, kernel_for, wide

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

    def unseen(self, behind: Tensor, positions: Tensor) -> Tensor:
        """Return which keys, so many positions `behind` their queries at `positions`, lie further
        back than those see."""
        if self.window:
            return behind >= self.window
        assert self.chunk
        return behind > positions % self.chunk


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
    firsts, asked = edges[:-1].tolist(), edges.diff().tolist()
    places = torch.zeros(len(queries), dtype=torch.long)
    key_places = torch.full((tokens,), -1)
    blocks: list[Block] = []
    at = keys_at = 0
    for members in _alike(lengths, asked):
        longest = max(lengths[s] for s in members)
        most = max(asked[s] for s in members)
        begins = starts[members][:, None]
        first = torch.tensor([firsts[s] for s in members])[:, None]
        last = torch.tensor([[lengths[s] - 1, asked[s] - 1] for s in members])
        column = torch.arange(max(longest, most))
        keys = begins + torch.minimum(column[:longest], last[:, :1])
        asking = first + torch.minimum(column[:most], last[:, 1:])
        real = column[:most] <= last[:, 1:]
        places[asking[real]] = at + real.flatten().nonzero()[:, 0]
        there = column[:longest] <= last[:, :1]
        key_places[keys[there]] = keys_at + there.flatten().nonzero()[:, 0]
        at, keys_at = at + real.numel(), keys_at + there.numel()
        sources = asking.masked_fill(~real, len(queries))
        held = [x.flatten().to(device) for x in (keys, asking, sources)]
        size = (len(members), most, longest)
        blocks.append(Block(size, held[0], held[1], held[2], begins[..., None].to(device)))
    key_places[key_places < 0] = keys_at
    firsts.append(len(queries))
    spans = [(firsts[a], firsts[b]) for a, b in pairwise([0, *accumulate(counts)])]
    taken = queries.to(device)
    return Layout(
        taken, positions[taken], spans, blocks, places.to(device), key_places.to(device),
        read is None,
    )  # fmt: skip


def _alike(lengths: Sequence[int], asked: Sequence[int]) -> list[list[int]]:
    """Return the sequences that have queries, in groups of like length."""
    groups: list[list[int]] = []
    for s in sorted((s for s, n in enumerate(asked) if n), key=lambda s: (-lengths[s], s)):
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


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, prefixes: Sequence[Tensor],
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention [M, H_q, D], and the log of its sums of exponentials [M, H_q]."""
    kernel, parts = kernel_for(q), []
    for block in layout.blocks:
        asked, keys, values = _padded(block, q, k, v)
        mask, causal = _own_mask(layout, block, options, q.dtype)
        found = kernel.forward(asked, keys, values, mask, causal, options.scale, options.cap)
        parts.append([x.transpose(1, 2).flatten(0, 1) for x in found])
    out, sums = (_joined(x, layout.places) for x in zip(*parts, strict=True))

    def mask_of(c: int, kv: Tensor) -> Tensor | None:
        return _prefix_mask(layout, c, kv, options, q.dtype)

    return over_prefixes(kernel, q, out, sums, layout.spans, prefixes, options, mask_of)


def over_prefixes(
    kernel: Kernel, q: Tensor, out: Tensor, sums: Tensor, spans: Sequence[tuple[int, int]],
    prefixes: Sequence[Tensor], options: AttentionOptions,
    mask: Callable[[int, Tensor], Tensor | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Join attention `out` [M, H_q, D], with the log of its sums of exponentials [M, H_q], with
    the sinks and with that of the queries over their prefixes; `mask` gives what is added to a
    prefix's scores."""
    if options.sinks is not None:
        both = torch.logaddexp(sums, options.sinks.to(sums))
        out, sums = wide(out) * (sums - both).exp()[..., None], both
    if not any(kv.shape[2] for kv in prefixes):
        return out.to(q.dtype), sums
    parts, asked = [], q.transpose(0, 1)[None]
    for c, ((first, stop), kv) in enumerate(zip(spans, prefixes, strict=True)):
        if not kv.shape[2] or first == stop:
            parts.append((out[first:stop], torch.full_like(sums[first:stop], UNSEEN)))
            continue
        keys, values = kv[:, None].unbind()
        read, of = kernel.forward(
            asked[:, :, first:stop], keys, values, mask(c, kv), False, options.scale, options.cap
        )
        parts.append((read[0].transpose(0, 1), of[0].transpose(0, 1)))
    read, read_sums = (torch.cat(x) for x in zip(*parts, strict=True))
    both = torch.logaddexp(sums, read_sums)
    share = (read_sums - both).exp()[..., None]
    return torch.lerp(wide(out), wide(read), share).to(q.dtype), both  # rounded once


def _padded(block: Block, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return a block's queries [B, H_q, Q, D], and its keys and values [B, H_kv, T, D]."""
    rows, most, longest = block.size
    return [
        _taken(q, block.queries, rows, most),
        _taken(k, block.keys, rows, longest),
        _taken(v, block.keys, rows, longest),
    ]


def _taken(x: Tensor, at: Tensor, rows: int, each: int) -> Tensor:
    """Return x[at] [B * T, H, ...] as [B, H, T, ...]."""
    return x.index_select(0, at).view(rows, each, *x.shape[1:]).transpose(1, 2)


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
        asked = layout.tokens[block.queries].view(rows, most, 1)
        behind = asked - (block.begins + torch.arange(longest, device=asked.device))
        hidden = behind < 0
        if options.limit:
            at = layout.positions[block.queries].view(rows, most, 1)
            hidden |= options.unseen(behind, at)
        layout.masks[kind] = _added(hidden, dtype)[:, None]
    return layout.masks[kind], False


def _prefix_mask(
    layout: Layout, c: int, kv: Tensor, options: AttentionOptions, dtype: torch.dtype
) -> Tensor | None:
    """Return what is added to the scores of prefix c's queries, None where they see all of it."""
    if options.limit is None:
        return None
    kind = (c, options.window, options.chunk)
    if kind not in layout.masks:
        first, stop = layout.spans[c]
        layout.masks[kind] = window_mask(layout.positions[first:stop], kv.shape[2], options, dtype)
    return layout.masks[kind]


def window_mask(
    positions: Tensor, seen: int, options: AttentionOptions, dtype: torch.dtype
) -> Tensor | None:
    """Return what a window or chunk adds to the scores of queries at `positions` [n] over keys 0 to
    `seen`, [1, 1, n, seen]; None where it hides none."""
    if options.limit is None or int(positions.max()) < options.limit:
        return None
    behind = positions[:, None] - torch.arange(seen, device=positions.device)
    return _added(options.unseen(behind, positions[:, None]), dtype)[None, None]


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
        out, sums = _attend(q, k, v, layout, prefixes, options)
        ctx.save_for_backward(q, k, v, out, sums, *prefixes)
        ctx.given = layout, options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, *prefixes = ctx.saved_tensors
        layout, options = ctx.given
        grads: list[Tensor | None] = [None, None, None]
        if any(ctx.needs_input_grad[:3]):
            grads = [*_own_gradients(grad, q, k, v, out, sums, layout, options)]
        of_prefixes: list[Tensor | None] = []
        for c, ((first, stop), kv) in enumerate(zip(layout.spans, prefixes, strict=True)):
            if first == stop or not kv.shape[2]:
                of_prefixes.append(torch.zeros_like(kv) if ctx.needs_input_grad[5 + c] else None)
                continue
            if grads[0] is None and not ctx.needs_input_grad[5 + c]:
                of_prefixes.append(None)
                continue
            of = slice(first, stop)
            asked, there, read, total = (x[of].transpose(0, 1)[None] for x in (q, grad, out, sums))
            mask = _prefix_mask(layout, c, kv, options, q.dtype)
            by_query, by_key, by_value = kernel_for(q).backward(
                there, asked, kv[None, 0], kv[None, 1], read, total, mask, False, options.scale,
                options.cap,
            )  # fmt: skip
            if grads[0] is not None:
                grads[0][of] += by_query[0].transpose(0, 1)
            of_prefixes.append(torch.cat([by_key, by_value]))
        return (*grads, None, None, *of_prefixes)


def _own_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, layout: Layout,
    options: AttentionOptions,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients by queries [M, H_q, D], keys and values [N, H_kv, D] of what the
    queries read of their own sequences."""
    held = torch.cat([grad, torch.zeros_like(grad[:1])])  # padding has no gradient
    parts: list[list[Tensor]] = []
    for block in layout.blocks:
        rows, most, _ = block.size
        there = _taken(held, block.sources, rows, most)
        read = _taken(out, block.queries, rows, most)
        total = _taken(sums, block.queries, rows, most)
        mask, causal = _own_mask(layout, block, options, q.dtype)
        asked, keys, values = _padded(block, q, k, v)
        found = kernel_for(q).backward(
            there, asked, keys, values, read, total, mask, causal, options.scale, options.cap
        )
        parts.append([x.transpose(1, 2).flatten(0, 1) for x in found])
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
