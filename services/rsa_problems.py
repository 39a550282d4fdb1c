"""What a course of recursive self-aggregation is about: problems to train on, problems held out.

    clinic       option questions of the run's patients, split by their words as in `services.tasks`
    all others   problems by number, from the aggregators: the first evaluate.questions are held out

The documents that cartridges begin as are the patients', or a page on solving problems.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from clinic.longhealth import is_held_out
from environments.problems import clinic_problem
from protocols.errors import DataError
from protocols.learn_spec import LearnSpec
from protocols.rsa import Problem
from services.tasks import in_turns, read_patients

PRIMER = "primer"
PRIMER_TEXT = """\
How to solve problems. Read the whole problem before you begin, and say in your own words what is \
asked for and in which form the answer is wanted. List what is given. Look for a method that fits, \
and try it on a small case. Then work step by step, one small step at a time, and check each step \
before you go on: put numbers back in, count again, look at units and at the extreme cases. When a \
step fails, go back to the last one that holds. Do not guess while you can compute.
How to review attempts at a problem. An attempt may be right, wrong or unfinished, and one that \
sounds sure may be wrong. Do not count votes alone: many attempts can share one mistake. Check \
where they differ first, for there at least one of them is wrong, and settle each difference by \
working that step out again yourself. Take over the steps that hold, from whichever attempt they \
come, and repair or drop the others. If every attempt fails, set all of them aside and solve the \
problem in another way. End with one answer, in the form that was asked for.
"""

Draw = Callable[[Sequence[int], str], Awaitable[Sequence[Problem]]]


class Source(Protocol):
    """`documents` are the texts that cartridges stand in for, by name."""

    documents: Mapping[str, str]

    async def training(self, step: int) -> Sequence[Problem]:
        """The problems of 0-based `step`."""

    async def held_out(self, most: int | None) -> Sequence[Problem]:
        """The first `most` problems to measure with (None: all)."""


def open_source(spec: LearnSpec, draw: Draw) -> Source:
    """The problems of a spec; `draw` asks an aggregator for those of some numbers."""
    assert spec.rsa is not None
    return OfPatients(spec) if spec.rsa.problems.kind == "clinic" else ByNumber(spec, draw)


class OfPatients:
    """Documents take turns; which of a document's questions is asked is drawn."""

    def __init__(self, spec: LearnSpec) -> None:
        """Raises DataError for patients without a question to train on, or to measure with."""
        assert spec.rsa is not None
        self._each, self._seed = spec.rsa.examples, spec.train.seed
        patients = read_patients(spec.data)
        self.documents: Mapping[str, str] = {p.id: p.document for p in patients}
        share, instruction = spec.data.held_out, spec.data.instruction
        held = {p.id: [q for q in p.questions if is_held_out(q, share)] for p in patients}
        self._training = {
            p.id: [clinic_problem(q, instruction) for q in p.questions if q not in held[p.id]]
            for p in patients
        }
        rows = [held[name] for name in sorted(held)]
        chosen = in_turns(rows)[: spec.evaluate.questions]
        self._held_out = [clinic_problem(q, instruction) for q in chosen]
        without = sorted(name for name, own in self._training.items() if not own)
        if without or not self._held_out:
            who = f"{without[0]} has no question to train on" if without else "none is held out"
            raise DataError(
                f"rsa trains on the questions that are not held out: {who} with data.held_out "
                f"{share:g}; change it, or give more questions"
            )

    async def training(self, step: int) -> Sequence[Problem]:
        names = sorted(self.documents)
        found = []
        for i in range(self._each):
            own = self._training[names[(step * self._each + i) % len(names)]]
            found.append(random.Random(f"problem/{self._seed}/{step}/{i}").choice(own))
        return found

    async def held_out(self, most: int | None) -> Sequence[Problem]:
        return self._held_out[:most]


class ByNumber:
    """The problems after those held out, in their order and round again."""

    def __init__(self, spec: LearnSpec, draw: Draw) -> None:
        assert spec.rsa is not None
        self._each, self._most = spec.rsa.examples, spec.rsa.problems.most
        self._questions, self._draw = spec.evaluate.questions, draw
        self.documents: Mapping[str, str] = {PRIMER: PRIMER_TEXT}

    async def training(self, step: int) -> Sequence[Problem]:
        of_training = self._most - self._questions
        first = step * self._each
        numbers = [self._questions + (first + i) % of_training for i in range(self._each)]
        return await self._draw(numbers, PRIMER)

    async def held_out(self, most: int | None) -> Sequence[Problem]:
        count = self._questions if most is None else min(most, self._questions)
        return await self._draw(range(count), PRIMER)
