"""Find the words and the ends of sentences of a text in any script, by Unicode's properties.

A word stands between spaces. In scripts without spaces between words (Chinese, Japanese, Thai and
others) each character with its marks counts as one.
"""

from __future__ import annotations

import regex

# Scripts that put no space between words, by Unicode's line breaking where it needs a dictionary.
UNSPACED = (
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Yi}\p{Tibetan}\p{Javanese}\p{Balinese}"
    r"\p{LB=SA}\u30fc\uff70\u3005]"
)
CLOSING = "[\"'\u201d\u2019)\\]]"
_CLOSING_ANY = "[\"'\u201d\u2019)\\]\u300d\u300f\uff09\u3011\u300b\u3009\uff02\uff07\uff3d]"
# Marks that end a sentence with or without a space behind them: all but the ASCII ones, after
# which a sentence goes on in "e.g. this" and "3.5".
STRONG = r"[[\p{SB=STerm}\uff0e\ufe52\u0f0d\u0f0e]--[!?]]"
STRONG_END = rf"(?<={STRONG}{_CLOSING_ANY}*)(?!{_CLOSING_ANY}|{STRONG})"
_UNSPACED_END = rf"(?<={UNSPACED}[.!?\u2026]+{_CLOSING_ANY}*)(?!{_CLOSING_ANY}|[.!?\u2026])"
# Greek asks with a semicolon, and Armenian often ends with a colon.
_LOCAL_END = r"(?<=\p{Greek};|\p{Armenian}:)\s+(?=\p{Lu})"

PARAGRAPH_END = regex.compile(r"\n[^\S\n]*\n\s*")
SENTENCE_END = regex.compile(
    # Georgian has one case, which Unicode calls lower.
    rf"(?<=[.!?\u2026]){CLOSING}*\s+(?=[^\p{{Ll}}\s]|\p{{Georgian}})|\n[^\S\n]*\n\s*"
    rf"|{STRONG_END}\s*|{_UNSPACED_END}\s*|{_LOCAL_END}",
    regex.V1,
)
"""Match what stands between two sentences: white space, or nothing."""

LINE_END = regex.compile(r"\s*\n\s*")
CLAUSE_END = regex.compile(
    r"(?<=[,;:\u3001\uff0c\uff1b\uff1a\u060c\u061b\u055d\u1363\u104a])\s*"
    rf"|(?<={UNSPACED}\p{{M}}*)\s+(?={UNSPACED})"
)
QUESTION_END = regex.compile(r"[?\uff1f\u061f\u055e\u2047\u1367\u037e]\s*\Z|\p{Greek};\s*\Z")

_PIECE = regex.compile(
    rf"[\p{{Ps}}\p{{Pi}}]*(?={UNSPACED})\X[\p{{Po}}\p{{Pe}}\p{{Pf}}]*|(?:(?!{UNSPACED})\S)+"
)
_WORD = regex.compile(rf"(?={UNSPACED})\X|(?:(?!{UNSPACED})\w)+")
_CHARACTER = regex.compile(r"(?=\S)\X")
_UNSPACED = regex.compile(rf"(?={UNSPACED})\X")


def words(text: str) -> list[str]:
    """Return a text's words without punctuation."""
    return _WORD.findall(text)


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return the characters [start, stop) of each word with its punctuation."""
    return [match.span() for match in _PIECE.finditer(text)]


def character_spans(text: str) -> list[tuple[int, int]]:
    """Return the span of each character that is no white space, with its marks."""
    return [match.span() for match in _CHARACTER.finditer(text)]


def unspaced(text: str) -> int:
    """Return the number of characters, each with its marks, of scripts without spaces between
    words."""
    return len(_UNSPACED.findall(text))


def is_question(text: str) -> bool:
    """Return whether a text ends with the question mark of a script."""
    return QUESTION_END.search(text) is not None
