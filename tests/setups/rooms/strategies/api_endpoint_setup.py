"""An endpoint over a local provider, and what tests of its sampler ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, ProviderRequest
from cartridge_forge.plugins.replay.spec import PriceSpec
from cartridge_forge.plugins.strategies.samplers.api_sampler import ApiEndpoint, ApiSampler
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest, SampleResult
from cartridge_forge.protocols.step import Sampling

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
