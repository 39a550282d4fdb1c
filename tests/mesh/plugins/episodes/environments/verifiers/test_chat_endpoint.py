"""The endpoint as OpenAI's own client sees it: whole answers, streams, calls and refusals."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest

from cartridge_forge.plugins.episodes.environments.verifiers.chat_endpoint import (
    BadChatRequest,
    ChatEndpoint,
)
from cartridge_forge.plugins.wire.openai_chat import HarnessRequest
from cartridge_forge.plugins.wire.openai_replies import ChatReply, FunctionCall
from cartridge_forge.protocols.teacher_replay import TeacherUsage

WORDS = ChatReply("let me see note 17.", False, False, TeacherUsage(7, 5))
CALLS = ChatReply(
    "find", False, False, TeacherUsage(7, 5),
    (FunctionCall("call_1", "find", '{"a":1}'), FunctionCall("call_2", "read", "{}")),
)  # fmt: skip
CUT = ChatReply("let me", False, True, TeacherUsage(7, 2))
Use = Callable[[openai.AsyncOpenAI, str], Awaitable[Any]]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ChatEndpoint]:
    with ChatEndpoint() as running:
        yield running


def using(endpoint: ChatEndpoint, answer: Any, use: Use) -> Any:
    async def main() -> Any:
        with endpoint.serving(answer) as url:
            async with openai.AsyncOpenAI(
                base_url=url, api_key=endpoint.key, max_retries=0, timeout=20
            ) as client:
                return await use(client, url)

    return asyncio.run(main())


def always(said: ChatReply) -> Callable[[HarnessRequest], Awaitable[ChatReply]]:
    async def answer(_: HarnessRequest) -> ChatReply:
        return said

    return answer


def create(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model="student", messages=[{"role": "user", "content": "where?"}], **more
    )


@pytest.mark.parametrize("said", [WORDS, CALLS, CUT])
def test_a_stream_says_what_a_whole_answer_says(endpoint: ChatEndpoint, said: ChatReply) -> None:
    async def both(client: openai.AsyncOpenAI, _: str) -> Any:
        whole = await create(client)
        async with client.chat.completions.stream(
            model="student",
            messages=[{"role": "user", "content": "where?"}],
            stream_options={"include_usage": True},
        ) as events:
            try:
                streamed = await events.get_final_completion()
            except openai.LengthFinishReasonError as error:
                streamed = error.completion
        return whole, streamed

    whole, streamed = using(endpoint, always(said), both)
    for done in (whole, streamed):
        (choice,) = done.choices
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (
            said.usage.input_tokens,
            said.usage.output_tokens,
        )
        if said.calls:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            told = [
                (c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls
            ]
            assert told == [(c.id, c.name, c.arguments) for c in said.calls]
        else:
            assert choice.message.content == said.text
            assert choice.finish_reason == ("length" if said.cut else "stop")


def test_only_the_key_and_the_address_open_an_episode(endpoint: ChatEndpoint) -> None:
    async def knock(client: openai.AsyncOpenAI, url: str) -> Any:
        stranger = client.with_options(api_key="sk-wrong")
        with pytest.raises(openai.AuthenticationError) as refused:
            await create(stranger)
        assert "sk-wrong" not in str(refused.value)
        other = client.with_options(base_url=url.replace("/episodes/", "/episodes/x"))
        with pytest.raises(openai.NotFoundError):
            await create(other)
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {endpoint.key}"}) as http:
            bad = await http.post(f"{url}/chat/completions", content=b'{"messages": 1}')
            got = await http.get(f"{url}/chat/completions")
        return url, bad.status_code, got.status_code

    url, *codes = using(endpoint, always(WORDS), knock)
    assert codes == [400, 404]
    over = httpx2.post(
        f"{url}/chat/completions", headers={"authorization": f"Bearer {endpoint.key}"}, json={}
    )
    assert over.status_code == 404


def test_refusals_and_failures_are_told_apart(endpoint: ChatEndpoint) -> None:
    async def refuses(_: HarnessRequest) -> ChatReply:
        raise BadChatRequest("the episode is over: context_full")

    async def fails(_: HarnessRequest) -> ChatReply:
        raise OSError("secrets of the host")

    async def ask(client: openai.AsyncOpenAI, _: str) -> Any:
        with pytest.raises(openai.APIStatusError) as raised:
            await create(client)
        return raised.value.status_code, str(raised.value)

    status, why = using(endpoint, refuses, ask)
    assert status == 400
    assert "context_full" in why
    status, why = using(endpoint, fails, ask)
    assert status == 500
    assert "secrets" not in why


def test_an_answer_that_is_called_off_is_a_failure(endpoint: ChatEndpoint) -> None:
    async def called_off(_: HarnessRequest) -> ChatReply:
        raise asyncio.CancelledError

    async def ask(client: openai.AsyncOpenAI, _: str) -> Any:
        with pytest.raises(openai.InternalServerError):
            await create(client)

    using(endpoint, called_off, ask)
