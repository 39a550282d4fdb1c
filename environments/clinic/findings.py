"""Ask for several fields of a chart at once, and score the values that a response gives.

question   what is the sodium? what is the surgeon?
response   the answer is sodium 41 mmol, surgeon weber.
right      every asked field has its value; F1 counts the parts, a field with its value each
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import comb

from environments.clinic.longhealth import Patient
from environments.clinic.prompts import findings_prompt, said_answer
from environments.clinic.vocabulary import FIELDS
from protocols.errors import DataError

_FIELD = re.compile(r"what is the (.+)\?")
_STOP = re.compile(r"\n|\.(?:\s|$)")


@dataclass(frozen=True)
class FindingsQuestion:
    """Hold a question of several fields of one patient's chart. `parts` are the right values by
    field, in the order of the question; a value has its unit."""

    id: str
    patient: str
    parts: Mapping[str, str]

    @property
    def text(self) -> str:
        return findings_prompt(tuple(self.parts))

    @property
    def correct(self) -> str:
        """Return the right answer as text: `"sodium 41 mmol, surgeon weber"`."""
        return part_list(self.parts)


def part_list(parts: Mapping[str, str]) -> str:
    """Return the parts as an answer lists them: `"sodium 41 mmol, surgeon weber"`."""
    return ", ".join(f"{field} {value}" for field, value in parts.items())


def says_parts(parts: Mapping[str, str]) -> str:
    """Return a response with these parts; without any, one that breaks off."""
    return f"the answer is {part_list(parts)}." if parts else "the answer is"


def answer_parts(answer: str) -> dict[str, str]:
    """Return the parts of an answer by their first word, folded; of two with the same, the first.

    `answer_parts("sodium 41 mmol, ecg normal")` is {"sodium": "41 mmol", "ecg": "normal"}.
    """
    found: dict[str, str] = {}
    for part in answer.lower().split(","):
        name, _, value = " ".join(part.split()).partition(" ")
        if value:
            found.setdefault(name, value)
    return found


def said_parts(response: str) -> dict[str, str]:
    """Return the parts that a response gives; none if it gives no answer."""
    said = said_answer(response)
    return {} if said is None else answer_parts(_STOP.split(said, maxsplit=1)[0])


def all_right(right: Mapping[str, str], said: Mapping[str, str]) -> bool:
    """Return whether every asked field has its value."""
    return all(said.get(field) == value for field, value in right.items())


def parts_f1(right: Mapping[str, str], said: Mapping[str, str]) -> float:
    """Return F1 of the parts, in [0, 1]: three of four right and one wrong are 0.75."""
    hits = sum(said.get(field) == value for field, value in right.items())
    return 2 * hits / (len(right) + len(said))


def draw_findings(
    patient: Patient, parts: int, count: int, seed: int
) -> tuple[FindingsQuestion, ...]:
    """Return `count` distinct questions of `parts` fields of a patient's chart, in random order.

    Raises DataError for a chart with too few fields, or one that is not the embedded clinic's.
    """
    values = {
        found[1]: q.correct
        for q in patient.questions
        if (found := _FIELD.fullmatch(q.text)) and found[1] in FIELDS
    }
    if comb(len(values), parts) < count:
        raise DataError(
            f"{count} questions of {parts} fields need a chart of the embedded clinic with more "
            f"facts: {patient.id} has {len(values)}; lower questions, or raise data.facts"
        )
    rng = random.Random(f"findings/{seed}/{patient.id}/{parts}")
    chosen: dict[frozenset[str], list[str]] = {}
    while len(chosen) < count:
        fields = rng.sample(sorted(values), parts)
        chosen.setdefault(frozenset(fields), fields)
    return tuple(
        FindingsQuestion(f"{patient.id}/findings/{i}", patient.id, {f: values[f] for f in fields})
        for i, fields in enumerate(chosen.values())
    )
