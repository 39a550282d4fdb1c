"""The embedded backend's draws, for an engine that chooses greedily. Pure: no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learning.decoding.sampling import draw
from protocols.types import Sampling


@dataclass(frozen=True)
class SeededRow:
    """A row of a batch whose next token is drawn.

    `uniforms` are all the request's draws (`learning.decoding.sampling.uniforms`), `tokens` the
    tokens so far: a list that the engine goes on filling, so its length says which draw is next.
    """

    sampling: Sampling
    uniforms: Tensor
    tokens: Sequence[int]


def leave_drawn(logits: Tensor, rows: Mapping[int, SeededRow]) -> Tensor:
    """In logits [B, V], leave each drawn row its drawn token alone to be chosen; in place.

    Draw t of a request is decided by its seed and t: by nothing else in the batch, nor by the
    chunks in which its prompt was read, nor by preemptions.
    """
    groups: dict[Sampling, list[int]] = {}
    for index, row in rows.items():
        groups.setdefault(row.sampling, []).append(index)
    for sampling, indices in groups.items():
        next_draws = [rows[i].uniforms[len(rows[i].tokens)] for i in indices]
        chosen = draw(logits[indices], torch.stack(next_draws).to(logits.device), sampling)
        logits[indices] = float("-inf")
        logits[indices, chosen] = 0.0
    return logits
