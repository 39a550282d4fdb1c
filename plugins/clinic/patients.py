"""Generate fictional patients in LongHealth's JSON schema.

`plugins.clinic.text` loads these and the real `benchmark_v5.json` alike; code that uses
its patients cannot distinguish the two. Schema: Adams et al., "LongHealth" (2024).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cartridge_forge.plugins.clinic import vocabulary as words
from cartridge_forge.protocols.errors import DataError

LETTERS = "abcde"


@dataclass(frozen=True)
class ClinicalNote:
    """Hold one note: its department and date, its (field, value) findings, and its remarks."""

    department: str
    date: str
    facts: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]

    @property
    def header(self) -> str:
        return f"{self.department}, {self.date}."

    @property
    def findings(self) -> str:
        """Return the findings as text: `"sodium 41 mmol. surgeon weber."`"""
        return " ".join(f"{fact_text(f)}." for f in self.facts)

    @property
    def text(self) -> str:
        """Return `"cardiology, 14 march. sodium 41 mmol. surgeon weber. night was quiet."`"""
        return " ".join([self.header, self.findings, *(f"{r}." for r in self.remarks)])


@dataclass(frozen=True)
class Chart:
    """Hold a patient as notes with facts, before texts and questions are made from it."""

    name: str
    birthday: str
    diagnosis: str
    notes: tuple[ClinicalNote, ...]


def fact_text(fact: tuple[str, str]) -> str:
    """Return a fact as notes write it: `("sodium", "41")` -> `"sodium 41 mmol"`."""
    field, value = fact
    return f"{field} {words.value_text(field, value)}"


def draw_chart(
    rng: random.Random,
    facts: int,
    notes: int,
    remark_rate: float = 1.0,
    fields: tuple[str, ...] = words.FIELDS,
) -> Chart:
    """Draw a chart with facts about `facts` distinct `fields`, spread evenly over `notes` notes.

    A note has `remark_rate` uninformative sentences for each fact; none occurs twice in a chart.
    Raises DataError when there are fewer fields, or a note would be empty.
    """
    if not 1 <= notes <= facts <= len(fields):
        raise DataError(
            f"a chart needs 1 <= notes <= facts <= {len(fields)} (the fields there are): "
            f"got notes={notes}, facts={facts}; change data.notes or data.facts"
        )
    pairs = [(f, rng.choice(words.CATEGORY_OF[f].values)) for f in rng.sample(fields, facts)]
    departments = rng.sample(words.DEPARTMENTS, min(notes, len(words.DEPARTMENTS)))
    months = rng.sample(words.MONTHS, len(words.MONTHS))  # one a note, after the birthday's
    remarks = iter(rng.sample(words.REMARKS, len(words.REMARKS)))
    drawn = []
    for index in range(notes):
        note_facts = tuple(pairs[facts * index // notes : facts * (index + 1) // notes])
        drawn.append(
            ClinicalNote(
                department=departments[index % len(departments)],
                date=f"{rng.randint(10, 28)} {months[(index + 1) % len(months)]}",
                facts=note_facts,
                remarks=tuple(islice(remarks, round(remark_rate * len(note_facts)))),
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
    """Return five distinct option texts in random order, and the fact's own text among them."""
    field, value = fact
    alternatives = [v for v in words.CATEGORY_OF[field].values if v != value]
    options = [words.value_text(field, v) for v in [value, *rng.sample(alternatives, 4)]]
    correct = options[0]
    rng.shuffle(options)
    return options, correct


def longhealth_record(
    chart: Chart, rng: random.Random, questions_per_fact: int = 1
) -> dict[str, Any]:
    """Return the chart as one patient of LongHealth's JSON: the texts, and questions for each fact.

    Several questions about one fact have the same text and differ in their options.
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
    seed: int,
    patients: int,
    facts: int,
    notes: int,
    questions_per_fact: int = 1,
    own_fields: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return a clinic as LongHealth's top-level object `{"patient_01": {...}, ...}`.

    It is deterministic in its arguments, in every process. Patient k does not depend on the number
    of patients after it. With `own_fields` no two patients have a fact about the same field; raises
    DataError where there are too few.
    """
    fields = words.FIELDS
    if own_fields:
        if patients * facts > len(fields):
            raise DataError(
                f"data.own_fields needs data.patients x data.facts <= {len(fields)} (the fields "
                f"there are): got {patients} x {facts}; lower one of them"
            )
        fields = tuple(random.Random(f"clinic/{seed}/fields").sample(fields, len(fields)))
    clinic = {}
    for index in range(1, patients + 1):
        rng = random.Random(f"clinic/{seed}/{index}")
        chart_fields = fields[facts * (index - 1) : facts * index] if own_fields else fields
        chart = draw_chart(rng, facts, notes, fields=chart_fields)
        clinic[f"patient_{index:02d}"] = longhealth_record(chart, rng, questions_per_fact)
    return clinic
