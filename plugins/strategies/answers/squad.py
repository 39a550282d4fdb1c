"""Score free answers as SQuAD does, by Unicode's classes of signs in place of ASCII's.

    normalised   NFKC, case folded, without punctuation (categories P), symbols (S), invisible signs
                 (Cf) and articles
    an answer of which that leaves nothing, such as the blood group "A" or the rhesus factor "+",
    is compared as it is written, but for its case and the marks around it

On ASCII text this equals SQuAD's own script (Rajpurkar et al., 2016).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from cartridge_forge.plugins.clinic.text import plain_signs
from cartridge_forge.plugins.strategies.answers.declines import declines

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_AROUND = " \t\n.,;:!?\"'`*_()[]{}<>"


def normalised(text: str) -> str:
    """Return text in lower case without punctuation, symbols and articles, and with single
    spaces."""
    folded = _folded(text)
    # U+02BC is a letter to Unicode, and an apostrophe to those who write it.
    characters = (c for c in folded if unicodedata.category(c)[0] not in "PS" and c != "\u02bc")
    plain = "".join(c for c in characters if unicodedata.category(c) != "Cf")
    return " ".join(_ARTICLES.sub(" ", plain).split())


def squad_scores(response: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return (exact match: 0 or 1, F1) of a response, each the best over the accepted answers."""
    return max(exact_match(response, a) for a in answers), max(f1(response, a) for a in answers)


def exact_match(response: str, answer: str) -> float:
    """Return 1.0 where a response is the answer, else 0.0."""
    form = normalised if normalised(answer) else _as_written
    return float(form(response) == form(answer))


def f1(response: str, answer: str) -> float:
    """Return the harmonic mean of precision and recall over words. Of an answer that normalisation
    empties, the words are those that are written, and a response that declines has 0."""
    a, b = normalised(response).split(), normalised(answer).split()
    if not b:
        if exact_match(response, answer) or declines(response):
            return exact_match(response, answer)
        a, b = ([_as_written(word) for word in text.split()] for text in (response, answer))
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else 0.0


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _as_written(text: str) -> str:
    """Return text in lower case without the marks around it, where there is more than marks."""
    plain = " ".join(plain_signs(_folded(text)).split())
    return plain.strip(_AROUND) or plain
