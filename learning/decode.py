"""Decode requests together in lockstep, one token of each per forward pass.

    generate            completes every request of a list
    DecodeBatch         reads the prompts in one flat forward pass; draws each row's first token
      step              runs one forward pass of one token a row; draws the next token of each row
      merge             adds rows that started later (continuous batching)
    DecodeCache         the keys and values of the rows
    DecodeAttention     attends over them, and over the rows' longer prefixes

A decode batch covers any prefixes, each held once; the rows over one lie side by side. Each row
draws from its own seeded stream, so its tokens do not depend on the other rows. Ids that the
tokenizer has no token for, with which embeddings are padded, are left out of the draw, as top_p
leaves others out: log-probabilities stay those of all logits, which the trainer computes too.

Dimensions: B rows, S columns of the cache, L layers, H_q query heads, H_kv key/value heads, D
numbers of a head, P_c tokens of prefix c, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from cartridge_forge.learning.attention import (
    UNSEEN,
    AttentionOptions,
    FlatAttention,
    kernel_for,
    over_prefixes,
    window_mask,
)
from cartridge_forge.learning.decoder import LanguageModel, linear
from cartridge_forge.learning.draws import (
    DecodeState,
    GrammarCompiler,
    draw_next,
    new_row,
    score_prompt,
)
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef

Lookup = Callable[[PrefixRef], Tensor]
Served = Callable[[PrefixRef, Tensor], tuple[str, ...]]


@torch.no_grad()
def generate(
    model: LanguageModel,
    requests: Sequence[GenerateRequest],
    lookup: Lookup,
    end_ids: frozenset[int],
    decode: Callable[[Sequence[int]], str] | None = None,
    served: Served = lambda ref, kv: (),
    grammars: GrammarCompiler | None = None,
    drawn_from: list[Tensor] | None = None,
) -> list[Completion]:
    """Complete every request; return the completions in the order of the requests.

    `lookup` returns a prefix's keys and values [L, 2, H_kv, P, D], those of a composition already
    at their positions. If it raises PublishError, only the requests over that prefix are refused.
    `decode` returns the text of ids, for requests with `until`; `served` the fingerprints of a
    prefix from the keys and values that are decoded over; `grammars` compiles those of requests
    that have one. `drawn_from` takes the logits [n, V] of each request with `logits`. Raises
    DataError as `new_row` does.
    """
    rows = [new_row(r, model.vocabulary, decode, grammars=grammars) for r in requests]
    groups: dict[PrefixRef, list[DecodeState]] = {}
    for row in rows:
        groups.setdefault(row.request.prefix, []).append(row)
    prefixes: dict[PrefixRef, Tensor] = {}
    for ref, group in groups.items():
        try:
            prefixes[ref] = lookup(ref)
        except PublishError as error:
            for row in group:
                row.error = str(error)
            continue
        proof = served(ref, prefixes[ref])
        for row in group:
            row.served = proof
    decoded = [row for ref in prefixes for row in groups[ref]]
    if decoded:
        batch = DecodeBatch(model, decoded, prefixes, end_ids)
        while batch.live:
            batch.step()
    if drawn_from is not None:
        drawn_from += [torch.stack(row.logits) for row in rows if row.logits]
    return [row.completion() for row in rows]


@dataclass(frozen=True)
class PromptPlan:
    """Lay the prompts of B rows out as N tokens of one forward pass.

    lengths  the prompts' tokens, and `ends` the token behind each one's last
    width    columns of the cache that the longest row takes. A row's columns end where those of the
             longest do, so that all rows write the same ones
    pad      [B] columns of padding before each row's own
    last     [B] the position of each prompt's last token
    rows, columns, positions  [N] of each token
    scored   the rows whose prompts' log-probabilities are read
    read     the tokens whose hidden states are read, ascending
    """

    lengths: Sequence[int]
    ends: Sequence[int]
    width: int
    pad: Tensor
    last: Tensor
    rows: Tensor
    columns: Tensor
    positions: Tensor
    scored: Sequence[int]
    read: Sequence[int]


def plan_prompts(
    rows: Sequence[DecodeState], prefix_tokens: Sequence[int], device: torch.device
) -> PromptPlan:
    """Return the plan of rows whose prefixes have so many tokens each."""
    lengths = [len(row.request.prompt_ids) for row in rows]
    ends = [*accumulate(lengths)]
    widths = [n + (p if p <= COPIED else 0) for p, n in zip(prefix_tokens, lengths, strict=True)]
    width, counts = max(widths), torch.tensor(lengths)
    last = torch.tensor([p + n - 1 for p, n in zip(prefix_tokens, lengths, strict=True)])  # [B]
    row_of = torch.repeat_interleave(torch.arange(len(rows)), counts)  # [N]
    # A token's column is its place among all tokens, moved to where its row's columns are.
    moved = torch.repeat_interleave(torch.tensor([width - end for end in ends]), counts)  # [N]
    columns = torch.arange(ends[-1]) + moved  # [N]
    scored = [b for b, row in enumerate(rows) if row.request.prompt_logprobs]
    whole_prompts = {i for b in scored for i in range(ends[b] - lengths[b], ends[b])}
    return PromptPlan(
        lengths, ends, width, torch.tensor([width - n for n in widths]).to(device),
        last.to(device), row_of.to(device), columns.to(device),
        (columns - width + 1 + last[row_of]).to(device), scored,
        sorted(whole_prompts | {end - 1 for end in ends}),
    )  # fmt: skip


class DecodeBatch:
    """Decode rows over their prefixes [L, 2, H_kv, P, D]."""

    def __init__(
        self,
        model: LanguageModel,
        rows: Sequence[DecodeState],
        prefixes: Mapping[PrefixRef, Tensor],
        end_ids: frozenset[int],
    ) -> None:
        """Read the prompts and draw the first token of every row. `prefixes` has all rows' own."""
        self._model, self._end_ids, self._prefixes = model, end_ids, dict(prefixes)
        self.rows = [rows[b] for b in self._grouped(rows)]
        prefix_tokens = [prefixes[row.prefix].shape[3] for row in self.rows]
        plan = plan_prompts(self.rows, prefix_tokens, model.device)
        self._pad, self._position = plan.pad, plan.last  # [B], [B]
        budget = max(map(_tokens_left, self.rows))
        self._cache = DecodeCache.empty(model, len(rows), plan.width + budget)
        hidden = self._read_prompts(plan)  # [tokens read, width]
        row_at = {token: at for at, token in enumerate(plan.read)}
        for b in plan.scored:
            first = row_at[plan.ends[b] - plan.lengths[b]]
            states = hidden[first : first + plan.lengths[b] - 1]  # [T - 1, width]

            def logits_at(start: int, stop: int, states: Tensor = states) -> Tensor:
                return self._logits(states[start:stop])

            score_prompt(self.rows[b], logits_at, model.vocabulary, model.tokens)
        self._cache.used = plan.width
        self._tokens = self._draw(hidden[[row_at[end - 1] for end in plan.ends]])  # [B]

    @property
    def live(self) -> bool:
        return any(not row.reason for row in self.rows)

    def step(self) -> None:
        """Draw the next token of every row that has not ended. Rows that have are dropped, once
        they are a quarter."""
        live = [b for b, row in enumerate(self.rows) if not row.reason]
        if len(live) <= 0.75 * len(self.rows):
            self._keep(live)
        self._tokens = self._draw(self._forward())

    def _read_prompts(self, plan: PromptPlan) -> Tensor:
        """Run the prompts' forward pass, which fills the cache; return the hidden states of the
        tokens `plan.read`."""
        device, groups = self._model.device, [*self._groups()]
        for kv, (first, stop) in groups:
            if 0 < kv.shape[3] <= COPIED:
                rows = torch.arange(first, stop, device=device)
                self._cache.copy(rows, self._pad[first:stop], kv)

        def write(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            self._cache.write(layer, plan.rows, plan.columns, k, v)

        read = torch.tensor(plan.read, device=device)
        attention = FlatAttention(
            plan.lengths, [stop - first for _, (first, stop) in groups], plan.positions,
            [kv for kv, _ in groups], read, write,
        )  # fmt: skip
        ids = torch.tensor([i for r in self.rows for i in r.request.prompt_ids], device=device)
        hidden: Tensor = self._model(ids, plan.positions, attention, read)
        return hidden

    def _forward(self) -> Tensor:
        """Run the forward pass of each row's last token; return its hidden states [B, width]."""
        self._position = self._position + 1
        # Prefixes that were copied into the cache are read there.
        groups = [
            (kv[..., :0, :] if kv.shape[3] <= COPIED else kv, span) for kv, span in self._groups()
        ]
        attention = DecodeAttention(
            self._cache, self._pad, self._position, [span for _, span in groups],
            [kv.unbind(0) for kv, _ in groups],
        )  # fmt: skip
        hidden: Tensor = self._model(self._tokens, self._position, attention)
        self._cache.used += 1
        return hidden

    def merge(self, other: DecodeBatch) -> None:
        """Take the rows of another decode batch of the same model."""
        used = max(self._cache.used, other._cache.used)
        budget = max(map(_tokens_left, (*self.rows, *other.rows)))
        pads = [batch._pad + (used - batch._cache.used) for batch in (self, other)]
        self._cache.join(other._cache, used + budget)
        self._prefixes = other._prefixes | self._prefixes
        self.rows = [*self.rows, *other.rows]
        self._pad = torch.cat(pads)
        self._position = torch.cat([self._position, other._position])
        self._tokens = torch.cat([self._tokens, other._tokens])
        self._keep(self._grouped(self.rows))

    def _keep(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.rows = [self.rows[b] for b in order]
        named = {row.prefix for row in self.rows}
        self._prefixes = {ref: kv for ref, kv in self._prefixes.items() if ref in named}
        rows = torch.tensor(order, device=self._pad.device)
        self._tokens, self._position = self._tokens[rows], self._position[rows]
        self._pad = self._pad[rows]
        # Columns that are padding in all remaining rows are cut off.
        trim = int(self._pad.min())
        self._cache.keep(rows, trim)
        self._pad = self._pad - trim

    def _grouped(self, rows: Sequence[DecodeState]) -> list[int]:
        """Return the order in which the rows over one prefix lie side by side."""
        order = {ref: at for at, ref in enumerate(self._prefixes)}
        return sorted(range(len(rows)), key=lambda b: order[rows[b].prefix])

    def _groups(self) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Return each prefix with its rows: the first, and the one behind the last."""
        first = 0
        for ref, members in groupby(self.rows, key=lambda row: row.prefix):
            stop = first + sum(1 for _ in members)
            yield self._prefixes[ref], (first, stop)
            first = stop

    def _logits(self, hidden: Tensor) -> Tensor:
        model, head = self._model, self._model.lm_head
        if model.sharded or model.tensor is not None:
            return model.projection()(hidden)
        return model.head(
            hidden, lambda x: linear(x, head.weight, head.bias, model.packed_head).float()
        )

    def _draw(self, hidden: Tensor) -> Tensor:
        """Draw the next token [B] of every live row from hidden states [B, width]."""
        return draw_next(self.rows, self._logits(hidden), self._model.tokens, self._end_ids)


def _tokens_left(row: DecodeState) -> int:
    return 1 if row.reason else row.request.sampling.max_tokens - len(row.tokens)


# A prefix of so many tokens is copied to each of its rows: to read a short one apart, and to join
# the two parts, takes longer than to read the row's tokens.
COPIED = 64


@dataclass
class DecodeCache:
    """Hold keys and values [L, B, H_kv, S, D] of the rows' own tokens, behind those of a prefix of
    up to COPIED, filled up to `used` columns. Rows are left-padded, so that every row writes the
    same columns."""

    keys: Tensor
    values: Tensor
    used: int = 0

    @classmethod
    def empty(cls, model: LanguageModel, rows: int, columns: int) -> DecodeCache:
        layers, heads, size = model.kv_shape
        if model.tensor is not None:
            heads //= model.tensor.size
        # Zeros: padding is hidden by its weight of 0, and 0 times garbage need not be 0.
        shape = (layers, rows, heads, columns, size)
        dtype = kernel_for(model.weight).stored_type(model.dtype)
        keys = torch.zeros(shape, dtype=dtype, device=model.device)
        return cls(keys, torch.zeros_like(keys))

    def write(
        self, layer: int, rows: Tensor, columns: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Write keys and values [N, H_kv, D] at N places (row, column)."""
        dtype = self.keys.dtype
        self.keys[layer, rows, :, columns] = keys.to(dtype)
        self.values[layer, rows, :, columns] = values.to(dtype)

    def copy(self, rows: Tensor, begins: Tensor, prefix: Tensor) -> None:
        """Write a prefix [L, 2, H_kv, P, D] into `rows` [n], from columns `begins` [n]."""
        columns = begins[:, None] + torch.arange(prefix.shape[3], device=begins.device)
        keys, values = prefix.to(self.keys.dtype).permute(1, 3, 0, 2, 4)  # [P, L, H_kv, D] each
        self.keys[:, rows[:, None], :, columns] = keys
        self.values[:, rows[:, None], :, columns] = values

    def keep(self, rows: Tensor, trim: int = 0) -> None:
        """Keep only these rows, in this order, without their first `trim` columns."""
        self.keys, self.values = self.keys[:, rows, :, trim:], self.values[:, rows, :, trim:]
        self.used -= trim

    def join(self, other: DecodeCache, columns: int) -> None:
        """Append another cache's rows, both right-aligned at the larger `used`, with room for
        `columns` in all."""
        mine, used = self.keys.shape[1], max(self.used, other.used)
        layers, rows, heads, _, size = self.keys.shape
        shape = (layers, rows + other.keys.shape[1], heads, columns, size)
        for name in ("keys", "values"):
            joined = getattr(self, name).new_zeros(shape)
            joined[:, :mine, :, used - self.used : used] = getattr(self, name)[..., : self.used, :]
            joined[:, mine:, :, used - other.used : used] = getattr(other, name)[
                ..., : other.used, :
            ]
            setattr(self, name, joined)
        self.used = used


class DecodeAttention:
    """Attend within one forward pass of one token a row: over what is cached of the rows, and over
    their longer prefixes."""

    def __init__(
        self,
        cache: DecodeCache,
        pad: Tensor,
        positions: Tensor,
        spans: Sequence[tuple[int, int]],
        prefixes: Sequence[Sequence[Tensor]],
    ) -> None:
        """Take rows with `pad` [B] columns of padding whose new tokens stand at `positions` [B].
        The rows `spans[c]` read prefix c, whose layers are `prefixes[c]`, [2, H_kv, P_c, D], of
        length 0 where the cache has it."""
        self._cache, self._positions = cache, positions
        self._spans, self._prefixes = spans, prefixes
        self._apart = any(layers[0].shape[2] for layers in prefixes)
        self._columns = torch.arange(cache.used + 1, device=pad.device)
        self._padding = self._columns < pad[:, None]
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Write keys and values [B, H_kv, D] into the cache, whose user advances `used` after the
        last layer; return the attention [B, H_q, D] of queries [B, H_q, D]."""
        at = self._cache.used
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[:, :, at], values[:, :, at] = k, v
        kernel, mask = kernel_for(q), self._mask(options, keys.dtype)
        keys, values = keys[:, :, : at + 1], values[:, :, : at + 1]
        # The heads that read one key stand as queries of one head: fewer, larger products.
        queries = q.view(q.shape[0], keys.shape[1], -1, q.shape[2])
        out, sums = kernel.forward(
            queries, keys, values, mask.expand(-1, -1, queries.shape[2], -1), False, options.scale,
            options.cap,
        )  # fmt: skip
        out = out.reshape(q.shape)
        if not self._apart and options.sinks is None:
            return out.to(q.dtype)

        def hidden(c: int, kv: Tensor) -> Tensor | None:
            if options.limit is None:
                return None
            first, stop = self._spans[c]
            return window_mask(self._positions[first:stop], kv.shape[2], options, q.dtype)

        read = [layers[layer] for layers in self._prefixes]
        return over_prefixes(
            kernel, q, out, sums.reshape(q.shape[:2]), self._spans, read, options, hidden, True
        )[0]

    def _mask(self, options: AttentionOptions, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of the rows' own tokens, [B, 1, 1, S]."""
        kind = options.window, options.chunk
        if kind not in self._masks:
            hidden = self._padding
            if options.limit is not None:
                distances = self._cache.used - self._columns
                hidden = hidden | options.unseen(distances, self._positions[:, None])
            added = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[kind] = added.masked_fill(hidden, UNSEEN)[:, None, None]
        return self._masks[kind]
