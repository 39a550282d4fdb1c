"""List every strategy by name, parse its options, and run it.

    parse("best_of_n", {"candidates": 8}) -> BestOfN(candidates=8)
    await run(strategy, sampler, messages, form="math", seed=7, budget=20_000, max_tokens=2048)

A strategy is a frozen, validated set of options with `solve(meter, question)`. To add one, write
that class and name it in STRATEGIES.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from pydantic import TypeAdapter, ValidationError

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.strategies.adaptive import AdaptiveScaling
from cartridge_forge.plugins.strategies.answers.extract import FORMS, Form
from cartridge_forge.plugins.strategies.deepconf import DeepConf
from cartridge_forge.plugins.strategies.offline import ChainOfThought, PartVote, SelfConsistency
from cartridge_forge.plugins.strategies.phi import PhiDecoding
from cartridge_forge.plugins.strategies.problem import (
    Judge,
    StrategyCost,
    StrategyProblem,
    StrategyResult,
)
from cartridge_forge.plugins.strategies.rsa.engine import RecursiveSelfAggregation
from cartridge_forge.plugins.strategies.samplers.sampler import Sampler
from cartridge_forge.plugins.strategies.samplers.token_budget import BudgetSpent, TokenBudget
from cartridge_forge.plugins.strategies.scorers import token_judge
from cartridge_forge.plugins.strategies.search import BeamSearch, BestOfN
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sampling


class Strategy(Protocol):
    """Hold the options of a strategy, and solve a question with them.

    `solve` raises DataError, before it samples, if the sampler lacks an ability. It may raise
    BudgetSpent if it has no response yet. `cost` is computed from the options alone, in no time
    and memory to speak of, whatever they are.
    """

    def cost(self) -> StrategyCost: ...

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult: ...


STRATEGIES: Mapping[str, type[Strategy]] = {
    "chain_of_thought": ChainOfThought,
    "self_consistency": SelfConsistency,
    "part_vote": PartVote,
    "deepconf": DeepConf,
    "best_of_n": BestOfN,
    "beam_search": BeamSearch,
    "phi_decoding": PhiDecoding,
    "adaptive_scaling": AdaptiveScaling,
    "rsa": RecursiveSelfAggregation,
}


def parse(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """Return the strategy of this name; missing options have their defaults.

    Raises DataError that names the option, its value and the remedy.
    """
    kind = STRATEGIES.get(name)
    if kind is None:
        raise DataError(
            f"strategy: got {name!r}; expected one of {', '.join(STRATEGIES)}{_near(name)}"
        )
    adapter: TypeAdapter[Strategy] = TypeAdapter(kind)
    try:
        # The options are JSON: lists become tuples, and nothing else is converted.
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
    """Solve one question, and never sample more than `budget` tokens in all, the judge's included.

    `max_tokens` bounds one response. Every draw depends only on `seed` and `name`, so a sampler
    with the ability "seed" repeats a run exactly. `judge` serves the scorer "process_reward": a
    sampler that replies + or - (`token_judge`), or a function from texts to probabilities. Raises
    DataError for a request that cannot be served, and errors of the sampler.
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
    matches = difflib.get_close_matches(name, STRATEGIES, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def _tupled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _tupled(v) for k, v in value.items()}
    return tuple(_tupled(v) for v in value) if isinstance(value, list) else value


def _fault(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"option {path}: there is none of this name; remove it"
    message = error["msg"][:1].lower() + error["msg"][1:]
    return f"option {path}: {message}, got {error['input']!r}"
