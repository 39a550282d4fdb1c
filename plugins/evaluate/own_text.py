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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import regex

from cartridge_forge.plugins.documents.filters import normalised
from cartridge_forge.plugins.documents.words import SENTENCE_END
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
