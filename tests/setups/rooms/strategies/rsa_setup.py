"""Samplers that say what a script tells them, for runs of recursive self-aggregation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, ProviderRequest
from cartridge_forge.plugins.replay.spec import PriceSpec
from cartridge_forge.plugins.strategies.rsa.engine import RSAEngine
from cartridge_forge.plugins.strategies.samplers.api_sampler import ApiEndpoint, ApiSampler
from cartridge_forge.plugins.strategies.samplers.sampler import Ability, SampleRequest, SampleResult
from cartridge_forge.protocols.step import Sampling

Script = Callable[
    [SampleRequest, list[str]], str
]  # the ask, the candidates that it shows -> a response
_ATTEMPT = re.compile(r"^Attempt \d+:\n(.*?)(?=^Attempt \d+:|^Write the improved)", re.M | re.S)


def shown(ask: SampleRequest) -> list[str]:
    """The candidates that an ask wants aggregated, in order; none at step 0."""
    return [found.strip() for found in _ATTEMPT.findall(ask.messages[-1].content)]


class Scripted:
    """A sampler, and every batch that it was asked for. A response takes all that it may, or
    `length` tokens if that is less."""

    def __init__(self, script: Script, length: int = 10) -> None:
        self.batches: list[list[SampleRequest]] = []
        self._script, self._length = script, length

    @property
    def abilities(self) -> frozenset[Ability]:
        return frozenset({"seed"})

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        self.batches.append(list(asks))
        return [self._answer(ask) for ask in asks]

    def _answer(self, ask: SampleRequest) -> SampleResult:
        tokens = min(self._length, ask.sampling.max_tokens)
        return SampleResult(
            self._script(ask, shown(ask)), tokens, 3, "stop", token_ids=(1,) * tokens
        )


def place(ask: SampleRequest) -> tuple[int, int, int]:
    """Question, step and slot of an ask."""
    question, step, slot = map(int, ask.id.split("/"))
    return question, step, slot


RIGHT, WRONG = r"so \boxed{1}", r"so \boxed{0}"


def scored(question: str, text: str) -> float:
    """Score 1 for what is right."""
    return float(RIGHT in text)


def begun(ask: SampleRequest, right: int) -> str:
    """Step 0: the first `right` slots know it."""
    return RIGHT if place(ask)[2] < right else WRONG


def majority_copier(right: int) -> Scripted:
    """An aggregator that says what most of its candidates say."""

    def say(ask: SampleRequest, shown: list[str]) -> str:
        return max(shown, key=shown.count) if shown else begun(ask, right)

    return Scripted(say)


def accuracies(sampler: Scripted, questions: int = 1, **numbers: int) -> list[float]:
    """Mean accuracy of each population, over all questions."""
    engine = RSAEngine(sampler, **numbers, scorer=scored, seed=3)
    runs = engine.run([f"question {q}" for q in range(questions)]).runs
    steps = zip(*(r.populations for r in runs), strict=True)
    return [sum(sum(p.scores) for p in step) / (questions * len(step[0].scores)) for step in steps]


KEY = "local-key-1234"
TALK = (
    AgentMessage("system", "be brief"),
    AgentMessage("user", "what is it?"),
    AgentMessage("assistant", "what?"),
    AgentMessage("tool", "it is 4"),
)


def rule(asked: ProviderRequest) -> str:
    """Return the last letter that the user said, as an answer."""
    return f"\\boxed{{{asked.user[-1]}}}"


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    """Yield a provider that answers by `rule`."""
    with FakeProvider(rule, {"tiny": PriceSpec(input=1.0, output=2.0)}, key=KEY) as running:
        yield running


def asks(count: int = 1, **changes: Any) -> list[SampleRequest]:
    """Return requests of one conversation, each with a seed of its own."""
    sampling = Sampling(temperature=0.7, max_tokens=50)
    return [
        replace(SampleRequest(f"q/{i}", TALK, sampling, seed=2**40 + i), **changes)
        for i in range(count)
    ]


def say(endpoint: ApiEndpoint, asked: Sequence[SampleRequest]) -> list[SampleResult]:
    """Return what the endpoint answers."""

    async def go() -> list[SampleResult]:
        async with ApiSampler(endpoint) as sampler:
            return await sampler(asked)

    return asyncio.run(go())


def openai_at(url: str, **changes: Any) -> ApiEndpoint:
    """Return an endpoint by OpenAI's API."""
    return ApiEndpoint(
        "openai",
        "tiny",
        f"{url}/v1",
        "LOCAL_KEY",
        **{"backoff_s": 0.01, "timeout_s": 20, **changes},
    )


def anthropic_at(url: str, **changes: Any) -> ApiEndpoint:
    """Return an endpoint by Anthropic's API."""
    return replace(openai_at(url, **changes), provider="anthropic", base_url=url)
