"""External models: the official SDKs against real servers on loopback."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from protocols.errors import RunError
from protocols.spec.teacher_replay import PriceSpec
from protocols.teacher_replay import AgentMessage
from protocols.types import Sampling
from strategies.samplers.api_sampler import ApiEndpoint, ApiSampler
from strategies.samplers.sampler import SampleRequest, SampleResult
from teachers.fake_provider.app import FakeProvider, FaultRates, ProviderRequest

KEY = "local-key-1234"

TALK = (
    AgentMessage("system", "be brief"),
    AgentMessage("user", "what is it?"),
    AgentMessage("assistant", "what?"),
    AgentMessage("tool", "it is 4"),
)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KEY", KEY)


def rule(asked: ProviderRequest) -> str:
    return f"\\boxed{{{asked.user[-1]}}}"


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    with FakeProvider(rule, {"tiny": PriceSpec(input=1.0, output=2.0)}, key=KEY) as running:
        yield running


def asks(count: int = 1, **changes: Any) -> list[SampleRequest]:
    sampling = Sampling(temperature=0.7, max_tokens=50)
    return [
        replace(SampleRequest(f"q/{i}", TALK, sampling, seed=2**40 + i), **changes)
        for i in range(count)
    ]


def say(endpoint: ApiEndpoint, asked: Sequence[SampleRequest]) -> list[SampleResult]:
    async def go() -> list[SampleResult]:
        async with ApiSampler(endpoint) as sampler:
            return await sampler(asked)

    return asyncio.run(go())


def openai_at(url: str, **changes: Any) -> ApiEndpoint:
    return ApiEndpoint(
        "openai",
        "tiny",
        f"{url}/v1",
        "LOCAL_KEY",
        **{"backoff_s": 0.01, "timeout_s": 20, **changes},
    )


def anthropic_at(url: str, **changes: Any) -> ApiEndpoint:
    return replace(openai_at(url, **changes), provider="anthropic", base_url=url)


@pytest.mark.parametrize("at", [openai_at, anthropic_at])
def test_what_never_answers_ends_in_time(at: Any, provider: FakeProvider) -> None:
    provider.faults = FaultRates(stall=1.0)
    try:
        with pytest.raises(RunError, match="q/0 to tiny: timeout at attempt 2 of 2"):
            say(at(provider.url, timeout_s=0.3, attempts=2), asks())
    finally:
        provider.faults = FaultRates()
