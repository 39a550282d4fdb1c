"""Compact a document's KV to P entries in closed form, without training (attention matching).

After Zweiger et al., "Fast KV Compaction via Attention Matching" (2026), per layer and KV head:

    queries   of the document's own tokens, read again in rows after the document
    keys      the P document keys whose attention weights have the largest root mean square
    values    least-squares fit, so that the attention outputs equal those over the whole document

The paper also gives each kept key a bias that carries the attention mass of the dropped keys. A
cartridge has no field for a bias. The fit therefore matches outputs after a softmax over prefix and
row together, where the lost mass shows, and the values compensate for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learning.cartridge.composition import shifted
from learning.model.attention import FlatAttention
from learning.model.decoder import LanguageModel

ROW = 64  # tokens of a row of reference queries
MOST_ROWS = 32  # of a page's 63: KL over it rose by 2.3 and 0.1% (docs/log.md)
AT_ONCE = 8  # rows of a forward pass
RIDGE = 1e-4  # times the mean diagonal of the normal equations


@dataclass(frozen=True)
class ObservedAttention:
    """Hold the attention inputs of one row of t tokens in one layer. `queries` [H_q, t, D] are
    times the layer's scale; `own` [2, H_kv, t, D] has the row's keys and values."""

    queries: Tensor
    own: Tensor


@torch.no_grad()
def attention_matched(
    model: LanguageModel, ids: Sequence[int], kv: Tensor, tokens: int, frozen: int
) -> Tensor:
    """Return a cartridge [L, 2, H_kv, P, D] made of a document's tokens `ids` and KV
    [L, 2, H_kv, T, D], P <= T.

    A prompt starts at position P after the cartridge and at T after the document. The kept keys are
    moved by P - T, so that every score equals the document's; the earliest get negative positions.
    The first `frozen` entries are the document's first, with their own values.
    """
    rows = observe(model, reference_rows(ids), kv)
    layers = [compacted(kv[layer], rows[layer], tokens, frozen) for layer in range(len(kv))]
    return shifted(torch.stack(layers), tokens - kv.shape[3], model.frequencies())


@torch.no_grad()
def attention_added(
    model: LanguageModel, ids: Sequence[int], kv: Tensor, given: Tensor, tokens: int
) -> Tensor:
    """Return entries [L, 2, H_kv, N, D] to stand beside a cartridge [L, 2, H_kv, G, D] that keeps
    its own, so that both together attend like the document, of N = `tokens`.

    A prompt starts at position G + N after both. `given` has the keys that it will have there.
    """
    whole = given.shape[3] + tokens
    of_model = model.frequencies()
    # Where the document's reference rows see the cartridge as a prompt will.
    beside = shifted(given, kv.shape[3] - whole, of_model)
    rows = observe(model, reference_rows(ids), kv)
    layers = [fitted(kv[layer], rows[layer], tokens, beside[layer]) for layer in range(len(kv))]
    return shifted(torch.stack(layers), whole - kv.shape[3], of_model)


def reference_rows(ids: Sequence[int]) -> list[Sequence[int]]:
    """Split the document into rows of ROW tokens; return at most MOST_ROWS of them, evenly
    spaced."""
    starts = range(0, len(ids), ROW)
    step = -(-len(starts) // MOST_ROWS)
    return [ids[start : start + ROW] for start in starts[::step]]


def observe(
    model: LanguageModel, rows: Sequence[Sequence[int]], kv: Tensor
) -> list[list[ObservedAttention]]:
    """Return each layer's attention inputs for each row, which is read after a prefix
    [L, 2, H_kv, T, D] and sees no other row."""
    scale = model.kv_shape[2] ** -0.5
    found: list[list[ObservedAttention]] = [[] for _ in range(len(kv))]
    for start in range(0, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        lengths = [len(row) for row in some]
        ids = torch.tensor([token for row in some for token in row], device=model.device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(model.device) + kv.shape[3]

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, lengths: list[int] = lengths) -> None:
            parts = (torch.split(x.transpose(0, 1), lengths, 1) for x in (q, k, v))
            for one in zip(*parts, strict=True):
                found[layer].append(ObservedAttention(one[0] * scale, torch.stack(one[1:])))

        model(ids, positions, FlatAttention(lengths, [len(some)], positions, [kv], observer=keep))
    return found


def compacted(kv: Tensor, rows: Sequence[ObservedAttention], tokens: int, frozen: int) -> Tensor:
    """Return one layer's KV [2, H_kv, T, D] compacted to [2, H_kv, P, D], keys at their old
    positions."""
    own = kv[:, :, :frozen]
    return torch.cat([own, fitted(kv, rows, tokens - frozen, own, first=frozen)], dim=2)


def fitted(
    kv: Tensor, rows: Sequence[ObservedAttention], tokens: int, given: Tensor, first: int = 0
) -> Tensor:
    """Return entries [2, H_kv, N, D] of one layer's document, from its token `first` on, to stand
    beside the `given` ones [2, H_kv, G, D]."""
    heads = [_head(kv[:, h], rows, h, tokens, given[:, h], first) for h in range(kv.shape[1])]
    return torch.stack(heads, dim=1).to(kv.dtype)


def _head(
    kv: Tensor,
    rows: Sequence[ObservedAttention],
    head: int,
    tokens: int,
    given: Tensor,
    first: int,
) -> Tensor:
    """Return one head's [2, N, D] of a document [2, T, D], beside `given` [2, G, D]: scores in
    float32 or wider, their sums over rows and the solution in float64."""
    keys, values = kv.to(torch.promote_types(kv.dtype, torch.float32))
    asked = [_asked(row, head, keys) for row in rows]
    whole = [torch.cat([q @ keys.T, own], dim=-1).softmax(-1) for q, own, _ in asked]
    seen = torch.zeros(len(keys), dtype=torch.float64, device=keys.device)
    for weights in whole:
        seen += weights[:, : len(keys)].square().sum(0)
    seen[:first] = -torch.inf
    kept = seen.topk(tokens).indices.sort().values
    beside_keys, beside = given.to(keys)
    near = torch.cat([keys[kept], beside_keys])
    gram = seen.new_zeros(tokens, tokens)
    wrong = seen.new_zeros(tokens, keys.shape[1])
    for (q, own, own_values), weights in zip(asked, whole, strict=True):
        ours = torch.cat([q @ near.T, own], dim=-1).softmax(-1)
        target = weights @ torch.cat([values, own_values])
        missing = target - ours @ torch.cat([values[kept], beside, own_values])
        on_kept = ours[:, :tokens]
        gram += on_kept.T @ on_kept
        wrong += on_kept.T @ missing
    # Ridge towards the kept keys' own values: a key without attention keeps its value.
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    moved = torch.linalg.solve(gram + ridge.to(gram.device), wrong)
    return torch.stack([keys[kept], (values[kept] + moved).to(keys)])


def _asked(row: ObservedAttention, head: int, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries [G*t, D] of the G query heads that share this KV head, their scores
    [G*t, t] of the row's own keys (-inf for later ones), and the row's values [t, D], in the type
    of `keys`."""
    shared = len(row.queries) // row.own.shape[1]
    queries = row.queries[head * shared : (head + 1) * shared].to(keys)
    own_keys, own_values = row.own[:, head].to(keys)
    t = len(own_keys)
    later = torch.ones(t, t, dtype=torch.bool, device=keys.device).triu(1)
    own = (queries @ own_keys.T).masked_fill(later, float("-inf"))
    return queries.flatten(0, 1), own.flatten(0, 1), own_values
