"""Ask for answers in a form that a function checks: does a model still obey over a cartridge?

The prompts are about nothing in particular, so that any document's cartridge may stand before them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from cartridge_forge.plugins.documents.words import words


@dataclass(frozen=True)
class FormatPrompt:
    """Hold a prompt and what tells whether a response obeys it."""

    id: str
    text: str
    obeys: Callable[[str], bool]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _bullets(text: str, count: int) -> bool:
    lines = _lines(text)
    return len(lines) == count and all(line.startswith(("- ", "* ")) for line in lines)


def _numbered(text: str, count: int) -> bool:
    lines = _lines(text)
    starts = [(f"{n}.", f"{n})") for n in range(1, count + 1)]
    return len(lines) == count and all(map(str.startswith, lines, starts))


def _object(text: str, *keys: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and sorted(value) == sorted(keys)


def _integers(text: str, count: int) -> bool:
    parts = [part.strip() for part in text.strip().split(",")]
    return len(parts) == count and all(part.isdecimal() for part in parts)


FORMATS: tuple[FormatPrompt, ...] = (
    FormatPrompt("one_word", "Name a colour. Answer with one word.", lambda t: len(words(t)) == 1),
    FormatPrompt(
        "yes_or_no", "Is ice cold? Answer only yes or no.",
        lambda t: t.strip().rstrip(".").lower() in ("yes", "no"),
    ),
    FormatPrompt(
        "five_words", "Describe the sea in five words at most.", lambda t: 1 <= len(words(t)) <= 5
    ),
    FormatPrompt(
        "bullets", "List three fruits. Begin each line with a hyphen and write nothing else.",
        lambda t: _bullets(t, 3),
    ),
    FormatPrompt(
        "numbered", "Give two reasons to walk, as a numbered list of two lines.",
        lambda t: _numbered(t, 2),
    ),
    FormatPrompt(
        "upper", "Greet a friend. Write in capital letters only.",
        lambda t: any(map(str.isalpha, t)) and t == t.upper(),
    ),
    FormatPrompt(
        "json", 'Answer with JSON alone, with the keys "city" and "country": where is the Louvre?',
        lambda t: _object(t, "city", "country"),
    ),
    FormatPrompt(
        "ends_with", 'Say good night in one sentence that ends with the word "moon".',
        lambda t: [w.lower() for w in words(t)][-1:] == ["moon"],
    ),
    FormatPrompt(
        "begins_with", 'Tell what rain is. Begin your answer with the word "Water".',
        lambda t: words(t)[:1] == ["Water"],
    ),
    FormatPrompt(
        "integers", "Write the numbers from 1 to 4, separated by commas, and nothing else.",
        lambda t: _integers(t, 4),
    ),
    FormatPrompt(
        "quoted", "Write a proverb between double quotation marks and nothing else.",
        lambda t: len(t.strip()) > 2 and t.strip()[0] == t.strip()[-1] == '"',
    ),
    FormatPrompt(
        "two_lines", "Write a poem about snow of exactly two lines.", lambda t: len(_lines(t)) == 2
    ),
)  # fmt: skip
