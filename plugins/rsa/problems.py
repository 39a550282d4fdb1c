"""Choose the problems of an RSA recipe: to train on, and held out.

    clinic       option questions of the run's patients, split by their words as in
                 `plugins.documents.study.longhealth`
    sentences    trained on: how a document's sentence ends, with look-alikes (self-study's
                 "choice"); held out: as of clinic
    all others   problems by number, from the aggregators: the first evaluate.questions are held out

Cartridges are initialized from the patients' documents, or from a page on solving problems.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from cartridge_forge.plugins.clinic.text import (
    LETTERS,
    PatientQuestion,
    cued_sentences,
    is_held_out,
    look_alikes,
    question_prompt,
    sentence_ends,
)
from cartridge_forge.plugins.documents.study.longhealth import read_patients
from cartridge_forge.plugins.environments.problems import clinic_problem
from cartridge_forge.plugins.environments.spec import OF_DOCUMENTS
from cartridge_forge.plugins.episodes.task_sources.base import PRIMER, PRIMER_TEXT
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.strategies.rsa.populations import RSAProblem
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.training.records import interleave

Draw = Callable[[Sequence[int], str], Awaitable[Sequence[RSAProblem]]]


class ProblemSource(Protocol):
    """Give problems by step. `documents` are the texts that the cartridges replace, by name."""

    documents: Mapping[str, str]

    async def training(
        self, step: int, first: int = 0, count: int | None = None
    ) -> Sequence[RSAProblem]:
        """Return `count` problems of 0-based `step` from index `first` on; None: as many as the
        step has. Those after them are further ones, for a refill."""

    async def held_out(self, most: int | None) -> Sequence[RSAProblem]:
        """Return the first `most` held-out problems (None: all)."""


def open_source(spec: RsaLearn, draw: Draw) -> ProblemSource:
    """Return the problem source of a spec; `draw` gets problems by number from an aggregator."""
    assert spec.rsa is not None
    return OfPatients(spec) if spec.rsa.problems.kind in OF_DOCUMENTS else ByNumber(spec, draw)


class OfPatients:
    """Draw problems from patients: documents take turns, the question or sentence is random."""

    def __init__(self, spec: RsaLearn) -> None:
        """Raise DataError for patients without a question to train on or to hold out."""
        assert spec.rsa is not None
        self._each, self._seed = spec.rsa.examples, spec.train.seed
        patients = read_patients(spec.data)
        self.documents: Mapping[str, str] = {p.id: p.document for p in patients}
        self._ends = sorted({end for p in patients for end in sentence_ends(p)})
        self._sentences = spec.rsa.problems.kind == "sentences"
        share, instruction = spec.data.held_out, spec.data.instruction
        held = {p.id: [q for q in p.questions if is_held_out(q, share)] for p in patients}
        self._training = {
            p.id: [clinic_problem(q, instruction) for q in p.questions if q not in held[p.id]]
            for p in patients
        }
        rows = [held[name] for name in sorted(held)]
        chosen = interleave(rows)[: spec.evaluate.questions]
        self._held_out = [clinic_problem(q, instruction) for q in chosen]
        self._instruction = instruction
        self._askable = {
            p.id: [(cue, end) for _, cue, end in cued_sentences(p) if end] for p in patients
        }
        askable: Mapping[str, Sequence[object]] = (
            self._askable if self._sentences else self._training
        )
        without = sorted(name for name, own in askable.items() if not own)
        if without or not self._held_out:
            who = f"{without[0]} has no question to train on" if without else "none is held out"
            raise DataError(
                f"rsa trains on the questions that are not held out: {who} with data.held_out "
                f"{share:g}; change it, or give more questions"
            )

    async def training(
        self, step: int, first: int = 0, count: int | None = None
    ) -> Sequence[RSAProblem]:
        names = sorted(self.documents)
        found = []
        for i in range(first, first + (self._each if count is None else count)):
            name, rng = names[(step * self._each + i) % len(names)], self._rng(step, i)
            if self._sentences:
                found.append(self._of_sentence(name, f"{name}/{step}/{i}", rng))
            else:
                found.append(rng.choice(self._training[name]))
        return found

    def _rng(self, step: int, i: int) -> random.Random:
        return random.Random(f"problem/{self._seed}/{step}/{i}")

    def _of_sentence(self, patient: str, name: str, rng: random.Random) -> RSAProblem:
        """Return a problem that asks how a sentence ends, among similar endings."""
        cue, end = rng.choice(self._askable[patient])
        options = [end, *look_alikes(end, self._ends, len(LETTERS) - 1, rng)]
        rng.shuffle(options)
        question = PatientQuestion(name, patient, question_prompt(cue), tuple(options), end)
        return clinic_problem(question, self._instruction)

    async def held_out(self, most: int | None) -> Sequence[RSAProblem]:
        return self._held_out[:most]


class ByNumber:
    """Give the problems after the held-out ones, in order, starting over at the end. Further ones
    of a step are random, and none of the step's others while there are enough."""

    def __init__(self, spec: RsaLearn, draw: Draw) -> None:
        assert spec.rsa is not None
        self._each, self._most = spec.rsa.examples, spec.rsa.problems.most
        self._questions, self._draw = spec.evaluate.questions, draw
        self._seed = spec.train.seed
        self.documents: Mapping[str, str] = {PRIMER: PRIMER_TEXT}

    async def training(
        self, step: int, first: int = 0, count: int | None = None
    ) -> Sequence[RSAProblem]:
        of_training = self._most - self._questions
        stop = first + (self._each if count is None else count)
        numbers = [(step * self._each + i) % of_training for i in range(self._each)]
        for i in range(self._each, stop):
            others = sorted(set(range(of_training)) - set(numbers)) or range(of_training)
            numbers.append(random.Random(f"problem/{self._seed}/{step}/{i}").choice(others))
        return await self._draw([self._questions + n for n in numbers[first:stop]], PRIMER)

    async def held_out(self, most: int | None) -> Sequence[RSAProblem]:
        count = self._questions if most is None else min(most, self._questions)
        return await self._draw(range(count), PRIMER)
