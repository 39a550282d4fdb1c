"""Draw training conversations for the tiny reader: a chart, and turns about it.

models/pretrain/README.md describes how reading emerged, and the order of difficulty. These
conversations teach the *skill* (read the chart, follow the prompt); a run's patients have other
seeds and never occur among them.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from cartridge_forge.plugins.clinic.patients import (
    Chart,
    draw_chart,
    draw_options,
    fact_text,
    longhealth_record,
)
from cartridge_forge.plugins.clinic.text import (
    Patient,
    claims,
    cued_sentences,
    option_prompt,
    parse_patients,
    question_prompt,
    recite_prompt,
    self_study_prompt,
    sentences,
    structure_prompt,
    summarise_prompt,
    unique_cue,
)
from cartridge_forge.plugins.clinic.vocabulary import CATEGORIES, FIELDS, value_text


@dataclass(frozen=True)
class TaughtMessage:
    """Hold one message. `kind` names a taught message; "" is one that is not taught."""

    role: str
    text: str
    kind: str = ""


# The context of all the row's conversations, as text with special tokens, and the conversations.
Row = tuple[str, list[list[TaughtMessage]]]


@dataclass(frozen=True)
class CorpusTurn:
    """Hold one exchange: the user's prompt and a good reader's response."""

    kind: str
    prompt: str
    response: str

    @property
    def said(self) -> list[TaughtMessage]:
        """Return the two messages; the answer is taught."""
        return [
            TaughtMessage("user", self.prompt),
            TaughtMessage("assistant", self.response, self.kind),
        ]


@dataclass(frozen=True)
class Difficulty:
    """Hold one rung of the curriculum: (min, max) facts of a chart, and its rate of remarks."""

    facts: tuple[int, int]
    remark_rate: float
    alike: float = 0.5  # share of charts whose facts are all of one category


LADDER = (
    Difficulty((2, 4), 0.0, alike=0.9),
    Difficulty((3, 6), 0.3, alike=0.7),
    Difficulty((4, 10), 0.6),
    Difficulty((6, 16), 0.8),
    Difficulty((8, 26), 1.0),
)
# Recitation first: it is dense and makes retrieval emerge. Before that option lists teach little.
FIRST_TURNS = ["recite", "recite", "recite", "question", "question"]
# Later turns teach to find a note by its number and to distinguish findings from remarks.
LATER_TURNS = [
    "recite", "structure", "structure", "summarise", "summarise", "question", "options",
]  # fmt: skip
# Rate of rows without a chart: there the model must name one of the offered options, not a value
# that it invents.
GUESS_RATE = 0.25


def rows(rng: random.Random, rung: int, args: Namespace) -> Iterator[Row]:
    """Draw new charts with their turns: `args.batch`, or fewer where charts are long."""
    kinds = FIRST_TURNS if rung == 0 else LATER_TURNS
    longest = 130 + 14 * LADDER[rung].facts[1]
    for _ in range(max(4, min(args.batch, args.tokens // longest))):
        if rung > 0 and rng.random() < GUESS_RATE:
            document, turns = "", [guess_turn(rng) for _ in kinds]
        else:
            patient, turns = draw_conversation(rng, LADDER[rung], kinds)
            document = patient.document
        yield head(document), [turn.said for turn in turns]


def head(document: str, is_whole: bool = True) -> str:
    """Return the text before a conversation: the document as system message, without its end token
    if it is cut off, or the begin token alone."""
    return f"<|bos|><|system|>{document}{'<|end|>' if is_whole else ''}" if document else "<|bos|>"


def draw_turn(kind: str, chart: Chart, patient: Patient, rng: random.Random) -> CorpusTurn:
    """Return one turn of a kind: recite, structure, summarise, question (open) or options."""
    index = rng.randrange(len(chart.notes))
    note = chart.notes[index]
    if kind == "structure":
        findings = f"note {index + 1}: {note.header} {note.findings}"
        return CorpusTurn(kind, structure_prompt(index + 1), findings)
    if kind == "summarise":
        # Naming the note first locates it.
        lead = f"note {index + 1}: {note.header} {fact_text(note.facts[0])}."
        return CorpusTurn(kind, summarise_prompt(index + 1), lead)
    if kind == "recite" or (kind == "question" and rng.random() < 0.5):
        sentence_list = sentences(note.text)
        starts = [
            (i, cue)
            for i, s in enumerate(sentence_list)
            if (cue := unique_cue(patient.document, s))
        ]
        start, cue = rng.choice(starts)
        if kind == "question":
            return CorpusTurn(kind, question_prompt(cue), f"the chart says {sentence_list[start]}.")
        return CorpusTurn(
            kind, recite_prompt(cue), " ".join(f"{s}." for s in sentence_list[start:])
        )
    if kind == "options" and rng.random() < 0.3:  # a choice as self-study offers it
        kind, prompt, _ = self_study_prompt(patient, [], ("choice",), rng)
        cue = prompt.removeprefix("what about ").split("?")[0]
        ending = next((r for _, c, r in cued_sentences(patient) if c == cue), "")
        if kind == "choice":
            return CorpusTurn(
                kind, prompt, f"the chart says {cue} {ending}. the answer is {ending}."
            )
    fact = rng.choice(note.facts)
    question = f"what is the {fact[0]}?"
    if kind == "question":
        return CorpusTurn(kind, question, f"the chart says {fact_text(fact)}.")
    options, _ = draw_options(rng, fact)
    answer = claims(fact[0], value_text(*fact))
    return CorpusTurn(kind, option_prompt(question, options), answer)


def draw_conversation(
    rng: random.Random, difficulty: Difficulty, kinds: list[str]
) -> tuple[Patient, list[CorpusTurn]]:
    """Return a new patient and one turn of each of `kinds`."""
    facts = rng.randint(*difficulty.facts)
    # In a mixed chart "the number in the chart" is a good guess at any measurement; in a chart of
    # one category only the field distinguishes them (models/pretrain/README.md).
    alike = [c.fields for c in CATEGORIES if len(c.fields) >= facts]
    fields = rng.choice(alike) if alike and rng.random() < difficulty.alike else FIELDS
    chart = draw_chart(rng, facts, max(1, min(4, facts // 3)), difficulty.remark_rate, fields)
    (patient,) = parse_patients({"p": longhealth_record(chart, rng)}, "corpus")
    return patient, [draw_turn(kind, chart, patient, rng) for kind in kinds]


def guess_turn(rng: random.Random) -> CorpusTurn:
    """Return a five-option question without a chart; the answer names any option."""
    chart = draw_chart(rng, 1, 1)
    fact = chart.notes[0].facts[0]
    options, _ = draw_options(rng, fact)
    pick = rng.choice(options)
    prompt = option_prompt(f"what is the {fact[0]}?", options)
    return CorpusTurn("guess", prompt, claims(fact[0], pick))
