"""Write a clinic desk's handbook with tasks, in the form of a handbook's file.

The text says at which department the records of each field lie; a task asks for fields, case after
case, as a shift at the desk does. A case has three calls and is a conversation of its own, because
the clerk was trained on single cases:

    user  what is the surgeon?      find surgeon in cardiology.    (the handbook's rule)
    tool  note 17.                  read note 17.
    tool  surgeon weber.            answer weber.

Tasks have 1, 4 or 12 turns: the first call of a case, a case and the first call of another, four
cases. Only the first call of a case needs the handbook.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

from cartridge_forge.plugins.clinic.desk import DeskCase, case_of, draw_desk

TURNS = (1, 4, 12)
CALLS = 3  # of a case
TRAIN_TASKS, HELD_OUT_TASKS = 16, 12  # of each number of turns
RULES: tuple[dict[str, Any], ...] = (
    {"id": "department", "check": {"expected": "equals"}},
    {"id": "note", "check": {"expected": "equals"}},
    {"id": "value", "check": {"expected": "equals"}},
    {"id": "finds_first", "check": {"calls_before": ["find", "read"]}},
    {"id": "full_stop", "check": {"ends_with": "."}},
    {"id": "one_sentence", "check": {"sentences": 1}},
)
EVERY_TURN = ["full_stop", "one_sentence"]


def desk_handbook(seed: int, number: int, fields: int) -> dict[str, Any]:
    """Return the handbook of desk `number` (from 1) of a seed, as the values of its file. Raises
    DataError for a wrong number of fields."""
    desk = draw_desk(seed, number, fields)
    rng = random.Random(f"handbook/{seed}/{number}")
    used = set[tuple[str, ...]]()  # what was asked: no two tasks ask the same

    def tasks(side: str, count: int) -> list[dict[str, Any]]:
        order, entries = rng.sample(desk.handbook, fields), list[dict[str, Any]]()
        for n in range(count):
            for turns in TURNS:
                cases = _cases(order[n % fields], desk.handbook, turns, rng)
                task = _task(f"{side}/{turns}/{n}", cases, turns)
                if (words := _words(task)) not in used:
                    used.add(words)
                    entries.append(task)
        return entries

    held_out = tasks("held_out", HELD_OUT_TASKS)
    return {
        "name": desk.id, "text": desk.document, "calls": "desk",
        "rules": [dict(rule) for rule in RULES], "train": tasks("train", TRAIN_TASKS),
        "held_out": held_out,
    }  # fmt: skip


def _cases(
    first: tuple[str, str], handbook: Sequence[tuple[str, str]], turns: int, rng: random.Random
) -> list[DeskCase]:
    """Return the cases of a task, about distinct fields where there are as many."""
    count, other_entries = -(-turns // CALLS), [entry for entry in handbook if entry != first]
    more = rng.sample(other_entries, min(count - 1, len(other_entries)))
    more += [rng.choice(handbook) for _ in range(count - 1 - len(more))]
    return [case_of(field, department, rng) for field, department in (first, *more)]


def _task(name: str, cases: Sequence[DeskCase], turns: int) -> dict[str, Any]:
    return {"id": name, "turns": list(chain.from_iterable(map(_turns, cases)))[:turns]}


def _turns(case: DeskCase) -> list[dict[str, Any]]:
    return [
        {
            "user": case.question, "new": True, "rules": ["department", "finds_first", *EVERY_TURN],
            "expected": f"find {case.field} in {case.department}.",
        },
        {
            "tool": f"note {case.note}.", "rules": ["note", "finds_first", *EVERY_TURN],
            "expected": f"read note {case.note}.",
        },
        {
            "tool": f"{case.field} {case.value}.", "rules": ["value", *EVERY_TURN],
            "expected": f"answer {case.value}.",
        },
    ]  # fmt: skip


def _words(task: dict[str, Any]) -> tuple[str, ...]:
    return tuple(turn.get("user") or turn["tool"] for turn in task["turns"])
