"""What is spent is told, and a budget is never exceeded; the same seed solves the same way."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_sampler import BABBLE, Babbler, Scripted, Word, words
from strategy_setup import ASKED, VARIANTS, digest, solve

from cartridge_forge.plugins.strategies.catalog import parse, run
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest
from cartridge_forge.plugins.strategies.samplers.token_budget import BudgetSpent, TokenBudget
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sampling

ROOT = Path(__file__).resolve().parents[5]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(VARIANTS)]


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=IDS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 400))
def test_a_budget_is_never_exceeded(variant: int, seed: int, budget: int) -> None:
    result, sampler = solve(variant, seed, budget)
    # By the sampler's own count.
    spent = result.spent
    assert spent.tokens == sum(a.tokens for a in sampler.said) <= budget
    assert (spent.calls, spent.asks) == (len(sampler.calls), len(sampler.said))
    assert spent.calls or (result.text, result.answer, result.finish_reason) == ("", None, "budget")


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=IDS)
def test_what_is_spent_is_told(variant: int) -> None:
    result, sampler = solve(variant, 11)
    spent = result.spent
    asks = [a for call in sampler.calls for a in call]
    assert spent.tokens == sum(a.tokens for a in sampler.said) > 0
    assert spent.prompt_tokens == sum(a.prompt_tokens for a in sampler.said) >= 3 * len(asks)
    assert (spent.calls, spent.asks) == (len(sampler.calls), len(asks))
    assert spent.seconds > 0
    # No two asks share a name or a draw.
    assert len({a.id for a in asks}) == len({a.seed for a in asks}) == len(asks)
    assert json.loads(json.dumps(result.details, allow_nan=False)) == result.details
    # Text and ids are of the same tokens.
    texts = {w.id: w.text for w in (Word(text, end=not text) for text, _ in BABBLE)}
    assert result.text == "".join(texts[i] for i in result.token_ids)
    # A budget that cuts nothing changes nothing.
    ample, _ = solve(variant, 11, 30 * len(asks))
    assert replace(ample, spent=spent) == result


def test_every_process_solves_the_same_way() -> None:
    program = "from strategy_setup import digest; print(digest())"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests/setups", ROOT / "tests/fakes")))
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "2024", "PYTHONPATH": paths},
        stdout=subprocess.PIPE, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert other.stdout.strip() == digest()


def asked(*most: int) -> list[SampleRequest]:
    return [SampleRequest(f"q/{i}", ASKED, Sampling(max_tokens=m), i) for i, m in enumerate(most)]


def test_the_meter_shares_what_is_left() -> None:
    sampler = Scripted(lambda ask: words("a " * 99))
    meter = TokenBudget(sampler, 20)
    answers = asyncio.run(meter(asked(3, 50, 60)))
    # 3 stay 3, and the others share 17.
    assert [a.tokens for a in answers] == [3, 8, 8]
    assert [a.finish_reason for a in answers] == ["length", "budget", "budget"]
    assert (meter.left, meter.spent.tokens) == (1, 19)
    with pytest.raises(BudgetSpent, match="1 of 20 tokens are left for 2 responses"):
        asyncio.run(meter(asked(1, 1)))
    # A judge beside it has what it leaves.
    (answer,) = asyncio.run(meter.beside(sampler)(asked(5)))
    assert (answer.tokens, answer.finish_reason, meter.left) == (1, "budget", 0)
    assert (meter.spent.calls, meter.spent.asks) == (2, 4)


def test_no_ask_is_no_call() -> None:
    meter = TokenBudget(Babbler(), 5)
    assert asyncio.run(meter([])) == []
    assert meter.spent.calls == 0


def test_a_budget_that_buys_nothing_answers_nothing() -> None:
    strategy = parse("self_consistency", {"samples": 9})
    solving = run(strategy, Babbler(), ASKED, form="rg", seed=1, budget=8, max_tokens=9)
    result = asyncio.run(solving)
    assert (result.text, result.answer, result.finish_reason) == ("", None, "budget")
    assert (result.spent.tokens, result.spent.calls) == (0, 0)


@pytest.mark.parametrize(
    ("change", "words_of_it"),
    [
        ({"form": "maths"}, "answer form: got 'maths'"),
        ({"budget": 0}, "a budget of 0"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"messages": ()}, "0 messages"),
    ],
)
def test_bad_questions_are_told(change: dict[str, object], words_of_it: str) -> None:
    given = {"messages": ASKED, "form": "rg", "seed": 1, "max_tokens": 9, **change}
    messages = given.pop("messages")
    with pytest.raises(DataError, match=words_of_it):
        asyncio.run(run(parse("best_of_n"), Babbler(), messages, **given))  # type: ignore[arg-type]
