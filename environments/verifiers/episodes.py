"""Episodes of `verifiers` tasksets, in the exact tokens of our own student.

    worker (another process)   a task's harness --chat completions--> endpoint (on loopback)
    here                       ChatRecord: context ids --generate--> response ids, a turn
    worker                     ... the harness ends, the taskset rewards --> Episode

verifiers drives the conversation and never sees a token; the student's turns are recorded here as
they are sampled. What an episode says hangs on its own task, member and turn alone, as for
`run_episodes`.
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
    """A `VerifiersWorker`, or whoever else plays tasks against a chat endpoint."""

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
    """`group_size` episodes of each task, in order, all of them ended: as `run_episodes`, with the
    same names and seeds. `tasks` are the worker's, or have such `arguments`.

    `sampling` is ours, whatever the harness asks for. With a dialect, what the student says is
    told as a tool's call where the dialect takes it for one and tools were offered. Raises
    PublishError for a request that was refused, DataError for a template that cannot hold such a
    conversation, and what `generate` raises.
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
                except Exception as error:  # no environment's fault: it ends the batch
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
    """Why an episode has no further turn; "" where it has one."""
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
    """The outcome stands on the last thing that was seen; our own ending goes before it."""
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
    """Requests of many episodes in batches: who asks while one is sampled goes with the next."""

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
