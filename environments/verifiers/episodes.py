"""Sample episodes of `verifiers` tasksets in exact tokens of the student.

    worker (other process)   a task's harness --chat completions--> endpoint (on loopback)
    this process             ChatRecord: context ids --generate--> response ids, a turn
    worker                   ... the harness ends, the taskset rewards --> Episode

verifiers leads the conversation as text; this module records the student's turns as sampled. As in
`run_episodes`, contexts and seeds depend only on an episode's own task, member and turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from environments.action_parsing import ActionFormat
from environments.renderer import ChatRenderer
from environments.rollout import BARE
from environments.verifiers.chat_endpoint import BadChatRequest, ChatEndpoint
from environments.verifiers.chat_recording import ChatRecord
from environments.verifiers.worker_process import VerifiersOutcome
from protocols.episodes import Episode, Observation, Task
from protocols.errors import PublishError
from protocols.ports import Generate
from protocols.teacher_replay import TeacherUsage
from protocols.types import Completion, GenerateRequest, PrefixRef, Sampling
from protocols.wire.openai_chat import HarnessRequest
from protocols.wire.openai_replies import ChatReply

AT_ONCE = 32  # rollouts; each has a server and two clients in the worker


class EpisodePlayer(Protocol):
    """Play tasks against a chat endpoint, as `VerifiersWorker` does."""

    @property
    def endpoint(self) -> ChatEndpoint: ...

    async def play(self, task: Task, url: str) -> VerifiersOutcome: ...


async def verifiers_episodes(
    worker: EpisodePlayer,
    tasks: Sequence[Task],
    generate: Generate,
    conversation: ChatRenderer,
    *,
    group_size: int,
    sampling: Sampling,
    prefix: Callable[[Task], PrefixRef],
    seed_of: Callable[[str], int],
    max_context: int,
    max_turns: int,
    dialect: ActionFormat | None = None,
) -> list[Episode]:
    """Return `group_size` finished episodes of each task, in order, named and seeded as in
    `run_episodes`. `tasks` come from the worker, or have such `arguments`.

    `sampling` overrides what the harness requests. With a `dialect` and offered tools, text that
    the dialect parses as a call becomes a tool call. Raises PublishError for a refused request,
    DataError for a template that cannot render the conversation, and errors of `generate`.
    """
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()
    places = asyncio.Semaphore(AT_ONCE)
    batches = RequestBatcher(generate)

    async def play(task: Task, group: str) -> Episode:
        ref = prefix(task)
        record = ChatRecord(conversation, None if ref == BARE else task.document, dialect)
        one_at_a_time = asyncio.Lock()
        kind = ""

        async def answer(request: HarnessRequest) -> ChatReply:
            nonlocal kind
            async with one_at_a_time:
                try:
                    ids, branch = record.context(request)
                    kind = kind or _ended(len(ids), len(record.turns), max_context, max_turns)
                    if kind:
                        raise BadChatRequest(f"the episode is over: {kind}")
                    name = f"{task.id}/{len(record.turns)}"
                    asked = GenerateRequest(name, ids, ref, sampling, seed_of(name))
                    completion = await batches.ask(asked)
                    if completion.error:
                        raise PublishError(f"{completion.request_id}: {completion.error}")
                    turn = record.add(asked, branch, completion)
                except BadChatRequest:
                    raise
                except Exception as error:  # not the environment's failure: it ends the batch
                    if not failed.done():
                        failed.set_exception(error)
                    raise
                cut = completion.finish_reason == "length"
                usage = TeacherUsage(len(ids), len(turn.response_ids))
                return ChatReply(turn.text, False, cut, usage, record.calls(turn))

        async with places:
            with worker.endpoint.serving(answer) as url:
                outcome = await worker.play(task, url)
        return _episode(task, group, record, sampling, outcome, kind)

    members = [
        (replace(task, id=f"{task.id}/{m}"), task.id) for task in tasks for m in range(group_size)
    ]
    sampled = asyncio.create_task(batches.run())
    played = asyncio.gather(*(play(task, group) for task, group in members))
    try:
        either: list[asyncio.Future[Any]] = [failed, played]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        return list(played.result())
    finally:
        failed.cancel()
        sampled.cancel()
        played.cancel()
        await asyncio.gather(sampled, played, return_exceptions=True)


def _ended(context: int, turns: int, max_context: int, max_turns: int) -> str:
    """Return why an episode gets no further turn; "" if it gets one."""
    if turns >= max_turns:
        return "no_verdict"
    return "context_full" if context > max_context else ""


def _episode(
    task: Task,
    group: str,
    record: ChatRecord,
    sampling: Sampling,
    outcome: VerifiersOutcome,
    kind: str,
) -> Episode:
    """Return the episode with the outcome on its last observation; a limit `kind` overrides it."""
    reward, error = (None, "") if kind else (outcome.reward, outcome.error)

    def at_end(seen: Observation) -> Observation:
        return replace(seen, done=True, reward=reward, error=error)

    opening, turns = record.opening, record.turns
    if turns:
        last = turns[-1]
        turns = (*turns[:-1], replace(last, observation=at_end(last.observation)))
    else:
        opening = at_end(opening)
    if reward is None and not kind:
        kind = error.partition(":")[0] or "no_verdict"
    return Episode(task, group, opening, turns, sampling, reward, kind)


class RequestBatcher:
    """Batch the requests of many episodes: those that arrive during a batch form the next."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Completion]]] = []
        self._some = asyncio.Event()

    async def ask(self, request: GenerateRequest) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._some.set()
        return await answer

    async def run(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            batch, self._waiting = self._waiting, []
            try:
                completions = await self._generate([request for request, _ in batch])
                for (_, answer), completion in zip(batch, completions, strict=True):
                    if not answer.done():  # its episode may have ended meanwhile
                        answer.set_result(completion)
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
