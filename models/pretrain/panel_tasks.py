"""Draw training conversations for the tiny panel: own answers, and reviews of other answers.

A panel answers five-option questions, alone or with candidate answers of which some are wrong
(`plugins.clinic.text.aggregation_prompt`). Where it can read the fact it answers with the
fact, whatever the candidates; else with the option that most of them choose. The document is a
whole chart, a chart that is cut off, as in an untrained cartridge, or empty.

To vary a learner's rewards, some answers are wrong: first answers more often than reviewed ones,
which makes aggregation worthwhile.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence

from cartridge_forge.plugins.clinic import vocabulary as words
from cartridge_forge.plugins.clinic.patients import draw_options
from cartridge_forge.plugins.clinic.text import (
    LETTERS,
    PatientQuestion,
    aggregation_prompt,
    claims,
    option_prompt,
    parse_answer,
)
from models.pretrain.reader_tasks import (
    CorpusTurn,
    Difficulty,
    Row,
    draw_conversation,
    head,
)

# The model learns to vote on small charts, where a step is cheap; this generalises to large ones.
LADDER = (Difficulty((2, 6), 0.3), Difficulty((4, 12), 0.6), Difficulty((8, 26), 1.0))
# The reader's turns, so that the model forgets nothing: mostly those that cartridges train on.
OTHER_TURNS = [
    "recite", "structure", "summarise", "question", "question", "options", "options",
]  # fmt: skip
CUT_RATE, NONE_RATE = 0.2, 0.35  # of the rows
CUT_WORDS = (16, 110)  # kept of a chart that is cut off
ABSENT_RATE = 0.4  # a question about a fact that is not in the whole chart
FIRST_SLIP, REVIEWED_SLIP = 0.1, 0.03  # answers that name any other option
CANDIDATES = (1, 2, 3, 3, 4, 4, 4)  # their number, drawn for each turn: voting is hard
RIGHT = (0.1, 0.95)  # probability that a candidate is right, drawn for each turn
# Wrong candidates agree more often than by chance, as a model's own mistakes do.
AGREE_RATE, FAVOURITE_RATE = 0.5, 0.7
BROKEN_RATE = 0.08  # candidates that choose no option
KEEP_RATE = 0.85  # a single candidate is kept where the fact cannot be read


def rows(rng: random.Random, rung: int, args: Namespace) -> Iterator[Row]:
    """Draw `args.batch` conversations of `args.first` plain questions, `args.reviewed` with
    candidates, and `args.others` of the reader's turns."""
    for _ in range(args.batch):
        kinds = [rng.choice(OTHER_TURNS) for _ in range(args.others)]
        document, is_whole, turns = draw_turns(rng, LADDER[rung], args.first, args.reviewed, kinds)
        yield head(document, is_whole), [turn.said for turn in turns]


def draw_turns(
    rng: random.Random, difficulty: Difficulty, first: int, reviewed: int, kinds: list[str]
) -> tuple[str, bool, list[CorpusTurn]]:
    """Return a chart (whole, cut off or ""), whether it is whole, and its turns: `first` plain
    questions, `reviewed` with candidates, and, if it is whole, the reader's turns of `kinds`."""
    patient, turns = draw_conversation(rng, difficulty, kinds)
    document, questions = patient.document, patient.questions
    draw = rng.random()
    if draw < NONE_RATE:
        document, questions, turns = "", (), []
    elif draw < NONE_RATE + CUT_RATE:
        parts = document.split(" ")
        document, turns = " ".join(parts[: rng.randint(*CUT_WORDS)]), []
    is_whole = document == patient.document
    for index in range(first + reviewed):
        if not questions or (is_whole and rng.random() < ABSENT_RATE):
            question = _absent(rng, questions)
        else:
            question = rng.choice(questions)
        ask = first_turn if index < first else reviewed_turn
        turns.append(ask(rng, question, can_read(document, question)))
    return document, is_whole, turns


def field_of(question: PatientQuestion) -> str:
    return question.text.removeprefix("what is the ").removesuffix("?")


def can_read(document: str, question: PatientQuestion) -> bool:
    """Return whether the document contains the fact; its unit may be cut off."""
    return f" {field_of(question)} {question.correct.split()[0]}" in document


def _absent(rng: random.Random, questions: Sequence[PatientQuestion]) -> PatientQuestion:
    """Return a question about a field that none of `questions` is about."""
    fields = {field_of(q) for q in questions}
    field = rng.choice([f for f in words.FIELDS if f not in fields])
    fact = field, rng.choice(words.CATEGORY_OF[field].values)
    options, correct = draw_options(rng, fact)
    return PatientQuestion("absent", "absent", f"what is the {field}?", tuple(options), correct)


def first_turn(rng: random.Random, question: PatientQuestion, readable: bool) -> CorpusTurn:
    """Return the plain question with an answer: read, guessed, or a slip."""
    prompt = option_prompt(question.text, question.options)
    if not readable:
        return CorpusTurn("guess", prompt, claims(field_of(question), rng.choice(question.options)))
    return _said("options", prompt, question, question.correct, FIRST_SLIP, rng)


def reviewed_turn(rng: random.Random, question: PatientQuestion, readable: bool) -> CorpusTurn:
    """Return the question with candidates, and an answer. Its kind is told (the fact can be read),
    voted (one option has the most votes), kept (a single one), tied (any option with the most
    votes, or any at all if none has a vote) or slip."""
    candidates = draw_candidates(rng, question)
    prompt = aggregation_prompt(option_prompt(question.text, question.options), candidates)
    if readable:
        return _said("told", prompt, question, question.correct, REVIEWED_SLIP, rng)
    leading = leaders(candidates, question)
    if len(candidates) == 1 and len(leading) == 1:
        return _said("kept", prompt, question, leading[0], 1 - KEEP_RATE, rng)
    if len(leading) == 1:
        return _said("voted", prompt, question, leading[0], REVIEWED_SLIP, rng)
    return CorpusTurn("tied", prompt, claims(field_of(question), rng.choice(leading)))


def leaders(candidates: Sequence[str], question: PatientQuestion) -> list[str]:
    """Return the options with the most votes; all of them if no candidate chose one."""
    letters = [letter for c in candidates if (letter := parse_answer(c, question))]
    votes = Counter(question.options[LETTERS.index(letter)] for letter in letters)
    most = max(votes.values(), default=0)
    return [o for o in question.options if votes[o] == most]


def draw_candidates(rng: random.Random, question: PatientQuestion) -> list[str]:
    """Return 1 to 4 responses such as the panel gives: right, wrong, or choosing no option."""
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
        claim = claims(field, option)
        candidates.append(_broken(rng, claim, question) if rng.random() < BROKEN_RATE else claim)
    return candidates


def _broken(rng: random.Random, claim: str, question: PatientQuestion) -> str:
    """Return a response without a choice: empty, cut off, or naming a value that is not offered."""
    field = field_of(question)
    values = [words.value_text(field, v) for v in words.CATEGORY_OF[field].values]
    other = rng.choice([v for v in values if v not in question.options])
    statement = claim.split(" the answer")[0]
    return rng.choice(("", statement, f"{statement} the answer is", claims(field, other)))


def _said(
    kind: str, prompt: str, question: PatientQuestion, option: str, slip: float, rng: random.Random
) -> CorpusTurn:
    """Return the option as a response or, at the rate `slip`, another one."""
    if rng.random() < slip:
        kind, option = "slip", rng.choice([o for o in question.options if o != option])
    return CorpusTurn(kind, prompt, claims(field_of(question), option))
