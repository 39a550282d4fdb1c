"""Decode requests together in lockstep, one token of each per forward pass.

    __init__  reads the prompts in one forward pass, left-padded; draws the first token of each row
    step      runs one forward pass of one token a row; draws the next token of each row
    merge     adds rows that started later (continuous batching)
    _drop     frees the memory of rows that have ended

A decode batch covers C prefixes, each held once; row b = c * per + r belongs to prefix c. Each row
draws from its own seeded stream, so its tokens do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learning.cartridge.composition import stack_prefixes
from learning.decoding.stopping import Decode, StopChecker
from learning.model.attention import DecodeCache, PrefixContext, hidden_states, kv_shape
from protocols.errors import DataError, PublishError
from protocols.types import Completion, GenerateRequest, PrefixRef, Sampling, TokenChunk, refused

if TYPE_CHECKING:  # importing it takes seconds, which only code that loads a model should pay
    from transformers import PreTrainedModel

Lookup = Callable[[PrefixRef], Tensor]
Served = Callable[[PrefixRef, Tensor], tuple[str, ...]]


def unserved(ref: PrefixRef, kv: Tensor) -> tuple[str, ...]:
    """Return no fingerprints: the `Served` of callers that compare none."""
    return ()


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    requests: Sequence[GenerateRequest],
    lookup: Lookup,
    end_ids: frozenset[int],
    decode: Decode | None = None,
    served: Served = unserved,
) -> list[Completion]:
    """Complete every request; return the completions in the order of the requests.

    `lookup` returns a prefix's keys and values [L, 2, H_kv, P, D], those of a composition already
    at their positions. If it raises PublishError, only the requests over that prefix are refused.
    `decode` returns the text of ids, for requests with `until`; `served` the fingerprints of a
    prefix from the keys and values that are decoded over. Raises DataError for an empty prompt.
    """
    rows = [new_row(r, decode) for r in requests]
    groups: dict[PrefixRef, list[DecodeState]] = {}
    for row in rows:
        groups.setdefault(row.request.prefix, []).append(row)
    if not rows:
        return []

    def found(ref: PrefixRef) -> Tensor | None:
        try:
            kv = lookup(ref)
        except PublishError as error:
            for row in groups[ref]:
                row.error = str(error)
            return None
        proof = served(ref, kv)
        for row in groups[ref]:
            row.served = proof
        return kv

    def decoded(prefixes: Sequence[Tensor], batch: Sequence[Sequence[DecodeState]]) -> None:
        lane = DecodeBatch(model, prefixes, batch, end_ids)
        while lane.live:
            lane.step()

    widest = max(len(g) for g in groups.values())
    if widest * len(groups) > 2 * len(rows):
        # Very uneven groups would fill a shared batch with dummy rows.
        for ref, group in groups.items():
            if (kv := found(ref)) is not None:
                decoded([kv], [group])
    else:
        prefixes = {ref: kv for ref in groups if (kv := found(ref)) is not None}
        if prefixes:
            decoded(list(prefixes.values()), [groups[r] for r in prefixes])
    return [row.completion() for row in rows]


@dataclass
class DecodeState:
    """Hold one request while it is decoded. `reason` is its finish reason, "" before the end."""

    request: GenerateRequest
    uniforms: Tensor  # [max_tokens] float64 in [0, 1): one draw for each token
    stopper: StopChecker | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_logprobs: tuple[float, ...] = ()
    prompt_likeliest: tuple[int, ...] = ()
    reason: str = ""
    ended_by: str = ""
    dropped: int = 0
    error: str = ""
    served: tuple[str, ...] = ()

    @property
    def top_wanted(self) -> int:
        """Return how many of the likeliest tokens are read at each position."""
        until = self.request.until
        return max(self.request.top_logprobs, until.top if until and until.window else 0)

    def add(
        self, token: int, logprob: float, top: tuple[tuple[int, float], ...], ends: bool
    ) -> None:
        """Append a drawn token with its log-probability; end the row if it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.request.top_logprobs:
            self.top.append(top[: self.request.top_logprobs])
        cut = None if self.stopper is None else self.stopper.add(token, [lp for _, lp in top])
        if ends:
            self.reason = "stop"
        elif cut is not None:
            self.reason, self.ended_by = "until", cut.by
            self.dropped = len(self.tokens) - cut.keep
            del self.tokens[cut.keep :], self.logprobs[cut.keep :], self.top[cut.keep :]
        elif len(self.tokens) == self.request.sampling.max_tokens:
            self.reason = "length"

    def came(self, first: int) -> TokenChunk:
        """Return the tokens from the `first`-th on."""
        return TokenChunk(
            self.request.id,
            first,
            tuple(self.tokens[first:]),
            tuple(self.logprobs[first:]),
            tuple(self.top[first:]),
        )

    def completion(self) -> Completion:
        if self.error:
            return refused(self.request, self.error)
        return Completion(
            request_id=self.request.id,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=(self.request.prefix.version,) * len(self.tokens),
            finish_reason=self.reason,
            prompt_logprobs=self.prompt_logprobs,
            prompt_likeliest=self.prompt_likeliest,
            served=self.served,
            top_logprobs=tuple(self.top),
            ended_by=self.ended_by,
            dropped=self.dropped,
        )


def new_row(request: GenerateRequest, decode: Decode | None) -> DecodeState:
    """Return the decode state of a request. Raises DataError for an empty prompt, and for `until`
    without a tokenizer to decode the text."""
    if not request.prompt_ids:
        raise DataError(f"request {request.id} has an empty prompt; give it a token")
    stopper = None
    if request.until is not None:
        if decode is None:
            raise DataError(f"request {request.id} ends by its text, and no tokenizer is here")
        stopper = StopChecker(request.until, decode)
    draws = uniforms(request.seed, request.sampling.max_tokens, request.first_draw)
    return DecodeState(request, draws, stopper)


class DecodeBatch:
    """Decode C groups of rows, each group over its prefix [L, 2, H_kv, P, D]; None fills shorter
    groups."""

    def __init__(
        self,
        model: PreTrainedModel,
        prefixes: Sequence[Tensor],
        groups: Sequence[Sequence[DecodeState]],
        end_ids: frozenset[int],
    ) -> None:
        """Read the prompts and draw the first token of every row."""
        self._model, self._end_ids, self._count = model, end_ids, len(groups)
        per = max(len(g) for g in groups)
        self.slots: list[DecodeState | None] = [
            group[r] if r < len(group) else None for group in groups for r in range(per)
        ]
        slots, device = self.slots, model.device
        kv, lengths = stack_prefixes(prefixes)
        starts = torch.tensor([p.shape[3] for p in prefixes for _ in range(per)], device=device)
        longest = max(len(s.request.prompt_ids) for s in slots if s)
        budget = max(s.request.sampling.max_tokens for s in slots if s)
        # Rows are left-padded; a dummy row has one token.
        prompts = [slot.request.prompt_ids if slot else (0,) for slot in slots]
        padding = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor(
            [[0] * left + [*prompt] for left, prompt in zip(padding, prompts, strict=True)],
            device=device,
        )
        self._pad = torch.tensor(padding, device=device)
        layers, heads, _ = kv_shape(model)
        self._cache = DecodeCache.empty(kv, layers, len(slots), heads, longest + budget)
        self._context = PrefixContext(kv=kv, lengths=lengths, cache=self._cache)
        columns = torch.arange(longest, device=device)
        pad = self._pad
        positions = (columns[None] - pad[:, None]).clamp(min=0) + starts[:, None]
        # A padding column attends to itself, so that its softmax is finite; no token attends to it.
        visible = (columns[None, :, None] >= columns[None, None, :]) & (
            columns[None, None, :] >= pad[:, None, None]
        )
        mask = visible | torch.eye(longest, dtype=torch.bool, device=device)
        read = hidden_states(model, ids, positions, mask[:, None], self._context)
        for b, slot in enumerate(slots):
            if slot and slot.request.prompt_logprobs:
                first = padding[b]
                logprobs = model.lm_head(read[b, first:-1]).float().log_softmax(-1)
                slot.prompt_logprobs = tuple(
                    logprobs.gather(-1, ids[b, first + 1 :, None])[:, 0].tolist()
                )
                slot.prompt_likeliest = tuple(logprobs.argmax(-1).tolist())
        self._cache.used = longest
        self._position = positions[:, -1]
        self._tokens = self._draw(read[:, -1])

    @property
    def live(self) -> bool:
        return any(s and not s.reason for s in self.slots)

    def step(self) -> None:
        """Draw the next token of every row that has not ended."""
        self._drop()
        self._position = self._position + 1
        columns = torch.arange(self._cache.used + 1, device=self._pad.device)
        mask = columns[None] >= self._pad[:, None]
        hidden = hidden_states(
            self._model,
            self._tokens[:, None],
            self._position[:, None],
            mask[:, None, None],
            self._context,
        )[:, -1]
        self._cache.used += 1
        self._tokens = self._draw(hidden)

    def merge(self, other: DecodeBatch) -> None:
        """Take the rows of another decode batch over the same prefix; each batch has one prefix."""
        assert self._count == other._count == 1
        mine, theirs = self._cache.used, other._cache.used
        used = max(mine, theirs)
        left = max(_tokens_left(s) for s in (*self.slots, *other.slots))
        self._cache.join(other._cache, used + left)
        self._pad = torch.cat([self._pad + (used - mine), other._pad + (used - theirs)])
        self._position = torch.cat([self._position, other._position])
        self._tokens = torch.cat([self._tokens, other._tokens])
        self.slots = [*self.slots, *other.slots]

    def _drop(self) -> None:
        """Drop rows once at most half of each group is live. All groups keep equally many rows,
        because a row finds its prefix by position."""
        keep = compaction(self.slots, self._count)
        if keep is None:
            return
        rows = torch.tensor(keep, device=self._pad.device)
        self.slots = [self.slots[b] for b in keep]
        self._tokens, self._position = self._tokens[rows], self._position[rows]
        self._pad = self._pad[rows]
        # Columns that are padding in all remaining rows are cut off.
        trim = int(self._pad.min())
        self._cache.keep(rows, trim)
        self._pad = self._pad - trim

    def _draw(self, hidden: Tensor) -> Tensor:
        """Draw the next token [B] of every live row from hidden states [B, width], and add it."""
        slots = self.slots
        logits: Tensor = self._model.lm_head(hidden).float()
        logprobs = logits.log_softmax(-1)
        chosen = logits.argmax(-1)
        by_sampling: dict[Sampling, list[tuple[int, DecodeState]]] = {}
        for b, slot in enumerate(slots):
            if slot and not slot.reason and slot.request.sampling.temperature > 0:
                by_sampling.setdefault(slot.request.sampling, []).append((b, slot))
        for sampling, drawing in by_sampling.items():
            rows = [b for b, _ in drawing]
            draws = torch.stack([slot.uniforms[len(slot.tokens)] for _, slot in drawing])
            chosen[rows] = draw(logits[rows], draws.to(logits.device), sampling)
        picked = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
        ids = chosen.tolist()
        wanted = max((s.top_wanted for s in slots if s and not s.reason), default=0)
        likeliest = _likeliest(logprobs, wanted)
        for b, slot in enumerate(slots):
            if slot and not slot.reason:
                slot.add(ids[b], picked[b], likeliest[b], ids[b] in self._end_ids)
        return chosen


def compaction(slots: Sequence[DecodeState | None], groups: int) -> list[int] | None:
    """Return the rows to keep once at most half of each group is still being decoded, else None."""
    per = len(slots) // groups
    live = [
        [b for b in range(c * per, (c + 1) * per) if (s := slots[b]) and not s.reason]
        for c in range(groups)
    ]
    most = max(len(rows) for rows in live)
    if 2 * most > per:
        return None
    keep = []
    for c, rows in enumerate(live):
        spare = (b for b in range(c * per, (c + 1) * per) if b not in rows)
        keep += rows + [next(spare) for _ in range(most - len(rows))]
    return keep


def _likeliest(logprobs: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the `count` likeliest tokens of every row [B, V] as (id, log-probability)."""
    if not count:
        return [()] * len(logprobs)
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [
        tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _tokens_left(row: DecodeState | None) -> int:
    return row.request.sampling.max_tokens - len(row.tokens) if row and not row.reason else 1


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Return inverse-CDF draws [B] from logits [B, V] with one uniform in [0, 1) each. Truncation
    is top_k first, then the smallest set of mass >= top_p."""
    probs = (logits.double() / sampling.temperature).softmax(-1)
    order = torch.arange(probs.shape[-1], device=probs.device).expand_as(probs)
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        probs, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        if sampling.top_k > 0:
            probs[:, sampling.top_k :] = 0
            probs = probs / probs.sum(-1, keepdim=True)
        if sampling.top_p < 1.0:
            before = probs.cumsum(-1) - probs
            probs = probs.masked_fill(before >= sampling.top_p, 0)
            probs = probs / probs.sum(-1, keepdim=True)
    cumulative = probs.cumsum(-1)
    # Scaled by the last sum, so that rounding cannot push a draw past the last possible token.
    found = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    return order.gather(-1, found.clamp(max=probs.shape[-1] - 1))[:, 0]


def uniforms(seed: int, count: int, first: int = 0) -> Tensor:
    """Return draws `first` to `first + count` [count] of a request's own stream, float64 in [0, 1):
    draw t decides token t."""
    stream = torch.Generator().manual_seed(seed)
    return torch.rand(first + count, generator=stream, dtype=torch.float64)[first:]
