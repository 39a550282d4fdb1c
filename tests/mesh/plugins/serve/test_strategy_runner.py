"""Strategies of the catalogue over the wire: every name, hard budgets, clients that leave."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from serving_setup import (
    MODEL,
    QUESTION,
    Served,
    add_cartridge,
    raw,
    refused,
    serving,
    wait_until,
)

from cartridge_forge.plugins.chat.wire.openai_chat import ChatRequest
from cartridge_forge.plugins.serve.access.keys import anyone
from cartridge_forge.plugins.serve.engine.strategy_runner import CatalogueStrategies
from cartridge_forge.plugins.strategies.catalog import STRATEGIES

CHAT: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("catalogue")
    with serving(directory, strategies=CatalogueStrategies) as one:
        add_cartridge(one.house.library, "p1", seed=1)
        yield one


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def ask(client: OpenAI, strategy: str, **forge: Any) -> Any:
    return client.chat.completions.create(
        model=f"{MODEL}+p1", messages=CHAT, max_tokens=9, seed=2,
        extra_body={"forge": {"strategy": strategy, **forge}},
    )  # fmt: skip


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_every_strategy_that_is_told_of_answers(client: OpenAI, name: str) -> None:
    first, again = ask(client, name, budget=400), ask(client, name, budget=400)
    assert first.choices == again.choices
    told = first.forge["strategy"]
    assert told["name"] == name
    assert 0 < told["tokens"] <= 400
    assert first.usage.completion_tokens == told["tokens"]
    assert told["details"] == again.forge["strategy"]["details"]


def test_the_models_tell_of_all(client: OpenAI) -> None:
    model = client.models.list().data[0]
    assert model.forge["strategies"] == list(STRATEGIES)  # type: ignore[attr-defined]


def test_a_vote_is_told(client: OpenAI) -> None:
    answer = ask(client, "self_consistency", options={"samples": 6})
    told = answer.forge["strategy"]
    assert (told["options"], told["asks"], told["calls"]) == ({"samples": 6}, 6, 1)
    assert sum(v["weight"] for v in told["details"]["votes"]) <= 6


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        ({"strategy": "self_consistency", "options": {"smaples": 6}}, "option smaples"),
        ({"strategy": "self_consistency", "options": {"samples": "6"}}, "option samples"),
        ({"strategy": "self_consistency", "form": "poem"}, "forge.form is one of"),
    ],
)
def test_options_are_checked_before_anything_is_sampled(
    client: OpenAI, served: Served, forge: dict[str, Any], said: str
) -> None:
    before = served.backend.calls
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        ask(client, **forge)
    assert refused.value.param == "forge.options"
    assert served.backend.calls == before


HUGE = 10**9


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        ("self_consistency", {"samples": HUGE}, f"asks for {HUGE} sequences at a time"),
        ("deepconf", {"traces": HUGE}, "and http.max_pending is 256"),
        ("best_of_n", {"candidates": HUGE}, "smaller forge.options"),
        ("best_of_n", {"max_steps": HUGE}, "and http.max_pending_tokens is 1048576"),
        ("beam_search", {"beams": HUGE}, "sequences"),
        ("phi_decoding", {"rollouts": HUGE}, "sequences"),
        ("adaptive_scaling", {"candidates": HUGE}, "sequences"),
        ("rsa", {"N": HUGE}, "sequences"),
        ("rsa", {"T": HUGE}, "set forge.budget or smaller forge.options"),
        ("deepconf", {"top": HUGE}, "less than or equal to 1024"),
    ],
)
@pytest.mark.parametrize("budget", [{}, {"budget": 64}])
def test_a_giant_strategy_is_refused_before_it_is_built(
    client: OpenAI, served: Served, strategy: str, options: Any, said: str, budget: dict[str, int]
) -> None:
    before, calls = resident_bytes(), served.backend.calls
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        ask(client, strategy, options=options, **budget)
    assert refused.value.param == "forge.options"
    assert served.backend.calls == calls
    assert served.door.handler.admission.pending == served.door.handler.admission.tokens == 0
    assert resident_bytes() - before < HUGE  # a list of them has 8 bytes for each


@pytest.mark.parametrize(
    ("strategy", "options", "responses", "again", "words"),
    [
        ("self_consistency", {"samples": 6}, 6, 0, 0),
        ("beam_search", {"beams": 2, "candidates": 4, "max_steps": 3}, 32, 1, 0),
        ("rsa", {"M": 1, "N": 4, "K": 3, "T": 2}, 8, 3, 712),
    ],
)
def test_what_is_read_again_is_in_the_cost(
    served: Served, strategy: str, options: Any, responses: int, again: int, words: int
) -> None:
    """Each response samples 10 tokens, and reads the prompt, `again` times 10 and `words`."""
    handler = served.door.handler
    body = {
        "model": MODEL, "messages": CHAT, "max_tokens": 10,
        "forge": {"strategy": strategy, "options": options},
    }  # fmt: skip
    request = handler.parser(anyone()).chat(ChatRequest.model_validate(body))
    cost = handler._cost(request)
    assert cost.tokens == responses * (request.prompt_tokens + words + again * 10 + 10)
    assert request.strategy is not None
    spare = replace(request, strategy=replace(request.strategy, budget=4))
    told = handler._cost(spare)
    assert told.tokens == responses * (request.prompt_tokens + words + again * 4 + 1)


@pytest.mark.parametrize("depth", [400, 900, 3000, 100_000])
def test_options_that_nest_too_deeply_are_a_mistake_of_the_request(
    served: Served, depth: int
) -> None:
    forge = {"strategy": "best_of_n", "options": {"a": 7}}
    chat = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 1, "forge": forge})
    body = chat.replace("7", "[" * depth + "]" * depth).encode()
    assert raw(served, "/v1/chat/completions", body)[0] == 400


def test_numbers_that_cannot_be_written_are_refused(served: Served) -> None:
    """The product of two numbers of 4,000 digits has more than Python writes."""
    forge = {"strategy": "rsa", "options": {"M": 7, "N": 7}}
    chat = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 1, "forge": forge})
    body = chat.replace("7", "9" * 4000).encode()
    status, at, message = refused(served, "/v1/chat/completions", body)
    assert (status, at) == (400, "forge.options")
    assert "http.max_pending is 256" in message


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_long_strategy_with_a_budget_is_served(client: OpenAI) -> None:
    """Each response of it samples a token at least: more of them than tokens are refused."""
    options = {"max_steps": 10_000}
    answer = ask(client, "best_of_n", options=options, budget=64)
    assert answer.forge["strategy"]["tokens"] <= 64


def test_a_client_that_leaves_ends_a_strategys_decoding(served: Served) -> None:
    served.backend.pause = 0.05
    try:
        before = served.backend.cancelled
        with (
            OpenAI(
                base_url=f"{served.url}/v1", api_key="none", timeout=0.3, max_retries=0
            ) as client,
            pytest.raises(openai.APITimeoutError),
        ):
            client.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=200, temperature=2,
                extra_body={"forge": {"strategy": "best_of_n"}},
            )  # fmt: skip
        wait_until(lambda: served.backend.cancelled > before)
        wait_until(lambda: served.backend.decoding() == 0)
        wait_until(lambda: served.door.handler.admission.pending == 0)
    finally:
        served.backend.pause = 0.0


def test_a_pattern_of_a_client_s_is_refused(client: OpenAI) -> None:
    """It would run in the generator's thread, and can be made to backtrack for ever."""
    options = {"detector": {"step_patterns": ["(a+)+b"]}}
    with pytest.raises(openai.BadRequestError, match="not taken over the wire"):
        ask(client, "best_of_n", options=options)


def test_a_judge_scores_the_steps_in_the_servers_loop(client: OpenAI, tmp_path: Path) -> None:
    """The shortest text is liked best; a server without a judge says what it lacks."""
    options = {"candidates": 4, "max_steps": 1, "scorer": "process_reward"}
    with pytest.raises(openai.BadRequestError, match="set process_reward where"):
        ask(client, "best_of_n", options=options)
    texts: list[str] = []
    loops = set()

    async def judge(given: Sequence[str]) -> list[float]:
        loops.add(asyncio.get_running_loop())
        texts.extend(given)
        return [1 / len(text) for text in given]

    with serving(tmp_path, strategies=partial(CatalogueStrategies, judge=judge)) as one:
        add_cartridge(one.house.library, "p1", seed=1)
        with OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as other:
            answer = ask(other, "best_of_n", options=options)
    assert len(loops) == 1
    assert all(text.startswith(QUESTION) for text in texts)
    said = (answer.choices[0].message.content or "").strip()
    first = [text.removeprefix(QUESTION).strip() for text in texts[:4]]
    assert said.startswith(min(first, key=len))
