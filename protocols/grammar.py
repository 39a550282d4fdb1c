"""Define what a response must match, as text that crosses processes."""

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
