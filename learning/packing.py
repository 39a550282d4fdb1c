"""Pack samples into rows over shared prefixes, and run the forward of student or teacher over them.

Samples of one document are laid into rows of at most `row_tokens` tokens. Every sample attends to
its prefix and itself, and its positions start where the prefix ends, so packing does not change its
result. Student and teacher logits are gathered in *sample order, response token by response token*:
index n means the same token for both, whatever the rows.

With a vocabulary of 128K the logits of one token take half a megabyte, and those of a batch more
than its model. The losses need a few numbers per token. Logits are therefore computed for a chunk
of tokens, read, dropped, and computed again in the backward pass. This costs one more projection,
and memory of a few times a chunk's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from learning.model.attention import PrefixContext, hidden_states, recomputing
from learning.model.distributed import vocabulary
from protocols.errors import DataError
from protocols.types import SEPARATOR, Sample

if TYPE_CHECKING:  # importing it takes seconds, which only code that loads a model should pay
    from transformers import PreTrainedModel

LOGIT_BYTES = 4  # float32
VALUE_BYTES = 2**24  # of logits whose exponentials exist at a time in `token_values`
# Computes [n] tensors from n tokens' logits [n, V]. The slice gives their place among the tokens
# that are read.
Reader = Callable[[Tensor, slice], tuple[Tensor, ...]]


@dataclass(frozen=True)
class PackedRows:
    """Hold C documents x R rows of T tokens. `ids`, `positions`, `segments` are [C*R, T].

    names[c]        the prefix that group c reads: by default a cartridge
    segments        which sample of its row a token belongs to; -1 is padding
    row, column     [N] the place of the token that *predicts* response token n
    targets         [N] the response tokens themselves
    """

    names: tuple[str, ...]
    ids: Tensor
    positions: Tensor
    segments: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor

    def only(self, needed: Tensor) -> PackedRows:
        """Return the same rows, with logits for the marked [N] response tokens only."""
        return replace(
            self, row=self.row[needed], column=self.column[needed], targets=self.targets[needed]
        )


def cartridge_of(sample: Sample) -> str:
    """Return the name of the sample's cartridge, the default prefix."""
    return sample.cartridge


def context_of(sample: Sample) -> str:
    """Return the name of what the document teacher reads before the sample's prompt. Raises
    DataError for a sample without a context."""
    if not sample.contexts:
        raise DataError(
            f"sample {sample.id} names no context for the document teacher to read; give it the "
            "document or chunk that its prompt is about"
        )
    return SEPARATOR.join(sample.contexts)


def pack(
    samples: Sequence[Sample],
    prefix_tokens: Mapping[str, int],
    row_tokens: int,
    prefix: Callable[[Sample], str] = cartridge_of,
) -> PackedRows:
    """Lay samples into rows, first fit by decreasing length within each prefix. Samples with the
    same tokens over the same prefix share a place, wherever prompt ends and response begins: an
    episode that two channels train on is read once.

    `prefix` names a sample's prefix where that is not its cartridge alone. `prefix_tokens[name]` is
    the length of that prefix, the first position of its samples. Without samples the result is a
    row of one token that predicts none. Raises DataError for a sample longer than a row, or one
    without prompt or response.
    """
    check_rows(samples, row_tokens)
    if not samples:
        return _one_token(*min(prefix_tokens.items()))
    names = tuple(sorted({prefix(s) for s in samples}))
    rows_of: dict[str, list[list[int]]] = {name: [] for name in names}
    room: dict[str, list[int]] = {name: [] for name in names}
    laid: dict[tuple[str, tuple[int, ...]], int] = {}  # text -> the first sample that has it
    same = [
        laid.setdefault((prefix(s), s.prompt_ids + s.response_ids), i)
        for i, s in enumerate(samples)
    ]
    for i in sorted(laid.values(), key=lambda i: (-_length(samples[i]), i)):
        name, length = prefix(samples[i]), _length(samples[i])
        fits = next((r for r, free in enumerate(room[name]) if free >= length), None)
        if fits is None:
            rows_of[name].append([])
            room[name].append(row_tokens)
            fits = len(room[name]) - 1
        rows_of[name][fits].append(i)
        room[name][fits] -= length

    per = max(len(rows) for rows in rows_of.values())
    width = max(row_tokens - min(free) for free in room.values())
    ids = torch.zeros(len(names) * per, width, dtype=torch.long)
    positions = torch.zeros_like(ids)
    segments = torch.full_like(ids, -1)
    first: dict[int, tuple[int, int]] = {}  # sample -> (row, column of its first token)
    for c, name in enumerate(names):
        for r, members in enumerate(rows_of[name]):
            row, at = c * per + r, 0
            for segment, i in enumerate(members):
                tokens = samples[i].prompt_ids + samples[i].response_ids
                stop = at + len(tokens)
                ids[row, at:stop] = torch.tensor(tokens)
                positions[row, at:stop] = torch.arange(len(tokens)) + prefix_tokens[name]
                segments[row, at:stop] = segment
                first[i] = (row, at)
                at = stop
    row_of: list[int] = []
    column_of: list[int] = []
    targets: list[int] = []
    for i, s in enumerate(samples):
        row, begin = first[same[i]]
        column = begin + len(s.prompt_ids)
        row_of += [row] * len(s.response_ids)
        column_of += range(column - 1, column - 1 + len(s.response_ids))
        targets += s.response_ids
    return PackedRows(
        names, ids, positions, segments,
        torch.tensor(row_of), torch.tensor(column_of), torch.tensor(targets),
    )  # fmt: skip


def text_of(sample: Sample) -> tuple[str, tuple[int, ...]]:
    """Return what a forward reads of a sample: its cartridge and its tokens."""
    return sample.cartridge, sample.prompt_ids + sample.response_ids


def check_rows(samples: Iterable[Sample], row_tokens: int) -> None:
    """Raise DataError for a sample longer than a row, or one without prompt or response."""
    for s in samples:
        length = len(s.prompt_ids) + len(s.response_ids)
        if not s.prompt_ids or not s.response_ids:
            raise DataError(f"sample {s.id} has an empty prompt or response: nothing to train on")
        if length > row_tokens:
            raise DataError(
                f"sample {s.id} has {length} tokens and a row holds {row_tokens}; raise "
                "train.row_tokens or lower rollout.max_tokens"
            )


def _one_token(name: str, position: int) -> PackedRows:
    none = torch.zeros(0, dtype=torch.long)
    one = torch.zeros(1, 1, dtype=torch.long)
    return PackedRows((name,), one, one + position, one, none, none, none)


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def response_logits(
    model: PreTrainedModel, packed: PackedRows, kv: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Return logits [N, V] in float32 that predict each response token, in sample order. kv
    [C, L, 2, H_kv, P, D] is in the order of `packed.names`, `lengths` as in PrefixContext. Gradient
    flows into `kv` when it requires it."""
    return response_tokens(model, packed, kv, lengths).logits


def response_tokens(
    model: PreTrainedModel,
    packed: PackedRows,
    kv: Tensor,
    lengths: Tensor | None = None,
    *,
    logit_bytes: int | None = None,
    recompute_layers: bool = False,
    noting: bool = False,
) -> ChunkedLogits:
    """Return the logits of `response_logits`, to be read in chunks of at most `logit_bytes`. With
    `recompute_layers` each layer keeps only its input for the backward pass; `noting` is for
    `ChunkedLogits.observed`."""
    device, length = model.device, packed.ids.shape[1]
    segments = packed.segments.to(device)
    same = segments[:, :, None] == segments[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    with recomputing(model) if recompute_layers else nullcontext():
        hidden = hidden_states(
            model,
            packed.ids.to(device),
            packed.positions.to(device),
            (same & causal)[:, None],
            PrefixContext(kv=kv, lengths=lengths),
        )
    chunk = chunk_tokens(model.config.vocab_size, logit_bytes)
    return ChunkedLogits(
        hidden[packed.row, packed.column], packed.targets, vocabulary(model), chunk, noting
    )


@dataclass(frozen=True)
class ChunkedLogits:
    """Hold N tokens' hidden states [N, width] and the tokens [N] that they predict. `project`
    computes logits [n, V] in float32 of [n, width]. `chunk` is the most tokens whose logits exist
    at a time; None: all of them, computed once. `noting` keeps each token's log-probability when
    its logits are read, for `observed`."""

    hidden: Tensor
    targets: Tensor
    project: Callable[[Tensor], Tensor]
    chunk: int | None = None
    noting: bool = False
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
        places = torch.arange(len(self.hidden))[rows]

        def one(part: Tensor, of: slice) -> tuple[Tensor, ...]:
            logits = self.project(part)
            if self.noting:
                self._note(places[of], logits)
            return reader(logits, of)

        parts = []
        for start in range(0, max(len(hidden), 1), self.chunk):  # no tokens: one empty chunk
            of = slice(start, min(start + self.chunk, len(hidden)))
            parts.append(
                checkpoint(one, hidden[of], of, use_reentrant=False, preserve_rng_state=False)
            )
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def observed(self) -> Tensor:
        """Return the log-probabilities [N] of all tokens, on the host and without gradient. Those
        of logits that were read before cost no further projection, and no loss changes by a bit."""
        if self.chunk is None or len(self.hidden) <= self.chunk:
            if 0 in self._logprobs:
                return self._logprobs[0].detach().cpu()
            return token_values(self.logits, self.targets).cpu()
        values, noted = self._noted
        for places in torch.split((~noted).nonzero().flatten(), self.chunk):
            with torch.no_grad():
                self._note(places, self.project(self.hidden[places.to(self.hidden.device)]))
        return values.cpu()

    @cached_property
    def _noted(self) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities [N] noted so far, and which they are."""
        tokens = len(self.hidden)
        values = torch.zeros(tokens, device=self.hidden.device)
        return values, torch.zeros(tokens, dtype=torch.bool)

    def _note(self, places: Tensor, logits: Tensor) -> None:
        """Note the log-probabilities of the tokens `places` [n] from their logits [n, V], unless
        they are noted: a backward pass computes the logits again."""
        values, noted = self._noted
        if not noted[places].all():
            values[places.to(values.device)] = token_values(logits, self.targets[places])
            noted[places] = True

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


@torch.no_grad()
def token_values(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the values of `token_logprobs`, without gradient and with little memory."""
    rows = chunk_tokens(logits.shape[-1], VALUE_BYTES)
    parts = [part.logsumexp(-1) for part in torch.split(logits, rows or 1)]
    picked = logits.gather(-1, targets.to(logits.device)[:, None])[:, 0]
    return picked - torch.cat(parts)


def chunk_tokens(vocabulary: int, max_bytes: int | None) -> int | None:
    """Return how many tokens' logits fit into `max_bytes`, at least 1; None for no bound."""
    return None if max_bytes is None else max(1, max_bytes // (LOGIT_BYTES * vocabulary))
