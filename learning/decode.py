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
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, Protocol

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
from cartridge_forge.learning.draws import draw, leave_likely, penalise, uniforms
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.grammar import ResponseGrammar
from cartridge_forge.protocols.logit_rules import (
    LEAST_REPETITION,
    MOST_REPETITION,
    LogitRules,
)
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.ports import TokenChunk, refused
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PrefixRef,
    require_ids,
)

MOST_TOKENS = 2**24  # of any number of tokens in a request
MOST_TEMPERATURE = 1e6  # every token is as likely long before
LEAST_MASS = 1e-9  # of top_p: the likeliest token alone
PROMPT_LOGITS = 2**26  # of a prompt's positions that exist at a time: 256 MiB
Lookup = Callable[[PrefixRef], Tensor]
Served = Callable[[PrefixRef, Tensor], tuple[str, ...]]


class TokenMatcher(Protocol):
    """Follow one response by its grammar. `error` says why it can be followed no further, "" while
    it can."""

    error: str

    def allowed(self, logits: Tensor) -> Tensor:
        """Return which of the tokens of `logits` [V] may come next, [V] bool."""
        ...

    def add(self, token: int) -> None:
        """Take the next token of the response."""
        ...


class GrammarCompiler(Protocol):
    """Compile the grammars of requests (`plugins.decoding.grammar`)."""

    def matcher(self, grammar: ResponseGrammar) -> TokenMatcher:
        """Return a matcher at the beginning of a response. Raises DataError for a grammar that
        cannot be followed."""
        ...


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


@dataclass
class DecodeState:
    """Hold one request while it is decoded, over `prefix`. `reason` is its finish reason, "" before
    the end."""

    request: GenerateRequest
    prefix: PrefixRef
    uniforms: Sequence[float]  # [max_tokens] in [0, 1): one draw for each token
    stopper: Any = None  # a `plugins.decoding.stopping.StopChecker`
    grammar: TokenMatcher | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_logprobs: tuple[float, ...] = ()
    prompt_likeliest: tuple[int, ...] = ()
    prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()
    reason: str = ""
    ended_by: str = ""
    dropped: int = 0
    error: str = ""
    served: tuple[str, ...] = ()
    logits: list[Tensor] = field(default_factory=list)  # [V] of each token, where they are wanted

    @property
    def top_wanted(self) -> int:
        """Return how many of the likeliest tokens are read at each position."""
        until = self.request.until
        return max(self.request.top_logprobs, until.top if until and until.window else 0)

    @property
    def keeps_logprobs(self) -> bool:
        return self.request.logprobs or self.top_wanted > 0

    def ends(self, token: int, end_ids: frozenset[int]) -> bool:
        return token in end_ids or token in self.request.stop_ids

    def add(
        self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...], ends: bool
    ) -> None:
        """Append a drawn token with its log-probability, which may be None where none is kept; end
        the row if it is the last."""
        self.tokens.append(token)
        if self.keeps_logprobs:
            assert logprob is not None
            self.logprobs.append(logprob)
        if self.request.top_logprobs:
            self.top.append(top[: self.request.top_logprobs])
        cut = None if self.stopper is None else self.stopper.add(token, [lp for _, lp in top])
        if self.grammar is not None:
            self.grammar.add(token)
        if self.grammar is not None and self.grammar.error:
            self.reason, self.ended_by = "grammar", self.grammar.error
        elif ends:
            self.reason = "stop"
        elif cut is not None:
            self.reason, self.ended_by = "until", cut.by
            self.dropped = len(self.tokens) - cut.keep
            del self.tokens[cut.keep :], self.logprobs[cut.keep :], self.top[cut.keep :]
        elif len(self.tokens) == self.request.sampling.max_tokens:
            self.reason = "length"

    def chunk(self, first: int) -> TokenChunk:
        """Return the tokens from the `first`-th on."""
        return TokenChunk(
            self.request.id, first, tuple(self.tokens[first:]), tuple(self.logprobs[first:]),
            tuple(self.top[first:]),
        )  # fmt: skip

    def completion(self) -> Completion:
        if self.error:
            return refused(self.request, self.error)
        return Completion(
            request_id=self.request.id, token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs), finish_reason=self.reason, served=self.served,
            versions=(self.request.prefix.version,) * len(self.tokens),
            prompt_logprobs=self.prompt_logprobs, prompt_likeliest=self.prompt_likeliest,
            prompt_top_logprobs=self.prompt_top, top_logprobs=tuple(self.top),
            ended_by=self.ended_by, dropped=self.dropped,
        )  # fmt: skip


def check_request(request: GenerateRequest, vocabulary: int) -> None:
    """Raise DataError for a request that no forward pass could serve, on any engine: a prompt that
    is empty or has an id that a model of `vocabulary` embeddings does not have, or a number out of
    its range."""
    if not request.prompt_ids:
        raise DataError(f"request {request.id} has an empty prompt; give it a token")
    require_ids(request.prompt_ids, vocabulary, f"the prompt of request {request.id}")
    sampling, until, rules = request.sampling, request.until, request.rules or LogitRules()
    if request.rules is not None and request.first_draw:
        raise DataError(
            f"request {request.id} has rules of logits and goes on with an earlier response, which "
            "they would not count; leave one of them out"
        )
    require_ids(request.stop_ids, vocabulary, f"stop_ids of request {request.id}")
    require_ids([i for i, _ in rules.bias], vocabulary, f"the bias of request {request.id}")
    for name, value, least, most in (
        ("sampling.max_tokens", sampling.max_tokens, 1, MOST_TOKENS),
        ("sampling.temperature", sampling.temperature, 0, MOST_TEMPERATURE),
        ("sampling.top_p", sampling.top_p, LEAST_MASS, 1),
        ("sampling.top_k", sampling.top_k, 0, MOST_TOKENS),
        *(("rules.bias", number, -100, 100) for _, number in rules.bias),
        (
            "rules.repetition_penalty",
            rules.repetition_penalty,
            LEAST_REPETITION,
            MOST_REPETITION,
        ),
        ("rules.frequency_penalty", rules.frequency_penalty, -2, 2),
        ("rules.presence_penalty", rules.presence_penalty, -2, 2),
        ("rules.min_p", rules.min_p, 0, 1),
        ("seed", request.seed, -(2**63), 2**64 - 1),
        ("top_logprobs", request.top_logprobs, 0, MOST_TOKENS),
        ("first_draw", request.first_draw, 0, MOST_TOKENS),
        ("until.after", until.after if until else 0, 0, MOST_TOKENS),
        ("until.window", until.window if until else 0, 0, MOST_TOKENS),
        ("until.top", until.top if until else 0, 1 if until and until.window else 0, MOST_TOKENS),
    ):
        if not least <= value <= most:  # false for a number that is none, too
            raise DataError(
                f"request {request.id} has {name} {value}; give it a number from {least} to {most}"
            )


def new_row(
    request: GenerateRequest,
    vocabulary: int,
    decode: Callable[[Sequence[int]], str] | None,
    prefix: PrefixRef | None = None,
    grammars: GrammarCompiler | None = None,
) -> DecodeState:
    """Return the decode state of a request to a model of `vocabulary` embeddings, over its own
    prefix or the equal one `prefix`. Raises DataError as `check_request` does, for `until` and
    `grammar` without a tokenizer to read the text by, and for a grammar that cannot be followed."""
    check_request(request, vocabulary)
    stopper = None
    if request.until is not None:
        if decode is None:
            raise DataError(f"request {request.id} ends by its text, and no tokenizer is here")
        stopper = resolve("hooks", "stop_checker")(request.until, decode)
    grammar = None
    if request.grammar is not None:
        if grammars is None or request.first_draw:
            why = "goes on with an earlier response" if grammars else "has no tokenizer to go by"
            raise DataError(f"request {request.id} has a grammar and {why}; leave the grammar out")
        grammar = grammars.matcher(request.grammar)
    draws = uniforms(request.seed, request.sampling.max_tokens, request.first_draw)
    return DecodeState(request, prefix or request.prefix, draws.tolist(), stopper, grammar)


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
            self._score_prompt(self.rows[b], hidden[first : first + plan.lengths[b] - 1])
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

    def _score_prompt(self, row: DecodeState, hidden: Tensor) -> None:
        """Set the log-probabilities of a prompt's tokens after its first, from the hidden states
        [T - 1, width] before them."""
        ids = torch.tensor(row.request.prompt_ids[1:], dtype=torch.long, device=hidden.device)
        values, best = list[float](), list[int]()
        top: list[tuple[tuple[int, float], ...]] = []
        chunk = max(1, PROMPT_LOGITS // self._model.vocabulary)
        for start in range(0, len(ids), chunk):
            part = slice(start, start + chunk)
            logprobs = self._logits(hidden[part]).log_softmax(-1)  # [n, V]
            values += logprobs.gather(-1, ids[part, None])[:, 0].tolist()
            of_tokens = logprobs[:, : self._model.tokens]
            best += of_tokens.argmax(-1).tolist()
            top += _likeliest(of_tokens, row.request.top_logprobs)
        row.prompt_logprobs, row.prompt_likeliest = tuple(values), tuple(best)
        if row.request.top_logprobs:
            row.prompt_top = tuple(top)

    def _logits(self, hidden: Tensor) -> Tensor:
        model, head = self._model, self._model.lm_head
        if model.sharded or model.tensor is not None:
            return model.projection()(hidden)
        return model.head(
            hidden, lambda x: linear(x, head.weight, head.bias, model.packed_head).float()
        )

    def _draw(self, hidden: Tensor) -> Tensor:
        """Draw the next token [B] of every live row from hidden states [B, width], and add it to
        its row, which ends with its last one."""
        logits = self._logits(hidden)  # [B, V]
        logprobs = logits.log_softmax(-1)  # [B, V]
        chosen = self._choose(logits[:, : self._model.tokens])  # [B]
        values = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
        ids = chosen.tolist()
        count = max((row.top_wanted for row in self.rows if not row.reason), default=0)
        likeliest = _likeliest(logprobs[:, : self._model.tokens], count)
        for b, row in enumerate(self.rows):
            if not row.reason:
                row.logits += [logits[b, : self._model.tokens]] * bool(row.request.logits)
                row.add(ids[b], values[b], likeliest[b], row.ends(ids[b], self._end_ids))
        return chosen

    def _choose(self, logits: Tensor) -> Tensor:
        """Return the token [B] that each live row draws from logits [B, V]; rows with the same
        sampling draw together."""
        for b, row in enumerate(self.rows):
            rules = None if row.reason else row.request.rules
            if rules is not None:
                penalise(logits[b], rules, row.request.prompt_ids, row.tokens)
            if row.grammar is not None and not row.reason:
                allowed = row.grammar.allowed(logits[b])  # [V]
                if not row.grammar.error:  # else the token is any one: `add` ends the row
                    logits[b].masked_fill_(~allowed, float("-inf"))
            if rules is not None:
                leave_likely(logits[b], rules, row.request.sampling.temperature)
        groups: dict[tuple[float, int, float], list[int]] = {}
        for b, row in enumerate(self.rows):
            if not row.reason:
                sampling = row.request.sampling
                key = (sampling.temperature, sampling.top_k, sampling.top_p)
                groups.setdefault(key, []).append(b)
        chosen = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        for members in groups.values():
            sampling = self.rows[members[0]].request.sampling
            part = logits if len(members) == len(logits) else logits[members]  # [n, V]
            if sampling.temperature == 0:
                chosen[members] = part.argmax(-1)
                continue
            draws = [self.rows[b].uniforms[len(self.rows[b].tokens)] for b in members]
            numbers = torch.tensor(draws, dtype=torch.float64, device=logits.device)  # [n]
            chosen[members] = draw(part, numbers, sampling)
        return chosen


def _likeliest(logprobs: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the `count` likeliest tokens of every row [B, V] as (id, log-probability)."""
    if not count:
        return [()] * len(logprobs)
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [
        tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
    ]


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
