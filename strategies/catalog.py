"""Every strategy by name, and how one is run.

    parse("best_of_n", {"candidates": 8}) -> BestOfN(candidates=8)
    await run(strategy, sampler, messages, form="math", seed=7, budget=20_000, max_tokens=2048)

A strategy is its options (frozen, checked) and `solve(meter, question)`; to add one, write that and
name it here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from pydantic import TypeAdapter, ValidationError

from protocols.errors import DataError
from protocols.teacher_replay import AgentMessage
from protocols.types import Sampling
from strategies.adaptive import AdaptiveScaling
from strategies.answers.extract import FORMS, Form
from strategies.deepconf import DeepConf
from strategies.offline import ChainOfThought, SelfConsistency
from strategies.phi import PhiDecoding
from strategies.problem import Judge, StrategyProblem
from strategies.result import StrategyResult
from strategies.rsa.strategy import RecursiveSelfAggregation
from strategies.samplers.sampler import Sampler
from strategies.samplers.token_budget import BudgetSpent, TokenBudget
from strategies.scorers import token_judge
from strategies.search import BeamSearch, BestOfN


class Strategy(Protocol):
    """Options of a way to solve a question, and the way.

    `solve` raises DataError where the sampler lacks an ability, before anything is sampled, and may
    raise BudgetSpent where it has nothing to answer with.
    """

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult: ...


STRATEGIES: Mapping[str, type[Strategy]] = {
    "chain_of_thought": ChainOfThought,
    "self_consistency": SelfConsistency,
    "deepconf": DeepConf,
    "best_of_n": BestOfN,
    "beam_search": BeamSearch,
    "phi_decoding": PhiDecoding,
    "adaptive_scaling": AdaptiveScaling,
    "rsa": RecursiveSelfAggregation,
}


def parse(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy of this name; options that are not given have their defaults.

    Raises DataError, which names the option, what it got and the remedy.
    """
    kind = STRATEGIES.get(name)
    if kind is None:
        raise DataError(
            f"strategy: got {name!r}; expected one of {', '.join(STRATEGIES)}{_near(name)}"
        )
    adapter: TypeAdapter[Strategy] = TypeAdapter(kind)
    try:
        # As JSON has it: lists are tuples, and nothing else is converted.
        return adapter.validate_python(_tupled(dict(options or {})))
    except ValidationError as error:
        raise DataError(f"strategy {name}: {'; '.join(map(_fault, error.errors()))}") from None


async def run(
    strategy: Strategy,
    sampler: Sampler,
    messages: Sequence[AgentMessage],
    *,
    form: Form,
    seed: int,
    max_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    budget: int | None = None,
    name: str = "question",
    judge: Sampler | Judge | None = None,
) -> StrategyResult:
    """Solve one question; never samples more than `budget` tokens in all, the judge's included.

    `max_tokens` bounds one response. Every draw hangs on `seed` and `name` alone, so that a run is
    repeated exactly by a sampler with the ability "seed". `judge`, for the scorer "process_reward":
    a sampler that says + or - (`token_judge`), or a function from texts to probabilities. Raises
    DataError for what cannot be served, and what the sampler raises.
    """
    if form not in FORMS:
        raise DataError(f"answer form: got {form!r}; expected one of {', '.join(FORMS)}")
    if not messages or max_tokens < 1 or (budget is not None and budget < 1):
        raise DataError(
            f"a question needs messages, and at least one token: got {len(messages)} messages, "
            f"max_tokens {max_tokens} and a budget of {budget}"
        )
    meter = TokenBudget(sampler, budget)
    sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    metered = None if judge is None else _metered(judge, meter)
    question = StrategyProblem(tuple(messages), form, seed, sampling, name, metered)
    try:
        result = await strategy.solve(meter, question)
    except BudgetSpent:
        result = StrategyResult("", None, meter.spent, "budget")
    return replace(result, spent=meter.spent)


def _metered(judge: Sampler | Judge, meter: TokenBudget) -> Judge:
    if hasattr(judge, "abilities"):
        return token_judge(meter.beside(cast(Sampler, judge)))
    return judge


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, STRATEGIES, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _tupled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _tupled(v) for k, v in value.items()}
    return tuple(_tupled(v) for v in value) if isinstance(value, list) else value


def _fault(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"option {place}: there is none of this name; remove it"
    message = error["msg"][:1].lower() + error["msg"][1:]
    return f"option {place}: {message}, got {error['input']!r}"
