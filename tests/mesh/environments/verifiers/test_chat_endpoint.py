"""The endpoint as OpenAI's own client sees it: whole answers, streams, calls and refusals."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest

from environments.verifiers.chat_endpoint import ChatEndpoint
from protocols.teacher_replay import TeacherUsage
from protocols.wire.openai_chat import HarnessRequest
from protocols.wire.openai_replies import ChatReply, FunctionCall

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
