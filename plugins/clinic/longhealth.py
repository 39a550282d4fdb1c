"""Read LongHealth patients from JSON: the embedded clinic's, or the real `benchmark_v5.json`.

The real file has 20 fictional patients and 400 questions. Its authors ask not to publish it where
models are trained, so it is never shipped: it is read from a path or a URL at run time.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cartridge_forge.protocols.errors import DataError

LETTERS = "abcde"
FETCH_TIMEOUT_S = 60.0
# Thai, Lao, Burmese, Khmer, kana, Han, Hangul, whose endings follow without a space.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
    "\U00020000-\U0003ffff]"
)
NoteSpan = tuple[int, int, int]  # a note's index, and the characters [start, stop) of it


@dataclass(frozen=True)
class PatientQuestion:
    """Hold a five-option question. `options[i]` has letter `LETTERS[i]`; `correct` is a *text*.

    Two options may have the same text (one real patient has such a pair), so a letter is right when
    its option's text equals `correct`. `places` are the passages of the notes that answer it, () if
    the file does not tell.
    """

    id: str
    patient: str
    text: str
    options: tuple[str, ...]
    correct: str
    places: tuple[NoteSpan, ...] = ()

    def is_correct(self, letter: str) -> bool:
        return self.options[LETTERS.index(letter)] == self.correct


@dataclass(frozen=True)
class Patient:
    """Hold one patient: the notes in order and the questions about them."""

    id: str
    name: str
    birthday: str
    diagnosis: str
    texts: tuple[str, ...]
    questions: tuple[PatientQuestion, ...]

    def __hash__(self) -> int:
        # Equal patients have equal ids. A hash of all fields would visit every question, each time
        # that a cache is asked about the patient.
        return hash(self.id)

    @property
    def document(self) -> str:
        """Return the whole chart as the model reads it, one line a note."""
        return self.excerpt([(i, 0, len(text)) for i, text in enumerate(self.texts)])

    def excerpt(self, spans: Sequence[NoteSpan]) -> str:
        """Return these passages of the chart as the model reads them, under the chart's head."""
        head = f"chart of {self.name}, born {self.birthday}, diagnosis {self.diagnosis}."
        lines = [head]
        for i, start, stop in spans:
            text = self.texts[i]
            part = text[start:stop].lstrip() if start else text[:stop]
            lines.append(f"note {i + 1}: {part if stop == len(text) else part.rstrip()}")
        return "\n".join(lines)

    def places_of(self, question: PatientQuestion) -> tuple[NoteSpan, ...]:
        """Return the passages that answer a question; where its file does not tell, the notes that
        hold the right option's words, or all of them."""
        notes = [(i, 0, len(text)) for i, text in enumerate(self.texts)]
        option = spaced(question.correct)
        holding = [s for s in notes if contains_words(spaced(self.texts[s[0]]), option)]
        return question.places or tuple(holding or notes)


def contains_words(text: str, words: str, fold: bool = False) -> bool:
    """Return whether a text has these words in a row, whole ("5 mg" is not in "25 mg", nor in
    "2.5 mg"); both have single spaces (`spaced`). With `fold` the case does not count. Scripts
    without spaces have no words to be whole."""
    if fold:
        text, words = text.casefold(), words.casefold()
    at = text.find(words) if words else -1
    while at >= 0:
        end = at + len(words)
        lead, tail = text[max(0, at - 2) : at], text[end : end + 2][::-1]
        if not _joined(lead, words[0]) and not _joined(tail, words[-1]):
            return True
        at = text.find(words, at + 1)
    return False


def _joined(neighbour: str, sign: str) -> bool:
    """Return whether the two signs beside a word's first or last one, the nearer one second, belong
    to the word or number."""
    if sign.isdigit() and re.fullmatch(r"\d[.,]", neighbour):
        return True
    return all(re.match(r"\w", s) and not _UNSPACED.match(s) for s in (neighbour[-1:], sign))


def spaced(text: str) -> str:
    """Return text with single spaces between its words and none around it."""
    return " ".join(text.split())


def load_patients(source: str) -> list[Patient]:
    """Return the patients of LongHealth JSON at a path or an http(s) URL. Raises DataError that
    names the source and its fault."""
    if source.startswith(("http://", "https://")):
        try:
            with urllib.request.urlopen(source, timeout=FETCH_TIMEOUT_S) as answer:
                raw = answer.read()
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # releases the connection
            raise DataError(
                f"cannot fetch {source}: {error}; download it once and give data.path its path"
            ) from error
    else:
        try:
            raw = Path(source).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {source}: {error.strerror}; check data.path") from error
    try:
        records = json.loads(raw)
    except ValueError as error:
        raise DataError(f"{source} is not JSON: {error}; expected benchmark_v5.json") from error
    return parse_patients(records, source)


def parse_patients(records: Any, source: str) -> list[Patient]:
    """Return the patients of LongHealth's top-level object; `source` names it in DataErrors."""
    if not isinstance(records, Mapping) or not records:
        raise DataError(
            f"{source}: expected an object of patients, got {type(records).__name__}; "
            "LongHealth's file starts with {'patient_01': {...}}"
        )
    return [_parse_patient(source, key, record) for key, record in records.items()]


def _parse_patient(source: str, key: str, record: Any) -> Patient:
    try:
        texts = record["texts"]
        order = sorted(texts, key=_natural)
        if not order:
            raise ValueError("texts is empty: a patient needs a note to be asked about")
        notes = {t: _text(texts, t) for t in order}
        return Patient(
            id=key,
            name=_text(record, "name"),
            birthday=_text(record, "birthday"),
            diagnosis=_text(record, "diagnosis"),
            texts=tuple(notes.values()),
            questions=tuple(_parse_question(key, q, notes) for q in record["questions"]),
        )
    except KeyError as error:
        raise DataError(
            f"{source}: {key} has no {error}; LongHealth's schema has name, birthday, diagnosis, "
            "texts and questions (No, question, answer_a..answer_e, correct)"
        ) from error
    except (TypeError, AttributeError) as error:
        raise DataError(f"{source}: {key} is malformed: {error}") from error
    except ValueError as error:
        raise DataError(f"{source}: {key}: {error}") from error


def _parse_question(
    patient: str, record: Mapping[str, Any], notes: Mapping[str, str]
) -> PatientQuestion:
    where = f"question {record['No']}: "
    options = tuple(_text(record, f"answer_{letter}", where) for letter in LETTERS)
    correct = _text(record, "correct", where)
    if correct not in options:
        raise ValueError(f"{where}correct is {correct!r}, which is none of its five options")
    return PatientQuestion(
        id=f"{patient}/{record['No']}",
        patient=patient,
        text=_text(record, "question", where),
        options=options,
        correct=correct,
        places=_places(record.get("answer_location") or {}, notes),
    )


def _text(record: Mapping[str, Any], key: str, where: str = "") -> str:
    """Return a text of a record, or a number as text. Raises ValueError for another or none."""
    value = record[key]
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError(f"{where}{key} is {value!r}, expected a text; write one, or delete it")
    return str(value)


def _places(located: Mapping[str, Any], notes: Mapping[str, str]) -> tuple[NoteSpan, ...]:
    """Return the passages of an `answer_location`, which gives them as shares of a note's length:
    {"text_0": {"start": [0.21], "end": [0.24]}}."""
    places = []
    for note, (name, words) in enumerate(notes.items()):
        location = located.get(name, {})
        for start, end in zip(location.get("start", ()), location.get("end", ()), strict=False):
            places.append((note, round(start * len(words)), round(min(end, 1) * len(words))))
    return tuple(places)


def _natural(name: str) -> tuple[int, str]:
    digits = re.sub(r"\D", "", name)
    return (int(digits) if digits else 0, name)


def is_held_out(question: PatientQuestion, share: float) -> bool:
    """Return whether a question belongs to the evaluation split.

    A hash of the question's text and patient decides. The split is therefore equal in every process
    and run, and does not change when patients are added or the file is reordered.
    """
    digest = hashlib.sha256(f"{question.patient}\n{question.text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share
