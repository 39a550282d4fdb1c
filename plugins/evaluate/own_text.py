"""Measure the text that an arm writes by itself, as it does once it is deployed.

An arm S writes where passages are asked for: greedily, and sampled at temperature 1. The model with
the whole document T reads those tokens y.

    teacher_nll    mean of -log T(y), nats a token: how likely the arm's text is to T
    kl             mean of log S(y) - log T(y) over sampled tokens, an estimate of KL(S || T)
    accepted       sampled: mean of min(1, T(y) / S(y)), the share of tokens that exact verification
                   accepts; greedy: the share of tokens that are T's likeliest
    until_refused  share of tokens before the first of a text to which T gives less than REFUSED
    precision      share of the text's whole sentences whose words stand in the document

After a first wrong token T goes on from the error: `accepted` and `until_refused` say more than
`kl` then. The measures are those of speculative sampling (Leviathan et al., arXiv:2211.17192).

Answers in a form that a function checks tell whether a model still obeys over a cartridge.

The prompts are about nothing in particular, so that any document's cartridge may stand before them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import regex

from cartridge_forge.plugins.documents.filters import normalised
from cartridge_forge.plugins.documents.words import SENTENCE_END, words
from cartridge_forge.plugins.evaluate.records import OwnText

FULL_STOP = regex.compile(r"(?<=\.)\s+")
REFUSED = 0.05  # the teacher's probability of a token, as `rollout.verify.below`


@dataclass(frozen=True)
class WrittenText:
    """Hold one text of an arm and how its document's teacher reads it.

    `logprobs` are the arm's own of its tokens, `teacher_logprobs` the teacher's of the same ones
    (nats), and `matches` tells of each whether it is the teacher's likeliest. `ended` tells whether
    the arm ended the text itself.
    """

    text: str
    document: str
    logprobs: tuple[float, ...]
    teacher_logprobs: tuple[float, ...]
    matches: tuple[bool, ...]
    ended: bool
    sampled: bool

    @property
    def kl(self) -> float | None:
        """Return the mean of log S - log T over sampled tokens, None for a greedy text."""
        if not self.sampled:
            return None
        pairs = zip(self.logprobs, self.teacher_logprobs, strict=True)
        return fmean(student - teacher for student, teacher in pairs)

    @property
    def accepted(self) -> float:
        """Return the share of the tokens that verification by the teacher accepts."""
        return fmean(self._acceptances)

    @property
    def before_refusal(self) -> int:
        """Return how many tokens come before the first that the teacher refuses."""
        refused = (i for i, x in enumerate(self.teacher_logprobs) if math.exp(x) < REFUSED)
        return next(refused, len(self.teacher_logprobs))

    @property
    def sentences(self) -> tuple[bool, ...]:
        """Return of each whole sentence whether the document has its words."""
        parts = whole_sentences(self.text, self.ended, self.document)
        return tuple(is_in(sentence, self.document) for sentence in parts)

    @property
    def _acceptances(self) -> list[float]:
        if not self.sampled:
            return [float(match) for match in self.matches]
        pairs = zip(self.logprobs, self.teacher_logprobs, strict=True)
        return [math.exp(min(0.0, teacher - student)) for student, teacher in pairs]


def summary(texts: Sequence[WrittenText]) -> OwnText:
    """Return the measures over all tokens, and all whole sentences, of texts of one kind. There
    must be a text."""
    tokens = sum(len(t.logprobs) for t in texts)
    sentences = [inside for t in texts for inside in t.sentences]
    kls = [len(t.logprobs) * t.kl for t in texts if t.kl is not None]
    return OwnText(
        tokens=tokens,
        teacher_nll=-math.fsum(x for t in texts for x in t.teacher_logprobs) / tokens,
        kl=math.fsum(kls) / tokens if kls else None,
        accepted=math.fsum(len(t.logprobs) * t.accepted for t in texts) / tokens,
        until_refused=sum(t.before_refusal for t in texts) / tokens,
        sentences=len(sentences),
        precision=fmean(map(float, sentences)) if sentences else None,
    )


def whole_sentences(text: str, ended: bool, document: str) -> list[str]:
    """Return the sentences of a text that have a word, as its document divides them: one in lower
    case throughout ends them by full stops alone. The last is left out where the text was cut."""
    ends = SENTENCE_END if SENTENCE_END.search(document) else FULL_STOP
    parts = ends.split(text)
    return [part for part in (parts if ended else parts[:-1]) if normalised(part)]


def is_in(sentence: str, document: str) -> bool:
    """Return whether a document has a sentence's words one after the other, whatever the case and
    the signs between them."""
    return f" {normalised(sentence)} " in f" {normalised(document)} "


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
