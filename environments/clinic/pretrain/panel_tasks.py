"""Training conversations for the tiny panel: answers of one's own, and answers of others reviewed.

A panel is asked five-option questions, and asked again with candidate answers beside them, of which
some are wrong (`environments.clinic.panel.aggregation_prompt`). Where it can read the fact, it
answers with the
fact, whatever the candidates say; where it cannot, with what most of them say. What it reads is a
whole chart, a chart that is cut off, as an untrained cartridge is, or nothing.

So that a learner's rewards vary, answers are now and then wrong: first answers more often than
reviewed ones, which is what makes aggregating worthwhile.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from environments.clinic import vocabulary as words
from environments.clinic.longhealth import LETTERS, PatientQuestion
from environments.clinic.panel import aggregation_prompt
from environments.clinic.patients import draw_options
from environments.clinic.pretrain.reader_tasks import (
    CorpusTurn,
    Difficulty,
    Row,
    draw_conversation,
    head,
)
from environments.clinic.prompts import claims, option_prompt, parse_answer

# Voting is learnt on small charts, where a step is cheap, and then holds for large ones.
LADDER = (Difficulty((2, 6), 0.3), Difficulty((4, 12), 0.6), Difficulty((8, 26), 1.0))
# The reader's turns, so that nothing is forgotten: most of what cartridges are trained with.
OTHER_TURNS = [
    "recite", "structure", "summarise", "question", "question", "options", "options",
]  # fmt: skip
CUT_RATE, NONE_RATE = 0.2, 0.35  # of the rows
CUT_WORDS = (16, 110)  # left of a chart that is cut off
ABSENT_RATE = 0.4  # a question about what the whole chart does not say
FIRST_SLIP, REVIEWED_SLIP = 0.1, 0.03  # answers that name any other option
CANDIDATES = (1, 2, 3, 3, 4, 4, 4)  # how many, drawn for each turn: voting is what is hard
RIGHT = (0.1, 0.95)  # how surely a candidate is right, drawn for each turn
# Wrong candidates agree with each other more often than chance: so do a model's own mistakes.
AGREE_RATE, FAVOURITE_RATE = 0.5, 0.7
BROKEN_RATE = 0.08  # candidates that choose no option
KEEP_RATE = 0.85  # a single candidate is kept where nothing can be read


@dataclass(frozen=True)
class PanelConversation:
    """What is read, and the turns that see it: `whole` is False where the chart is cut off."""

    document: str
    whole: bool
    turns: tuple[CorpusTurn, ...]


def rows(rng: random.Random, rung: int, args: Namespace) -> Iterator[Row]:
    """Draw `args.batch` sittings of `args.first` plain questions, `args.reviewed` with candidates,
    and `args.others` of the reader's turns."""
    for _ in range(args.batch):
        kinds = [rng.choice(OTHER_TURNS) for _ in range(args.others)]
        sitting = draw_sitting(rng, LADDER[rung], args.first, args.reviewed, kinds)
        yield head(sitting.document, sitting.whole), [turn.said for turn in sitting.turns]


def draw_sitting(
    rng: random.Random, difficulty: Difficulty, first: int, reviewed: int, kinds: list[str]
) -> PanelConversation:
    """A chart, whole or cut off or none (""), `first` questions asked plainly, `reviewed` asked
    with candidates, and, where the chart is whole, the reader's turns of `kinds`.
    """
    patient, turns = draw_conversation(rng, difficulty, kinds)
    document, questions = patient.document, patient.questions
    draw = rng.random()
    if draw < NONE_RATE:
        document, questions, turns = "", (), []
    elif draw < NONE_RATE + CUT_RATE:
        told = document.split(" ")
        document, turns = " ".join(told[: rng.randint(*CUT_WORDS)]), []
    whole = document == patient.document
    for index in range(first + reviewed):
        if not questions or (whole and rng.random() < ABSENT_RATE):
            question = _absent(rng, questions)
        else:
            question = rng.choice(questions)
        ask = first_turn if index < first else reviewed_turn
        turns.append(ask(rng, question, can_read(document, question)))
    return PanelConversation(document, whole, tuple(turns))


def field_of(question: PatientQuestion) -> str:
    return question.text.removeprefix("what is the ").removesuffix("?")


def can_read(document: str, question: PatientQuestion) -> bool:
    """Whether the fact asked for stands in the document; its unit may be cut off."""
    return f" {field_of(question)} {question.correct.split()[0]}" in document


def _absent(rng: random.Random, asked: Sequence[PatientQuestion]) -> PatientQuestion:
    """A question about a field that none of `asked` is about."""
    known = {field_of(q) for q in asked}
    field = rng.choice([f for f in words.FIELDS if f not in known])
    fact = field, rng.choice(words.CATEGORY_OF[field].values)
    options, correct = draw_options(rng, fact)
    return PatientQuestion("absent", "absent", f"what is the {field}?", tuple(options), correct)


def first_turn(rng: random.Random, question: PatientQuestion, told: bool) -> CorpusTurn:
    """The question asked plainly: read, or guessed, or a slip."""
    prompt = option_prompt(question.text, question.options)
    if not told:
        return CorpusTurn("guess", prompt, claims(field_of(question), rng.choice(question.options)))
    return _said("options", prompt, question, question.correct, FIRST_SLIP, rng)


def reviewed_turn(rng: random.Random, question: PatientQuestion, told: bool) -> CorpusTurn:
    """The question with candidates. The kinds: told (the fact can be read), voted (one option has
    the most votes), kept (a single one), tied (any of those with the most votes, or, if none has a
    vote, any option), and slip.
    """
    candidates = draw_candidates(rng, question)
    prompt = aggregation_prompt(option_prompt(question.text, question.options), candidates)
    if told:
        return _said("told", prompt, question, question.correct, REVIEWED_SLIP, rng)
    leading = leaders(candidates, question)
    if len(candidates) == 1 and len(leading) == 1:
        return _said("kept", prompt, question, leading[0], 1 - KEEP_RATE, rng)
    if len(leading) == 1:
        return _said("voted", prompt, question, leading[0], REVIEWED_SLIP, rng)
    return CorpusTurn("tied", prompt, claims(field_of(question), rng.choice(leading)))


def leaders(candidates: Sequence[str], question: PatientQuestion) -> list[str]:
    """The options with the most votes; all of them if no candidate chose one."""
    letters = [letter for c in candidates if (letter := parse_answer(c, question))]
    votes = Counter(question.options[LETTERS.index(letter)] for letter in letters)
    most = max(votes.values(), default=0)
    return [o for o in question.options if votes[o] == most]


def draw_candidates(rng: random.Random, question: PatientQuestion) -> list[str]:
    """1 to 4 responses as the panel itself gives them: right, wrong, or choosing no option."""
    sure = rng.uniform(*RIGHT)
    wrong = [o for o in question.options if o != question.correct]
    favourite = rng.choice(wrong) if rng.random() < AGREE_RATE else ""
    field, candidates = field_of(question), []
    for _ in range(rng.choice(CANDIDATES)):
        if rng.random() < sure:
            option = question.correct
        elif favourite and rng.random() < FAVOURITE_RATE:
            option = favourite
        else:
            option = rng.choice(wrong)
        said = claims(field, option)
        candidates.append(_broken(rng, said, question) if rng.random() < BROKEN_RATE else said)
    return candidates


def _broken(rng: random.Random, said: str, question: PatientQuestion) -> str:
    """A response that chooses no option: empty, cut off, or naming a value that is not offered."""
    field = field_of(question)
    values = [words.value_text(field, v) for v in words.CATEGORY_OF[field].values]
    other = rng.choice([v for v in values if v not in question.options])
    statement = said.split(" the answer")[0]
    return rng.choice(("", statement, f"{statement} the answer is", claims(field, other)))


def _said(
    kind: str, prompt: str, question: PatientQuestion, option: str, slip: float, rng: random.Random
) -> CorpusTurn:
    """The option as a response, or, at the rate `slip`, another one."""
    if rng.random() < slip:
        kind, option = "slip", rng.choice([o for o in question.options if o != option])
    return CorpusTurn(kind, prompt, claims(field_of(question), option))
