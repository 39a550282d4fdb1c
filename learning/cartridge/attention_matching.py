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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learning.cartridge.composition import shifted
from learning.model.attention import FlatAttention
from learning.model.decoder import LanguageModel

ROW = 64  # tokens of a row of reference queries: bounds the scores in memory at a time
MOST_ROWS = 128
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
    rows = [observe(model, part, kv) for part in reference_rows(ids)]
    layers = [
        compacted(kv[layer], [row[layer] for row in rows], tokens, frozen)
        for layer in range(len(kv))
    ]
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
    rows = [observe(model, part, kv) for part in reference_rows(ids)]
    layers = [
        fitted(kv[layer], [row[layer] for row in rows], tokens, beside[layer])
        for layer in range(len(kv))
    ]
    return shifted(torch.stack(layers), whole - kv.shape[3], of_model)


def reference_rows(ids: Sequence[int]) -> list[Sequence[int]]:
    """Split the document into rows of ROW tokens; return at most MOST_ROWS of them, evenly
    spaced."""
    starts = range(0, len(ids), ROW)
    step = -(-len(starts) // MOST_ROWS)
    return [ids[start : start + ROW] for start in starts[::step]]


def observe(model: LanguageModel, row: Sequence[int], kv: Tensor) -> list[ObservedAttention]:
    """Return each layer's attention inputs for a row that is read after a prefix
    [L, 2, H_kv, T, D]."""
    ids = torch.tensor(list(row), device=model.device)
    positions = torch.arange(kv.shape[3], kv.shape[3] + len(row), device=model.device)
    scale = model.kv_shape[2] ** -0.5
    found: list[ObservedAttention] = []

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        own = torch.stack([k.transpose(0, 1), v.transpose(0, 1)])
        found.append(ObservedAttention(q.transpose(0, 1) * scale, own))

    model(ids, positions, FlatAttention([len(ids)], [1], positions, [kv], observer=keep))
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
    """Return one head's [2, N, D] of a document [2, T, D], beside `given` [2, G, D], in float64."""
    keys, values = kv.double()
    seen = torch.zeros(len(keys), dtype=torch.float64, device=keys.device)
    for scores, own, _ in _scores(keys, rows, head):
        weights = torch.cat([scores, own], dim=-1).softmax(-1)[:, : len(keys)]
        seen += weights.square().sum(0)
    seen[:first] = -torch.inf
    kept = seen.topk(tokens).indices.sort().values
    beside_keys, beside = given.to(keys)
    gram = keys.new_zeros(tokens, tokens)
    wrong = keys.new_zeros(tokens, keys.shape[1])
    both = torch.cat([keys, beside_keys])
    for scores, own, own_values in _scores(both, rows, head):
        document, cartridge = scores.tensor_split([len(keys)], dim=-1)
        whole = torch.cat([document, own], dim=-1).softmax(-1)
        ours = torch.cat([document[:, kept], cartridge, own], dim=-1).softmax(-1)
        target = whole @ torch.cat([values, own_values])
        missing = target - ours @ torch.cat([values[kept], beside, own_values])
        on_kept = ours[:, :tokens]
        gram += on_kept.T @ on_kept
        wrong += on_kept.T @ missing
    # Ridge towards the kept keys' own values: a key without attention keeps its value.
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    moved = torch.linalg.solve(gram + ridge.to(gram.device), wrong)
    return torch.stack([keys[kept], values[kept] + moved])


def _scores(
    keys: Tensor, rows: Sequence[ObservedAttention], head: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield for each row, with the G query heads that share this KV head: scores [G*t, T] of the
    document's keys, [G*t, t] of the row's own keys (-inf for later ones), and the row's values
    [t, D]."""
    for row in rows:
        shared = len(row.queries) // row.own.shape[1]
        queries = row.queries[head * shared : (head + 1) * shared].double()
        own_keys, own_values = row.own[:, head].double()
        t = len(own_keys)
        later = torch.ones(t, t, dtype=torch.bool, device=keys.device).triu(1)
        own = (queries @ own_keys.T).masked_fill(later, float("-inf"))
        yield (queries @ keys.T).flatten(0, 1), own.flatten(0, 1), own_values
