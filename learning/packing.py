"""Pack samples into one flat list of tokens, and run the forward of student or teacher over it.

Sequences over one prefix lie side by side. Every one attends to its prefix and itself, and its
positions start where the prefix ends, so packing does not change its result, and nothing is padded.
Student and teacher logits are gathered in *sample order, response token by response token*: index n
means the same token for both, wherever it lies.

With a vocabulary of 128K the logits of one token take half a megabyte, and those of a batch more
than its model. The losses need a few numbers per token. Logits are therefore computed for a chunk
of tokens, read, dropped, and computed again in the backward pass. This costs one more projection,
and memory of a few times a chunk's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from learning.attention import FlatAttention
from learning.decoder import LanguageModel, recomputing
from protocols.errors import DataError
from protocols.types import SEPARATOR, Sample, require_ids

LOGIT_BYTES = 4  # float32
VALUE_BYTES = 2**24  # of logits whose exponentials exist at a time in `token_values`
# Computes [n] tensors from n tokens' logits [n, V]. The slice gives their place among the tokens
# that are read.
Reader = Callable[[Tensor, slice], tuple[Tensor, ...]]


@dataclass(frozen=True)
class PackedTokens:
    """Hold N tokens of S sequences over C prefixes, sequence by sequence and prefix by prefix.

    names[c]        the prefix that group c reads: by default a cartridge
    counts[c]       how many sequences read it
    lengths         the sequences' tokens
    ids, positions  [N]; the last response token predicts none, and is left out
    predicts        [n] the token that predicts response token n
    targets         [n] the response tokens themselves
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    ids: Tensor
    positions: Tensor
    predicts: Tensor
    targets: Tensor

    def only(self, needed: Tensor) -> PackedTokens:
        """Return the same tokens, with logits for the marked [n] response tokens only."""
        return replace(self, predicts=self.predicts[needed], targets=self.targets[needed])


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
) -> PackedTokens:
    """Lay samples side by side, by prefix and then longest first. Samples with the same tokens over
    the same prefix share a place, wherever prompt ends and response begins: an episode that two
    channels train on is read once.

    `prefix` names a sample's prefix where that is not its cartridge alone. `prefix_tokens[name]` is
    the length of that prefix, the first position of its samples. Without samples the result is one
    token that predicts none. Raises DataError for a sample of more than `row_tokens` tokens, or one
    without prompt or response.
    """
    check_rows(samples, row_tokens)
    if not samples:
        return _one_token(*min(prefix_tokens.items()))
    laid: dict[tuple[str, tuple[int, ...]], int] = {}  # text -> the first sample that has it
    same = [
        laid.setdefault((prefix(s), s.prompt_ids + s.response_ids), i)
        for i, s in enumerate(samples)
    ]
    names = tuple(sorted({name for name, _ in laid}))
    order = sorted(laid.values(), key=lambda i: (prefix(samples[i]), -tokens_of(samples[i]), i))
    ids: list[int] = []
    positions: list[int] = []
    first: dict[int, int] = {}  # sample -> its first token
    for i in order:
        s = samples[i]
        tokens = (s.prompt_ids + s.response_ids)[:-1]
        first[i], start = len(ids), prefix_tokens[prefix(s)]
        ids += tokens
        positions += range(start, start + len(tokens))
    predicts: list[int] = []
    for i, s in enumerate(samples):
        begin = first[same[i]] + len(s.prompt_ids) - 1
        predicts += range(begin, begin + len(s.response_ids))
    count = Counter(name for name, _ in laid)
    return PackedTokens(
        names,
        tuple(count[name] for name in names),
        tuple(tokens_of(samples[i]) - 1 for i in order),
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(predicts),
        torch.tensor([t for s in samples for t in s.response_ids]),
    )


def even_parts(lengths: Sequence[int], prefixes: Sequence[str], count: int) -> list[list[int]]:
    """Return the indices of texts in `count` parts of about equally many tokens, fewer where there
    are fewer texts. Texts over one prefix lie together: at most `count` - 1 prefixes are in two
    parts or more."""
    parts: list[list[int]] = [[] for _ in range(count)]
    whole, before = max(1, sum(lengths)), 0
    for i in sorted(range(len(lengths)), key=lambda i: (prefixes[i], i)):
        middle = before + lengths[i] / 2
        parts[min(count - 1, int(middle * count / whole))].append(i)
        before += lengths[i]
    return [sorted(part) for part in parts if part]


def text_of(sample: Sample) -> tuple[str, tuple[int, ...]]:
    """Return what a forward reads of a sample: its cartridge and its tokens."""
    return sample.cartridge, sample.prompt_ids + sample.response_ids


def check_rows(samples: Iterable[Sample], row_tokens: int) -> None:
    """Raise DataError for a sample of more than `row_tokens` tokens, or one without prompt or
    response."""
    for s in samples:
        length = len(s.prompt_ids) + len(s.response_ids)
        if not s.prompt_ids or not s.response_ids:
            raise DataError(f"sample {s.id} has an empty prompt or response: nothing to train on")
        if length > row_tokens:
            raise DataError(
                f"sample {s.id} has {length} tokens of prompt and response, and train.row_tokens "
                f"allows {row_tokens}; raise train.row_tokens or lower rollout.max_tokens"
            )


def check_ids(samples: Iterable[Sample], model: LanguageModel) -> None:
    """Raise DataError for a sample with a token id that the model does not have."""
    for s in samples:
        for ids, part in ((s.prompt_ids, "prompt"), (s.response_ids, "response")):
            require_ids(ids, model.vocabulary, f"the {part} of sample {s.id}")


def _one_token(name: str, position: int) -> PackedTokens:
    none = torch.zeros(0, dtype=torch.long)
    one = torch.zeros(1, dtype=torch.long)
    return PackedTokens((name,), (1,), (1,), one, one + position, none, none)


def tokens_of(sample: Sample) -> int:
    """Return the tokens of a sample's prompt and response."""
    return len(sample.prompt_ids) + len(sample.response_ids)


def response_logits(
    model: LanguageModel, packed: PackedTokens, prefixes: Sequence[Tensor]
) -> Tensor:
    """Return logits [n, V] in float32 that predict each response token, in sample order. Prefixes
    [L, 2, H_kv, P_c, D] are in the order of `packed.names`. Gradient flows into those that require
    it."""
    return response_tokens(model, packed, prefixes).logits


def response_tokens(
    model: LanguageModel,
    packed: PackedTokens,
    prefixes: Sequence[Tensor],
    *,
    logit_bytes: int | None = None,
    recompute_layers: bool = False,
    noting: bool = False,
) -> ChunkedLogits:
    """Return the logits of `response_logits`, to be read in chunks of at most `logit_bytes`. With
    `recompute_layers` each layer keeps only its input for the backward pass; `noting` is for
    `ChunkedLogits.observed`."""
    device = model.device
    read, places = torch.unique(packed.predicts, return_inverse=True)
    if not len(read):  # a pass runs all the same where ranks gather the base together
        read = torch.zeros(1, dtype=torch.long)
    positions, read = packed.positions.to(device), read.to(device)
    own = [model.own_heads(kv) for kv in prefixes]
    attention = FlatAttention(packed.lengths, packed.counts, positions, own, read)
    with recomputing(model) if recompute_layers else nullcontext():
        hidden = model(packed.ids.to(device), positions, attention, read)
    chunk = chunk_tokens(model.vocabulary, logit_bytes)
    return ChunkedLogits(
        hidden[places.to(device)], packed.targets, model.projection(), chunk, noting
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
