"""Compact a document's KV to P entries in closed form, without training (attention matching).

After Zweiger et al., "Fast KV Compaction via Attention Matching" (2026), per layer and KV head:

    queries   of the document's own tokens, read again in rows after the document
    keys      the P document keys whose attention weights have the largest root mean square
    values    least-squares fit, so that the attention outputs equal those over the whole document,
              which the second reading has computed

The paper also gives each kept key a bias that carries the attention mass of the dropped keys. A
cartridge has no field for a bias. The fit therefore matches outputs after a softmax over prefix and
row together, where the lost mass shows, and the values compensate for it. Queries of the first
reading would save the second, and closed less of the gap of real articles (docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.cartridge import shifted
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.ranks import concurrently, most_beside, passes_beside

ROW = 64  # tokens of a row of reference queries
MOST_ROWS = 32  # of a page's 63: KL over it rose by 2.3 and 0.1% (docs/log.md)
AT_ONCE = 4  # rows of a forward pass, and whose scores are in memory together
LOG2_E = math.log2(math.e)
RIDGE = 1e-4  # times the mean diagonal of the normal equations


@dataclass(frozen=True)
class ReferenceRows:
    """Hold the attention of R rows of t tokens in one layer, behind the document. `queries`
    [R, H_q, t, D] are times the layer's scale; `own` [R, 2, H_kv, t, D] has the rows' keys and
    values; `outputs` [R, H_q, t, D] are read of the document and the row itself."""

    queries: Tensor
    own: Tensor
    outputs: Tensor


@torch.no_grad()
def attention_matched(
    model: LanguageModel, ids: Sequence[int], kv: Tensor, tokens: int, frozen: int
) -> Tensor:
    """Return a cartridge [L, 2, H_kv, P, D] made of a document's T tokens `ids`, P <= T, and their
    KV [L, 2, H_kv, T, D].

    A prompt starts at position P after the cartridge and at T after the document. The kept keys are
    moved by P - T, so that every score equals the document's; the earliest get negative positions.
    The first `frozen` entries are the document's first, with their own values.
    """
    rows = reference_rows(model, ids, kv)

    def fit(item: tuple[Tensor, ReferenceRows]) -> Tensor:
        return compacted(*item, tokens, frozen)

    layers = [*concurrently(fit, zip(kv, rows, strict=True), most_beside(kv.device))]
    return shifted(torch.stack(layers), tokens - len(ids), model.frequencies())


@torch.no_grad()
def attention_added(
    model: LanguageModel, ids: Sequence[int], kv: Tensor, start_kv: Tensor, tokens: int
) -> Tensor:
    """Return entries [L, 2, H_kv, N, D] to stand beside a cartridge [L, 2, H_kv, G, D] that keeps
    its own, so that both together attend like the document, of N = `tokens`.

    A prompt starts at position G + N after both. `start_kv` has the keys that it will have there.
    """
    offset = len(ids) - start_kv.shape[3] - tokens
    rows = reference_rows(model, ids, kv)
    # Where the document's reference rows see the cartridge as a prompt will.
    given_there = shifted(start_kv, offset, model.frequencies())

    def fit(item: tuple[Tensor, ReferenceRows, Tensor]) -> Tensor:
        return fitted(*item, tokens=tokens)

    layers = [*concurrently(fit, zip(kv, rows, given_there, strict=True), most_beside(kv.device))]
    return shifted(torch.stack(layers), -offset, model.frequencies())


def row_starts(tokens: int) -> list[int]:
    """Return where the rows of a document of T tokens begin: every ROW tokens, at most MOST_ROWS,
    evenly spaced from its first token to its last."""
    count = min(MOST_ROWS, -(-tokens // ROW))
    free = max(0, tokens - ROW)
    return [free * i // max(1, count - 1) for i in range(count)]


def reference_rows(model: LanguageModel, ids: Sequence[int], kv: Tensor) -> list[ReferenceRows]:
    """Read a document's rows again behind its KV [L, 2, H_kv, T, D], which see no other row; return
    each layer's. All ranks of a divided base must call it."""
    row = min(ROW, len(ids))
    starts = row_starts(len(ids))
    heads = model.own_heads(kv)

    scales: dict[int, float] = {}

    def read(first: int) -> list[list[Tensor]]:
        batch = starts[first : first + AT_ONCE]
        flat = torch.tensor([t for s in batch for t in ids[s : s + row]], device=model.device)
        positions = torch.arange(len(ids), len(ids) + row, device=model.device).repeat(len(batch))
        of_layers: list[list[Tensor]] = []

        def keep(layer: int, *captured: Tensor) -> None:
            parts = [torch.unflatten(x, 0, (len(batch), row)).transpose(1, 2) for x in captured]
            of_layers.append(parts)

        reading = FlatAttention([row] * len(batch), [len(batch)], positions, [heads], observer=keep)
        model(flat, positions, reading)
        scales.update(reading.scales)
        return of_layers

    passes = passes_beside(model, row * len(starts))
    by_layer = zip(*concurrently(read, range(0, len(starts), AT_ONCE), passes), strict=True)
    layers = []
    for layer, parts in enumerate(by_layer):
        q, k, v, out = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        if (ranks := model.tensor) is not None:
            q, k, v, out = (ranks.whole(x, 1) for x in (q, k, v, out))
        layers.append(ReferenceRows(q * scales[layer], torch.stack([k, v], dim=1), out))
    return layers


def compacted(kv: Tensor, rows: ReferenceRows, tokens: int, frozen: int) -> Tensor:
    """Return one layer's KV [2, H_kv, T, D] compacted to [2, H_kv, P, D], keys at their old
    positions."""
    frozen_kv = kv[:, :, :frozen]
    return torch.cat([frozen_kv, fitted(kv, rows, frozen_kv, tokens - frozen, first=frozen)], dim=2)


def fitted(kv: Tensor, rows: ReferenceRows, extra: Tensor, tokens: int, first: int = 0) -> Tensor:
    """Return entries [2, H_kv, N, D] of one layer's document, from its token `first` on, to stand
    beside `extra` [2, H_kv, G, D]."""
    queries, outputs = (
        torch.unflatten(x, 1, (kv.shape[1], -1)) for x in (rows.queries, rows.outputs)
    )
    heads = [
        _head(kv[:, h], queries[:, h], rows.own[:, :, h], outputs[:, h], extra[:, h], tokens, first)
        for h in range(kv.shape[1])
    ]
    return torch.stack(heads, dim=1).to(kv.dtype)


def _head(
    kv: Tensor, queries: Tensor, context_keys: Tensor, outputs: Tensor, extra: Tensor, tokens: int,
    first: int,
) -> Tensor:  # fmt: skip
    """Return one head's [2, N, D] of a document [2, T, D], beside `extra` [2, G, D], for the
    queries [R, S, t, D] of the S query heads that share it, the rows' own [R, 2, t, D] and the
    outputs [R, S, t, D]: sums over rows and the solution in float64, the rest in float32 or wider;
    but the scores that choose keys are as precise as the document's numbers."""
    parts = list(
        zip(*(torch.split(x, AT_ONCE) for x in (queries, context_keys, outputs)), strict=True)
    )
    mass = torch.zeros(kv.shape[1], dtype=torch.float64, device=kv.device)
    for query_part, context_part, _ in parts:
        mass += _squares(query_part, context_part, kv[0])
    mass[:first] = -torch.inf
    chosen = mass.topk(tokens).indices.sort().values
    keys, values = kv[:, chosen].to(_wide(kv))
    all_keys, all_values = (torch.cat(x) for x in zip((keys, values), extra.to(keys), strict=True))
    gram = mass.new_zeros(tokens, tokens)
    wrong = mass.new_zeros(tokens, keys.shape[1])
    for query_part, context_part, target in parts:
        weights, ours = _attended(query_part.to(keys), context_part.to(keys), all_keys, all_values)
        on_kept = weights[:, :tokens]
        gram += on_kept.T @ on_kept
        wrong += on_kept.T @ (target.reshape(ours.shape) - ours)
    # Ridge towards the kept keys' own values: a key without attention keeps its value.
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    moved = torch.linalg.solve(gram + RIDGE * gram.diagonal().mean() * identity, wrong)
    return torch.stack([keys, (values + moved).to(keys)])


def _squares(queries: Tensor, context_keys: Tensor, keys: Tensor) -> Tensor:
    """Return the sums [K] over the queries [R, S, t, D] of their squared attention weights on the
    keys [K, D], beside each row's own [R, 2, t, D]."""
    scores = _scores(queries, context_keys, keys)
    # In place: new memory would cost as much. `exp2` takes a third of the time of `exp` on a CPU.
    scores.sub_(scores.amax(-1, keepdim=True)).mul_(LOG2_E).exp2_()
    total = scores.sum(-1)
    return total.square_().reciprocal_() @ scores[:, : len(keys)].square_()


def _attended(
    queries: Tensor, context_keys: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention weights [R*S*t, K] of queries [R, S, t, D] over keys and values [K, D],
    and the outputs [R*S*t, D] over those and each row's own [R, 2, t, D], of which a query sees
    none after its token."""
    count, shared, t, _ = queries.shape
    weights, context_weights = torch.split(
        _scores(queries, context_keys, keys).softmax(-1), [len(keys), t], dim=1
    )
    read_own = torch.unflatten(context_weights, 0, (count, shared, t)) @ context_keys[:, 1, None]
    return weights, weights @ values + read_own.flatten(0, 2)


def _scores(queries: Tensor, context_keys: Tensor, keys: Tensor) -> Tensor:
    """Return the scores [R*S*t, K + t] of queries [R, S, t, D] on keys [K, D] and on those of each
    row's own [R, 2, t, D], in float32 or wider."""
    count, shared, t, width = queries.shape
    scores = queries.new_empty(count * shared * t, len(keys) + t, dtype=_wide(queries))
    scores[:, : len(keys)] = queries.reshape(-1, width) @ keys.T
    later = torch.ones(t, t, dtype=torch.bool, device=keys.device).triu(1)
    context_scores = (queries @ context_keys[:, None, 0].mT).masked_fill(later, -torch.inf)
    scores[:, len(keys) :] = context_scores.flatten(0, 2)
    return scores


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
