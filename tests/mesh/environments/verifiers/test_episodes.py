"""Episodes that others lead, over the real endpoint: the turns of `run_episodes`, to the token."""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from episode_setup import LOST, RIGHT, Desk, Students, conversation, seen_at_desk, task

from environments.action_parsing import JSON
from environments.episode_files import from_row, to_row
from environments.rollout import BARE, over_cartridge, run_episodes
from environments.training_signals import rl_samples
from environments.verifiers.chat_endpoint import ChatEndpoint
from environments.verifiers.episodes import RequestBatcher, verifiers_episodes
from environments.verifiers.worker_process import VerifiersOutcome
from protocols.episodes import Episode, Task
from protocols.errors import DataError, PublishError
from protocols.teacher_replay import AgentMessage, AgentTool
from protocols.types import Completion, GenerateRequest, PrefixRef, Sampling, refused

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


async def refuses(requests: Sequence[GenerateRequest]) -> list[Completion]:
    return [refused(r, "cartridge/desk_01 has no version 3") for r in requests]


async def breaks(requests: Sequence[GenerateRequest]) -> list[Completion]:
    raise DataError("a prompt is empty")


async def loses(requests: Sequence[GenerateRequest]) -> list[Completion]:
    return []


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


def test_what_is_rewritten_is_a_second_sample(endpoint: ChatEndpoint) -> None:
    async def forgets(_: Task, say: Say) -> VerifiersOutcome:
        await say([{"role": "user", "content": "where?"}])
        await say([{"role": "user", "content": "in short: where?"}])
        return VerifiersOutcome(0.5)

    (episode,) = run(endpoint, forgets, Students(TALK, script), group_size=1)
    first, second = rl_samples([episode])
    assert (first.sample.id, second.sample.id) == ("desk/12/0/0", "desk/12/0/0/branch1")
    assert second.sample.prompt_ids == TALK.opening(
        "desk_01", (AgentMessage("user", "in short: where?"),)
    )
    assert (first.reward, second.reward) == (0.5, 0.5)
    assert from_row(to_row(episode, "arm", 1)) == episode


def test_calls_are_told_and_taken_back(endpoint: ChatEndpoint) -> None:
    find = AgentTool("find", "Find it.", {"type": "object", "properties": {}})
    words = ('{"arguments":{"a":1},"tool":"find"}', "17")

    async def calls(_: Task, say: Say) -> VerifiersOutcome:
        asked = {"role": "user", "content": "where?"}
        said = await say([asked])
        (call,) = said.tool_calls
        told = {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}
        said = await say([asked, said.model_dump(exclude_none=True), told])
        return VerifiersOutcome(float(said.content.strip()))

    (episode,) = run(
        endpoint, calls, Students(TALK, lambda m, t: words[t]), tools=(find,), group_size=1,
        prefix=lambda _: BARE, dialect=JSON,
    )  # fmt: skip
    assert episode.reward == 17.0
    assert episode.opening.tools == (find,)
    assert [t.branch for t in episode.turns] == [0, 0]
    assert episode.turns[0].observation.messages == (AgentMessage("tool", '{"a":1}'),)


@pytest.mark.parametrize(
    ("settings", "kind"), [({"max_turns": 2}, "no_verdict"), ({"max_context": 40}, "context_full")]
)
def test_our_own_ends_go_before_the_outcome(
    endpoint: ChatEndpoint, settings: dict[str, Any], kind: str
) -> None:
    async def never_minds(task: Task, say: Say) -> VerifiersOutcome:
        try:
            return await at_desk(task, say)
        except openai.BadRequestError:
            return VerifiersOutcome(1.0)

    students = Students(TALK, script)
    led = run(endpoint, never_minds, students, tools=seen_at_desk(()).tools, **settings)
    ours = asyncio.run(
        run_episodes((task(),), Students(TALK, script), Desk(), TALK, **USUAL | settings)
    )
    assert [(e.reward, e.error_kind, len(e.turns)) for e in led] == [(None, kind, 2)] * 2
    assert [(e.reward, e.error_kind, len(e.turns)) for e in ours] == [(None, kind, 2)] * 2


def test_outcomes_without_a_reward(endpoint: ChatEndpoint) -> None:
    outcomes = {
        "a": VerifiersOutcome(None, error="environment_died: it ended with -9"),
        "b": VerifiersOutcome(None, error="environment_refused: no such taskset"),
        "c": VerifiersOutcome(None),
    }

    async def silent(task: Task, _: Say) -> VerifiersOutcome:
        return outcomes[task.id.partition("/")[0]]

    episodes = run(
        endpoint, silent, Students(TALK, script), [task(n) for n in outcomes], group_size=1
    )
    kinds = ["environment_died", "environment_refused", "no_verdict"]
    assert [e.error_kind for e in episodes] == kinds
    assert [e.opening.error for e in episodes] == [o.error for o in outcomes.values()]
    assert rl_samples(episodes) == []
    assert run(endpoint, silent, Students(TALK, script), ()) == []


@pytest.mark.parametrize(
    ("generate", "error"), [(refuses, PublishError), (breaks, DataError), (loses, ValueError)]
)
def test_what_the_generator_refuses_ends_all(
    endpoint: ChatEndpoint, generate: Any, error: type[Exception]
) -> None:
    async def hangs_on(task: Task, say: Say) -> VerifiersOutcome:
        if task.id.endswith("/1"):
            await asyncio.sleep(math.inf)
        return await at_desk(task, say)

    with pytest.raises(error):
        run(endpoint, hangs_on, generate)


def test_a_generator_that_never_answers_keeps_nobody(endpoint: ChatEndpoint) -> None:
    async def main() -> list[Episode]:
        asked = asyncio.Event()

        async def never(requests: Sequence[GenerateRequest]) -> list[Completion]:
            asked.set()
            await asyncio.sleep(math.inf)
            return []

        async def late(task: Task, say: Say) -> VerifiersOutcome:
            waiting = asyncio.create_task(at_desk(task, say))
            await asked.wait()
            waiting.cancel()
            return VerifiersOutcome(None, error="environment_died: no end within 1 s")

        player = Player(endpoint, late, seen_at_desk(()).tools, stream=False)
        settings = {**USUAL, "group_size": 1}
        episodes = await verifiers_episodes(player, (task(),), never, TALK, **settings)
        left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 30)
        return episodes

    (episode,) = asyncio.run(main())
    assert (episode.error_kind, episode.turns) == ("environment_died", ())
    assert episode.opening.messages == seen_at_desk(()).messages


def test_who_asks_while_a_batch_is_sampled_goes_with_the_next() -> None:
    async def main() -> list[list[str]]:
        sizes: list[list[str]] = []

        async def generate(requests: Sequence[GenerateRequest]) -> list[Completion]:
            sizes.append([r.id for r in requests])
            if len(sizes) == 1:
                later.extend(asyncio.ensure_future(batches.ask(r)) for r in requests_of("b", "c"))
                await asyncio.sleep(0)
            return [Completion(r.id, (), (), (), "stop") for r in requests]

        later: list[asyncio.Future[Completion]] = []
        batches = RequestBatcher(generate)
        running = asyncio.create_task(batches.run())
        (first,) = requests_of("a")
        assert (await batches.ask(first)).request_id == "a"
        assert [c.request_id for c in await asyncio.gather(*later)] == ["b", "c"]
        running.cancel()
        return sizes

    def requests_of(*names: str) -> list[GenerateRequest]:
        return [GenerateRequest(n, (1,), BARE, Sampling(), 0) for n in names]

    assert asyncio.run(main()) == [["a"], ["b", "c"]]
