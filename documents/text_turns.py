"""Make self-study turns whose answers are the document's own words: no model writes them.

    recite     a few words of the text              -> the words that follow them
    continue   the beginning of a sentence          -> its end
    cloze      a sentence without a name, a number
               or a part of it                      -> the words left out
    quiz       a sentence and words of it           -> A writes a question, which these words answer

`paraphrase` asks for a passage in other words. Its answer is the teacher's or the student's own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from protocols.teacher_replay import AgentMessage

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

_WORD, _CHARACTER = re.compile(r"\S+"), re.compile(r"\S")
_ENDS = re.compile(
    "(?<=[.!?\u2026])[\"'\u201d\u2019)\\]]*\\s+(?=[^a-z\\s])|\\n[^\\S\\n]*\\n\\s*"
    "|(?<=[\u3002\uff01\uff1f])"
)
_NAMED = re.compile(
    "[~\u223c]?"
    r"[<>]?\d[\d,.]*\d?%?"
    r"(?:\s(?!(?:the|an?|and|or|in|on|at|to|by|for|with|as|is|are|was|were)\b)[a-z]+){0,3}"
    r"|[A-Z][\w-]+(?:[ -][A-Z][\w-]+)+|`[^`]+`|[A-Z]{2,}[\w-]*"
)
_BEFORE = re.compile(
    r"\b(?:is|are|was|were|has|have|by|because|due to|with|to|of|that|which|from|in|for|as|and)\s"
)
_AFTER = re.compile(r"[.,;:)]\s|[.]$|\s(?:and|which|that)\s")


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
    found = quizzed(text, rng)
    if found is None:
        return None
    asked = rng.choice(TURNS["cloze"]).format(cue=found.turn.replace(found.answer, BLANK, 1))
    return TextTurn(asked, found.answer, found.chars)


def quizzed(text: str, rng: random.Random) -> TextTurn | None:
    """Return a sentence as the turn and words of it as the answer; None where no sentence drawn
    has any."""
    spans = _sentences(text)
    for _ in range(DRAWS if spans else 0):
        start, stop = rng.choice(spans)
        if parts := answers_in(text[start:stop]):
            return TextTurn(text[start:stop], rng.choice(parts), (start, stop))
    return None


def question_prompt(sentence: str, answer: str) -> tuple[AgentMessage, ...]:
    """Return A's conversation: the examples as earlier turns, then the sentence and the answer."""
    said = []
    for text, words, question in EXAMPLES:
        said.append(AgentMessage("user", _asked(text, words)))
        said.append(AgentMessage("assistant", question))
    return (*said, AgentMessage("user", _asked(sentence, answer)))


def question_fault(question: str, answer: str) -> str | None:
    """Return why A's text is no question for the answer, None if it is one."""
    if not question.endswith("?") or "\n" in question:
        return "no_question"
    return "answer_inside" if answer.lower() in question.lower() else None


def answers_in(sentence: str) -> list[str]:
    """Return numbers, names and short parts of a sentence, each once, in the order of their
    kind."""
    found = [match.group().strip(" ,.;") for match in _NAMED.finditer(sentence)]
    for match in _BEFORE.finditer(sentence):
        part = _AFTER.split(sentence[match.end() :])[0].strip(" .\n")
        if 1 <= len(part.split()) <= LONGEST_ANSWER:
            found.append(part)
    return [part for part in dict.fromkeys(found) if len(part) > 1]


def _asked(text: str, answer: str) -> str:
    return f"Text: {' '.join(text.split())}\nAnswer: {' '.join(answer.split())}\n{ASK}"


def _recited(kind: str, text: str, rng: random.Random) -> TextTurn | None:
    words = _words(text)
    cue, length = rng.randint(*CUE), rng.randint(*RECITED)
    if len(words) < cue + RECITED[0]:
        return None
    first = rng.randrange(len(words) - cue - RECITED[0] + 1)
    behind = first + cue
    last = min(len(words), behind + length)
    quoted = text[words[first][0] : words[behind - 1][1]]
    turn = rng.choice(TURNS[kind]).format(cue=quoted)
    answer = text[words[behind][0] : words[last - 1][1]] if kind == "recite" else ""
    return TextTurn(turn, answer, (words[first][0], words[last - 1][1]))


def _continued(text: str, rng: random.Random) -> TextTurn | None:
    spans = _sentences(text)
    if not spans:
        return None
    start, stop = rng.choice(spans)
    words = _words(text[start:stop])
    shown = rng.randint(2, max(2, min(len(words) - 2, len(words) * 2 // 3)))
    cue = text[start : start + words[shown - 1][1]]
    turn = rng.choice(TURNS["continue"]).format(cue=cue)
    return TextTurn(turn, text[start + words[shown][0] : stop], (start, stop))


def _sentences(text: str) -> list[tuple[int, int]]:
    """Return the characters of each sentence of SENTENCE_WORDS words, without white space around
    it."""
    ends = [(m.start(), m.end()) for m in _ENDS.finditer(text)]
    starts = [0, *(after for _, after in ends)]
    stops = [*(before for before, _ in ends), len(text)]
    found = []
    for start, stop in zip(starts, stops, strict=True):
        words = _words(text[start:stop])
        if SENTENCE_WORDS[0] <= len(words) <= SENTENCE_WORDS[1]:
            found.append((start + words[0][0], start + words[-1][1]))
    return found


def _words(text: str) -> list[tuple[int, int]]:
    """Return the characters of each word; of each character where words have no spaces between
    them."""
    words = [match.span() for match in _WORD.finditer(text)]
    if words and sum(stop - start for start, stop in words) > LONGEST_WORD * len(words):
        return [match.span() for match in _CHARACTER.finditer(text)]
    return words
