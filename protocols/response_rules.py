"""Bound the tokens that a response may have: its grammar, and rules that change logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Bounds of what one request may give: a grammar is compiled while other requests wait.
MAX_GRAMMAR_BYTES = 32_768
MAX_GRAMMAR_DEPTH = 64  # objects and arrays of a schema inside each other

GrammarKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True)
class ResponseGrammar:
    """Hold what the whole text of a response must match.

    `ResponseGrammar("json_schema", '{"type":"integer"}')`: JSON that satisfies the schema.
    `ResponseGrammar("regex", "[0-9]{3}")`: the expression from beginning to end, in Rust's syntax.
    `ResponseGrammar("lark", 'start: "yes" | "no"')`: llguidance's form of Lark.
    """

    kind: GrammarKind
    text: str


LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0


@dataclass(frozen=True)
class LogitRules:
    """Hold the changes of logits that one request asks for; the default asks for none.

    `bias` has pairs (token id, number added to its logit). `repetition_penalty` divides the logit
    of every token of the prompt and of the response so far if it is above 0, and multiplies it
    otherwise. `frequency_penalty` is subtracted once for each time that a token stands in the
    response, `presence_penalty` once if it stands there. `min_p` leaves out the tokens whose
    probability, at the temperature of the draw, is below this share of the likeliest token's. The
    prompt is what the request sends: neither a document nor a cartridge before it.

    `LogitRules(bias=((13, -100.0),), repetition_penalty=1.1, min_p=0.05)`
    """

    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
