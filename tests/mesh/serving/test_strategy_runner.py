"""Strategies of the catalogue over the wire: every name, hard budgets, clients that leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from serving_setup import MODEL, QUESTION, Served, add_cartridge, serving

from serving.strategy_runner import CatalogueStrategies
from strategies.catalog import STRATEGIES

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
