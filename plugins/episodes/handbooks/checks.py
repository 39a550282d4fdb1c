"""Check whether answers obey a rule: pure functions of the texts that the rule governs.

A text is looked at without its thinking block and without white space at its ends. Letters count
as they are written. A text without capital letters ends its sentences by marks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import regex

from cartridge_forge.plugins.chat.messages import ToolAction
from cartridge_forge.plugins.documents.words import SENTENCE_END, words
from cartridge_forge.plugins.environments.action_parsing import (
    DESK,
    JSON,
    ActionFormat,
    action_in,
)
from cartridge_forge.plugins.episodes.handbooks.file import CallCheck, CheckSpec

DIALECTS = {"json": JSON, "desk": DESK}
ANY_END = regex.compile(r"(?<=[.!?])\s+")
SEARCH_S = 2.0  # that a regular expression may search one text


@dataclass(frozen=True)
class GovernedTurn:
    """Hold an answer that a rule governs, and the right one where the task tells it."""

    text: str
    expected: str | None = None


def obeys(check: CheckSpec, turns: Sequence[GovernedTurn], dialect: ActionFormat) -> bool:
    """Return whether the answers of a task obey a built-in check. There must be an answer; a
    function of the user's is called elsewhere. Raises TimeoutError where a regular expression
    searches for longer than SEARCH_S."""
    if check.calls_before is not None:
        first, second = check.calls_before
        called = [_tool(turn.text, dialect) for turn in turns]
        return first in called and second not in called[: called.index(first)]
    return all(_obeys(check, turn, dialect) for turn in turns)


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text that have a word."""
    ends = ANY_END if text == text.lower() else SENTENCE_END
    return [part for part in ends.split(text) if part and words(part)]


def _obeys(check: CheckSpec, turn: GovernedTurn, dialect: ActionFormat) -> bool:
    text, value = action_in(turn.text, "text"), getattr(check, check.kind)
    match check.kind:
        case "ends_with":
            return bool(text.endswith(value))
        case "begins_with":
            return bool(text.startswith(value))
        case "contains":
            return value in text
        case "lacks":
            return value not in text
        case "matches":
            return regex.search(value, text, timeout=SEARCH_S) is not None
        case "sentences":
            return len(sentences_of(text)) <= value
        case "words":
            return len(words(text)) <= value
        case "expected":
            wanted = (turn.expected or "").strip()
            return text == wanted if value == "equals" else wanted in text
        case "calls":
            return _calls(turn.text, value, dialect)
    raise AssertionError(f"{check.kind} is no built-in check")


def _calls(text: str, wanted: CallCheck, dialect: ActionFormat) -> bool:
    call = dialect.parse(text)
    if not isinstance(call, ToolAction) or call.tool != wanted.tool:
        return False
    return all(k in call.arguments and call.arguments[k] == v for k, v in wanted.arguments.items())


def _tool(text: str, dialect: ActionFormat) -> str | None:
    call = dialect.parse(text)
    return call.tool if isinstance(call, ToolAction) else None
