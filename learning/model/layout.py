"""Lay ragged sequences out for attention: in blocks of like length, and side by side by prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

LIKE = 0.75  # a block's shortest sequence has more than this part of its longest's tokens


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
