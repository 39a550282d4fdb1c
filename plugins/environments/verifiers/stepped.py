"""Step the tasks of a verifiers taskset from outside, though verifiers leads the conversation.

    reset    the worker plays the task; its first chat request        -> the opening
    step     the student's text answers that request; the next one    -> the observation
             or the end of the rollout, with the taskset's reward     -> done

The harness waits in its chat request until the student's next turn is there, so that episodes of
tasksets are those of any environment: several turns, tools, lockstep or ahead of training. A
harness that rewrites earlier messages cannot be stepped, and its episode ends as an error.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.plugins.chat.messages import (
    AgentMessage,
    AgentTool,
    TeacherUsage,
    ToolAction,
)
from cartridge_forge.plugins.chat.wire.openai_chat import HarnessRequest
from cartridge_forge.plugins.chat.wire.openai_replies import ChatReply, FunctionCall
from cartridge_forge.plugins.environments.action_parsing import JSON, with_tools_shown
from cartridge_forge.plugins.environments.sessions import (
    EnvironmentRefusal,
    ReplayedSessions,
    SessionLost,
)
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.environments.verifiers.worker_process import (
    VerifiersOutcome,
    VerifiersWorker,
)
from cartridge_forge.plugins.replay.actions import dense
from cartridge_forge.protocols.errors import DataError

ROLLOUT_S = 24 * 3600.0  # a rollout waits for training between its turns; moves have `timeout_s`
LIST_S = 300.0  # to read the tasks of a taskset


@dataclass(frozen=True)
class AskedTurn:
    """Hold a chat request of the harness, and the future of its answer."""

    request: HarnessRequest
    answer: asyncio.Future[ChatReply]


@dataclass
class HarnessSession:
    """Hold a rollout under way: what it asked last, and how many messages that had."""

    events: asyncio.Queue[AskedTurn | VerifiersOutcome] = field(default_factory=asyncio.Queue)
    playing: asyncio.Task[None] | None = None
    asked: AskedTurn | None = None
    messages: tuple[AgentMessage, ...] = ()
    tools: tuple[AgentTool, ...] = ()


class TasksetEnvironment(ReplayedSessions[HarnessSession]):
    """Play the moves of many concurrent episodes, in one event loop and one worker process."""

    def __init__(self, spec: EnvironmentSpec, most_turns: int) -> None:
        super().__init__(spec, most_turns)
        self._stack = AsyncExitStack()
        self._worker: VerifiersWorker | None = None
        self._tasks: list[Task] = []

    async def start(self) -> None:
        """Start the worker and read the taskset's tasks. Raises RunError without verifiers, and
        DataError for a taskset that cannot be loaded or has fewer tasks than `tasks`."""
        spec = self._spec
        assert spec.taskset is not None
        assert spec.tasks is not None
        paths = [Path(spec.folder)] if spec.folder else []
        worker = await self._stack.enter_async_context(VerifiersWorker(paths, LIST_S))
        self._tasks = await worker.tasks(spec.taskset, spec.arguments, most=spec.tasks)
        if len(self._tasks) < spec.tasks:
            raise DataError(
                f"the taskset {spec.taskset} has {len(self._tasks)} tasks, fewer than the "
                f"{spec.tasks} of the environment {spec.id}; lower its key tasks"
            )
        self._worker = worker

    async def close(self) -> None:
        await super().close()
        await self._stack.aclose()

    async def move(self, move: EnvironmentRequest) -> Observation:
        observation = await super().move(move)
        if (
            observation.error.startswith("environment_died: no answer within")
            and self._worker is not None
        ):
            await self._worker.check()  # replaces a worker that a taskset's code has blocked
        return observation

    async def _open(self, move: EnvironmentRequest) -> HarnessSession:
        worker, session = self._worker, HarnessSession()
        assert worker is not None, "start first"
        task = self._tasks[move.task.arguments["index"]]

        async def answer(request: HarnessRequest) -> ChatReply:
            turn = AskedTurn(request, asyncio.get_running_loop().create_future())
            session.events.put_nowait(turn)
            return await turn.answer

        async def play() -> None:
            with worker.endpoint.serving(answer) as url:
                session.events.put_nowait(await worker.play(task, url, ROLLOUT_S))

        session.playing = asyncio.create_task(play())
        return session

    async def _say(
        self, handle: HarnessSession, move: EnvironmentRequest, played: int
    ) -> tuple[Observation, float | None]:
        if played:
            assert handle.asked is not None
            text = move.actions[played - 1]
            calls = self._calls(handle, text, played)
            if not handle.asked.answer.done():  # its client may have gone
                handle.asked.answer.set_result(
                    ChatReply(text, False, False, TeacherUsage(0, 0), calls)
                )
        event = await handle.events.get()
        if isinstance(event, VerifiersOutcome):
            if event.error.startswith("environment_died"):
                raise SessionLost(event.error.partition(": ")[2])
            if event.error:
                raise EnvironmentRefusal(event.error.partition(": ")[2])
            return Observation(done=True), event.reward
        read = tuple(AgentMessage(m.speaker, m.text) for m in event.request.messages)
        previous, handle.messages, handle.asked = handle.messages, read, event
        if not played:
            handle.tools = event.request.offered
            opening = Observation(read, handle.tools)
            return with_tools_shown(opening, self._spec.show_tools), None
        if len(read) == 1 and read[0].role == "user":
            return Observation(read, new_conversation=True), None
        extended = read[: len(previous)] == previous and len(read) > len(previous)
        if not extended or read[len(previous)].role != "assistant":
            raise EnvironmentRefusal(
                "its harness rewrites earlier messages, and a turn's tokens stay as they were "
                "sampled; use a harness that appends"
            )
        return Observation(read[len(previous) + 1 :]), None

    def _calls(self, handle: HarnessSession, text: str, played: int) -> tuple[FunctionCall, ...]:
        """Return the tool call that a text makes; none where no tools are offered."""
        action = JSON.parse(text) if handle.tools else None
        if not isinstance(action, ToolAction):
            return ()
        return (FunctionCall(f"call_{played}", action.tool, dense(dict(action.arguments))),)

    async def _end(self, handle: HarnessSession) -> None:
        self._drop(handle)
        if handle.playing is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await handle.playing

    def _drop(self, handle: HarnessSession) -> None:
        if handle.playing is not None:
            handle.playing.cancel()
