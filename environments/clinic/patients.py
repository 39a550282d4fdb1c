"""A generator of fictional patients in LongHealth's own JSON schema.

The same loader (`environments.clinic.longhealth`) reads these and the real `benchmark_v5.json`:
nothing below
this file knows which of the two it was given. Schema: Adams et al., "LongHealth" (2024), and the
field list in `environments.clinic.longhealth`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from typing import Any

from environments.clinic import vocabulary as words
from protocols.errors import DataError

LETTERS = "abcde"


@dataclass(frozen=True)
class ClinicalNote:
    """One clinical note: where it is from, its (field, value) findings, then remarks."""

    department: str
    date: str
    facts: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]

    @property
    def header(self) -> str:
        return f"{self.department}, {self.date}."

    @property
    def findings(self) -> str:
        """`"sodium 41 mmol. surgeon weber."`"""
        return " ".join(f"{fact_text(f)}." for f in self.facts)

    @property
    def text(self) -> str:
        """`"cardiology, 14 march. sodium 41 mmol. surgeon weber. night was quiet."`"""
        return " ".join([self.header, self.findings, *(f"{r}." for r in self.remarks)])


@dataclass(frozen=True)
class Chart:
    """A patient before rendering: the notes with their facts, from which all else follows."""

    name: str
    birthday: str
    diagnosis: str
    notes: tuple[ClinicalNote, ...]


def fact_text(fact: tuple[str, str]) -> str:
    """A fact as a note says it: `("sodium", "41")` -> `"sodium 41 mmol"`."""
    field, value = fact
    return f"{field} {words.value_text(field, value)}"


def draw_chart(
    rng: random.Random,
    facts: int,
    notes: int,
    remark_rate: float = 1.0,
    fields: tuple[str, ...] = words.FIELDS,
) -> Chart:
    """Draw a chart of `facts` distinct ones of `fields`, spread evenly over `notes` notes.

    A note has `remark_rate` uninformative sentences for each of its facts, none twice in a chart.
    Raises DataError when there are fewer fields, or a note would be empty.
    """
    if not 1 <= notes <= facts <= len(fields):
        raise DataError(
            f"a chart needs 1 <= notes <= facts <= {len(fields)} (the fields there are): "
            f"got notes={notes}, facts={facts}; change data.notes or data.facts"
        )
    pairs = [(f, rng.choice(words.CATEGORY_OF[f].values)) for f in rng.sample(fields, facts)]
    departments = rng.sample(words.DEPARTMENTS, min(notes, len(words.DEPARTMENTS)))
    months = rng.sample(words.MONTHS, len(words.MONTHS))  # one a note, the birthday's first
    remarks = iter(rng.sample(words.REMARKS, len(words.REMARKS)))
    drawn = []
    for index in range(notes):
        own = tuple(pairs[facts * index // notes : facts * (index + 1) // notes])
        drawn.append(
            ClinicalNote(
                department=departments[index % len(departments)],
                date=f"{rng.randint(10, 28)} {months[(index + 1) % len(months)]}",
                facts=own,
                remarks=tuple(islice(remarks, round(remark_rate * len(own)))),
            )
        )
    surname = rng.choice(words.CATEGORY_OF["surgeon"].values)
    return Chart(
        name=f"{rng.choice(words.FIRST_NAMES)} {surname}",
        birthday=f"{rng.randint(10, 28)} {months[0]}",
        diagnosis=rng.choice(words.DIAGNOSES),
        notes=tuple(drawn),
    )


def draw_options(rng: random.Random, fact: tuple[str, str]) -> tuple[list[str], str]:
    """Five distinct option texts in random order, and the text of the fact's own among them."""
    field, value = fact
    others = [v for v in words.CATEGORY_OF[field].values if v != value]
    options = [words.value_text(field, v) for v in [value, *rng.sample(others, 4)]]
    correct = options[0]
    rng.shuffle(options)
    return options, correct


def longhealth_record(
    chart: Chart, rng: random.Random, questions_per_fact: int = 1
) -> dict[str, Any]:
    """The chart as one patient of LongHealth's JSON: the texts, and questions for each fact.

    Several questions about one fact share its words and differ in their options.
    """
    questions: list[dict[str, Any]] = []
    for note_index, note in enumerate(chart.notes):
        for fact in (f for f in note.facts for _ in range(questions_per_fact)):
            options, correct = draw_options(rng, fact)
            start = note.text.index(f"{fact_text(fact)}.")
            questions.append(
                {
                    "No": len(questions),
                    "question": f"what is the {fact[0]}?",
                    **{f"answer_{letter}": o for letter, o in zip(LETTERS, options, strict=True)},
                    "correct": correct,
                    "answer_location": {
                        f"text_{note_index}": {
                            "start": [round(start / len(note.text), 4)],
                            "end": [round((start + len(fact_text(fact))) / len(note.text), 4)],
                        }
                    },
                }
            )
    return {
        "name": chart.name,
        "birthday": chart.birthday,
        "diagnosis": chart.diagnosis,
        "texts": {f"text_{i}": note.text for i, note in enumerate(chart.notes)},
        "questions": questions,
    }


def generate_clinic(
    seed: int, patients: int, facts: int, notes: int, questions_per_fact: int = 1
) -> dict[str, dict[str, Any]]:
    """A whole clinic as LongHealth's top-level object `{"patient_01": {...}, ...}`.

    Deterministic in its arguments, in every process. Patient k does not depend on how many
    patients follow it.
    """
    clinic = {}
    for index in range(1, patients + 1):
        rng = random.Random(f"clinic/{seed}/{index}")
        clinic[f"patient_{index:02d}"] = longhealth_record(
            draw_chart(rng, facts, notes), rng, questions_per_fact
        )
    return clinic
