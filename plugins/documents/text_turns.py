"""Make self-study turns whose answers are the document's own words: no model writes them.

    recite     a few words of the text              -> the words that follow them
    continue   the beginning of a sentence          -> its end
    cloze      a sentence without a name, a number
               or a part of it                      -> the words left out
    quiz       a sentence and words of it           -> A writes a question, which these words answer

`paraphrase` asks for a passage in other words. Its answer is the teacher's or the student's own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import regex

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.documents.words import (
    CLAUSE_END,
    LINE_END,
    SENTENCE_END,
    UNSPACED,
    character_spans,
    is_question,
    unspaced,
    word_spans,
)

TURNS: Mapping[str, tuple[str, ...]] = {
    "recite": (
        'How does the passage go on that begins with "{cue}"?',
        'Continue the text word for word: "{cue}"',
        'What does the text say after "{cue}"?',
    ),
    "continue": (
        'Complete this sentence of the text: "{cue} ..."',
        'How does this sentence of the text end? "{cue} ..."',
        "Finish: {cue} ...",
    ),
    "cloze": (
        "Fill in the blank: {cue}",
        "Which words of the text are missing? {cue}",
        'What stands in place of "____" in the text? {cue}',
    ),
    "paraphrase": (
        'Say in your own words what the text says from "{cue}" on.',
        'Explain in a sentence or two the passage that begins with "{cue}".',
    ),
}
# (text, answer, question): examples for the writer of questions.
EXAMPLES = (
    (
        "The bridge over the Tamar was opened by Prince Albert on 2 May 1859, after eleven years "
        "of work.",
        "Prince Albert",
        "Who opened the bridge over the Tamar?",
    ),
    (
        "Because the harbour freezes in winter, grain is stored in three brick silos outside the "
        "town.",
        "the harbour freezes in winter",
        "Why is grain stored outside the town?",
    ),
    (
        "In trials, 42% of the seedlings survived the first frost, compared with 11% in the open "
        "field.",
        "42% of the seedlings",
        "How many seedlings survived the first frost in trials?",
    ),
    (
        "A ledger is a book in which a firm records all money that it receives and pays.",
        "a book in which a firm records all money that it receives and pays",
        "What is a ledger?",
    ),
)
ASK = "Write one question about the text that the answer answers."
BLANK = "____"
CUE = (6, 14)  # words
RECITED = (16, 40)  # words
SENTENCE_WORDS = (5, 60)  # shorter ones are headings, longer ones tables
LONGEST_ANSWER = 14  # words of a part of a sentence
LONGEST_WORD = 24  # characters on average: above, the text has no spaces between words
DRAWS = 20  # of a sentence, until one has words to leave out
SENTENCES_SHARE = 0.5  # of the words: below, lines and clauses are asked about too
ENGLISH_SHARE = 0.08  # of the words: above, a text with so many of _ENGLISH is English
LEFT_OUT = 4  # most characters of a script without spaces

_NAMED = regex.compile(
    "[~\u223c]?"
    r"[<>]?\d[\d,.]*\d?%?"
    r"(?:\s(?!(?:the|an?|and|or|in|on|at|to|by|for|with|as|is|are|was|were)\b)[a-z]+){0,3}"
    r"|\p{Lu}[\w-]+(?:[ -]\p{Lu}[\w-]+)+|`[^`]+`|\p{Lu}{2,}[\w-]*"
)
_BEFORE = regex.compile(
    r"\b(?:is|are|was|were|has|have|by|because|due to|with|to|of|that|which|from|in|for|as|and)\s"
)
_AFTER = regex.compile(r"[.,;:)]\s|[.]$|\s(?:and|which|that)\s")
_ENGLISH = frozenset({"the", "of", "and", "to", "in", "is", "was", "are", "that", "for"})
_SAYS = regex.compile(r"[\p{L}\p{N}]")
_LETTERS = regex.compile(r"[\p{L}\p{M}\p{N}][\p{L}\p{M}\p{N}'\u2019-]*")
_RUN = regex.compile(rf"\p{{Han}}+|[\p{{Katakana}}\u30fc]+|(?:(?={UNSPACED})\X)+")


@dataclass(frozen=True)
class TextTurn:
    """Hold a user's turn, its answer ("" where a model writes it), and the characters
    [start, stop) of the text that it is about."""

    turn: str
    answer: str
    chars: tuple[int, int]


def text_turn(kind: str, text: str, rng: random.Random) -> TextTurn | None:
    """Return a turn of one of TURNS about a text; None where it has no words for one."""
    if kind in ("recite", "paraphrase"):
        return _recited(kind, text, rng)
    if kind == "continue":
        return _continued(text, rng)
    quiz = quizzed(text, rng)
    if quiz is None:
        return None
    question = rng.choice(TURNS["cloze"]).format(cue=quiz.turn.replace(quiz.answer, BLANK, 1))
    return TextTurn(question, quiz.answer, quiz.chars)


def quizzed(text: str, rng: random.Random) -> TextTurn | None:
    """Return a sentence as the turn and words of it as the answer; None where no sentence drawn
    has any."""
    sentences, english = _sentences(text), _is_english(text)
    for last in range(DRAWS - 1, -1, -1) if sentences else ():
        part = rng.choice(sentences)
        sentence = text[part.start : part.stop]
        parts = answers_in(sentence)
        # Only of English is it known which words ask for something.
        if not english or not (parts or last):
            parts = [*dict.fromkeys((*parts, *content_words(sentence)))]
        if parts:
            return TextTurn(sentence, rng.choice(parts), (part.start, part.stop))
    return None


def question_prompt(sentence: str, answer: str) -> tuple[AgentMessage, ...]:
    """Return A's conversation: the examples as earlier turns, then the sentence and the answer."""
    messages = []
    for text, words, question in EXAMPLES:
        messages.append(AgentMessage("user", _asked(text, words)))
        messages.append(AgentMessage("assistant", question))
    return (*messages, AgentMessage("user", _asked(sentence, answer)))


def question_fault(question: str, answer: str) -> str | None:
    """Return why A's text is no question for the answer, None if it is one."""
    if not is_question(question) or "\n" in question:
        return "no_question"
    return "answer_inside" if answer.lower() in question.lower() else None


def answers_in(sentence: str) -> list[str]:
    """Return numbers, names and short parts of a sentence, each once, in the order of their
    kind."""
    answers = [match.group().strip(" ,.;") for match in _NAMED.finditer(sentence)]
    for match in _BEFORE.finditer(sentence):
        part = _AFTER.split(sentence[match.end() :])[0].strip(" .\n")
        if 1 <= len(part.split()) <= LONGEST_ANSWER:
            answers.append(part)
    return [part for part in dict.fromkeys(answers) if len(part) > 1]


def content_words(sentence: str) -> list[str]:
    """Return the longer words of a sentence in any script, each once and in order: those of at
    least the mean length, or up to LEFT_OUT characters where words have no spaces between them."""
    pieces: list[tuple[int, str]] = []
    runs = [match.span() for match in _RUN.finditer(sentence)]
    if not runs and len(sentence.split()) == 1:  # as in a hash
        runs = [(0, len(sentence))]
    for start, stop in runs:
        ends = [m.end() for m in regex.finditer(r"\X", sentence, pos=start, endpos=stop)]
        step = max(1, min(LEFT_OUT, len(ends) - 1) // 2 * 2)
        starts = [start, *ends[:-1]]
        for i in range(0, len(ends), step):
            pieces.append((starts[i], sentence[starts[i] : ends[min(i + step, len(ends)) - 1]]))
    if not runs:
        spans = [match.span() for match in _LETTERS.finditer(sentence)]
        mean = sum(stop - start for start, stop in spans) / max(1, len(spans))
        pieces = [(start, sentence[start:stop]) for start, stop in spans if stop - start >= mean]
    # The blank takes the first place of the words.
    parts = dict.fromkeys(word for start, word in pieces if sentence.find(word) == start)
    return [part for part in parts if part != sentence]


def _asked(text: str, answer: str) -> str:
    return f"Text: {' '.join(text.split())}\nAnswer: {' '.join(answer.split())}\n{ASK}"


def _recited(kind: str, text: str, rng: random.Random) -> TextTurn | None:
    words = _words(text)
    cue, length = rng.randint(*CUE), rng.randint(*RECITED)
    least = RECITED[0]
    if len(words) < cue + least:  # a short text, of which a third is the cue
        if len(words) < SENTENCE_WORDS[0]:
            return None
        cue = max(2, len(words) // 3)
        least = len(words) - cue
    first = rng.randrange(len(words) - cue - least + 1)
    end = first + cue
    last = min(len(words), end + length)
    quoted = text[words[first][0] : words[end - 1][1]]
    turn = rng.choice(TURNS[kind]).format(cue=quoted)
    answer = text[words[end][0] : words[last - 1][1]] if kind == "recite" else ""
    return TextTurn(turn, answer, (words[first][0], words[last - 1][1]))


def _continued(text: str, rng: random.Random) -> TextTurn | None:
    sentences = _sentences(text)
    if not sentences:
        return None
    part = rng.choice(sentences)
    words = part.words
    count = rng.randint(2, max(2, min(len(words) - 2, len(words) * 2 // 3)))
    cue = text[part.start : words[count - 1][1]]
    turn = rng.choice(TURNS["continue"]).format(cue=cue)
    return TextTurn(turn, text[words[count][0] : part.stop], (part.start, part.stop))


Span = tuple[int, int]


@lru_cache(maxsize=4096)  # documents, which take turns, and their sentences
def _words(text: str) -> tuple[Span, ...]:
    """Return the characters of each word; of each character where there are no spaces at all, as
    in a hash."""
    spans = word_spans(text)
    if spans and sum(stop - start for start, stop in spans) > LONGEST_WORD * len(spans):
        spans = character_spans(text)
    return tuple(spans)


@lru_cache(maxsize=256)
def _is_english(text: str) -> bool:
    words = [word.lower() for word in text.split()]
    return sum(word in _ENGLISH for word in words) >= ENGLISH_SHARE * len(words)


@lru_cache(maxsize=256)
def _sentences(text: str) -> tuple[_Part, ...]:
    """Return each sentence of SENTENCE_WORDS words, without white space around it. Where
    sentences are less than SENTENCES_SHARE of the text, as in lists, tables, poems and code,
    what is longer is divided into lines and clauses, and what is shorter is joined."""
    least, most = SENTENCE_WORDS
    parts = _divided(_Part.of(text, 0, len(text)), text, SENTENCE_END)
    fit = [part for part in parts if len(part.words) >= least and part.size <= most]
    if sum(part.size for part in fit) < SENTENCES_SHARE * sum(part.size for part in parts):
        for ends in (LINE_END, CLAUSE_END):
            parts = [
                piece
                for part in parts
                for piece in ([part] if part.size <= most else _divided(part, text, ends))
            ]
        fit = _joined([piece for part in parts for piece in part.windows(most)], text)
    return tuple(fit)


@dataclass(frozen=True)
class _Part:
    """Hold a stretch of a text by the spans of its words. Its `size` is in words, of which two
    characters of a script without spaces make one."""

    words: tuple[Span, ...]
    size: float

    @classmethod
    def of(cls, text: str, start: int, stop: int) -> _Part:
        part = text[start:stop]
        words = tuple((start + a, start + b) for a, b in _words(part))
        return cls(words, len(words) - unspaced(part) / 2)

    @property
    def start(self) -> int:
        return self.words[0][0]

    @property
    def stop(self) -> int:
        return self.words[-1][1]

    def windows(self, most: int) -> list[_Part]:
        """Return the part cut into equal ones of at most `most` words."""
        cuts = math.ceil(self.size / most)
        step = math.ceil(len(self.words) / cuts)
        return [
            _Part(self.words[i : i + step], self.size / cuts)
            for i in range(0, len(self.words), step)
        ]


def _divided(part: _Part, text: str, ends: regex.Pattern[str]) -> list[_Part]:
    """Return what lies between the ends in a part, without what has no word."""
    if not part.words:
        return []
    parts, start = [], part.start
    for match in ends.finditer(text, part.start, part.stop):
        parts.append((start, match.start()))
        start = match.end()
    pieces = (_Part.of(text, *span) for span in (*parts, (start, part.stop)))
    return [piece for piece in pieces if piece.words]


def _joined(parts: Sequence[_Part], text: str) -> list[_Part]:
    """Return parts of SENTENCE_WORDS words: a shorter one with those after it, or before the end
    of the text with the one before it; what has no letter or digit, as a table's rule, is left."""
    least, most = SENTENCE_WORDS
    merged: list[_Part] = []
    words: tuple[Span, ...] = ()
    size = 0.0
    for part in parts:
        if not _SAYS.search(text, part.start, part.stop):
            continue
        apart = size + part.size > most
        words, size = (part.words, part.size) if apart else (words + part.words, size + part.size)
        if len(words) >= least:
            merged.append(_Part(words, size))
            words, size = (), 0.0
    if words and merged and merged[-1].size + size <= most:
        merged[-1] = _Part(merged[-1].words + words, merged[-1].size + size)
    return merged
