"""Episodes that others lead, over the real endpoint: the turns of `run_episodes`, to the token."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from episode_setup import LOST, RIGHT, Desk, Students, conversation, seen_at_desk, task

from environments.rollout import over_cartridge, run_episodes
from environments.training_signals import rl_samples
from environments.verifiers.chat_endpoint import ChatEndpoint
from environments.verifiers.episodes import verifiers_episodes
from environments.verifiers.worker_process import VerifiersOutcome
from protocols.episodes import Episode, Task
from protocols.teacher_replay import AgentTool
from protocols.types import PrefixRef, Sampling

TALK = conversation()

Say = Callable[[Sequence[dict[str, Any]]], Awaitable[Any]]

Lead = Callable[[Task, Say], Awaitable[VerifiersOutcome]]


class Player:
    """Plays tasks as verifiers would: by a harness that talks to the endpoint."""

    def __init__(
        self, endpoint: ChatEndpoint, lead: Lead, tools: Sequence[AgentTool], stream: bool
    ):
        self.endpoint = endpoint
        self._lead, self._stream = lead, stream
        self._tools: Any = [
            {
                "type": "function",
                "function": {
                    "name": t.name,
                    "description": t.description,
                    "parameters": t.parameters,
                },
            }
            for t in tools
        ] or openai.NOT_GIVEN

    async def play(self, task: Task, url: str) -> VerifiersOutcome:
        async with openai.AsyncOpenAI(
            base_url=url, api_key=self.endpoint.key, max_retries=0, timeout=20
        ) as client:

            async def say(messages: Sequence[dict[str, Any]]) -> Any:
                whole: Any = {"model": "m", "messages": messages, "tools": self._tools}
                if not self._stream:
                    return (await client.chat.completions.create(**whole)).choices[0].message
                async with client.chat.completions.stream(**whole) as events:
                    return (await events.get_final_completion()).choices[0].message

            try:
                return await self._lead(task, say)
            except openai.APIStatusError as error:
                return VerifiersOutcome(None, error=f"environment_refused: {error.status_code}")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ChatEndpoint]:
    with ChatEndpoint() as running:
        yield running


def seed_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def script(member: int, turn: int) -> str:
    return (RIGHT, LOST)[member % 2][turn]


async def at_desk(task: Task, say: Say) -> VerifiersOutcome:
    """The desk of `seen_at_desk`, led from outside."""
    messages = [{"role": "user", "content": seen_at_desk(()).messages[0].content}]
    actions: list[str] = []
    while True:
        said = await say(messages)
        actions.append(said.content)
        seen = seen_at_desk(actions)
        if seen.done:
            return VerifiersOutcome(seen.reward)
        messages.append({"role": "assistant", "content": said.content})
        messages += [{"role": m.role, "content": m.content} for m in seen.messages]


USUAL: dict[str, Any] = {
    "group_size": 2, "sampling": Sampling(), "prefix": over_cartridge(3), "seed_of": seed_of,
    "max_context": 500, "max_turns": 3,
}  # fmt: skip


def run(
    endpoint: ChatEndpoint, lead: Lead, generate: Any, tasks: Sequence[Task] = (task(),),
    tools: Sequence[AgentTool] = (), stream: bool = False, **settings: Any,
) -> list[Episode]:  # fmt: skip
    player = Player(endpoint, lead, tools, stream)
    wanted = verifiers_episodes(player, tasks, generate, TALK, **USUAL | settings)
    return asyncio.run(asyncio.wait_for(wanted, 60))


@pytest.mark.parametrize("stream", [False, True])
def test_the_turns_are_those_of_run_episodes(endpoint: ChatEndpoint, stream: bool) -> None:
    tasks, tools = (task("a"), task("b")), seen_at_desk(()).tools
    students = Students(TALK, script)
    led = run(endpoint, at_desk, students, tasks, tools, stream)
    ours = asyncio.run(run_episodes(tasks, Students(TALK, script), Desk(), TALK, **USUAL))
    assert [e.reward for e in led] == [1.0, 0.0, 1.0, 0.0]
    for one, other in zip(led, ours, strict=True):
        assert (one.task, one.group, one.reward, one.error_kind, one.sampling) == (
            other.task, other.group, other.reward, other.error_kind, other.sampling
        )  # fmt: skip
        assert (one.opening.messages, one.opening.tools) == (other.opening.messages, tools)
        for turn, wanted in zip(one.turns, other.turns, strict=True):
            assert replace(turn, observation=wanted.observation) == wanted
        for turn, wanted in zip(one.turns[:-1], other.turns[:-1], strict=True):
            assert turn.observation.messages == wanted.observation.messages
    assert [s.sample for s in rl_samples(led)] == [s.sample for s in rl_samples(ours)]
    asked = {r.id: r for batch in students.batches for r in batch}
    assert asked["b/1/2"].seed == seed_of("b/1/2")
    assert asked["b/1/2"].prompt_ids == led[3].turns[2].context_ids
    assert asked["b/1/2"].prefix == PrefixRef("cartridge/desk_01", 3)
