"""Draw training conversations for the tiny merger: questions of several fields, and lists to merge.

A merger answers a question of two to four fields (`plugins.clinic.findings`), alone or with
candidate lists, in which any part may be wrong or missing, as the prompt of aggregation writes
them. Each part of its answer is the fact where the document can be read; else the value that most
candidates give; else a guess. Documents are those of the panel: a whole chart, one that is cut off,
as in an untrained cartridge, or none. A step is with documents or without any: without, its rows
are short and merging is cheap to learn.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from cartridge_forge.plugins.clinic import vocabulary as words
from cartridge_forge.plugins.clinic.findings import said_parts, says_parts
from cartridge_forge.plugins.clinic.text import aggregation_prompt, findings_prompt
from models.pretrain.panel_tasks import (
    AGREE_RATE,
    CUT_WORDS,
    FAVOURITE_RATE,
    OTHER_TURNS,
    can_read,
    field_of,
)
from models.pretrain.reader_tasks import (
    CorpusTurn,
    Difficulty,
    Row,
    draw_conversation,
    head,
)

LADDER = (Difficulty((4, 12), 0.6), Difficulty((8, 26), 1.0))
NONE_RATE, CUT_RATE = 0.5, 0.3  # of the steps; of the charts
ABSENT_RATE = 0.3  # fields of a question that are not in the whole chart
PARTS = (2, 3, 3, 4, 4, 4)  # fields of a question, drawn for each
CANDIDATES = (1, 2, 3, 3, 4, 4, 4)
RIGHT = (0.3, 0.95)  # probability that a part of a candidate is right, drawn for each turn
MISSING_RATE = 0.1  # parts that a candidate leaves out

Parts = Mapping[str, str]  # field -> value, with its unit


def rows(rng: random.Random, rung: int, args: Namespace) -> Iterator[Row]:
    """Draw `args.alone` questions with candidates and no document; or `args.batch` charts with
    `args.first` plain questions, `args.merged` with candidates, and, after a whole chart,
    `args.others` of the reader's turns."""
    if rng.random() < NONE_RATE:
        for _ in range(args.alone):
            fields = draw_asked(rng, {})
            yield head(""), [merge_turn(rng, fields, {}).said]
        return
    for _ in range(args.batch):
        kinds = [rng.choice(OTHER_TURNS) for _ in range(args.others)]
        document, is_whole, turns = draw_turns(rng, LADDER[rung], args.first, args.merged, kinds)
        yield head(document, is_whole), [turn.said for turn in turns]


def draw_turns(
    rng: random.Random, difficulty: Difficulty, first: int, merged: int, kinds: list[str]
) -> tuple[str, bool, list[CorpusTurn]]:
    """Return a chart, whether it is whole or cut off, and its turns: `first` plain questions,
    `merged` with candidates, and, if it is whole, the reader's of `kinds`."""
    patient, turns = draw_conversation(rng, difficulty, kinds)
    document = patient.document
    if rng.random() < CUT_RATE:
        parts = document.split(" ")
        document, turns = " ".join(parts[: rng.randint(*CUT_WORDS)]), []
    facts = {field_of(q): q.correct for q in patient.questions}
    readable = {field_of(q) for q in patient.questions if can_read(document, q)}
    for index in range(first + merged):
        question = draw_asked(rng, facts)
        readable_facts = {field: value for field, value in question.items() if field in readable}
        ask = first_turn if index < first else merge_turn
        turns.append(ask(rng, question, readable_facts))
    return document, document == patient.document, turns


def draw_asked(rng: random.Random, facts: Parts) -> dict[str, str]:
    """Return two to four fields with their values; some, or all without `facts`, are not in the
    chart."""
    count = rng.choice(PARTS)
    present = rng.sample(sorted(facts), min(len(facts), count))
    present_facts = {field: facts[field] for field in present if rng.random() >= ABSENT_RATE}
    other_fields = [field for field in words.FIELDS if field not in facts]
    absent = {f: draw_value(rng, f) for f in rng.sample(other_fields, count - len(present_facts))}
    parts = list({**present_facts, **absent}.items())
    rng.shuffle(parts)
    return dict(parts)


def first_turn(rng: random.Random, parts: Parts, facts: Parts) -> CorpusTurn:
    """Return the plain question with an answer: "findings" if all of it is known, else "guess"."""
    answer = {field: facts.get(field) or draw_value(rng, field) for field in parts}
    kind = "findings" if len(facts) == len(parts) else "guess"
    return CorpusTurn(kind, findings_prompt(tuple(parts)), says_parts(answer))


def merge_turn(rng: random.Random, parts: Parts, facts: Parts) -> CorpusTurn:
    """Return the question with candidates, and the merged answer. Its kind is "told" (all of it is
    known), "merged" (every other part has one leading value) or "tied" (any of the leading values,
    a guess where no candidate has one)."""
    candidates = draw_candidates(rng, parts)
    prompt = aggregation_prompt(findings_prompt(tuple(parts)), candidates)
    leading = {field: leaders(candidates, field) for field in parts if field not in facts}
    answer = {
        field: facts.get(field) or rng.choice(leading[field] or [draw_value(rng, field)])
        for field in parts
    }
    sure = all(len(values) == 1 for values in leading.values())
    kind = "tied" if not sure else "merged" if leading else "told"
    return CorpusTurn(kind, prompt, says_parts(answer))


def leaders(candidates: Sequence[str], field: str) -> list[str]:
    """Return the values that most candidates give to the field, in order of appearance."""
    votes = Counter(v for c in candidates if (v := said_parts(c).get(field)))
    most = max(votes.values(), default=0)
    return [value for value, count in votes.items() if count == most]


def draw_candidates(rng: random.Random, parts: Parts) -> list[str]:
    """Return one to four responses, of which each part is right, wrong or missing. Wrong ones may
    agree on a favourite, as a model's own mistakes do."""
    sure = rng.uniform(*RIGHT)
    favourites = {
        field: draw_value(rng, field, value) if rng.random() < AGREE_RATE else ""
        for field, value in parts.items()
    }
    candidates = []
    for _ in range(rng.choice(CANDIDATES)):
        claimed = {}
        for field, value in parts.items():
            if rng.random() < MISSING_RATE:
                continue
            if rng.random() < sure:
                claimed[field] = value
            elif favourites[field] and rng.random() < FAVOURITE_RATE:
                claimed[field] = favourites[field]
            else:
                claimed[field] = draw_value(rng, field, value)
        candidates.append(says_parts(claimed))
    return candidates


def draw_value(rng: random.Random, field: str, other_than: str = "") -> str:
    """Return a random value of the field, with its unit."""
    values = [words.value_text(field, v) for v in words.CATEGORY_OF[field].values]
    return rng.choice([v for v in values if v != other_than])
