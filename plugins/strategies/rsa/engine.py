"""Run recursive self-aggregation over any `Sampler`, by itself or as a strategy of the catalogue.

    step 0        M * N times the question                        -> population 0
    step t        for every slot K parents -> aggregation prompt  -> population t
    after T - 1   the answers of the last population vote

Every population is one batched call for all questions together: T calls in all. Parents and sample
seeds depend only on `seed`, the question's index, step and slot.

Source: Venkatraman et al. 2025, "Recursive Self-Aggregation Unlocks Deep Thinking in LLMs".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pydantic import Field
from pydantic_core import to_jsonable_python

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.strategies.answers.extract import extract
from cartridge_forge.plugins.strategies.answers.votes import AnswerVote, tally
from cartridge_forge.plugins.strategies.problem import StrategyCost, StrategyProblem, StrategyResult
from cartridge_forge.plugins.strategies.rsa.islands import Parents, RSAShape
from cartridge_forge.plugins.strategies.rsa.populations import (
    METRICS,
    RSAPopulation,
    ask,
    chosen_of,
    measure,
)
from cartridge_forge.plugins.strategies.rsa.prompts import ATTEMPT_WORDS, PROMPT_WORDS, as_task
from cartridge_forge.plugins.strategies.samplers.sampler import Sampler, SampleRequest, SampleResult
from cartridge_forge.plugins.strategies.samplers.token_budget import (
    BudgetSpent,
    TokenBudget,
    TokenSpend,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.base import SpecSection
from cartridge_forge.protocols.step import Sampling

Score = Callable[[str, str], float]  # question, text -> 1 or more if the text is right


@dataclass(frozen=True)
class RSARun:
    """Hold the result of one question: `populations` in order, and the votes of the last.

    `chosen` is a slot with the majority's answer (None: no candidate has an answer). `metrics` is
    None without a scorer. `finish_reason` is "budget" if the token budget ended the run before T
    populations, "" otherwise.
    """

    question: str
    populations: tuple[RSAPopulation, ...]
    votes: tuple[AnswerVote, ...] = ()
    metrics: Mapping[str, float] | None = None
    finish_reason: str = ""

    @property
    def chosen(self) -> int | None:
        return chosen_of(self.votes)

    @property
    def answer(self) -> str | None:
        return self.votes[0].answer if self.votes else None


@dataclass(frozen=True)
class RSAResult:
    """Hold the runs in the order of the questions, the means of their metrics, and the spend."""

    runs: tuple[RSARun, ...]
    metrics: Mapping[str, float]
    spent: TokenSpend


class RSAEngine:
    """Run `RSAEngine(sampler, M=1, N=4, K=2, T=3, task="math").run(["What is 2 + 2?"])`.

    `scorer(question, text)`, if given, scores every candidate. `budget` is the maximum of tokens
    that one `run` samples; a run that reaches it ends with its finished populations. Raises
    DataError for numbers that are inconsistent, and for an unknown task.
    """

    def __init__(
        self,
        generate: Sampler,
        M: int = 1,
        N: int = 4,
        K: int = 2,
        T: int = 3,
        task: str = "math",
        *,
        max_tokens: int = 4096,
        seed: int = 0,
        budget: int | None = None,
        scorer: Score | None = None,
    ) -> None:
        self._generate = generate
        self._shape, self._task = RSAShape(M, N, K, T), as_task(task)
        self._max_tokens, self._seed, self._budget = max_tokens, seed, budget
        self._scorer = scorer

    def run(self, questions: Sequence[str], temperature: float = 0.7) -> RSAResult:
        """Run `arun` in a new event loop, for scripts."""
        return asyncio.run(self.arun(questions, temperature))

    async def arun(self, questions: Sequence[str], temperature: float = 0.7) -> RSAResult:
        """Return the runs of all questions. Raises DataError for a single text as `questions`."""
        if isinstance(questions, str):
            raise DataError("rsa: questions must be a list of them: got one text; put it in [...]")
        sampling = Sampling(temperature=temperature, max_tokens=self._max_tokens)
        problems = [
            StrategyProblem((AgentMessage("user", text),), self._task, self._seed, sampling, str(i))
            for i, text in enumerate(questions)
        ]
        meter = TokenBudget(self._generate, self._budget)
        runs = await evolve(meter, problems, self._shape, self._scorer)
        scored = [run.metrics for run in runs if run.metrics]
        means = {name: fmean(m[name] for m in scored) for name in METRICS} if scored else {}
        return RSAResult(tuple(runs), means, meter.spent)


async def evolve(
    meter: TokenBudget,
    questions: Sequence[StrategyProblem],
    shape: RSAShape,
    scorer: Score | None = None,
) -> list[RSARun]:
    """Return a run of each question. Its last message is aggregated; earlier ones stay before it.

    Ends early, with the finished populations, when the meter's budget is spent.
    """
    populations: list[list[RSAPopulation]] = [[] for _ in questions]
    ended = ""
    for step in range(shape.T):
        planned = [
            _ask(*of_one, shape, step) for of_one in zip(questions, populations, strict=True)
        ]
        try:
            answers = iter(await meter([one for requests, _ in planned for one in requests]))
        except BudgetSpent:
            ended = "budget"
            break
        for question, so_far, (step_requests, parents) in zip(
            questions, populations, planned, strict=True
        ):
            responses = [next(answers) for _ in step_requests]
            so_far.append(
                _population(question, shape, step, step_requests, parents, responses, scorer)
            )
    return [
        await _ended(question, so_far, ended)
        for question, so_far in zip(questions, populations, strict=True)
    ]


def _ask(
    question: StrategyProblem, populations: Sequence[RSAPopulation], shape: RSAShape, step: int
) -> tuple[list[SampleRequest], Parents]:
    """Return the requests of population `step`, and the parents of each."""
    previous = populations[-1].texts if populations else ()
    *earlier, last = question.messages
    stream = f"rsa/{question.seed}/{question.name}"
    prompts, parents = ask(last.content, previous, shape, step, question.form, stream)
    requests = [
        replace(
            question.ask(f"{step}/{slot}"),
            messages=(*earlier, replace(last, content=prompt)),
        )
        for slot, prompt in enumerate(prompts)
    ]
    return requests, parents


def _population(
    question: StrategyProblem,
    shape: RSAShape,
    step: int,
    requests: Sequence[SampleRequest],
    parents: Parents,
    answers: Sequence[SampleResult],
    scorer: Score | None,
) -> RSAPopulation:
    text = question.messages[-1].content
    return RSAPopulation(
        step=step,
        islands=shape.islands(step),
        ids=tuple(a.id for a in requests),
        prompts=tuple(a.messages[-1].content for a in requests),
        parents=parents,
        texts=tuple(a.text for a in answers),
        token_ids=tuple(a.token_ids for a in answers),
        finish_reasons=tuple(a.finish_reason for a in answers),
        answers=tuple(extract(a.text, question.form) for a in answers),
        scores=tuple(scorer(text, a.text) for a in answers) if scorer else (),
    )


async def _ended(
    question: StrategyProblem, populations: Sequence[RSAPopulation], ended: str
) -> RSARun:
    text = question.messages[-1].content
    if not populations:
        return RSARun(text, (), finish_reason=ended)
    last = populations[-1]
    votes = tuple(await tally(last.answers, question.form))
    metrics = measure(last.scores, chosen_of(votes, last.scores)) if last.scores else None
    return RSARun(text, tuple(populations), votes, metrics, ended)


class RecursiveSelfAggregation(SpecSection):
    """Evolve M islands of N candidates, each made of K, over T populations; the last one votes."""

    M: int = Field(default=1, ge=1, description="islands, a power of two")
    N: int = Field(default=4, ge=1, description="candidates of an island")
    K: int = Field(default=2, ge=1, description="candidates that are aggregated into one")
    T: int = Field(default=3, ge=1, description="populations, the first included")

    def cost(self) -> StrategyCost:
        if self.T == 1:  # nothing is aggregated
            return StrategyCost(self.M * self.N, self.M * self.N)
        words = PROMPT_WORDS + ATTEMPT_WORDS * self.K
        return StrategyCost(self.M * self.N, self.M * self.N * self.T, self.K, words)

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        """Return the majority's response. Raises DataError for inconsistent numbers, BudgetSpent
        without a first population."""
        shape = RSAShape(self.M, self.N, self.K, self.T)
        (run,) = await evolve(meter, [question], shape)
        if not run.populations:
            raise BudgetSpent("no token is left for a first population")
        last, slot = run.populations[-1], run.chosen or 0
        details = to_jsonable_python({"populations": run.populations, "votes": run.votes})
        reason = run.finish_reason or last.finish_reasons[slot]
        return StrategyResult(
            last.texts[slot], run.answer, meter.spent, reason, last.token_ids[slot], details
        )
