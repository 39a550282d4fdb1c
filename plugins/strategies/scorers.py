r"""Score the last step of a path; higher is better.

    sequence_logprob   sum of the log-probabilities of its tokens
    perplexity         -exp(-mean log-probability)
    entropy            -mean entropy of the next-token distributions, in nats
    gap                mean of p(likeliest) - p(second), in [0, 1]
    process_reward     P(positive) after the step, of a judge that reads the text

For example, two tokens of probability 0.5 out of (0.5, 0.5) score -1.386, -2, -0.693 and 0. A
backend returns only the top k of a distribution; the remaining mass counts as one more token, so
the entropy is a lower bound. A step without tokens scores `NOTHING`, lower than any other.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.strategies.problem import Judge, StrategyProblem
from cartridge_forge.plugins.strategies.samplers.sampler import (
    Ability,
    Sampler,
    SampleRequest,
    SampleResult,
    require,
)
from cartridge_forge.plugins.strategies.steps import StepPath
from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.step import Sampling

ScorerName = Literal["sequence_logprob", "perplexity", "entropy", "gap", "process_reward"]
NOTHING = -1e9
TOP = 20  # log-probabilities to request, where the scorer needs them
SEPARATOR = "\n\n"  # between steps in a judge's input
INSTRUCTION = (
    "You check a solution step by step. Say + if the last step is right and helps to solve the "
    "problem, and - if not. Answer with that one character."
)

Told = Sequence[tuple[str, float]]


def sequence_logprob(step: SampleResult) -> float:
    return math.fsum(step.logprobs)


def perplexity(step: SampleResult) -> float:
    """Return the negative perplexity, so that higher is better."""
    return -math.exp(min(-fmean(step.logprobs), math.log(-NOTHING)))


def entropy(step: SampleResult) -> float:
    return -fmean(_entropy(candidates) for candidates in step.top_logprobs)


def gap(step: SampleResult) -> float:
    return fmean(_gap(candidates) for candidates in step.top_logprobs)


def _entropy(candidates: Told) -> float:
    masses = [math.exp(logprob) for _, logprob in candidates]
    masses.append(max(1.0 - math.fsum(masses), 0.0))
    return -math.fsum(p * math.log(p) for p in masses if p > 0)


def _gap(candidates: Told) -> float:
    first, second = (*(math.exp(logprob) for _, logprob in candidates[:2]), 0.0)[:2]
    return first - second


_MEASURES: Mapping[str, tuple[Ability, int, Callable[[SampleResult], float]]] = {
    "sequence_logprob": ("logprobs", 0, sequence_logprob),
    "perplexity": ("logprobs", 0, perplexity),
    "entropy": ("top_logprobs", TOP, entropy),
    "gap": ("top_logprobs", TOP, gap),
}


@dataclass(frozen=True)
class Scorer:
    """Score the last step of each path, many paths at once."""

    needs: tuple[Ability, ...]
    top_logprobs: int
    score: Callable[[Sequence[StepPath]], Awaitable[list[float]]]


def scorer(name: ScorerName, question: StrategyProblem) -> Scorer:
    """Return the scorer of this name. Raises DataError for "process_reward" without a judge."""
    if name == "process_reward":
        judge = question.judge
        if judge is None:
            raise DataError(
                "scorer process_reward: got no judge; configure process_reward in the server's or "
                "the frontier's file, or in Python give run a `judge`: a sampler that says + or -, "
                "or a function from texts to probabilities"
            )

        async def judged(paths: Sequence[StepPath]) -> list[float]:
            probabilities = await judge([judged_text(question, p) for p in paths]) if paths else []
            return [float(p) for p in probabilities]

        return Scorer((), 0, judged)
    ability, top, measure = _MEASURES[name]

    async def measured(paths: Sequence[StepPath]) -> list[float]:
        steps = [p.steps[-1] for p in paths]
        if any(s.text and not getattr(s, ability) for s in steps):
            raise RunError(
                f"scorer {name}: the backend says that it tells {ability}, and told none"
            )
        return [measure(s) if getattr(s, ability) else NOTHING for s in steps]

    return Scorer((ability,), top, measured)


def judged_text(question: StrategyProblem, path: StepPath) -> str:
    """Return the question and the steps so far, each followed by the separator after which a
    process reward model judges."""
    question_text = next((m.content for m in reversed(question.messages) if m.role == "user"), "")
    return "".join(
        f"{part.strip()}{SEPARATOR}" for part in (question_text, *(s.text for s in path.steps))
    )


def token_judge(
    sampler: Sampler,
    *,
    positive: str = "+",
    negative: str = "-",
    instruction: str = INSTRUCTION,
) -> Judge:
    """Return a judge that samples one token for each text: P(+) / (P(+) + P(-)) of the top
    log-probabilities, or 0.5 if neither is among them.

    Raises DataError for a sampler without top log-probabilities, BudgetSpent if it is metered.
    """
    require(sampler, "a process reward model", "top_logprobs")

    async def judge(texts: Sequence[str]) -> list[float]:
        requests = [
            SampleRequest(
                f"judge/{i}",
                (AgentMessage("system", instruction), AgentMessage("user", text)),
                Sampling(temperature=0.0, max_tokens=1),
                seed=0,  # greedy
                top_logprobs=TOP,
            )
            for i, text in enumerate(texts)
        ]
        return [_positive(a, positive, negative) for a in await sampler(requests)]

    return judge


def _positive(answer: SampleResult, positive: str, negative: str) -> float:
    candidates = answer.top_logprobs[0] if answer.top_logprobs else ()
    yes, no = (
        math.fsum(math.exp(lp) for text, lp in candidates if text.strip() == word)
        for word in (positive, negative)
    )
    return yes / (yes + no) if yes + no > 0 else 0.5
