"""Read LongHealth patients from JSON, and write the prompts about their charts.

Patients are the embedded clinic's, or those of the real `benchmark_v5.json`. Self-study prompts ask
to recite, structure or summarise a part of a chart, or ask for one fact in it, without options;
they use only the documents and the questions kept for training. Their kinds follow the seed prompts
of the Cartridges paper (Eyuboglu et al., 2025), reduced to those that a tiny model can follow.
Five-option questions evaluate.

The real file has 20 fictional patients and 400 questions. Its authors ask not to publish it where
models are trained, so it is never shipped: it is read from a path or a URL at run time.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import re
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.clinic.vocabulary import FIELDS
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
        whole = [(i, 0, len(text)) for i, text in enumerate(self.texts)]
        option = spaced(question.correct)
        holding = [s for s in whole if contains_words(spaced(self.texts[s[0]]), option)]
        return question.places or tuple(holding or whole)


def contains_words(text: str, words: str, fold: bool = False) -> bool:
    """Return whether a text has these words in a row, whole ("5 mg" is not in "25 mg", nor in
    "2.5 mg"); both have single spaces (`spaced`). With `fold` the case does not count. Scripts
    without spaces have no words to be whole."""
    if fold:
        text, words = text.casefold(), words.casefold()
    at = text.find(words) if words else -1
    while at >= 0:
        end = at + len(words)
        before, after = text[max(0, at - 2) : at], text[end : end + 2][::-1]
        if not _joined(before, words[0]) and not _joined(after, words[-1]):
            return True
        at = text.find(words, at + 1)
    return False


def _joined(beside: str, sign: str) -> bool:
    """Return whether the two signs beside a word's first or last one, the nearer one second, belong
    to the word or number."""
    if sign.isdigit() and re.fullmatch(r"\d[.,]", beside):
        return True
    return all(re.match(r"\w", s) and not _UNSPACED.match(s) for s in (beside[-1:], sign))


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
    found = []
    for note, (name, words) in enumerate(notes.items()):
        place = located.get(name, {})
        for start, end in zip(place.get("start", ()), place.get("end", ()), strict=False):
            found.append((note, round(start * len(words)), round(min(end, 1) * len(words))))
    return tuple(found)


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


_ANSWER = re.compile(
    r"(?:(?:(?<!\bno )answer|(?:correct|right|best) (?:option|choice))[*_`]*"
    r"(?: is(?!\w|['\u2019]):?|:)[*_`]*|<answer>)"
    r"\s*(?=\S)(?!</answer>)",
    re.IGNORECASE,
)
_END = re.compile(r"</answer>", re.IGNORECASE)
_BEFORE = re.compile(
    r"^(?:\$*\\boxed\{(?:\\text\{)?)?(?:(?:option|choice|letter) )?", re.IGNORECASE
)
# A lower-case "a" before a word is an article ("the answer is a kind of ..."), not a choice.
_LETTER = re.compile(r"\(?([a-eA-E])(?:[).:,*}]|\s*(?:\n|$)|(?<!a)\s)")
_SEVERAL = re.compile(
    r"\(?[a-e]\)?[*]*\s*(?:,|/|&|\bor\b|\band\b)\s*[*]*\(?(?:[b-e](?!\w)|a\s*(?:[).,*]|$))",
    re.IGNORECASE,
)
_AROUND = " .\"'*_`"
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201b\u02bc`\u00b4\u2032", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    }
)
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\w")
_FIELD_QUESTION = re.compile(r"what is the (.+)\?")
LEAD = "answer:"
TAGS = ("<answer>", "</answer>")


def recite_prompt(cue: str) -> str:
    return f"recite from {cue}."


def structure_prompt(note: int) -> str:
    return f"list the findings of note {note}."


def summarise_prompt(note: int) -> str:
    return f"summarise note {note}."


def question_prompt(cue: str) -> str:
    return f"what about {cue}?"


def findings_prompt(fields: Sequence[str]) -> str:
    """Return a question of several fields: `"what is the sodium? what is the surgeon?"`."""
    return " ".join(f"what is the {field}?" for field in fields)


def option_prompt(text: str, options: tuple[str, ...] | list[str], instruction: str = "") -> str:
    """Return a question with its lettered options on one line, then any `instruction`."""
    lettered = " ".join(f"{letter}) {o}" for letter, o in zip(LETTERS, options, strict=True))
    return f"{text} options: {lettered}" + (f"\n{instruction}" if instruction else "")


def aggregation_prompt(question: str, candidates: Sequence[str]) -> str:
    """Return the question (from `option_prompt`) with numbered candidate responses below, as in
    recursive self-aggregation (Venkatraman et al., 2025), in words of the tiny tokenizer.

    Every candidate takes one line, without its own line breaks; an empty one keeps its number. A
    line begins with a space, else its first word is encoded as bytes. Raises DataError if empty.
    """
    if not candidates:
        raise DataError("there are no candidates to aggregate; give at least one, or just ask")
    lines = [" ".join([f" {i}:", *c.split()]) for i, c in enumerate(candidates, start=1)]
    return "\n".join([question, " review the answers:", *lines])


def sentences(text: str) -> list[str]:
    """Return a note's sentences without their full stops."""
    return [s.strip() for s in re.split(r"\.(?:\s+|$)", text) if s.strip()]


def unique_cue(document: str, sentence: str, most: int = 8) -> str | None:
    """Return the fewest leading words of the sentence that occur nowhere else in the document."""
    parts = sentence.split()
    for count in range(1, min(most, len(parts)) + 1):
        cue = " ".join(parts[:count]).rstrip(",;:")
        if cue and len(list(islice(_occurrences(_spaced(document), cue), 2))) == 1:
            return cue
    return None


@lru_cache(maxsize=32)  # a chart of 12,000 tokens has a thousand sentences to look up
def _spaced(document: str) -> str:
    return " ".join(document.split())


def _occurrences(text: str, words: str) -> Iterator[int]:
    """Yield where `words` begin in the text as whole words; occurrences may overlap."""
    at = text.find(words)
    while at >= 0:
        lead, tail = text[at - 1 : at], text[at + len(words) : at + len(words) + 1]
        if not (_WORD.match(lead) or _WORD.match(tail)):
            yield at
        at = text.find(words, at + 1)


def self_study_prompt(
    patient: Patient,
    questions: list[PatientQuestion],
    kinds: tuple[str, ...],
    rng: random.Random,
    endings: Sequence[str] = (),
) -> tuple[str, str, tuple[NoteSpan, ...]]:
    """Draw one training prompt for a patient: its kind, its text, and the passages that it is
    about.

    A "question" is about a sentence of the document or, half of the time if `questions` has any,
    one of `questions` without its options. `questions` are those that may be trained on. A "choice"
    is about a sentence too; its options are the sentence's end and four similar ones. These come
    from the ends of the document's sentences and from `endings`, ends in other documents. A
    "recite_note" asks for a whole note, by its first sentence; "findings" for two to four fields of
    the chart. A note without a unique cue, and a chart without fields, get the kind "structure".
    """
    kind = rng.choice(kinds)
    note = rng.randrange(len(patient.texts))
    spans = ((note, 0, len(patient.texts[note])),)
    if kind == "structure":
        return kind, structure_prompt(note + 1), spans
    if kind == "summarise":
        return kind, summarise_prompt(note + 1), spans
    if kind == "recite_note":
        first = sentences(patient.texts[note])[:1]
        cue = unique_cue(patient.document, first[0]) if first else None
        if cue is None:
            return "structure", structure_prompt(note + 1), spans
        return kind, recite_prompt(cue), spans
    if kind == "question" and questions and rng.random() < 0.5:
        question = rng.choice(questions)
        return kind, question.text, patient.places_of(question)
    cued = cued_sentences(patient)
    if kind == "findings":
        fields = [(n, cue) for n, cue, ending in cued if ending and cue in FIELDS]
        chosen = rng.sample(fields, min(len(fields), rng.randint(2, 4)))
        places = tuple((n, 0, len(patient.texts[n])) for n in sorted({n for n, _ in chosen}))
        if not chosen:
            return "structure", structure_prompt(note + 1), spans
        return kind, findings_prompt([field for _, field in chosen]), places
    of_note = [(c, ending) for n, c, ending in cued if n == note and (kind != "choice" or ending)]
    ends = _all_ends(patient, tuple(endings)) if kind == "choice" else []
    if not of_note or (kind == "choice" and len(ends) < len(LETTERS)):
        return "structure", structure_prompt(note + 1), spans
    cue, chosen_ending = rng.choice(of_note)
    start = patient.texts[note].find(cue)  # -1: the cue's words are spaced otherwise there
    passage = spans if start < 0 else ((note, start, start + len(cue) + len(chosen_ending)),)
    if kind == "choice":
        options = [chosen_ending, *look_alikes(chosen_ending, ends, len(LETTERS) - 1, rng)]
        rng.shuffle(options)
        return kind, option_prompt(question_prompt(cue), options), passage
    text = question_prompt(cue) if kind == "question" else recite_prompt(cue)
    return kind, text, passage


def sentence_ends(patient: Patient) -> list[str]:
    """Return the texts after the cues of a patient's sentences, sorted, without duplicates."""
    return sorted({ending for _, _, ending in cued_sentences(patient) if ending})


@lru_cache(maxsize=256)  # as `cued_sentences`
def _all_ends(patient: Patient, endings: tuple[str, ...]) -> list[str]:
    return sorted({*sentence_ends(patient), *endings})


def look_alikes(end: str, ends: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Return `count` hard wrong options for `end`.

    An end with a number gets other numbers of as many digits. Any other gets those of `ends` with
    the nearest number of words. Easy options would train a cartridge to distinguish drugs from
    surgeons, which questions do not test (docs/log.md).
    """
    alternatives: list[str] = []
    if _NUMBER.search(end):
        for _ in range(8 * count):  # few digits allow few numbers: `ends` supply the rest
            other = _NUMBER.sub(lambda m: _another_number(m.group(), rng), end)
            if other != end and other not in alternatives:
                alternatives.append(other)
            if len(alternatives) == count:
                return alternatives
    pool = [e for e in ends if e != end and e not in alternatives]
    rng.shuffle(pool)
    words = _words(end)
    pool.sort(key=lambda e: abs(_words(e) - words))
    return alternatives + pool[: count - len(alternatives)]


@lru_cache(maxsize=2**14)  # every choice of a run compares the same ends
def _words(text: str) -> int:
    return len(text.split())


def _another_number(digits: str, rng: random.Random) -> str:
    lowest = 10 ** (len(digits) - 1) if len(digits) > 1 else 0
    return str(rng.randint(lowest, 10 ** len(digits) - 1))


@lru_cache(maxsize=256)  # a run needs the same few patients thousands of times
def cued_sentences(patient: Patient) -> list[tuple[int, str, str]]:
    """Return (note, cue, rest) of every sentence with a unique cue: (0, "sodium", "41 mmol")."""
    cued = []
    document = patient.document
    for note, text in enumerate(patient.texts):
        for sentence in sentences(text):
            cue = unique_cue(document, sentence)
            if cue:
                cued.append((note, cue, sentence[len(cue) :].strip(" ,;:")))
    return cued


def parse_answer(response: str, question: PatientQuestion) -> str | None:
    """Return the letter that a response chose, or None if it chose none of the options.

    Reads the text after the last "answer is", "answer:" or <answer>: an option's whole text, or a
    letter. Of
    two options with equal text the first is returned; either scores alike. Text precedes letter,
    because an option's text may begin with one ("a fracture"). Two letters choose nothing.
    """
    answer = said_answer(response)
    if answer is None:
        return None
    folded = _fold(answer)
    texts = [_fold(o) for o in question.options]
    exact = [i for i, t in enumerate(texts) if t == folded]
    leading = [i for i, t in enumerate(texts) if re.match(rf"{re.escape(t)}(?!\w)", folded)]
    if exact or leading:
        # The longest option that the answer starts with: "41 gram daily" is not "41 gram".
        best = exact or sorted(leading, key=lambda i: -len(texts[i]))
        return LETTERS[best[0]]
    chosen = _BEFORE.sub("", answer.strip(_AROUND))
    letter = None if _SEVERAL.match(chosen) else _LETTER.match(chosen)
    return letter.group(1).lower() if letter else None


def said_answer(response: str) -> str | None:
    """Return the text after the last "answer is", "answer:" or <answer>, up to </answer>; None if
    there is none."""
    matches = list(_ANSWER.finditer(response))
    return _END.split(response[matches[-1].end() :])[0] if matches else None


def plain_signs(text: str) -> str:
    """Return text in Unicode's form NFKC, with ASCII's quotes and hyphens for all others."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text.translate(_SIGNS))


def _fold(text: str) -> str:
    return " ".join(plain_signs(text).lower().split()).strip(_AROUND)


def claims(field: str, value: str) -> str:
    """Return one line of reasoning and the answer, right or wrong:
    `claims("sodium", "41 mmol")`."""
    return f"the chart says {field} {value}. the answer is {value}."


def right_answer(question: PatientQuestion, prompt_text: str) -> str:
    """Return the right answer of a question in the model's wording: between tags where the prompt
    `prompt_text` names them."""
    # clinic-reader begins its answers with "the chart says"; it never learned another wording.
    field = _FIELD_QUESTION.fullmatch(question.text)
    if field and field[1] in FIELDS:
        return claims(field[1], question.correct)
    if all(tag in prompt_text for tag in TAGS):
        return question.correct.join(TAGS)
    return f"{LEAD} {question.correct}"
