"""Draw tokens as the embedded backend does, for an engine that decodes greedily; without vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learning.decoding.decode_batch import draw
from protocols.types import Sampling


@dataclass(frozen=True)
class SeededRow:
    """Hold a row of a batch whose next token is drawn.

    `uniforms` are the request's draws (`learning.decoding.decode_batch.uniforms`). `tokens` is a
    list that the engine keeps filling, so its length is the index of the next draw.
    """

    sampling: Sampling
    uniforms: Tensor
    tokens: Sequence[int]


def leave_drawn(logits: Tensor, rows: Mapping[int, SeededRow]) -> Tensor:
    """Return logits [B, V], changed in place, in which each drawn row allows only its drawn token.

    Draw t of a request depends on its seed and t alone: not on the rest of the batch, nor on
    chunked prefill, nor on preemptions.
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
