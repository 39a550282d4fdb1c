"""The fake provider: the official SDKs talk to it over every wire, and its faults are theirs."""

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel, ValidationError

from protocols.spec.teacher_replay import PriceSpec
from teachers.fake_provider.app import (
    FakeProvider,
    FaultRates,
    ProviderRequest,
)

PRICES = {"tiny": PriceSpec(input=1.0, output=2.0, cached=0.5)}


class Point(BaseModel):
    x: int
    y: int


def rule(asked: ProviderRequest) -> str:
    return json.dumps({"x": len(asked.user), "y": len(asked.system)})


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    with FakeProvider(rule, PRICES) as running:
        yield running


def openai_client(provider: FakeProvider, key: str = "k") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url=provider.openai_url, max_retries=0, timeout=60)


@pytest.mark.parametrize(
    ("fault", "raised", "charged"),
    [
        ("rate_limit", openai.RateLimitError, False),
        ("server_error", openai.InternalServerError, False),
        ("stall", openai.APITimeoutError, False),
        ("cut_off", openai.APIConnectionError, True),
        ("malformed", json.JSONDecodeError, True),
        ("garbage", ValidationError, True),
    ],
)
def test_a_fault_is_what_the_sdk_calls_it(
    provider: FakeProvider, fault: str, raised: type[Exception], charged: bool
) -> None:
    provider.faults = FaultRates(**{fault: 1.0})

    async def ask() -> Exception:
        async with openai_client(provider) as client:
            try:
                patience = 0.3 if fault == "stall" else 60.0
                await client.with_options(timeout=patience).chat.completions.parse(
                    model="tiny",
                    messages=[{"role": "user", "content": "hello"}],
                    response_format=Point,
                )
            except Exception as error:
                return error
        raise AssertionError("it was answered")

    error = asyncio.run(ask())
    assert type(error) is raised
    if isinstance(error, openai.RateLimitError):
        assert error.response.headers["retry-after"] == "0.05"
    assert [served.fault for served in provider.served] == [fault]
    assert (provider.money() > 0) is charged
