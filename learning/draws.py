"""Hold requests while they are decoded, and draw their tokens from logits.

    new_row             a request's `DecodeState`, which takes tokens until one ends it
    score_prompt        sets the log-probabilities of its prompt
    draw_next           draws the next token of each row

A row's logits change as its request's rules say, in the order of vLLM's sampler:

    penalise      bias, then the penalties for repetition, frequency and presence
    (grammar)     what may not follow is left out
    leave_likely  min_p at the temperature of the draw, before top_k and top_p
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.ports import TokenChunk, refused
from cartridge_forge.protocols.response_rules import (
    LEAST_REPETITION,
    MOST_REPETITION,
    LogitRules,
    ResponseGrammar,
)
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PrefixRef,
    Sampling,
    require_ids,
)

MOST_TOKENS = 2**24  # of any number of tokens in a request
MOST_TEMPERATURE = 1e6  # every token is as likely long before
LEAST_MASS = 1e-9  # of top_p: the likeliest token alone
PROMPT_LOGITS = 2**26  # of a prompt's positions that exist at a time: 256 MiB


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


def score_prompt(
    row: DecodeState, logits_at: Callable[[int, int], Tensor], vocabulary: int, tokens: int | None
) -> None:
    """Set the log-probabilities of a prompt's tokens after its first. `logits_at(first, stop)`
    returns the logits [stop - first, V] of these positions of the prompt, which are read in
    ascending order; the first `tokens` ids are those of the tokenizer, None for all."""
    ids = torch.tensor(row.request.prompt_ids[1:], dtype=torch.long)
    values, best = list[float](), list[int]()
    top: list[tuple[tuple[int, float], ...]] = []
    chunk = max(1, PROMPT_LOGITS // vocabulary)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        logprobs = logits_at(start, start + len(part)).log_softmax(-1)  # [n, V]
        values += logprobs.gather(-1, part.to(logprobs.device)[:, None])[:, 0].tolist()
        of_tokens = logprobs[:, :tokens]
        best += of_tokens.argmax(-1).tolist()
        top += _likeliest(of_tokens, row.request.top_logprobs)
    row.prompt_logprobs, row.prompt_likeliest = tuple(values), tuple(best)
    if row.request.top_logprobs:
        row.prompt_top = tuple(top)


def draw_next(
    rows: Sequence[DecodeState], logits: Tensor, tokens: int | None, end_ids: frozenset[int]
) -> Tensor:
    """Draw the next token [B] of every live row from logits [B, V], which may be changed, and add
    it to its row, which ends with its last one. The first `tokens` ids are the tokenizer's, None
    for all."""
    live = [row for row in rows if not row.reason]
    logprobs = None  # [B, V], where a row keeps any
    if any(row.keeps_logprobs for row in live):
        logprobs = logits.log_softmax(-1)
    chosen = _choose(rows, logits[:, :tokens])  # [B]
    ids = chosen.tolist()
    values: Sequence[float | None] = [None] * len(rows)
    likeliest: Sequence[tuple[tuple[int, float], ...]] = [()] * len(rows)
    if logprobs is not None:
        values = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
        count = max(row.top_wanted for row in live)
        likeliest = _likeliest(logprobs[:, :tokens], count)
    for b, row in enumerate(rows):
        if not row.reason:
            row.logits += [logits[b, :tokens]] * bool(row.request.logits)
            row.add(ids[b], values[b], likeliest[b], row.ends(ids[b], end_ids))
    return chosen


def _choose(rows: Sequence[DecodeState], logits: Tensor) -> Tensor:
    """Return the token [B] that each live row draws from logits [B, V]; rows with the same sampling
    draw together."""
    for b, row in enumerate(rows):
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
    for b, row in enumerate(rows):
        if not row.reason:
            sampling = row.request.sampling
            key = (sampling.temperature, sampling.top_k, sampling.top_p)
            groups.setdefault(key, []).append(b)
    chosen = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    for members in groups.values():
        sampling = rows[members[0]].request.sampling
        part = logits if len(members) == len(logits) else logits[members]  # [n, V]
        if sampling.temperature == 0:
            chosen[members] = part.argmax(-1)
            continue
        draws = [rows[b].uniforms[len(rows[b].tokens)] for b in members]
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


def penalise(
    logits: Tensor, rules: LogitRules, prompt_ids: Iterable[int], response_ids: Sequence[int]
) -> None:
    """Change logits [V] in place by the bias and the penalties of `rules`, for the next token of a
    response to a prompt. Ids from V on are left alone: nothing draws them."""

    def at(ids: Iterable[int]) -> Tensor:
        token_ids = sorted({i for i in ids if i < len(logits)})
        return torch.tensor(token_ids, dtype=torch.long, device=logits.device)

    if rules.bias:
        added = dict(rules.bias)
        ids = at(added)
        logits[ids] += logits.new_tensor([added[i] for i in ids.tolist()])
    if rules.repetition_penalty != 1.0:
        ids = at((*prompt_ids, *response_ids))
        values, penalty = logits[ids], rules.repetition_penalty
        logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if rules.frequency_penalty or rules.presence_penalty:
        counts = Counter(response_ids)
        ids = at(counts)
        times = logits.new_tensor([counts[i] for i in ids.tolist()])
        logits[ids] -= rules.frequency_penalty * times
        logits[ids] -= rules.presence_penalty


def leave_likely(logits: Tensor, rules: LogitRules, temperature: float) -> None:
    """Change logits [V] in place to -inf where a token's probability at this temperature is below
    `rules.min_p` times the likeliest token's. At temperature 0 nothing changes the choice."""
    if rules.min_p > 0 and temperature > 0:
        # p < min_p * p_max, where both have one denominator.
        least = logits.max().double() + temperature * math.log(rules.min_p)
        logits.masked_fill_(logits.double() < least, float("-inf"))


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Return inverse-CDF draws [B] from logits [B, V] with one uniform in [0, 1) each."""
    probs, order = truncated(logits, sampling)
    cumulative = probs.cumsum(-1)  # scaled by the last, so that no rounding moves a draw past it
    picks = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    picks = picks.clamp(max=probs.shape[-1] - 1)
    return (picks if order is None else order.gather(-1, picks))[:, 0]


def truncated(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities [B, V] (float64) to draw from at a temperature > 0, and the token of
    each column, None for the vocabulary's order. Truncation is top_k first, then the smallest set
    of mass >= top_p."""
    probs, order = (logits.double() / sampling.temperature).softmax(-1), None
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        probs, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        if sampling.top_k > 0:
            probs[:, sampling.top_k :] = 0
            probs = probs / probs.sum(-1, keepdim=True)
        if sampling.top_p < 1.0:
            preceding = probs.cumsum(-1) - probs
            probs = probs.masked_fill(preceding >= sampling.top_p, 0)
            probs = probs / probs.sum(-1, keepdim=True)
    return probs, order


def uniforms(seed: int, count: int, first: int = 0) -> Tensor:
    """Return draws `first` to `first + count` [count] of a request's own stream, float64 in [0, 1):
    draw t decides token t."""
    stream = torch.Generator().manual_seed(seed)
    return torch.rand(first + count, generator=stream, dtype=torch.float64)[first:]
