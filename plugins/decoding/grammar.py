"""Follow a `ResponseGrammar` token by token, and say which tokens may come next (llguidance).

    Grammars, one for each tokenizer    matcher(grammar) -> GrammarMatcher, one for each response
    GrammarMatcher                      allowed(logits) -> [V];  add(token), which may raise no more

Compiling and every step have bounds of their own in llguidance, which count work and not seconds,
so that a grammar is refused alike on every machine.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
import torch
from torch import Tensor

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.response_rules import (
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_DEPTH,
    ResponseGrammar,
)

KEPT = 64  # compiled grammars; the responses of one request share theirs
# Blanks as json.dumps writes them and nowhere else: where any number may stand, a model that is
# unsure writes them until its tokens end. A schema's own options cannot change this.
JSON_OPTIONS: Any = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
    "coerce_one_of": False, "lenient": False,
}  # fmt: skip


def _limits() -> llguidance.LLParserLimits:
    # The library's own defaults let one short regular expression hold a batch up for 5 s; these
    # 0.2 s. Errors do not show the parser's state, which repeats the whole schema.
    return llguidance.LLParserLimits(
        initial_lexer_fuel=100_000, step_lexer_fuel=100_000, step_max_items=50_000,
        max_lexer_states=10_000, max_grammar_size=50_000, verbose_errors=False,
    )  # fmt: skip


class GrammarMatcher:
    """Follow one response. `error` says why the grammar can be followed no further, "" while it
    can."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self.error = ""

    def allowed(self, logits: Tensor) -> Tensor:
        """Return which of the tokens of `logits` [V] may come next, [V] bool; none after an
        error."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))
        width = min(len(mask), len(logits))
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        allowed[:width] = mask[:width]
        self._note("" if bool(allowed.any()) else "no token of the model goes on")
        if self.error:
            allowed[:] = False
        return allowed.to(logits.device)

    def add(self, token: int) -> None:
        """Take the next token of the response, its end token too; set `error` where it does not
        match."""
        if not self.error:
            is_taken = self._matcher.consume_token(token)
            self._note("" if is_taken else "a token does not match")

    def _note(self, why: str) -> None:
        if self._matcher.is_error():
            why = _reason(self._matcher)
        self.error = self.error or why


class Grammars:
    """Compile grammars for a model's tokenizer, which `read` returns when the first one comes.
    `end_ids` are the tokens that end a response."""

    def __init__(self, read: Callable[[], Any], end_ids: frozenset[int]) -> None:
        self._read, self._end_ids = read, end_ids
        self._compiled: OrderedDict[ResponseGrammar, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, grammar: ResponseGrammar) -> GrammarMatcher:
        """Return a matcher at the beginning of a response. Raises DataError for a grammar that is
        wrong, too large, or too costly to follow."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarMatcher(self._compiled[grammar].deep_copy())

    def _compile(self, grammar: ResponseGrammar) -> llguidance.LLMatcher:
        length = len(grammar.text.encode(errors="replace"))
        if length > MAX_GRAMMAR_BYTES:
            raise DataError(
                f"it has {length} bytes, and {MAX_GRAMMAR_BYTES} are allowed; ask for less at once"
            )
        matcher = llguidance.LLMatcher(
            self._tokenizer, _source(grammar), log_level=0, limits=_limits()
        )
        # Most of the compiling is done for the first masks.
        trial = matcher.deep_copy()
        for _ in range(2):
            if trial.is_error():
                raise DataError(f"it cannot be followed: {_reason(trial)}")
            bits = np.frombuffer(trial.compute_bitmask(), dtype=np.uint8)
            trial.consume_token(int(np.unpackbits(bits, bitorder="little").argmax()))
        return matcher

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        if not self._end_ids:
            raise DataError(
                "no token ends a response of this model; give it an end token (generation_config)"
            )
        fast = getattr(self._read(), "backend_tokenizer", None)
        if fast is None:
            raise DataError(
                "the model's tokenizer is not one of the tokenizers library, which following a "
                "grammar needs; save it with tokenizer.json"
            )
        plain = json.loads(fast.to_str())
        plain["padding"] = plain["truncation"] = None
        # Where only one text can follow, its tokens are looked up as if it stood alone. A blank
        # that the tokenizer puts before such a text would not match.
        _without_prefix_space(plain.get("pre_tokenizer"))
        ends = sorted(self._end_ids)
        return llguidance.LLTokenizer(json.dumps(plain), eos_token=ends)


def _reason(matcher: llguidance.LLMatcher) -> str:
    return str(matcher.get_error()).removesuffix("<non-verbose/>").strip()


def _source(grammar: ResponseGrammar) -> str:
    """Return llguidance's form of a grammar. Raises DataError for one that is malformed."""
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(grammar.text)
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise DataError(f"a schema is an object: got {grammar.text[:80]}")
    if json_depth(schema) > MAX_GRAMMAR_DEPTH:
        raise DataError(
            f"its parts are more than {MAX_GRAMMAR_DEPTH} deep inside each other; flatten it, or "
            "name parts in $defs"
        )
    return llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS)


def json_depth(value: Any) -> int:
    """Return how deep lists and objects are inside each other, without recursion."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        part, depth = waiting.pop()
        if isinstance(part, dict | list):
            deepest = max(deepest, depth)
            inner = part.values() if isinstance(part, dict) else part
            waiting += [(one, depth + 1) for one in inner]
    return deepest


def _without_prefix_space(pre_tokenizer: Any) -> None:
    """Turn `add_prefix_space` off in a pre-tokenizer's JSON, in place."""
    if not isinstance(pre_tokenizer, dict):
        return
    if "add_prefix_space" in pre_tokenizer:
        pre_tokenizer["add_prefix_space"] = False
    for part in pre_tokenizer.get("pretokenizers", ()):
        _without_prefix_space(part)
