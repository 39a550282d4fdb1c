"""Read a user's own questions about their documents, in SQuAD's or LongHealth's JSON.

    SQuAD        {"data": [{"title", "paragraphs": [{"context", "qas": [{"question", "answers"},
                 ...]}]}]}: free answers; F1 and exact match over the best given answer; a response
                 to one of 2.0's unanswerable questions, where they are included, must decline. A
                 question may have a "kind", by which `forge bench` tells outcomes apart
    LongHealth   {"report": {"texts", "questions": [{"question", "answer_a", ..., "correct"}]}}:
                 five options; the key is the document's name

Questions belong to the document that their title (or key) names, else to the one that holds the
words of their paragraph (or of all their notes). Others are left out. In a document of several
chunks a question is about the first that holds its paragraph's words, or the right option's.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.clinic.text import (
    LETTERS,
    PatientQuestion,
    contains_words,
    option_prompt,
    parse_answer,
    parse_patients,
    plain_signs,
    right_answer,
    said_answer,
    spaced,
)
from cartridge_forge.plugins.strategies.answers.declines import declines
from cartridge_forge.plugins.strategies.answers.squad import (
    exact_match,
    f1,
    normalised,
    squad_scores,
)
from cartridge_forge.protocols.errors import DataError

_LABEL = re.compile(r"^\W*[a-eA-E][).:]+\s*")
GROUP = 5  # words
MOST_NAMES = 5  # of titles or documents in a message
_PART = re.compile(r"\.part_\d+$")
SQUAD_SHAPE = (
    'SQuAD\'s shape is {"data": [{"title": "a document\'s name", "paragraphs": [{"context": "its '
    'words", "qas": [{"id": "1", "question": "...", "answers": [{"text": "..."}]}]}]}]}'
)


@dataclass(frozen=True)
class UserQuestion:
    """Hold a question about a document: with options (`choice`), with accepted answers, or, with
    neither, a question that the document does not answer. It may have a conversation `before`
    it, and a `kind`."""

    id: str
    document: str
    text: str
    answers: tuple[str, ...] = ()
    choice: PatientQuestion | None = None
    before: tuple[AgentMessage, ...] = ()
    kind: str = ""

    @property
    def messages(self) -> tuple[AgentMessage, ...]:
        """Return the conversation that ends with the question."""
        return (*self.before, AgentMessage("user", self.text))

    @property
    def fact(self) -> str:
        """Return the words of the question without its options."""
        return self.choice.text if self.choice else self.text

    @property
    def forms(self) -> tuple[str, ...]:
        """Return the words that no training prompt may have: the question's, and those of its
        options with it."""
        if self.choice is None:
            return (self.text,)
        return self.choice.text, option_prompt(self.choice.text, self.choice.options)

    @property
    def expected(self) -> str | None:
        """Return the right answer, or None where there is none."""
        return self.choice.correct if self.choice else next(iter(self.answers), None)

    @property
    def wording(self) -> str | None:
        """Return the right answer as the model says it, or None where there is none."""
        return right_answer(self.choice, self.text) if self.choice else self.expected

    def read(self, response: str) -> str | None:
        """Return the answer in a response, or None where it gives none."""
        if self.choice is not None:
            letter = parse_answer(response, self.choice)
            return None if letter is None else self.choice.options[LETTERS.index(letter)]
        return said_answer(response) or response or None

    def scores(self, response: str) -> tuple[float, float, bool]:
        """Return (right: 0 or 1, F1, whether an answer was given) for a response."""
        if self.choice is not None:
            letter = parse_answer(response, self.choice)
            right = float(letter is not None and self.choice.is_correct(letter))
            return right, right, letter is not None
        answer = said_answer(response) or response
        if not self.answers:
            declined = float(declines(answer, self.text))
            return declined, declined, True
        right, score = squad_scores(answer, self.answers)
        return right, score, bool(right or normalised(answer) or any(map(str.isalnum, answer)))

    def words(self, response: str) -> tuple[float, float]:
        """Return (exact match, F1) of a response against the words of the right answer. Of a
        question with options, a letter alone counts as its option's text."""
        if self.choice is None:
            exact, score, _ = self.scores(response)
            return exact, score
        answer, letter = said_answer(response) or "", parse_answer(response, self.choice)
        if letter is not None:
            option = self.choice.options[LETTERS.index(letter)]
            contained = f" {normalised(option)} " in f" {normalised(answer)} "
            answer = _LABEL.sub("", answer) if normalised(option) and contained else option
        return exact_match(answer, self.choice.correct), f1(answer, self.choice.correct)


@dataclass(frozen=True)
class QuestionFile:
    """Hold the questions of a file about a run's documents, and notes on others, left out."""

    questions: tuple[UserQuestion, ...]
    notes: tuple[str, ...]


def read_questions(
    path: str,
    texts: Mapping[str, str],
    instruction: str,
    owners: Mapping[str, str] | None = None,
    *,
    unanswerable: bool = False,
) -> list[UserQuestion]:
    """Return the questions of `read_question_file`."""
    return list(read_question_file(path, texts, instruction, owners, unanswerable).questions)


def read_question_file(
    path: str,
    texts: Mapping[str, str],
    instruction: str,
    owners: Mapping[str, str] | None = None,
    unanswerable: bool = False,
) -> QuestionFile:
    """Return the questions of a file about the contexts in `texts`, of which `owners` are the
    documents, by default themselves; SQuAD's impossible ones only with `unanswerable`.

    Raises DataError for a file of another shape, one without a question about these documents, and
    one whose paragraph stands in several of them while its title names none.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check data.questions") from error
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON: {error}; give SQuAD's or LongHealth's; {SQUAD_SHAPE}"
        ) from error
    documents = _Documents(texts, owners or {name: name for name in texts})
    if isinstance(content, Mapping) and isinstance(content.get("data"), list):
        read = _squad(path, content["data"], documents, unanswerable)
    else:
        read = _longhealth(path, content, documents, instruction)
    if not read:
        if not documents.first:
            raise DataError(
                f"{path} has no question that can be answered; check data.questions; {SQUAD_SHAPE}"
            )
        raise DataError(f"{path}: no question is about a document of the run; {documents.first}")
    twice = [i for i, n in Counter(q.id for q in read).items() if n > 1]
    if twice:
        raise DataError(f"{path}: two questions have the id {twice[0]}; give each its own")
    return QuestionFile(tuple(read), documents.notes)


class _Documents:
    """Find the context that a question is about, and count the questions about no document."""

    def __init__(self, texts: Mapping[str, str], owners: Mapping[str, str]) -> None:
        self._texts = {name: _spaced(text) for name, text in texts.items()}
        self._chunks: dict[str, list[str]] = {}
        for name in texts:
            self._chunks.setdefault(owners[name], []).append(name)
        self._groups = {name: _groups(text) for name, text in self._texts.items()}
        self._all = 0
        self._notes: dict[str, Counter[str]] = {}  # questions by title, by what is told of them
        self.first = ""  # which question is left out, and why

    def chunks(self, where: str, title: str, passages: Sequence[str], count: int) -> list[str]:
        """Return the chunks of the document that a title names, else of the only one that holds the
        words of a passage. [] where it is none of them; `count` questions are then left out."""
        self._all += count
        spaced = [p for p in map(_spaced, passages) if p]
        named, holding = self._named(title), self._holding(spaced)
        if named:
            if holding and not set(named) & set(holding):
                self._note(f"follow their title, and their context is that of {_listed(holding)}",
                           title, count)  # fmt: skip
            either = [d for d in named if d in holding]
            return [c for d in either or named for c in self._chunks[d]]
        if len(holding) == 1 or (not spaced and not title and len(self._chunks) == 1):
            return self._chunks[(holding or list(self._chunks))[0]]
        stands = f"in {_listed(holding)}" if holding else "in no document"
        self._note(f"are left out: their context stands {stands}, and their title names none",
                   title, count)  # fmt: skip
        self.first = self.first or (
            f"{where}: its context stands {stands}, and its title {title!r} is the name of none: "
            f"{self.names}; give the document's words as its context, or its name as the title"
        )
        return []

    def _note(self, what: str, title: str, count: int) -> None:
        self._notes.setdefault(what, Counter())[title or "no title"] += count

    def _named(self, title: str) -> list[str]:
        """Return the document with a title as its name, or as its file's path, or the parts of the
        one that has it."""
        if title in self._chunks:
            return [title]
        bare = re.sub(r"\.\w{1,5}$", "", title)
        wanted = {_name(title), _name(bare), _name(_file(title))} - {""}
        for name in (_name, lambda d: _name(_file(d))):
            documents = [d for d in self._chunks if name(d) in wanted]
            if len(documents) == 1:
                return documents
        return [d for d in self._chunks if (w := _PART.sub("", d)) != d and _name(w) in wanted]

    def _holding(self, passages: Sequence[str]) -> list[str]:
        """Return the documents with the words of a passage in a chunk of theirs; if there is none,
        the one with most of its groups of words."""
        matching = [
            d
            for d, chunks in self._chunks.items()
            if any(contains_words(self._texts[c], p) for c in chunks for p in passages)
        ]
        if matching or not passages:
            return matching
        groups = set[str]().union(*map(_groups, passages))
        shares = {d: len(set[str]().union(*(groups & self._groups[c] for c in chunks)))
                  for d, chunks in self._chunks.items()}  # fmt: skip
        best = max(shares.values())
        return [d for d, n in shares.items() if n == best and 2 * n > len(groups)]

    def context(self, chunks: Sequence[str], passage: str, answers: Sequence[str]) -> str:
        """Return the first of a document's chunks that holds the words of a passage, else the first
        with groups of its words and an answer, else the one with most of them."""
        if len(chunks) == 1:
            return chunks[0]
        groups = _groups(passage)
        neighbours = [c for c in chunks if groups & self._groups[c]]
        holding = self.holding(chunks, [passage]) or self.holding(neighbours, answers)
        return holding or max(chunks, key=lambda c: len(groups & self._groups[c]))

    def holding(self, chunks: Sequence[str], answers: Sequence[str]) -> str | None:
        """Return the first of the chunks that holds the words of an answer, None if none does."""
        spaced = [a for a in map(_spaced, answers) if a]
        pairs = ((c, a, fold) for fold in (False, True) for c in chunks for a in spaced)
        return next((c for c, a, fold in pairs if contains_words(self._texts[c], a, fold)), None)

    @property
    def names(self) -> str:
        """Return the names of the documents, or of the first few."""
        return _listed(list(self._chunks))

    @property
    def notes(self) -> tuple[str, ...]:
        """Return how many questions are left out or have two documents, with their titles."""
        return tuple(
            f"{sum(titles.values())} of {self._all} questions {what} ({_listed(list(titles))})"
            for what, titles in self._notes.items()
            if sum(titles.values())
        )


def _squad(
    path: str, articles: Sequence[Any], documents: _Documents, unanswerable: bool
) -> list[UserQuestion]:
    questions = []
    for a, article in enumerate(articles):
        try:
            for p, paragraph in enumerate(article["paragraphs"]):
                title, context = str(article.get("title") or ""), str(paragraph["context"])
                entries = []
                for q, qa in enumerate(paragraph["qas"]):
                    answers = tuple(dict.fromkeys(str(x["text"]) for x in qa["answers"]))
                    answers = tuple(filter(str.strip, () if qa.get("is_impossible") else answers))
                    if answers or unanswerable:
                        key = str(qa.get("id", f"{a}/{p}/{q}"))
                        kind = str(qa.get("kind", ""))
                        entries.append((key, str(qa["question"]), answers, kind))
                where = f"data[{a}].paragraphs[{p}]"
                chunks = documents.chunks(where, title, [context], len(entries))
                for key, text, answers, kind in entries if chunks else ():
                    name = documents.context(chunks, context, answers)
                    questions.append(UserQuestion(key, name, text, answers, kind=kind))
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: data[{a}] is no article of SQuAD ({error}): it has paragraphs, each with "
                f"a context and qas; {SQUAD_SHAPE}"
            ) from error
    return questions


def _longhealth(
    path: str, content: Any, documents: _Documents, instruction: str
) -> list[UserQuestion]:
    try:
        patients = parse_patients(content, path)
    except DataError as error:
        raise DataError(f"{error}. Or give SQuAD's: {SQUAD_SHAPE}") from error
    questions = []
    for patient in patients:
        # A shorter note stands anywhere.
        notes = [text for text in patient.texts if len(text.split()) >= GROUP]
        where = f"{patient.id} is the name of no document: {documents.names}"
        chunks = documents.chunks(where, patient.id, notes, len(patient.questions))
        for q in patient.questions if chunks else ():
            passages = [_whole_words(patient.texts[n][i:j]) for n, i, j in q.places]
            name = documents.holding(chunks, passages) or documents.holding(chunks, [q.correct])
            text = option_prompt(q.text, q.options, instruction)
            questions.append(UserQuestion(q.id, name or chunks[0], text, choice=q))
    return questions


def _spaced(text: str) -> str:
    """Return text with plain signs and single spaces."""
    return spaced(plain_signs(text))


def _whole_words(passage: str) -> str:
    """Return a passage, given by characters, without the words that it may cut."""
    return " ".join(passage.split()[1:-1])


def _name(title: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", plain_signs(title).casefold()))


def _file(path: str) -> str:
    """Return the name of a path's file without its ending."""
    return re.sub(r"\.\w{1,5}$", "", re.split(r"[/\\]", path)[-1])


def _groups(text: str) -> set[str]:
    """Return every GROUP words in a row."""
    words = re.findall(r"\w+", plain_signs(text).casefold())
    return {" ".join(words[i : i + GROUP]) for i in range(len(words) - GROUP + 1)}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
