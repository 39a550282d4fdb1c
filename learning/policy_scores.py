"""Compute the log-probabilities that the trainer itself adds to a batch, without gradient.

    old    under the cartridges before a rollout's first update: the version that sampled it

They are of all response tokens of the batch's episodes, in order. Every rank reads its share of the
episodes and gets all numbers, which do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learning.model.distributed import ALONE, ProcessGroup, is_sharded
from learning.packing import check_rows
from learning.scoring import response_logprobs
from protocols.types import Sample

if TYPE_CHECKING:  # importing it takes seconds, which only code that loads a model should pay
    from transformers import PreTrainedModel


def shared_logprobs(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    names: Sequence[str],
    kv: Tensor,
    *,
    row_tokens: int,
    micro_tokens: int | None = None,
    ranks: ProcessGroup = ALONE,
) -> Tensor:
    """Return the log-probability [N] (float32) of every response token over the cartridges `kv`
    [C, L, 2, H_kv, P, D] of the documents `names`. One forward reads at most `micro_tokens` tokens,
    or one longer sample; None: all samples. Raises DataError for a sample longer than a row."""
    check_rows(samples, row_tokens)
    prefixes = dict(zip(names, kv.detach().to(model.dtype), strict=True))
    begins = [0]
    for s in samples:
        begins.append(begins[-1] + len(s.response_ids))
    found = torch.zeros(begins[-1], dtype=torch.float32, device=model.device)
    parts = _parts(samples, micro_tokens)
    rounds = -(-len(parts) // ranks.world)
    for turn in range(rounds):
        at = turn * ranks.world + ranks.rank
        part = parts[at] if at < len(parts) else range(0)
        if not part and not is_sharded(model):
            continue  # a sharded base is gathered by all ranks in every pass
        logprobs = response_logprobs(model, [samples[i] for i in part], prefixes, row_tokens)
        if part:
            found[begins[part.start] : begins[part.stop]] = logprobs
    ranks.add(found)
    return found


def _parts(samples: Sequence[Sample], micro_tokens: int | None) -> list[range]:
    """Return runs of samples that one forward reads."""
    if micro_tokens is None:
        return [range(len(samples))] if samples else []
    parts: list[range] = []
    room = 0
    for i, s in enumerate(samples):
        length = len(s.prompt_ids) + len(s.response_ids)
        if not parts or length > room:
            parts.append(range(i, i))
            room = micro_tokens
        parts[-1] = range(parts[-1].start, i + 1)
        room -= length
    return parts
