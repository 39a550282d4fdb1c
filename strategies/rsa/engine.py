"""RSAEngine: whole runs of recursive self-aggregation, over anything that samples.

    step 0        M * N times the question                        -> population 0
    step t        for every slot K parents -> aggregation prompt  -> population t
    after T - 1   the answers of the last population vote

Every population is one batched call, for all questions together: T calls in all. Parents, and the
seeds of the samples, hang on `seed`, the question's place in the list, step and slot alone.

Source: Venkatraman et al. 2025, "Recursive Self-Aggregation Unlocks Deep Thinking in LLMs".
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from protocols.errors import DataError
from protocols.replay import Message
from protocols.types import Sampling
from strategies.answers import clustered, extract
from strategies.meter import BudgetSpent, Meter, Spent
from strategies.port import Ask, Sampler
from strategies.rsa.islands import Parents, Shape
from strategies.rsa.populations import METRICS, Population, ask, majority, measure
from strategies.rsa.prompts import as_task

Score = Callable[[str, str], float]  # question, text -> 1 or more where it is right


@dataclass(frozen=True)
class Run:
    """What became of one question: `populations` in order, and the vote of the last.

    `clusters` are slots with the same answer, `chosen` the one that speaks for the largest (None:
    nobody gave an answer). `metrics` is empty without a scorer. `finish_reason` is "budget" where
    the token budget ended the run before T populations, "" otherwise.
    """

    question: str
    populations: tuple[Population, ...]
    clusters: tuple[tuple[int, ...], ...]
    chosen: int | None
    metrics: Mapping[str, float]
    finish_reason: str = ""

    @property
    def answer(self) -> str | None:
        return None if self.chosen is None else self.populations[-1].answers[self.chosen]


@dataclass(frozen=True)
class RSAResult:
    """The runs in the order of the questions, the means of their metrics, and what all cost."""

    runs: tuple[Run, ...]
    metrics: Mapping[str, float]
    spent: Spent


class RSAEngine:
    """`RSAEngine(sampler, M=1, N=4, K=2, T=3, task="math").run(["What is 2 + 2?"])`.

    `scorer(question, text)` is asked for every candidate, where there is one. `budget` is the most
    tokens that one `run` samples: it then ends with the populations it has. Raises DataError for
    numbers that do not go together, and for an unknown task.
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
        self._shape, self._task = Shape(M, N, K, T), as_task(task)
        self._max_tokens, self._seed, self._budget = max_tokens, seed, budget
        self._score = scorer

    def run(self, questions: Sequence[str], temperature: float = 0.7) -> RSAResult:
        """`arun` for scripts, in an event loop of its own."""
        return asyncio.run(self.arun(questions, temperature))

    async def arun(
        self, questions: Sequence[str | tuple[Message, ...]], temperature: float = 0.7
    ) -> RSAResult:
        """All T populations of every question: its text, or a conversation that ends with it."""
        if isinstance(questions, str):
            raise DataError("rsa: questions must be a list of them: got one text; put it in [...]")
        sampling = Sampling(temperature=temperature, max_tokens=self._max_tokens)
        talks = [(Message("user", q),) if isinstance(q, str) else q for q in questions]
        meter = Meter(self._generate, self._budget)
        populations: list[list[Population]] = [[] for _ in talks]
        ended = ""
        for step in range(self._shape.T):
            try:
                drawn = await self._population(meter, talks, populations, step, sampling)
            except BudgetSpent:
                ended = "budget"
                break
            for so_far, population in zip(populations, drawn, strict=True):
                so_far.append(population)
        runs = [
            await self._ended(talk[-1].content, so_far, ended)
            for talk, so_far in zip(talks, populations, strict=True)
        ]
        scored = [r.metrics for r in runs if r.metrics]
        means = {name: fmean(m[name] for m in scored) for name in METRICS} if scored else {}
        return RSAResult(tuple(runs), means, meter.spent)

    async def _population(
        self,
        sampler: Sampler,
        talks: Sequence[tuple[Message, ...]],
        before: Sequence[Sequence[Population]],
        step: int,
        sampling: Sampling,
    ) -> list[Population]:
        """Population `step` of every question, by one call."""
        shape = self._shape
        asks: list[Ask] = []
        told: list[tuple[tuple[str, ...], Parents]] = []
        for q, talk in enumerate(talks):
            previous = before[q][-1].texts if step else ()
            stream = f"rsa/{self._seed}/{q}"
            prompts, parents = ask(talk[-1].content, previous, shape, step, self._task, stream)
            told.append((prompts, parents))
            asks += [
                Ask(
                    f"{q}/{step}/{slot}",
                    (*talk[:-1], Message("user", prompt)),
                    sampling,
                    random.Random(f"{stream}/sample/{step}/{slot}").getrandbits(63),
                )
                for slot, prompt in enumerate(prompts)
            ]
        answers = await sampler(asks)
        found = []
        for q, (prompts, parents) in enumerate(told):
            own = slice(q * shape.slots, (q + 1) * shape.slots)
            texts = tuple(a.text for a in answers[own])
            question = talks[q][-1].content
            found.append(
                Population(
                    step=step,
                    islands=shape.schedule[step],
                    ids=tuple(a.id for a in asks[own]),
                    prompts=prompts,
                    parents=parents,
                    texts=texts,
                    token_ids=tuple(a.token_ids for a in answers[own]),
                    finish_reasons=tuple(a.finish_reason for a in answers[own]),
                    answers=tuple(extract(text, self._task) for text in texts),
                    scores=tuple(self._score(question, t) for t in texts) if self._score else (),
                )
            )
        return found

    async def _ended(self, question: str, populations: Sequence[Population], ended: str) -> Run:
        if not populations:
            return Run(question, (), (), None, {}, ended)
        last = populations[-1]
        clusters = await clustered(last.answers, self._task)
        chosen = majority(clusters)
        metrics = measure(last.scores, chosen) if last.scores else {}
        return Run(
            question, tuple(populations), tuple(map(tuple, clusters)), chosen, metrics, ended
        )
