"""Judge a population, write the prompts of the next, and compute metrics and reward of a run.

AggregationInput --judge--> candidates --vote--> chosen
                 --draw parents--> prompts of the next population       -> JudgedPopulation

metrics    mean_accuracy   share of a population that scores 1 or more
           majority_vote   1 if the most frequent answer, in one of its spellings, scores 1 or more
           pass_at_n       1 if any candidate does
reward     metric of the last population + greedy_weight * mean score of all T * M * N

The aggregator judges population t - 1 and makes the prompts of population t. An AggregationInput is
the complete state of a run between two populations, so any aggregator can continue it and one that
dies loses nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.strategies.answers.extract import Form
from cartridge_forge.plugins.strategies.answers.votes import AnswerVote, tally
from cartridge_forge.plugins.strategies.rsa.islands import Parents, RSAShape, draw_parents
from cartridge_forge.plugins.strategies.rsa.prompts import aggregation_prompt, opening_prompt
from cartridge_forge.protocols.errors import DataError


@dataclass(frozen=True)
class RSAProblem:
    """Describe the problem of a run: `RSAProblem("patient_01/7", "patient_01", "what is the sodium?
    options: a) 41 mmol b) ...", {"options": ("41 mmol", ...), "correct": "41 mmol"})`.

    `document` names the document whose cartridge is the prefix. `facts` are what answers are judged
    by and depend on the kind of problem: those of a taskset hold the problem's index, {"index": 7}.
    """

    id: str
    document: str
    question: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AggregationInput:
    """Hold the run `name` before population `step`; `texts` are population step - 1, if any.

    `stream` names the random stream that draws the parents. At `step` T the last population is
    judged and no prompt follows.
    """

    name: str
    stream: str
    problem: RSAProblem
    step: int
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class JudgedCandidate:
    """Hold a text's answer, None where it gives none, and its score, 1 or more where the answer is
    right. A text that could not be judged has score None and an `error` ("environment_died: ...").
    """

    answer: str | None
    score: float | None
    error: str = ""


@dataclass(frozen=True)
class JudgedPopulation:
    """Carry the reply to an AggregationInput: `candidates` has one for each of its texts.

    `chosen` is the index of the best candidate with the most frequent answer, None where no answer
    was given. `prompts` are those of population `step`, each with its `parents` among the texts.
    """

    candidates: tuple[JudgedCandidate, ...] = ()
    chosen: int | None = None
    prompts: tuple[str, ...] = ()
    parents: tuple[tuple[int, ...], ...] = ()


Judge = Callable[[RSAProblem, Sequence[str]], Awaitable[Sequence[JudgedCandidate]]]
METRICS = ("mean_accuracy", "majority_vote", "pass_at_n")


@dataclass(frozen=True)
class RSAPopulation:
    """Hold one step of a run; every field but `step` and `islands` has an entry for each slot.

    `parents` are slots of the previous population. `answers` are extracted, None where a text has
    none. `scores` is empty without a scorer; a slot's `token_ids` if the backend returns none.
    """

    step: int
    islands: int
    ids: tuple[str, ...]
    prompts: tuple[str, ...]
    parents: Parents
    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    answers: tuple[str | None, ...]
    scores: tuple[float, ...] = ()


def ask(
    question: str, previous: Sequence[str], shape: RSAShape, step: int, task: Form, stream: str
) -> tuple[tuple[str, ...], Parents]:
    """Return the prompts of population `step`, and the parents of each among `previous`, the texts
    of the previous population (none at step 0). `stream` seeds the draw of parents."""
    parents = draw_parents(shape, step, stream)
    if step == 0:
        return (opening_prompt(question, task),) * shape.slots, parents
    prompts = (
        aggregation_prompt(question, [previous[p] for p in indices], task) for indices in parents
    )
    return tuple(prompts), parents


async def aggregate(
    standing: AggregationInput, shape: RSAShape, task: Form, judge: Judge
) -> JudgedPopulation:
    """Return the last population judged, and the next one's prompts; none after the last of T.

    Equal inputs give equal results in any process. Raises DataError for a `standing` that does not
    fit.
    """
    step, texts, problem = standing.step, standing.texts, standing.problem
    if not 0 <= step <= shape.T or len(texts) != (shape.slots if step else 0):
        raise DataError(
            f"rsa: {standing.name} stands before population {step} with {len(texts)} texts; there "
            f"are {shape.T} populations of {shape.slots}, and none before the first"
        )
    candidates, chosen = tuple[JudgedCandidate, ...](), None
    if step:
        candidates = tuple(await judge(problem, texts))
        votes = await tally([c.answer for c in candidates], task)
        chosen = chosen_of(votes, [c.score for c in candidates])
    if step == shape.T:
        return JudgedPopulation(candidates, chosen)
    prompts, parents = ask(problem.question, texts, shape, step, task, standing.stream)
    return JudgedPopulation(candidates, chosen, prompts, parents)


def chosen_of(votes: Sequence[AnswerVote], scores: Sequence[float | None] = ()) -> int | None:
    """Return the slot with the majority's answer that scores best, so that the order of its
    spellings decides nothing; of equals the earliest. None without votes."""
    if not votes:
        return None
    return max(votes[0].traces, key=lambda slot: (scores[slot] or 0.0) if scores else 0.0)


def measure(scores: Sequence[float], chosen: int | None) -> dict[str, float]:
    """Return METRICS of one population; `chosen` is the slot with the majority's answer."""
    right = [score >= 1.0 for score in scores]
    return {
        "mean_accuracy": fmean(right),
        "majority_vote": float(chosen is not None and right[chosen]),
        "pass_at_n": float(any(right)),
    }


def reward(
    metrics: Mapping[str, float],
    metric: str,
    scores: Sequence[Sequence[float]],
    greedy_weight: float = 0.0,
) -> float:
    """Return a run's reward from the last population's `metrics` and all populations' `scores`."""
    return metrics[metric] + greedy_weight * fmean(s for population in scores for s in population)
