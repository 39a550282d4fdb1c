"""Adaptive scaling: which steps are scaled, and what comes of it."""

import asyncio
from math import exp

import pytest
from scripted_sampler import Scripted, Word, by_name, words

from cartridge_forge.plugins.strategies.adaptive import AdaptiveScaling, Momentum
from cartridge_forge.plugins.strategies.catalog import parse, run
from cartridge_forge.plugins.strategies.problem import StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest
from cartridge_forge.protocols.teacher_replay import AgentMessage

ASKED = (AgentMessage("user", "what is it?"),)


def scaled(uncertainties: list[float], *, corrected: bool = False) -> list[int]:
    """The steps that are scaled."""
    momentum, found = Momentum(0.9, 0.9, corrected), []
    for t, u in enumerate(uncertainties):
        if momentum.scales(u):
            # The rule as it is written.
            assert corrected or exp(momentum.value) / 0.9 < exp(u)
            found.append(t)
        momentum = momentum.after(u)
    return found


def test_a_constant_uncertainty_is_scaled_while_the_momentum_lags() -> None:
    assert scaled([0.3] * 30) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert scaled([0.1] * 30) == []
    assert scaled([0.3] * 30, corrected=True) == []
    # Once it has caught up, a step must be less sure than usual by -ln 0.9 = 0.105.
    assert scaled([0.2] * 8 + [0.31, 0.2, 0.28], corrected=True) == [8]


def test_momentum_is_a_running_mean() -> None:
    momentum = Momentum(0.9, 0.9, False).after(1.0).after(0.5)
    assert momentum.value == pytest.approx(0.9 * 0.1 + 0.1 * 0.5)
    assert momentum.steps == 2


def steps(ask: SampleRequest) -> list[Word]:
    """Probes of uncertainty 0.3, and of other candidates the second is the best."""
    kind, t, _, c = ask.id.split("/")[1:]
    if kind == "probe":
        return words(f"probe{t}\n\nx", -0.3)
    return words(f"more{t}\n\nx", -0.2 if c == "1" else -0.4)


def solve(strategy: AdaptiveScaling, sampler: Scripted) -> StrategyResult:
    return asyncio.run(run(strategy, sampler, ASKED, form="rg", seed=7, max_tokens=60))


def test_scaled_steps_take_the_best_candidate() -> None:
    sampler = Scripted(lambda a: words("<answer>1</answer>") if "final" in a.id else steps(a))
    result = solve(AdaptiveScaling(candidates=3, max_steps=11), sampler)
    # Steps 0 and 10 keep their probe.
    assert result.text == "".join(
        [
            "probe0\n\n",
            *(f"more{t}\n\n" for t in range(1, 10)),
            "probe10\n\n",
            "<answer>1</answer>",
        ]
    )
    assert [entry["scaled"] for entry in result.details["log"]] == [False] + [True] * 9 + [False]
    # Eleven probes, nine calls for two more, and three final answers.
    assert (result.spent.calls, result.spent.asks) == (11 + 9 + 1, 11 + 18 + 3)
    lean = Scripted(sampler.script)
    solve(AdaptiveScaling(candidates=3, max_steps=11, momentum="bias_corrected"), lean)
    assert len(lean.calls) == 12


def test_an_empty_answer_is_dropped_here_too() -> None:
    strategy = parse(
        "adaptive_scaling", {"candidates": 2, "detector": {"answer_patterns": ["<answer>"]}}
    )
    script = {
        "probe/0/0/0": words("a\n\nx", -0.1),
        "probe/1/0/0": words("so <answer> x", -0.1),
        "final/0/0": words("b <answer>1</answer>", -0.5),
        "final/0/1": words("c <answer>2</answer>", -0.2),
    }
    result = solve(strategy, Scripted(by_name(script)))  # type: ignore[arg-type]
    assert (result.text, result.answer) == ("a\n\nc <answer>2</answer>", "2")
    script["probe/1/0/0"] = [Word("so <answer"), Word(">", end=True)]
    result = solve(strategy, Scripted(by_name(script)))  # type: ignore[arg-type]
    assert (result.text, result.answer, result.finish_reason) == ("a\n\nso <answer>", None, "stop")


def test_the_budget_leaves_the_probe() -> None:
    sampler = Scripted(steps)
    solving = run(
        AdaptiveScaling(candidates=4), sampler, ASKED, form="rg", seed=7, max_tokens=60, budget=6
    )
    result = asyncio.run(solving)
    # Two probes of two tokens; three more candidates do not fit in two tokens.
    assert (result.text, result.finish_reason) == ("probe0\n\nprobe1\n\n", "budget")
