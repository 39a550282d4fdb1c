"""Keep the entries of a document's KV that published rules rank first, without training.

snapkv   entries that the text's last tokens attend to (Li et al., arXiv:2404.14469)
kvzip    entries that the model attends to while it repeats the text (Kim et al., arXiv:2505.23416)

These are the rules and not the authors' code: each head keeps equally many entries, which both
papers have as a variant, and the first entry of all is kept. The prompt follows at position P, so
kept keys are moved to the distance from it that they had behind the whole document.

Dimensions: L layers, H_kv key/value heads, S query heads that share one, D numbers of a head, T
tokens of the document, P of the prefix, M queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.cartridge import shifted
from cartridge_forge.learning.decoder import LanguageModel

WINDOW = 32  # last tokens of the text whose attention counts
POOLED = 7  # neighbouring entries that share their score, as the paper's kernel
CHUNK = 512  # tokens of the text that are repeated in one pass

# (layer, attention weights [H_kv, S, M, T] of queries on the document, as shares of all they read)
Visit = Callable[[int, Tensor], None]


@torch.no_grad()
def visit_attention(
    model: LanguageModel, kv: Tensor, ids: Sequence[int], read: int, visit: Visit
) -> None:
    """Let `visit` see how the last `read` tokens of `ids`, read after a document's KV
    [L, 2, H_kv, T, D], attend to it."""
    tokens = torch.tensor(list(ids), device=model.device)
    length = kv.shape[3]
    positions = length + torch.arange(len(ids), device=model.device)

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        queries = q[-read:].transpose(0, 1).unflatten(0, (kv.shape[2], -1))  # [H_kv, S, M, D]
        keys = torch.cat([kv[layer, 0], k.transpose(0, 1)], dim=1)  # [H_kv, T + N, D]
        scores = queries @ keys[:, None].transpose(-1, -2) * attention.scales[layer]
        later = torch.ones(read, len(ids), dtype=torch.bool, device=q.device).triu(
            len(ids) - read + 1
        )
        scores[..., length:].masked_fill_(later, float("-inf"))
        visit(layer, scores.float().softmax(-1)[..., :length])

    attention = FlatAttention([len(ids)], [1], positions, [kv], observer=observe)
    model(tokens, positions, attention)


def best_entries(model: LanguageModel, kv: Tensor, scores: Tensor, tokens: int) -> Tensor:
    """Return the prefix [L, 2, H_kv, P, D] of the P = `tokens` entries with the highest scores
    [L, H_kv, T] of each head, in their order; the first entry is one of them."""
    scores = scores.clone()
    scores[..., 0] = float("inf")
    places = scores.topk(tokens, dim=-1).indices.sort(dim=-1).values  # [L, H_kv, P]
    places = places[:, None, :, :, None].expand(-1, 2, -1, -1, kv.shape[-1])
    return shifted(kv.gather(3, places), tokens - kv.shape[3], model.frequencies())


def snapkv(model: LanguageModel, kv: Tensor, ids: Sequence[int], tokens: int) -> Tensor:
    """Return the prefix [L, 2, H_kv, P, D] of a document's KV and its T ids: the last entries, and
    those before that their queries attend to most, averaged over queries and neighbours."""
    window = min(WINDOW, tokens // 2)
    earlier = kv[:, :, :, : kv.shape[3] - window]
    scores = torch.full(kv.shape[0:1] + kv.shape[2:4], float("inf"), device=kv.device)

    def visit(layer: int, weights: Tensor) -> None:
        mean = weights.mean(dim=(1, 2))  # [H_kv, T - window]
        pooled = F.avg_pool1d(mean[:, None], POOLED, stride=1, padding=POOLED // 2)[:, 0]
        scores[layer, :, : pooled.shape[-1]] = pooled

    visit_attention(model, earlier, ids[-window:], window, visit)
    return best_entries(model, kv, scores, tokens)


def kvzip(
    model: LanguageModel, kv: Tensor, ids: Sequence[int], tokens: int, cue: Sequence[int]
) -> Tensor:
    """Return the prefix [L, 2, H_kv, P, D] of the entries with the highest attention weight of any
    query that repeats the document's T ids after the tokens `cue`, a chunk at a time."""
    scores = torch.zeros(kv.shape[0:1] + kv.shape[2:4], device=kv.device)

    def visit(layer: int, weights: Tensor) -> None:
        scores[layer] = torch.maximum(scores[layer], weights.amax(dim=(1, 2)))

    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        visit_attention(model, kv, (*cue, *chunk), len(chunk), visit)
    return best_entries(model, kv, scores, tokens)
