"""The fake provider: the official SDKs talk to it over every wire, and its faults are theirs."""

import asyncio
import json
from collections.abc import Iterator

import anthropic
import openai
import pytest
from pydantic import BaseModel, ValidationError

from cartridge_forge.plugins.chat.messages import TeacherUsage
from cartridge_forge.plugins.replay.fake_provider.app import (
    FakeProvider,
    FaultRates,
    ProviderRequest,
)
from cartridge_forge.plugins.replay.prompts import ATTEMPT_HEADER
from cartridge_forge.plugins.replay.spec import PriceSpec

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


def anthropic_client(provider: FakeProvider) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(api_key="k", base_url=provider.url, max_retries=0, timeout=60)


def test_chat_completions_parse_and_charge(provider: FakeProvider) -> None:
    async def ask() -> None:
        async with openai_client(provider) as client:
            for _ in range(2):
                done = await client.chat.completions.parse(
                    model="tiny",
                    messages=[
                        {"role": "system", "content": "abcdefgh"},
                        {"role": "user", "content": "hello"},
                    ],
                    response_format=Point,
                    extra_headers={ATTEMPT_HEADER: "a1"},
                )
                assert done.choices[0].message.parsed == Point(x=5, y=8)
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        # 13 bytes are 4 tokens, 2 of them the system text it saw before; '{"x": 5, "y": 8}' is 4.
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (4, 4)
        assert done.usage.prompt_tokens_details.cached_tokens == 2

    asyncio.run(ask())
    first, second = provider.served
    assert (first.usage, second.usage) == (TeacherUsage(4, 4, 0), TeacherUsage(2, 4, 2))
    # 1000, 2000 and 500 nanodollars a token.
    assert (first.nanodollars, second.nanodollars) == (12_000, 11_000)
    assert provider.money() == 23_000
    assert (first.attempt, first.wire, first.fault) == ("a1", "chat", "")


def test_messages_parse(provider: FakeProvider) -> None:
    async def ask() -> None:
        async with anthropic_client(provider) as client:
            done = await client.messages.parse(
                model="tiny",
                max_tokens=100,
                system="abcdefgh",
                messages=[{"role": "user", "content": "hello"}],
                output_format=Point,
            )
            assert done.parsed_output == Point(x=5, y=8)
            assert (done.usage.input_tokens, done.usage.output_tokens) == (4, 4)

    asyncio.run(ask())


def test_an_answer_is_cut_at_max_tokens(provider: FakeProvider) -> None:
    async def ask() -> None:
        async with anthropic_client(provider) as client:
            done = await client.messages.create(
                model="tiny", max_tokens=2, messages=[{"role": "user", "content": "hello"}]
            )
            assert done.stop_reason == "max_tokens"
            assert done.content[0].type == "text"
            assert done.content[0].text == '{"x": 5,'
            assert done.usage.output_tokens == 2

    asyncio.run(ask())


def test_a_refusal_has_each_wire_s_form(provider: FakeProvider) -> None:
    provider.faults = FaultRates(refuse=1.0)

    async def ask() -> None:
        async with openai_client(provider) as client:
            done = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}]
            )
            assert done.choices[0].message.content is None
            assert done.choices[0].message.refusal == "I cannot help with that."
        async with anthropic_client(provider) as other:
            message = await other.messages.create(
                model="tiny", max_tokens=9, messages=[{"role": "user", "content": "hello"}]
            )
            assert message.stop_reason == "refusal"

    asyncio.run(ask())


def test_a_message_is_cut_off_in_the_middle(provider: FakeProvider) -> None:
    provider.faults = FaultRates(cut_off=1.0)

    async def ask() -> None:
        async with anthropic_client(provider) as client:
            with pytest.raises(anthropic.APIConnectionError):
                await client.messages.create(
                    model="tiny", max_tokens=99, messages=[{"role": "user", "content": "hello"}]
                )

    asyncio.run(ask())


def test_a_stream_is_refused(provider: FakeProvider) -> None:
    async def ask() -> None:
        async with openai_client(provider) as client:
            with pytest.raises(openai.BadRequestError, match="no streaming here"):
                await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
                )

    asyncio.run(ask())


def test_a_wrong_key_is_refused_and_repeated_as_real_providers_do() -> None:
    async def ask(provider: FakeProvider) -> str:
        async with openai_client(provider, "sk-wrong") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "hello"}]
                )
        return str(caught.value)

    with FakeProvider(rule, PRICES, key="sk-right") as provider:
        assert "sk-wrong" in asyncio.run(ask(provider))
        assert provider.money() == 0


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
