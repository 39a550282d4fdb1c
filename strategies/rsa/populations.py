"""Write a population's prompts, choose its majority, and compute metrics and reward of a run.

metrics    mean_accuracy   share of a population that scores 1 or more
           majority_vote   1 if the most frequent answer scores 1 or more
           pass_at_n       1 if any candidate does
reward     metric of the last population + greedy_weight * mean score of all T * M * N

The module does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from strategies.answers.extract import Form
from strategies.answers.votes import AnswerVote
from strategies.rsa.islands import Parents, RSAShape, draw_parents
from strategies.rsa.prompts import aggregation_prompt, opening_prompt

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

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "step": self.step,
            "islands": self.islands,
            "ids": list(self.ids),
            "prompts": list(self.prompts),
            "parents": [list(slots) for slots in self.parents],
            "texts": list(self.texts),
            "token_ids": [list(ids) for ids in self.token_ids],
            "finish_reasons": list(self.finish_reasons),
            "answers": list(self.answers),
            "scores": list(self.scores),
        }


def ask(
    question: str, previous: Sequence[str], shape: RSAShape, step: int, task: Form, stream: str
) -> tuple[tuple[str, ...], Parents]:
    """Return the prompts of population `step`, and the parents of each among `previous`, the texts
    of the previous population (none at step 0). `stream` seeds the draw of parents."""
    parents = draw_parents(shape, step, stream)
    if step == 0:
        return (opening_prompt(question, task),) * shape.slots, parents
    prompts = (aggregation_prompt(question, [previous[p] for p in own], task) for own in parents)
    return tuple(prompts), parents


def chosen_of(votes: Sequence[AnswerVote]) -> int | None:
    """Return the earliest slot with the majority's answer; None without votes."""
    return votes[0].traces[0] if votes else None


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
