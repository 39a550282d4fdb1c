"""Read a user's own questions about their documents, in SQuAD's or LongHealth's JSON.

    SQuAD        {"data": [{"title", "paragraphs": [{"context", "qas": [{"question", "answers"},
                 ...]}]}]}: free answers; F1 and exact match over the best given answer; a response
                 to one of 2.0's unanswerable questions, where they are included, must decline
    LongHealth   {"report": {"texts", "questions": [{"question", "answer_a", ..., "correct"}]}}:
                 five options; the key is the document's name

A SQuAD paragraph belongs to the document that contains its words, else to the one of its title.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.clinic.longhealth import LETTERS, PatientQuestion, parse_patients
from environments.clinic.prompts import option_prompt, parse_answer, right_answer, said_answer
from protocols.errors import DataError
from protocols.teacher_replay import AgentMessage

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LABEL = re.compile(r"^\W*[a-eA-E][).:]+\s*")
# Responses that decline to answer, in `normalised` form.
_DECLINES = re.compile(
    r"^$|\b(?:unanswerable|not answerable|no answer|cannot be answered|cant be answered"
    r"|(?:not|isnt|is never|never) (?:stated|mentioned|given|specified|said|provided)"
    r"|does not (?:say|state|mention)|doesnt (?:say|state|mention)|i (?:do not|dont) know)\b"
)


@dataclass(frozen=True)
class UserQuestion:
    """Hold a question about a document: with options (`choice`), with accepted answers, or, with
    neither, a question that the document does not answer. It may have a conversation `before`
    it."""

    id: str
    document: str
    text: str
    answers: tuple[str, ...] = ()
    choice: PatientQuestion | None = None
    before: tuple[AgentMessage, ...] = ()

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
        said = said_answer(response) or response
        if not self.answers:
            declined = float(_DECLINES.search(normalised(said)) is not None)
            return declined, declined, True
        exact = max(float(normalised(said) == normalised(a)) for a in self.answers)
        return exact, max(f1(said, a) for a in self.answers), bool(normalised(said))

    def words(self, response: str) -> tuple[float, float]:
        """Return (exact match, F1) of a response against the words of the right answer. Of a
        question with options, a letter alone counts as its option's text."""
        if self.choice is None:
            exact, score, _ = self.scores(response)
            return exact, score
        said, letter = said_answer(response) or "", parse_answer(response, self.choice)
        if letter is not None:
            option = self.choice.options[LETTERS.index(letter)]
            said = _LABEL.sub("", said) if normalised(option) in normalised(said) else option
        right = self.choice.correct
        return float(normalised(said) == normalised(right)), f1(said, right)


def normalised(text: str) -> str:
    """Normalize as SQuAD does: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(said: str, answer: str) -> float:
    """Return the harmonic mean of precision and recall over words (Rajpurkar et al., 2016). Two
    empty texts are equal."""
    a, b = normalised(said).split(), normalised(answer).split()
    if not a or not b:
        return float(a == b)
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b))


def read_questions(
    path: str,
    texts: Mapping[str, str],
    instruction: str,
    owners: Mapping[str, str] | None = None,
    *,
    unanswerable: bool = False,
) -> list[UserQuestion]:
    """Return the questions of a file about the contexts in `texts`, of which `owners` are the
    documents, by default themselves; SQuAD's impossible ones only with `unanswerable`. A question
    about a document of several chunks is about the first that holds its paragraph, or the right
    option's words.

    Raises DataError for a file of another shape, and for a question about no document of the run.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check data.questions") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}; give SQuAD's or LongHealth's") from error
    if isinstance(content, Mapping) and isinstance(content.get("data"), list):
        found = _squad(path, content["data"], texts, unanswerable)
    else:
        of = owners or {name: name for name in texts}
        found = _longhealth(path, content, texts, instruction, of)
    if not found:
        raise DataError(f"{path} has no question that can be answered; check data.questions")
    twice = [i for i, n in Counter(q.id for q in found).items() if n > 1]
    if twice:
        raise DataError(f"{path}: two questions have the id {twice[0]}; give each its own")
    return found


def _squad(
    path: str, articles: Sequence[Any], texts: Mapping[str, str], unanswerable: bool
) -> list[UserQuestion]:
    plain = {name: _spaced(text) for name, text in texts.items()}
    found = []
    for a, article in enumerate(articles):
        try:
            for p, paragraph in enumerate(article["paragraphs"]):
                where = f"{path}: data[{a}].paragraphs[{p}]"
                title, context = str(article.get("title", "")), str(paragraph["context"])
                name = _of_context(where, title, context, plain)
                for q, qa in enumerate(paragraph["qas"]):
                    answers = tuple(dict.fromkeys(str(x["text"]) for x in qa["answers"]))
                    if qa.get("is_impossible") or not any(map(normalised, answers)):
                        answers = ()
                    if answers or unanswerable:
                        key = str(qa.get("id", f"{a}/{p}/{q}"))
                        found.append(UserQuestion(key, name, str(qa["question"]), answers))
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: data[{a}] is no article of SQuAD ({error}): it has paragraphs, each "
                "with a context and qas (question, answers: [{text}])"
            ) from error
    return found


def _of_context(where: str, title: str, context: str, plain: Mapping[str, str]) -> str:
    holding = [name for name, text in plain.items() if _spaced(context) in text]
    if context.strip() and holding:
        return holding[0]
    if title in plain:
        return title
    if len(plain) == 1:
        return next(iter(plain))
    raise DataError(
        f"{where}: its context stands in no document, and its title {title!r} is the name of none: "
        f"{', '.join(plain)}; give the document's words as its context, or its name as the title"
    )


def _longhealth(
    path: str,
    content: Any,
    texts: Mapping[str, str],
    instruction: str,
    owners: Mapping[str, str],
) -> list[UserQuestion]:
    found = []
    documents = list(dict.fromkeys(owners.values()))
    for patient in parse_patients(content, path):
        only = next(iter(documents)) if len(documents) == 1 else ""
        chunks = [c for c, d in owners.items() if d in (patient.id, only)]
        if not chunks:
            raise DataError(
                f"{path}: {patient.id} is the name of no document: "
                f"{', '.join(documents)}; name it as one of them (set documents.long: "
                "chunks for one that was split)"
            )
        for q in patient.questions:
            text = option_prompt(q.text, q.options, instruction)
            holding = next((c for c in chunks if q.correct in texts[c]), chunks[0])
            found.append(UserQuestion(q.id, holding, text, choice=q))
    return found


def _spaced(text: str) -> str:
    return " ".join(text.split())
