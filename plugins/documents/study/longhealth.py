"""Train on single answers to prompts about a document; measure on five-option questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cartridge_forge.plugins.clinic.prompts import parse_answer
from cartridge_forge.plugins.documents.study.longhealth_prompts import (
    LongHealthPrompts,
    LongHealthQuestion,
    open_prompts,
)
from cartridge_forge.plugins.documents.study.prefix_repair import repaired
from cartridge_forge.plugins.documents.study.prompts import answered_over, texts_of
from cartridge_forge.plugins.statistics.gold import gold_results
from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.protocols.records.answers import KeepAnswers, mean_nll
from cartridge_forge.protocols.records.run_files import ArmResult, MeasuredAccuracy
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.train_batch import TrainBatch
from cartridge_forge.services.mesh import Mesh
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.training.recipe import Recipe, Route, drawn_steps, own_cartridge
from cartridge_forge.training.rollouts import (
    GenerateCall,
    Rollout,
    ScoreGroup,
    as_rollout,
    as_rows,
    handed_over,
    unheard,
)

OFFLINE_CHUNK = 4  # steps of teacher-written text generated in one call


class LongHealthRecipe(Recipe):
    """Train on self-study prompts about patients' charts."""

    def __init__(self, tasks: LongHealthPrompts, *, measured: bool) -> None:
        """Need no held-out question unless `measured`."""
        self._tasks = tasks
        self._exams = tasks.exams if measured else []
        self.documents: Mapping[str, tuple[int, ...]] = tasks.documents
        self.layout = tasks.layout
        self.texts = texts_of(tasks.layout, tasks.texts)
        self.end_ids, self.note = tasks.end_ids, tasks.conversation.note

    def prepare(self, step: int) -> None:
        self._tasks.prepare(step)

    def updates(self, steps: int) -> Mapping[str, int]:
        return drawn_steps([c for _, c in self.layout.turns], self._tasks.prompts, steps)

    async def sample(
        self, step: int, version: int, generate: GenerateCall, ended: ScoreGroup = unheard
    ) -> Rollout:
        prompts = self._tasks.rollout(step, version)
        requests = [p.request for p in prompts]
        if (least := self._tasks.repair) is None:
            completions = await generate(requests, handed_over(prompts, ended))
        else:
            drafts = await generate(requests)
            completions = await repaired(prompts, drafts, least, self.end_ids, generate)
        return as_rollout(step, prompts, completions, False)

    async def offline(self, first: int, generate: GenerateCall) -> list[Rollout]:
        """Return the teacher's answers to the prompts of the next OFFLINE_CHUNK steps."""
        steps = range(first, first + OFFLINE_CHUNK)
        prompts = [self._tasks.offline(s) for s in steps]
        flat = [p for step in prompts for p in step]
        completions = await generate([p.request for p in flat])
        rollouts = []
        for i, step in enumerate(steps):
            share = slice(i * len(prompts[i]), (i + 1) * len(prompts[i]))
            rollouts.append(as_rollout(step, prompts[i], completions[share], True))
        return rollouts

    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, sampled: bool,
        generate: GenerateCall, keep: KeepAnswers | None = None, route: Route = own_cartridge,
    ) -> MeasuredAccuracy:  # fmt: skip
        exams = self._exams[:most]
        requests = self._tasks.exam_requests(exams, arm, prefix, version, sampled, route)
        completions = await generate(requests)
        texts = [self._tasks.decode(c.token_ids) for c in completions]
        if keep is not None:
            nll: list[float | None] = [None] * len(exams)
            if not sampled:  # it does not depend on what was sampled
                readings, tokens = self._tasks.readings(exams, requests)
                read = await generate(readings)
                nll = [mean_nll(c, n) for c, n in zip(read, tokens, strict=True)]
            spent = [len(c.token_ids) for c in completions]
            keep(answered_over(self._tasks.answers(exams, texts, spent, nll), requests))
        return measure(exams, texts)

    async def lesson(self, rollout: Rollout, version: int) -> TrainBatch:
        return TrainBatch(doc=tuple(rollout.samples))

    def results(self, state: Mapping[str, ArmResult], answers: Iterable[Any]) -> Mapping[str, Any]:
        gold = gold_results(answers)
        return {} if gold is None else {"gold": gold}

    def record(self, rollout: Rollout, arm: str, step: int, directory: RunDirectory) -> None:
        directory.append_rollouts(as_rows(rollout, arm, step, self._tasks.decode))


def measure(exams: Sequence[LongHealthQuestion], answers: Sequence[str]) -> MeasuredAccuracy:
    """Return accuracy with its 95% Wilson interval; unparsed answers count as wrong."""
    letters = [parse_answer(a, e.question) for e, a in zip(exams, answers, strict=True)]
    right = sum(
        letter is not None and e.question.is_correct(letter)
        for e, letter in zip(exams, letters, strict=True)
    )
    low, high = wilson_interval(right, len(exams))
    return MeasuredAccuracy(
        accuracy=right / len(exams),
        ci95=[low, high],
        n=len(exams),
        parse_failures=sum(letter is None for letter in letters),
    )


def open_recipe(
    learn: LearnSpec, tokenizer: Any, mesh: Mesh, directory: RunDirectory | None
) -> LongHealthRecipe:
    """Return the recipe of a spec without episodes, rsa, self-study and a dataset's rows."""
    prompts = open_prompts(learn, tokenizer, None if directory is None else directory.date)
    return LongHealthRecipe(prompts, measured=bool(learn.evaluate.arms))
