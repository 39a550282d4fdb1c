"""Draw training episodes for the tiny clerk: cases at the clinic desk, played with some mistakes.

There are three kinds of episode. With a handbook the clerk finds in the department that it names.
Without one the clerk guesses among the departments not tried yet. After a hint, a separate user
message right before the call, the clerk follows it. To vary a learner's rewards, some calls have a
wrong form or state values that were not looked up: with a handbook at a tenth of the rate, after a
hint or a mistake never.

In some episodes the first calls are a stumbling clerk's and are not taught. They show how to
continue after errors, which a teacher needs to score a weaker student's episode.

A taught call has a kind. find, read and answer are calls that the clerk knows; hinted is one of
these right after a hint; guess is a find in an unknown department; a mistake has its name in
`GUESSING`.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cartridge_forge.plugins.clinic import vocabulary as words
from cartridge_forge.plugins.clinic.desk import (
    HINTS,
    CaseState,
    ClinicDesk,
    DeskCase,
    case_of,
    reply_to,
)
from models.pretrain.reader_tasks import Row, TaughtMessage, head

MAX_TURNS = 6
FIELDS = (6, 24)  # of a handbook, on the highest rung
# The model learns to look up from few fields (models/pretrain/README.md), and generalises to many.
LADDER = ((2, 3), (2, 5), (4, 9), (6, 16), FIELDS)
HANDBOOK_RATE = 0.5  # of the rows, below: of their episodes
HINTED_WITH_HANDBOOK, HINTED_WITHOUT = 0.1, 0.3
# Episodes for each handbook that are cut after the first taught call. In whole episodes looking up
# is one token in fifty; the skill did not emerge from those alone (models/pretrain/README.md).
OPENINGS = 8
UNNAMED_RATE = 0.1  # the handbook lacks the field (it may be cut): the clerk guesses
STUMBLING_RATE = 0.25  # with a handbook: the first calls ignore it
AT_ONCE_RATE = 0.3  # hinted before the first call
HINT_AGAIN_RATE = 0.5  # another hint at a later error


# The rate of each mistake. The last two occur only before the note was read.
ErrorRates = Mapping[str, float]
GUESSING: ErrorRates = {
    "unknown_tool": 0.06, "bad_arguments": 0.06, "blind_answer": 0.05, "wrong_note": 0.03,
}  # fmt: skip
INFORMED: ErrorRates = {name: rate * 0.1 for name, rate in GUESSING.items()}
# A blind answer would end the episode.
STUMBLING: ErrorRates = {"unknown_tool": 0.15, "bad_arguments": 0.2, "wrong_note": 0.1}
NEVER: ErrorRates = {}


@dataclass(frozen=True)
class ClerkState:
    """Hold what the clerk knows between two calls."""

    known: str  # the department, "" if unknown
    tried: frozenset[str] = frozenset()
    careful: bool = False  # right after a mistake


def rows(rng: random.Random, rung: int, args: Namespace) -> Iterator[Row]:
    """Draw `args.batch` desks with `args.episodes` whole episodes each."""
    for _ in range(args.batch):
        desk, drawn = draw_row(rng, args.episodes, LADDER[rung])
        yield head(desk.document), drawn


def draw_row(
    rng: random.Random, episodes: int, fields: tuple[int, int] = FIELDS
) -> tuple[ClinicDesk, list[list[TaughtMessage]]]:
    """Return a desk with a handbook of `fields` (min, max) fields, or none, and episodes that read
    it. Each episode is a list of messages that ends with a call."""
    names: Sequence[str] = ()
    if rng.random() < HANDBOOK_RATE:
        names = rng.sample(words.FIELDS, rng.randint(*fields))
    handbook = {name: rng.choice(words.DEPARTMENTS) for name in names}
    drawn = []
    for index in range(episodes + (OPENINGS if handbook else 0)):
        named = bool(handbook) and rng.random() >= UNNAMED_RATE
        name = rng.choice([f for f in words.FIELDS if (f in handbook) == named])
        case = case_of(name, handbook.get(name) or rng.choice(words.DEPARTMENTS), rng)
        hinted = rng.random() < (HINTED_WITH_HANDBOOK if handbook else HINTED_WITHOUT)
        episode = draw_episode(rng, case, case.department if named else "", hinted)
        drawn.append(episode if index < episodes else _opening(episode))
    return ClinicDesk("corpus", tuple(handbook.items())), drawn


def _opening(messages: list[TaughtMessage]) -> list[TaughtMessage]:
    taught = next(i for i, s in enumerate(messages) if s.kind)
    return messages[: taught + 1]


def draw_episode(
    rng: random.Random, case: DeskCase, known: str, hinted: bool
) -> list[TaughtMessage]:
    """Return one case, from question to last call. `known` is the handbook's department or ""."""
    at_once = hinted and rng.random() < AT_ONCE_RATE
    stumbles = 0
    if (hinted and not at_once) or (known and rng.random() < STUMBLING_RATE):
        stumbles = rng.choice((1, 1, 2))
    messages = [TaughtMessage("user", case.question)]
    standing, clerk, hints = CaseState(), ClerkState(""), 0
    while True:
        taught = standing.turns >= stumbles
        if taught and known:
            clerk = replace(clerk, known=known)
        text, department = "", ""
        if hinted and taught and (hints == 0 or rng.random() < HINT_AGAIN_RATE):
            text, department = _hint(rng, case, standing)
        if text:
            messages.append(TaughtMessage("user", text))
            clerk = replace(clerk, known=department or clerk.known)
            hints += 1
        rates = INFORMED if clerk.known else GUESSING
        if not taught:
            rates = STUMBLING
        elif text or clerk.careful:
            rates = NEVER
        call, kind, clerk = _call(rng, case, standing, clerk, rates)
        if text and kind in ("find", "read", "answer"):
            kind = "hinted"
        messages.append(TaughtMessage("assistant", call, kind if taught else ""))
        standing = reply_to(case, standing, call, MAX_TURNS)
        assert standing.reply is not None
        if standing.reply.done:
            return messages
        messages.append(TaughtMessage("tool", standing.reply.text))


def _hint(rng: random.Random, case: DeskCase, standing: CaseState) -> tuple[str, str]:
    """Return the fitting hint and the department in it; each is "" if there is none."""
    key, facts = "", {"field": case.field, "department": case.department}
    if standing.reply is None:
        key = "where" if rng.random() < 0.7 else rng.choice(("tools", "form_of_find", "find_first"))
    elif standing.reply.hint_key:
        key, facts = standing.reply.hint_key, dict(standing.reply.hint_facts)
    if not key:
        return "", ""
    return HINTS[key].format(**facts), case.department if key == "where" else ""


def _call(
    rng: random.Random, case: DeskCase, standing: CaseState, clerk: ClerkState, rates: ErrorRates
) -> tuple[str, str, ClerkState]:
    """Return the next call, its kind, and the clerk's state after it."""
    untried = [d for d in words.DEPARTMENTS if d not in clerk.tried]
    department = clerk.known or rng.choice(untried)
    draw = rng.random()
    for name, rate in rates.items():
        if standing.read and name in ("blind_answer", "wrong_note"):
            continue
        if (draw := draw - rate) < 0:
            text = _slip(rng, name, case, standing, department)
            return text, name, replace(clerk, careful=True)
    clerk = replace(clerk, careful=False)
    if standing.read:
        return f"answer {case.value}.", "answer", clerk
    if standing.found:
        return f"read note {case.note}.", "read", clerk
    tried = replace(clerk, tried=clerk.tried | {department})
    return f"find {case.field} in {department}.", "find" if clerk.known else "guess", tried


def _slip(
    rng: random.Random, name: str, case: DeskCase, standing: CaseState, department: str
) -> str:
    """Return a call with the named mistake, close to the right call."""
    if name == "blind_answer":
        value = rng.choice(words.CATEGORY_OF[case.field].values)
        return f"answer {words.value_text(case.field, value)}."
    if name == "wrong_note":
        return f"read note {rng.choice([n for n in range(10, 100) if n != case.note])}."
    if standing.read:
        return f"give {case.value}." if name == "unknown_tool" else "answer."
    if standing.found:
        return f"open note {case.note}." if name == "unknown_tool" else f"read {case.note}."
    if name == "unknown_tool":
        look = f"look {case.field} in {department}."
        return rng.choice((look, look, f"open note {rng.randint(10, 99)}."))
    return rng.choice(
        (f"find {case.field}.", f"find in {department}.", f"read {rng.randint(10, 99)}.")
    )
