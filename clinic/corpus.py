"""Training conversations for the tiny base model: a chart, and turns asked about it.

What made reading emerge, and in which order the difficulty grows, is told in docs/log.md. These
conversations show the *skill* (read the chart, follow the prompt); the patients of a run are
drawn from other seeds and are never among them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from clinic.longhealth import Patient, parse_patients
from clinic.patients import Chart, Note, draw_chart, draw_options, fact_text, longhealth_record
from clinic.prompts import (
    cued_sentences,
    option_prompt,
    question_prompt,
    recite_prompt,
    self_study_prompt,
    sentences,
    structure_prompt,
    summarise_prompt,
    unique_cue,
)
from clinic.vocabulary import CATEGORIES, FIELDS, value_text


@dataclass(frozen=True)
class Turn:
    """One exchange: what the user asks and what a good reader answers."""

    kind: str
    prompt: str
    response: str


@dataclass(frozen=True)
class Difficulty:
    """One rung of the curriculum: facts per chart, and how many remarks say nothing."""

    facts: tuple[int, int]
    remark_rate: float
    alike: float = 0.5  # share of charts that hold one kind of thing only


def says(fact: tuple[str, str]) -> str:
    return f"the chart says {fact_text(fact)}."


def answers(fact: tuple[str, str]) -> str:
    """The line of reasoning and the answer, as the option's text."""
    return claims(fact[0], value_text(*fact))


def claims(field: str, value: str) -> str:
    """The same for any value, right or wrong, as written: `claims("sodium", "41 mmol")`."""
    return f"the chart says {field} {value}. the answer is {value}."


def summarised(number: int, note: Note) -> str:
    """Where the note is from and what it leads with. Naming the note first finds its place."""
    return f"note {number}: {note.header} {fact_text(note.facts[0])}."


def structured(number: int, note: Note) -> str:
    """The note's findings without its remarks."""
    return f"note {number}: {note.header} {note.findings}"


def draw_turn(kind: str, chart: Chart, patient: Patient, rng: random.Random) -> Turn:
    """One turn of a kind: recite, structure, summarise, question (open) or options."""
    index = rng.randrange(len(chart.notes))
    note = chart.notes[index]
    if kind == "structure":
        return Turn(kind, structure_prompt(index + 1), structured(index + 1, note))
    if kind == "summarise":
        return Turn(kind, summarise_prompt(index + 1), summarised(index + 1, note))
    if kind == "recite" or (kind == "question" and rng.random() < 0.5):
        told = sentences(note.text)
        starts = [(i, cue) for i, s in enumerate(told) if (cue := unique_cue(patient.document, s))]
        start, cue = rng.choice(starts)
        if kind == "question":
            return Turn(kind, question_prompt(cue), f"the chart says {told[start]}.")
        return Turn(kind, recite_prompt(cue), " ".join(f"{s}." for s in told[start:]))
    if kind == "options" and rng.random() < 0.3:  # a choice as self-study offers it
        kind, prompt = self_study_prompt(patient, [], ("choice",), rng)
        cue = prompt.removeprefix("what about ").split("?")[0]
        rest = next((r for _, c, r in cued_sentences(patient) if c == cue), "")
        if kind == "choice":
            return Turn(kind, prompt, f"the chart says {cue} {rest}. the answer is {rest}.")
    fact = rng.choice(note.facts)
    question = f"what is the {fact[0]}?"
    if kind == "question":
        return Turn(kind, question, says(fact))
    options, _ = draw_options(rng, fact)
    return Turn(kind, option_prompt(question, options), answers(fact))


def draw_conversation(
    rng: random.Random, difficulty: Difficulty, kinds: list[str]
) -> tuple[Patient, list[Turn]]:
    """A new patient and one turn of each of `kinds`."""
    facts = rng.randint(*difficulty.facts)
    # In a mixed chart "the number in the chart" is a good guess at any measurement; where all are
    # alike only the field tells them apart (docs/log.md).
    alike = [c.fields for c in CATEGORIES if len(c.fields) >= facts]
    fields = rng.choice(alike) if alike and rng.random() < difficulty.alike else FIELDS
    chart = draw_chart(rng, facts, max(1, min(4, facts // 3)), difficulty.remark_rate, fields)
    (patient,) = parse_patients({"p": longhealth_record(chart, rng)}, "corpus")
    return patient, [draw_turn(kind, chart, patient, rng) for kind in kinds]


def guess_turn(rng: random.Random) -> Turn:
    """A five-option question with no chart to read: the answer names any option."""
    chart = draw_chart(rng, 1, 1)
    fact = chart.notes[0].facts[0]
    options, _ = draw_options(rng, fact)
    pick = rng.choice(options)
    prompt = option_prompt(f"what is the {fact[0]}?", options)
    return Turn("guess", prompt, claims(fact[0], pick))
