"""Test samplers and their budgets."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_sampler import BABBLE, Babbler, Scripted, Word, words
from strategy_setup import ASKED, VARIANTS, digest, solve

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.strategies.catalog import parse, run
from cartridge_forge.plugins.strategies.samplers.sampler import (
    ABILITIES,
    Ability,
    AlternatingSampler,
    PartialResponse,
    SampleRequest,
    SampleResult,
)
from cartridge_forge.plugins.strategies.samplers.token_budget import BudgetSpent, TokenBudget
from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.ports import refused
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PrefixRef,
    Sampling,
    StopCondition,
)

MODEL = Path(__file__).parents[5] / "models" / "clinic-reader"
PREFIX = PrefixRef("cartridge/p", 3)
DOCUMENT = "chart of anna weber. note 1: surgery, 14 march. sodium 41 mmol."


@pytest.fixture(scope="module")
def conversation() -> ChatRenderer:
    return ChatRenderer(load_tokenizer(str(MODEL)), {"p": DOCUMENT})


class Scripted_token_sampler:
    def __init__(self, conversation: ChatRenderer, *says: str) -> None:
        self.says, self.conversation = says, conversation
        self.requests: list[GenerateRequest] = []

    async def __call__(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self.requests += requests
        found = []
        for r, text in zip(requests, self.says, strict=True):
            ids = self.conversation.ids_of(text)
            tops = tuple(((i, -0.5), (0, -2.0)) for i in ids)
            found.append(
                Completion(r.id, ids, (-0.5,) * len(ids), (3,) * len(ids), "until",
                           ended_by=".", top_logprobs=tops, dropped=2)
            )  # fmt: skip
        return found


def ask(*begun: PartialResponse) -> SampleRequest:
    return SampleRequest(
        "q/0", (AgentMessage("user", "what is the sodium?"),), Sampling(max_tokens=9), 5,
        *(begun or (PartialResponse(),)), StopCondition(strings=(".",)), 2,
    )  # fmt: skip


def test_an_ask_is_the_opening_after_the_document_s_head(conversation: ChatRenderer) -> None:
    generate = Scripted_token_sampler(conversation, "the chart says sodium 41 mmol.")
    sampler = TokenSampler(generate, conversation, "p", PREFIX)
    (answer,) = asyncio.run(sampler([ask()]))
    (r,) = generate.requests
    assert r == GenerateRequest(
        "q/0", conversation.opening("p", (AgentMessage("user", "what is the sodium?"),)), PREFIX,
        Sampling(max_tokens=9), 5, top_logprobs=2, until=StopCondition(strings=(".",)),
    )  # fmt: skip
    assert answer.text == conversation.decode(answer.token_ids)
    assert answer.text.strip() == "the chart says sodium 41 mmol."
    assert (answer.tokens, answer.prompt_tokens) == (len(answer.token_ids) + 2, len(r.prompt_ids))
    assert answer.top_logprobs[0][0] == (conversation.decode(answer.token_ids[:1]), -0.5)
    assert sampler.abilities == ABILITIES


def test_a_response_goes_on_from_its_own_ids_and_words_after_them(
    conversation: ChatRenderer,
) -> None:
    first = conversation.ids_of("the chart says")
    text = conversation.decode(first)
    generate = Scripted_token_sampler(conversation, " 41 mmol.")
    sampler = TokenSampler(generate, conversation, "p", PREFIX)
    asyncio.run(sampler([ask(PartialResponse(f"{text} sodium", first))]))
    (r,) = generate.requests
    opening = conversation.opening("p", (AgentMessage("user", "what is the sodium?"),))
    assert r.prompt_ids == (*opening, *first, *conversation.ids_of(" sodium"))
    assert r.first_draw == len(first) + 1


def test_words_that_are_not_the_ids_are_refused(conversation: ChatRenderer) -> None:
    sampler = TokenSampler(Scripted_token_sampler(conversation, "x"), conversation, "p", PREFIX)
    with pytest.raises(DataError, match="give the text of the ids"):
        asyncio.run(
            sampler([ask(PartialResponse("another", conversation.ids_of("the chart says")))])
        )


def test_a_prefix_that_nobody_holds_is_told(conversation: ChatRenderer) -> None:
    async def none(requests: Sequence[GenerateRequest]) -> list[Completion]:
        return [refused(r, "cartridge p version 3 is not held here") for r in requests]

    with pytest.raises(PublishError, match="q/0: cartridge p version 3"):
        asyncio.run(TokenSampler(none, conversation, "p", PREFIX)([ask()]))


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


class Named:
    def __init__(self, name: str, *abilities: Ability) -> None:
        self.name, self.abilities = name, frozenset(abilities)

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        return [SampleResult(f"{self.name}{ask.id}", 1, 1, "stop") for ask in asks]


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, []), (1, ["a0"]), (2, ["a0", "b1"]), (5, ["a0", "b1", "c2", "a3", "b4"])],
)
def test_request_i_goes_to_sampler_i_modulo_their_number(count: int, said: list[str]) -> None:
    sampler = AlternatingSampler([Named(name, "seed") for name in "abc"])
    asks = [
        SampleRequest(str(i), (AgentMessage("user", "what?"),), Sampling(max_tokens=4), seed=i)
        for i in range(count)
    ]
    assert [result.text for result in asyncio.run(sampler(asks))] == said


def test_its_abilities_are_those_of_all() -> None:
    both = AlternatingSampler([Named("a", "seed", "logprobs"), Named("b", "logprobs", "until")])
    assert both.abilities == {"logprobs"}
