"""Decode rows whose cartridge proposes and whose document verifies (speculative decoding).

    VerifiedBatch   rows with keys and values of their own tokens twice, behind both prefixes
      step          the draft proposes K tokens a row, one forward pass each; the model over the
                    document reads all of them in one pass, and `verify_exact` accepts or replaces
    RowCache        the keys and values of the rows behind their prefixes, of unequal lengths
    RowAttention    attends over them in one pass of n tokens a row

A row's response is that of the document alone: the same tokens at temperature 0 (but where
rounding decides between two), the same distribution at another one. A bad draft costs time. No
token is drawn behind a wholly accepted block, so that a token depends on its place and on the
request's seed, and not on how many were proposed at a time: K may change from pass to pass.

Dimensions: B rows, n tokens of each, S columns of a cache, L layers, H_q query heads, H_kv
key/value heads, D numbers of a head, P_c tokens of prefix c, V the vocabulary, K tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

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
from cartridge_forge.learning.draws import DecodeState, draw
from cartridge_forge.plugins.decoding.verified.rules import (
    LONGEST_BLOCK,
    Verdict,
    verification_draws,
    verify_exact,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Completion, GenerateRequest, Sampling

# A draft's prefix of up to so many tokens is copied to each of its rows: rows over drafts of their
# own are then one product a layer, and not one for each of them.
COPIED_DRAFT = 512
SPARE_COLUMNS = 64  # by which a cache grows beyond what a pass needs


def check_draft(request: GenerateRequest) -> None:
    """Raise DataError for a request with a draft that cannot be verified block by block."""
    draft = request.draft
    if draft is None:
        return
    if not 1 <= draft.block <= LONGEST_BLOCK:
        raise DataError(
            f"request {request.id} has draft.block {draft.block}; give it a number from 1 to "
            f"{LONGEST_BLOCK}"
        )
    for name, value in (
        ("grammar", request.grammar),
        ("prompt_logprobs", request.prompt_logprobs),
        ("rules", request.rules),
    ):
        if value:
            raise DataError(
                f"request {request.id} has {name} and a draft, which are not served together; "
                "leave the draft out"
            )


@dataclass(eq=False)
class VerifiedRow:
    """Hold one request while it is decoded over the keys and values of its document, with those of
    a cartridge that proposes, `block` tokens at a time. Counts the tokens that were proposed for a
    place of the response, those that stayed, and the passes that verified them."""

    state: DecodeState
    block: int
    document_kv: Tensor  # [L, 2, H_kv, T, D]
    draft_kv: Tensor  # [L, 2, H_kv, P, D]
    proposed: int = 0
    accepted: int = 0
    verifications: int = 0

    def __post_init__(self) -> None:
        request = self.state.request
        # The longest block of the rows beside it may reach behind the response's last place.
        count = request.sampling.max_tokens + LONGEST_BLOCK + 1
        self.draws = verification_draws(request.seed, request.first_draw, count)

    def completion(self) -> Completion:
        """Return the response, with the counts of its draft."""
        return replace(
            self.state.completion(), proposed=self.proposed, accepted=self.accepted,
            verifications=self.verifications,
        )  # fmt: skip


class VerifiedBatch:
    """Decode rows that may join at any time."""

    def __init__(self, model: LanguageModel, end_ids: frozenset[int]) -> None:
        self._model, self._end_ids = model, end_ids
        self.rows: list[VerifiedRow] = []
        self._document, self._draft = RowCache(model, 0), RowCache(model, COPIED_DRAFT)
        device = model.device
        self._lengths = torch.zeros(0, dtype=torch.long, device=device)  # [B] tokens in the caches
        self._pending = torch.zeros(0, dtype=torch.long, device=device)  # [B] the token behind them

    @property
    def live(self) -> bool:
        return any(not row.state.reason for row in self.rows)

    @torch.no_grad()
    def add(self, rows: Sequence[VerifiedRow]) -> None:
        """Read the prompts of new rows, but for their last tokens, over both prefixes."""
        device = self._model.device
        lengths = torch.tensor([len(r.state.request.prompt_ids) - 1 for r in rows], device=device)
        last = torch.tensor([r.state.request.prompt_ids[-1] for r in rows], device=device)
        first = len(self.rows)
        self.rows = [*self.rows, *rows]
        self._lengths = torch.cat([self._lengths, lengths])
        self._pending = torch.cat([self._pending, last])
        for cache, prefixes in (
            (self._document, [row.document_kv for row in rows]),
            (self._draft, [row.draft_kv for row in rows]),
        ):
            cache.add(prefixes, int(lengths.max()))
            self._read_prompts(cache, first)
        # Rows over one document lie side by side, and of them those over one draft.
        of_row = [(id(row.document_kv), id(row.draft_kv)) for row in self.rows]
        self._keep(sorted(range(len(self.rows)), key=of_row.__getitem__))

    @torch.no_grad()
    def step(self) -> None:
        """Propose one block of every row and verify it; rows that have ended are dropped."""
        live = [b for b, row in enumerate(self.rows) if not row.state.reason]
        if len(live) < len(self.rows):
            self._keep(live)
        if not live:
            return
        states = [row.state for row in self.rows]
        remaining = max(s.request.sampling.max_tokens - len(s.tokens) for s in states)
        block = min(max(row.block for row in self.rows), remaining)
        ids, student = self._propose(block)  # [B, K + 1], [B, K, V]
        hidden = self._pass(self._document, ids[:, :block], 0)  # [B * K, width]
        logits = self._logits(hidden).view(len(self.rows), block, -1)  # [B, K, V]
        teacher = logits[..., : self._model.tokens]
        keeps = any(row.state.keeps_logprobs for row in self.rows)
        logprobs = logits.log_softmax(-1) if keeps else None
        added, pending = list[int](), list[int]()
        proposed = ids[:, 1:].tolist()
        for b, verdict in self._verdicts(proposed, teacher, student).items():
            row = self.rows[b]
            new = proposed[b][: verdict.accepted]
            if verdict.accepted < block:  # what would follow a whole block is left to the next one
                assert verdict.token is not None
                new.append(verdict.token)
            added.append(len(new))
            pending.append(new[-1])
            length = len(row.state.tokens)
            self._say(row, new, None if logprobs is None else logprobs[b])
            count = len(row.state.tokens) + row.state.dropped - length
            row.verifications += 1
            row.proposed += count if row.state.reason else block  # none is behind the end
            row.accepted += min(verdict.accepted, count)
        self._lengths = self._lengths + torch.tensor(added, device=self._lengths.device)
        self._pending = torch.tensor(pending, device=self._pending.device)

    def _verdicts(
        self, blocks: Sequence[Sequence[int]], teacher: Tensor, student: Tensor
    ) -> dict[int, Verdict]:
        """Return the verdict on each row's block, in the order of the rows, from logits
        [B, K, V]."""
        verdicts: dict[int, Verdict] = {}
        count = teacher.shape[1]
        for sampling, members in self._samplings().items():
            at = torch.tensor(members, device=teacher.device)
            # `verify_exact` reads the place behind a block too; its token is not used here.
            read = torch.cat([teacher[at], teacher[at, -1:]], 1)  # [n, K + 1, V]
            places = [len(self.rows[b].state.tokens) for b in members]
            draws = [
                self.rows[b].draws[first : first + count + 1]
                for b, first in zip(members, places, strict=True)
            ]
            judged = verify_exact(
                read.flatten(0, 1), student[at].flatten(0, 1), [blocks[b] for b in members],
                sampling, torch.cat(draws).to(teacher.device),
            )  # fmt: skip
            verdicts |= dict(zip(members, judged, strict=True))
        return dict(sorted(verdicts.items()))

    def _samplings(self) -> dict[Sampling, list[int]]:
        """Return the rows by how their tokens are drawn."""
        groups: dict[Sampling, list[int]] = {}
        for b, row in enumerate(self.rows):
            key = replace(row.state.request.sampling, max_tokens=0)
            groups.setdefault(key, []).append(b)
        return groups

    def _propose(self, block: int) -> tuple[Tensor, Tensor]:
        """Return each row's pending token with the tokens proposed behind it, [B, K + 1], and the
        logits that these were drawn from, [B, K, V]."""
        ids, logits = [self._pending], []
        for at in range(block):
            hidden = self._pass(self._draft, ids[-1][:, None], at)  # [B, width]
            logits.append(self._logits(hidden)[:, : self._model.tokens])
            ids.append(self._choose(logits[-1], at))
        return torch.stack(ids, 1), torch.stack(logits, 1)

    def _choose(self, logits: Tensor, at: int) -> Tensor:
        """Return the token [B] that each row's draft draws from logits [B, V], `at` places behind
        its response; rows with the same sampling draw together."""
        chosen = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        for sampling, members in self._samplings().items():
            part = logits if len(members) == len(logits) else logits[members]  # [n, V]
            if sampling.temperature == 0:
                chosen[members] = part.argmax(-1)
                continue
            states = [self.rows[b].state for b in members]
            # Behind the last token nothing is used: any number will do.
            places = [min(len(s.tokens) + at, len(s.uniforms) - 1) for s in states]
            numbers = [s.uniforms[at] for s, at in zip(states, places, strict=True)]
            uniforms = torch.tensor(numbers, dtype=torch.float64, device=logits.device)  # [n]
            chosen[members] = draw(part, uniforms, sampling)
        return chosen

    def _say(self, row: VerifiedRow, tokens: Sequence[int], logprobs: Tensor | None) -> None:
        """Add tokens to a row, up to its end; `logprobs` [K, V] are those of the document."""
        state = row.state
        for at, token in enumerate(tokens):
            logprob: float | None = None
            top: tuple[tuple[int, float], ...] = ()
            if logprobs is not None and state.keeps_logprobs:
                logprob = float(logprobs[at, token])
                named = logprobs[at, : self._model.tokens]
                values, likeliest = named.topk(min(state.top_wanted, len(named)))
                top = tuple(zip(likeliest.tolist(), values.tolist(), strict=True))
            state.add(token, logprob, top, state.ends(token, self._end_ids))
            if state.reason:
                return

    def _read_prompts(self, cache: RowCache, first: int) -> None:
        """Fill a cache with the prompts of the rows from `first` on."""
        device = self._model.device
        texts = {
            b: row.state.request.prompt_ids[:-1]
            for b, row in enumerate(self.rows[first:], first)
            if len(row.state.request.prompt_ids) > 1
        }
        if not texts:
            return
        counts = torch.tensor([len(text) for text in texts.values()], device=device)
        rows = torch.repeat_interleave(torch.tensor([*texts], device=device), counts)  # [N]
        places = torch.cat([torch.arange(len(text), device=device) for text in texts.values()])
        columns, positions = cache.begins[rows] + places, cache.prefix_tokens[rows] + places
        runs = [[*run] for _, run in groupby((cache.prefixes[b] for b in texts), key=id)]

        def write(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            cache.write(layer, rows, columns, k, v)

        nothing = torch.zeros(0, dtype=torch.long, device=device)
        attention = FlatAttention(
            counts.tolist(), [len(run) for run in runs], positions, [run[0] for run in runs],
            nothing, write,
        )  # fmt: skip
        ids = torch.tensor([id for text in texts.values() for id in text], device=device)
        self._model(ids, positions, attention, nothing)

    def _pass(self, cache: RowCache, ids: Tensor, at: int) -> Tensor:
        """Run a forward pass of tokens [B, n], `at` places behind each row's own; return their
        hidden states [B * n, width]."""
        count = ids.shape[1]
        steps = torch.arange(at, at + count, device=ids.device)
        places = self._lengths[:, None] + steps  # [B, n]
        columns, positions = cache.begins[:, None] + places, cache.prefix_tokens[:, None] + places
        cache.reserve(int(columns.max()) + 1)
        spans = [(first * count, stop * count) for first, stop in cache.spans]
        attention = RowAttention(cache, columns, positions, spans)
        hidden: Tensor = self._model(ids.flatten(), positions.flatten(), attention)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        model, head = self._model, self._model.lm_head
        return model.head(
            hidden, lambda x: linear(x, head.weight, head.bias, model.packed_head).float()
        )

    def _keep(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.rows = [self.rows[b] for b in order]
        at = torch.tensor(order, dtype=torch.long, device=self._lengths.device)
        self._lengths, self._pending = self._lengths[at], self._pending[at]
        self._document.keep(order)
        self._draft.keep(order)


class RowCache:
    """Hold keys and values [L, B, H_kv, S, D] of the rows' own tokens behind their prefixes. A
    row's own tokens stand in its columns from `begins` [B] on, behind its prefix where that was
    copied, and at positions from `prefix_tokens` [B] on. Rows of one prefix that was not copied are
    `spans`, (first, last + 1)."""

    def __init__(self, model: LanguageModel, copied: int) -> None:
        self._model, self._copied = model, copied
        self.prefixes: list[Tensor] = []  # of each row [L, 2, H_kv, P, D], whole
        self.begins = torch.zeros(0, dtype=torch.long, device=model.device)
        self.prefix_tokens = self.begins
        self.keys = self.values = self._empty(0, 0)
        self.spans: list[tuple[int, int]] = []
        self.layers: list[tuple[Tensor, ...]] = []  # of each span's prefix, layer by layer

    def add(self, prefixes: Sequence[Tensor], columns: int) -> None:
        """Add rows over these prefixes with room for so many `columns` of tokens behind them."""
        device = self._model.device
        tokens = [kv.shape[3] for kv in prefixes]
        begins = [count if count <= self._copied else 0 for count in tokens]
        first = len(self.prefixes)
        self.prefixes += prefixes
        self.begins = torch.cat([self.begins, torch.tensor(begins, device=device)])
        self.prefix_tokens = torch.cat([self.prefix_tokens, torch.tensor(tokens, device=device)])
        needed = max(begins) + columns + SPARE_COLUMNS
        self._resize(len(self.prefixes), max(self.keys.shape[3], needed))
        for b, (kv, begin) in enumerate(zip(prefixes, begins, strict=True), first):
            if begin:
                keys, values = kv.to(self.keys.dtype).unbind(1)  # [L, H_kv, P, D] each
                self.keys[:, b, :, :begin], self.values[:, b, :, :begin] = keys, values
        self.group()

    def reserve(self, columns: int) -> None:
        """Make room for so many columns."""
        if columns > self.keys.shape[3]:
            self._resize(len(self.prefixes), columns + SPARE_COLUMNS)

    def write(
        self, layer: int, rows: Tensor, columns: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Write keys and values [N, H_kv, D] at N places (row, column)."""
        self.keys[layer, rows, :, columns] = keys.to(self.keys.dtype)
        self.values[layer, rows, :, columns] = values.to(self.values.dtype)

    def keep(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        at = torch.tensor(order, dtype=torch.long, device=self.begins.device)
        self.prefixes = [self.prefixes[b] for b in order]
        self.begins, self.prefix_tokens = self.begins[at], self.prefix_tokens[at]
        if [*order] != [*range(self.keys.shape[1])]:
            self.keys, self.values = self.keys[:, at], self.values[:, at]
        self.group()

    def group(self) -> None:
        """Set the spans of the rows side by side over one prefix."""
        self.spans, self.layers, first = [], [], 0
        apart = [kv if kv.shape[3] > self._copied else None for kv in self.prefixes]
        if not any(kv is not None for kv in apart):
            return
        for _, members in groupby(apart, key=id):
            run = [*members]
            stop = first + len(run)
            kv = run[0] if run[0] is not None else self.prefixes[first][..., :0, :]
            self.spans.append((first, stop))
            self.layers.append(kv.unbind(0))
            first = stop

    def _resize(self, rows: int, columns: int) -> None:
        for name in ("keys", "values"):
            stored: Tensor = getattr(self, name)
            fresh = self._empty(rows, columns)
            fresh[:, : stored.shape[1], :, : stored.shape[3]] = stored
            setattr(self, name, fresh)

    def _empty(self, rows: int, columns: int) -> Tensor:
        layers, heads, size = self._model.kv_shape
        dtype = kernel_for(self._model.weight).stored_type(self._model.dtype)
        # Zeros: what is hidden by its weight of 0 must be finite.
        return torch.zeros(
            (layers, rows, heads, columns, size), dtype=dtype, device=self._model.device
        )


class RowAttention:
    """Attend within one forward pass of n tokens a row, which stand in `columns` [B, n] of a cache
    at `positions` [B, n]. The queries `spans[c]` read prefix c of the cache."""

    def __init__(
        self, cache: RowCache, columns: Tensor, positions: Tensor, spans: Sequence[tuple[int, int]]
    ) -> None:
        self._cache, self._columns, self._positions = cache, columns, positions
        self._spans = spans
        self._rows = torch.arange(len(columns), device=columns.device)[:, None].expand_as(columns)
        self._used = int(columns.max()) + 1
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Write keys and values [B * n, H_kv, D] into the cache; return the attention
        [B * n, H_q, D] of queries [B * n, H_q, D]."""
        cache, (rows, count) = self._cache, self._columns.shape
        cache.write(layer, self._rows.flatten(), self._columns.flatten(), k, v)
        keys = cache.keys[layer, :, :, : self._used]  # [B, H_kv, S, D]
        values = cache.values[layer, :, :, : self._used]
        heads, shared = q.shape[1], q.shape[1] // keys.shape[1]
        kernel, mask = kernel_for(q), self._mask(options, keys.dtype)
        # The heads that read one key stand as queries of one head, as in DecodeAttention.
        grouped = q.view(rows, count, keys.shape[1], shared, -1).permute(0, 2, 3, 1, 4)
        grouped = grouped.reshape(rows, keys.shape[1], shared * count, -1)
        out, sums = kernel.forward(
            grouped, keys, values, mask.repeat(1, 1, shared, 1), False, options.scale, options.cap
        )
        out = out.reshape(rows, heads, count, -1).transpose(1, 2).reshape(q.shape)
        if not self._spans and options.sinks is None:
            return out.to(q.dtype)
        sums = sums.reshape(rows, heads, count).transpose(1, 2).reshape(q.shape[:2])

        def hidden(c: int, kv: Tensor) -> Tensor | None:
            if options.limit is None:
                return None
            first, stop = self._spans[c]
            return window_mask(self._positions.flatten()[first:stop], kv.shape[2], options, q.dtype)

        read = [layers[layer] for layers in cache.layers]
        return over_prefixes(kernel, q, out, sums, self._spans, read, options, hidden, True)[0]

    def _mask(self, options: AttentionOptions, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of the rows' own tokens, [B, 1, n, S]."""
        kind = options.window, options.chunk
        if kind not in self._masks:
            columns = torch.arange(self._used, device=self._columns.device)
            distances = self._columns[..., None] - columns  # [B, n, S]
            hidden = distances < 0
            if options.limit is not None:
                hidden = hidden | options.unseen(distances, self._positions[..., None])
            added = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[kind] = added.masked_fill(hidden, UNSEEN)[:, None]
        return self._masks[kind]
