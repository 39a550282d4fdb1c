"""Ask for several fields of one or more charts at once, and score the values that a response gives.

question   what is the sodium? what is the surgeon?
response   the answer is sodium 41 mmol, surgeon weber.
right      every asked field has its value; F1 counts the parts, a field with its value each
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, prod

from cartridge_forge.plugins.clinic.text import Patient, findings_prompt, said_answer
from cartridge_forge.plugins.clinic.vocabulary import FIELDS
from cartridge_forge.protocols.errors import DataError

_FIELD = re.compile(r"what is the (.+)\?")
_STOP = re.compile(r"\n|\.(?:\s|$)")


@dataclass(frozen=True)
class FindingsQuestion:
    """Hold a question of several fields of the charts of `patients`. `parts` are the right values
    by field, in the order of the question; a value has its unit."""

    id: str
    patients: tuple[str, ...]
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
    parts: dict[str, str] = {}
    for part in answer.lower().split(","):
        name, _, value = " ".join(part.split()).partition(" ")
        if value:
            parts.setdefault(name, value)
    return parts


def said_parts(response: str) -> dict[str, str]:
    """Return the parts that a response gives; none if it gives no answer."""
    answer = said_answer(response)
    return {} if answer is None else answer_parts(_STOP.split(answer, maxsplit=1)[0])


def all_right(right: Mapping[str, str], answer: Mapping[str, str]) -> bool:
    """Return whether every asked field has its value."""
    return all(answer.get(field) == value for field, value in right.items())


def parts_f1(right: Mapping[str, str], answer: Mapping[str, str]) -> float:
    """Return F1 of the parts, in [0, 1]: three of four right and one wrong are 0.75."""
    hits = sum(answer.get(field) == value for field, value in right.items())
    return 2 * hits / (len(right) + len(answer))


def draw_findings(
    patients: Sequence[Patient], parts: int, count: int, seed: int
) -> tuple[FindingsQuestion, ...]:
    """Return `count` distinct questions of `parts` fields in random order: as many fields of each
    of the patients' charts, and none that two of these charts have.

    Raises DataError for charts with too few fields, or that are not the embedded clinic's.
    """
    charts = [_values(patient) for patient in patients]
    times = Counter(field for values in charts for field in values)
    chart_values = [{f: v for f, v in values.items() if times[f] == 1} for values in charts]
    per_chart, ids = parts // len(chart_values), tuple(patient.id for patient in patients)
    if prod(comb(len(values), per_chart) for values in chart_values) < count:
        raise DataError(
            f"{count} questions of {per_chart} fields of each chart need charts of the embedded "
            f"clinic with more facts that no other has: {', '.join(ids)} have "
            f"{', '.join(str(len(values)) for values in chart_values)}; lower questions, or "
            "raise data.facts"
        )
    right = {field: value for values in chart_values for field, value in values.items()}
    rng = random.Random(f"findings/{seed}/{'+'.join(ids)}/{parts}")
    chosen: dict[frozenset[str], list[str]] = {}
    while len(chosen) < count:
        fields = [
            field for values in chart_values for field in rng.sample(sorted(values), per_chart)
        ]
        if len(chart_values) > 1:
            rng.shuffle(fields)
        chosen.setdefault(frozenset(fields), fields)
    return tuple(
        FindingsQuestion(f"{'+'.join(ids)}/findings/{i}", ids, {f: right[f] for f in fields})
        for i, fields in enumerate(chosen.values())
    )


def _values(patient: Patient) -> dict[str, str]:
    """Return the values of a chart's fields, with their units."""
    return {
        match[1]: q.correct
        for q in patient.questions
        if (match := _FIELD.fullmatch(q.text)) and match[1] in FIELDS
    }
