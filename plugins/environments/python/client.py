"""Run episodes in a class of the user's, in processes with limits of time and memory.

    class Guess:
        def reset(self, seed): ...                    -> "guess a number from 1 to 9."
        def step(self, text): ...                     -> ("too low.", 0.0, False)

The class is never imported here. Each process plays one move at a time (`processes` of them beside
each other). One that breaks a limit is replaced, and its other episodes are replayed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation
from cartridge_forge.plugins.chat.messages import AgentMessage, ToolAction
from cartridge_forge.plugins.environments.action_parsing import (
    BAD_ACTION,
    NoAction,
    action_in,
    with_tools_shown,
)
from cartridge_forge.plugins.environments.openenv.wire import observed, reward_of
from cartridge_forge.plugins.environments.sessions import (
    EnvironmentRefusal,
    ReplayedSessions,
    SessionLost,
)
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.host.limited_process import (
    BrokenLimitError,
    LimitedProcess,
    ProcessLimits,
)
from cartridge_forge.protocols.errors import DataError, RunError

WORKER = "cartridge_forge.plugins.environments.python.worker:answer"
MIB = 1 << 20

Handle = tuple[int, str]  # a process by its number, and a session in it


class PythonEnvironment(ReplayedSessions[Handle]):
    """Play the moves of many concurrent episodes, in one event loop."""

    def __init__(self, spec: EnvironmentSpec, most_turns: int) -> None:
        super().__init__(spec, most_turns)
        limits = ProcessLimits(
            cpu_s=spec.cpu_s, wall_s=spec.timeout_s, memory=spec.memory_mb * MIB,
            file_bytes=spec.file_mb * MIB,
        )  # fmt: skip
        self._processes = [
            LimitedProcess(WORKER, limits, "for one move", "make it faster, or raise its limits")
            for _ in range(spec.processes)
        ]
        self._places = [asyncio.Lock() for _ in self._processes]
        self._loaded: list[bool] = [False] * spec.processes
        self._loads: list[asyncio.Future[Mapping[str, Any]] | None] = [None] * spec.processes
        self._serial = itertools.count(1)

    async def start(self) -> None:
        """Load the class. Raises DataError where that fails, with the file and line."""
        try:
            async with self._places[0]:
                await self._load(0)
        except (EnvironmentRefusal, SessionLost) as error:
            raise DataError(
                f"the environment {self._spec.id} ({self._spec.factory}) cannot be made: {error}; "
                "correct it, or its keys factory, folder and arguments"
            ) from error

    async def close(self) -> None:
        self._waiting.clear()
        loads = [loading for loading in self._loads if loading is not None]
        for loading in loads:
            loading.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        for process in self._processes:
            await asyncio.to_thread(process.end)

    async def _open(self, move: EnvironmentRequest) -> Handle:
        number = next(self._serial)
        return number % len(self._processes), str(number)

    async def _say(
        self, handle: Handle, move: EnvironmentRequest, played: int
    ) -> tuple[Observation, float | None]:
        _, session = handle
        if played == 0:
            request = {"ask": "reset", "session": session, "arguments": dict(move.task.arguments)}
        else:
            try:
                action = action_in(move.actions[played - 1], self._spec.action)
            except NoAction as error:
                return Observation((AgentMessage("tool", str(error)),), error_kind=BAD_ACTION), None
            if isinstance(action, ToolAction):
                action = {"tool": action.tool, "arguments": dict(action.arguments)}
            request = {"ask": "step", "session": session, "action": action}
        data = (await self._ask(handle, request))["reply"]
        try:
            observation = observed(data, opening=played == 0, text_key=self._spec.observation)
        except ValueError as error:
            raise EnvironmentRefusal(f"{error}; correct its key observation") from error
        return with_tools_shown(observation, self._spec.show_tools), reward_of(data)

    async def _end(self, handle: Handle) -> None:
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                await self._ask(handle, {"ask": "close", "session": handle[1]})
        except (EnvironmentRefusal, SessionLost, TimeoutError):
            return  # it is over in any case

    def _drop(self, handle: Handle) -> None:
        return  # the process gives up its oldest sessions

    async def _ask(self, handle: Handle, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the reply of the handle's process, one request at a time."""
        number, _ = handle
        async with self._places[number]:
            if not self._loaded[number]:
                await self._load(number)
            reply = await self._call(number, request)
        if reply.get("lost"):
            raise SessionLost("its process was replaced")
        return reply

    async def _load(self, number: int) -> None:
        """Start the process and load the class. A move whose time is over ends neither: on a busy
        machine a start takes longer than a move may, and the next move waits for it."""
        spec, loading = self._spec, self._loads[number]
        if loading is None or loading.done():
            loading = self._loads[number] = asyncio.ensure_future(self._call(number, {
                "ask": "load", "factory": spec.factory, "folder": spec.folder,
                "arguments": spec.arguments,
            }))  # fmt: skip
        await asyncio.wait({loading})
        loading.result()
        self._loaded[number] = True

    async def _call(self, number: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        process = self._processes[number]
        called = asyncio.ensure_future(asyncio.to_thread(process.call, request))
        try:
            reply: Mapping[str, Any] = await asyncio.shield(called)
        except asyncio.CancelledError:  # its time is over: what it does now is nobody's
            self._loaded[number] = False
            process.kill()
            await asyncio.wait({called})
            called.exception()
            raise
        except BrokenLimitError as error:
            self._loaded[number] = False
            raise SessionLost(f"it {error}") from error
        except RunError as error:
            self._loaded[number] = False
            raise SessionLost(str(error)) from error
        if "error" in reply:
            raise EnvironmentRefusal(reply["error"])
        return reply
