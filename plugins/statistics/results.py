"""Define what plug-ins add to results.json (`protocols.records.run_files.RunResults`)."""

from __future__ import annotations

from typing import TypedDict


class PopulationMeans(TypedDict):
    """Hold the results of recursive self-aggregation: means over the questions.

    `{"accuracy": [0.52, 0.61, 0.66], "majority_vote": 0.7, "pass_at_n": 0.81}`: `accuracy` is the
    share of right candidates in each population, the others are of the last.
    """

    accuracy: list[float]
    majority_vote: float
    pass_at_n: float


class AggregationGain(TypedDict):
    """Hold what training gained, as on_policy minus untrained: `{"last": 0.2, "first": 0.08,
    "aggregation": 0.12, "share": 0.6}`.

    `last` and `first` are the gains of the last and first population. `aggregation` is their
    difference, which is due to aggregation; `share` is its share of `last`, None where nothing was
    gained.
    """

    last: float
    first: float
    aggregation: float
    share: float | None


class Agreement(TypedDict):
    """Measure how near an arm is to the teacher, token by token on the teacher's answers.

    `{"kl": 0.21, "kl_ci95": [0.17, 0.25], "top1": 0.83, "tokens": 1210}`: `kl` estimates KL(T || S)
    in nats a token; `top1` is the share of tokens at which both have the same most likely token.
    Both are means over questions.
    """

    kl: float
    kl_ci95: list[float]
    top1: float
    tokens: int


class RoutingAccuracy(TypedDict):
    """Hold how often the router finds a held-out question's own cartridge by its words, with the
    Wilson interval: `{"accuracy": 0.97, "ci95": [0.936, 0.986], "n": 200}`."""

    accuracy: float
    ci95: list[float]
    n: int


class RuleObedience(TypedDict):
    """Hold the share of n held-out tasks that obey a rule of a handbook, with Wilson's 95%
    interval: `{"obeyed": 0.75, "ci95": [0.47, 0.91], "n": 12}`."""

    obeyed: float
    ci95: list[float]
    n: int


class EpisodeMeans(TypedDict, total=False):
    """Hold the mean reward of held-out episodes with its 95% interval, where a spec has rewards.

    Of a handbook's tasks, `rules` has the obedience to each rule, by the tasks' number of turns;
    `all` counts tasks that obey all of their rules: `{"all": {"1": .., "12": ..}, "short": ..}`.
    """

    reward: float
    reward_ci95: list[float]
    rules: dict[str, dict[str, RuleObedience]]


class GoldArm(TypedDict):
    """Hold an arm's mean negative log-probability of the gold answers, nats a token, and the share
    of the gap that it closes with its 95% interval, None where there is no gap:
    `{"nll": 2.31, "closed": 0.62, "ci95": [0.51, 0.7]}`."""

    nll: float
    closed: float | None
    ci95: list[float] | None


class GoldResults(TypedDict):
    """Hold the arms' results on the `n` questions that all of them answered."""

    n: int
    documents: int
    arms: dict[str, GoldArm]
