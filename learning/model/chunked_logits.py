"""Project hidden states to the vocabulary in chunks, so that not all logits exist at once.

With a vocabulary of 128K the logits of one token take half a megabyte, and those of a batch more
than its model. The losses need a few numbers per token. Logits are therefore computed for a chunk
of tokens, read, dropped, and computed again in the backward pass. This costs one more projection,
and memory of a few times a chunk's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LOGIT_BYTES = 4  # float32

# Computes [n] tensors from n tokens' logits [n, V]. The slice gives their place among the tokens
# that are read.
Reader = Callable[[Tensor, slice], tuple[Tensor, ...]]


@dataclass(frozen=True)
class ChunkedLogits:
    """Hold N tokens' hidden states [N, width] and the tokens [N] that they predict. `project`
    computes logits [n, V] in float32 of [n, width]. `chunk` is the most tokens whose logits exist
    at a time; None: all of them, computed once."""

    hidden: Tensor
    targets: Tensor
    project: Callable[[Tensor], Tensor]
    chunk: int | None = None
    _logprobs: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def logits(self) -> Tensor:
        """Return all tokens' logits, [N, V]."""
        return self.project(self.hidden)

    def read(self, rows: slice | Tensor, reader: Reader) -> tuple[Tensor, ...]:
        """Return what `reader` computes for the tokens `rows`, in their order. A reader is called
        once for each chunk, and again in the backward pass: it must be deterministic and have no
        side effects."""
        if self.chunk is None or len(self.hidden) <= self.chunk:
            logits = self.logits[rows]
            return reader(logits, slice(0, len(logits)))
        hidden = self.hidden[rows]

        def one(part: Tensor, of: slice) -> tuple[Tensor, ...]:
            return reader(self.project(part), of)

        parts = []
        for start in range(0, max(len(hidden), 1), self.chunk):  # no tokens: one empty chunk
            of = slice(start, min(start + self.chunk, len(hidden)))
            parts.append(
                checkpoint(one, hidden[of], of, use_reentrant=False, preserve_rng_state=False)
            )
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def logprobs(self, at: slice | Tensor, first: int = 0) -> Tensor:
        """Return the log-probabilities [n] of the tokens `at`, all at or after `first`. All tokens
        from `first` on are read once and kept for later calls."""
        if not any(start <= first for start in self._logprobs):
            rest = self.targets[first:]
            (self._logprobs[first],) = self.read(
                slice(first, None), lambda logits, of: (token_logprobs(logits, rest[of]),)
            )
        start = max(start for start in self._logprobs if start <= first)
        moved = slice(at.start - start, at.stop - start) if isinstance(at, slice) else at - start
        return self._logprobs[start][moved]


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability [N] of each target [N] under logits [N, V]."""
    return -F.cross_entropy(logits, targets.to(logits.device), reduction="none")


def chunk_tokens(vocabulary: int, max_bytes: int | None) -> int | None:
    """Return how many tokens' logits fit into `max_bytes`, at least 1; None for no bound."""
    return None if max_bytes is None else max(1, max_bytes // (LOGIT_BYTES * vocabulary))
