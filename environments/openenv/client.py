"""Run episodes on any OpenEnv server, and recover from a lost connection or a restarted server.

    EnvironmentRequest(task, ("find surgeon in cardiology.",))
    --/ws--> Observation((AgentMessage("tool", ..),))

One /ws session is one episode. Idle sessions are keyed by task and actions played; the next action
of such an episode takes any session with its key, because equal actions must give equal
observations. Without one, or when the session is lost, the client resets a new session with the
task's arguments and replays the earlier actions. Replayed observations must equal the first ones.

This module implements the wire protocol itself: OpenEnv's client silently reopens a lost connection
and would then step a session that was never reset.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from typing import Any, Literal
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from environments.openenv.wire import observed
from protocols.episodes import EnvironmentRequest, Observation

MAX_WAITING = 256  # idle sessions; the oldest is closed first, and replayed if needed again
MAX_SEEN = 1 << 16  # digests of observations, to compare replays with
MAX_MESSAGE_BYTES = 1 << 22
CLOSE_TIMEOUT_S = 1.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class OpenEnvClient:
    """Send the moves of many concurrent episodes, in one event loop. `action_key` is the field of
    the server's action that holds the text."""

    def __init__(self, url: str, timeout_s: float = 30.0, action_key: str = "text") -> None:
        self._url = f"ws{url.rstrip('/').removeprefix('http')}/ws"
        # A proxy cannot reach this machine's loopback.
        self._proxy: Literal[True] | None = None if urlsplit(url).hostname in LOOPBACK else True
        self._timeout_s, self._action_key = timeout_s, action_key
        self._waiting: OrderedDict[ClientConnection, str] = OrderedDict()
        self._seen: OrderedDict[str, str] = OrderedDict()

    async def move(self, move: EnvironmentRequest) -> Observation:
        """Return the environment's reply to the last action, or to a reset if there is none.

        Never raises for a failure of the environment. `error` then begins with "environment_died"
        (connection lost, or no reply within `timeout_s`), "environment_refused" (the server sent an
        error) or "environment_diverged" (a replay gave another observation).
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._moved(move)
        except TimeoutError:
            return _failed("environment_died", f"no answer within {self._timeout_s:g} s")
        except (OSError, WebSocketException, ValueError) as error:
            return _failed("environment_died", f"{type(error).__name__}: {error}")
        except ServerRefusal as error:
            return _failed("environment_refused", str(error))
        except ReplayDiverged as error:
            return _failed("environment_diverged", str(error))

    async def close(self) -> None:
        """Close every idle session."""
        waiting, self._waiting = list(self._waiting), OrderedDict()
        await asyncio.gather(*(_end(connection) for connection in waiting))

    async def _moved(self, move: EnvironmentRequest) -> Observation:
        last = len(move.actions)
        connection = self._take(_key(move, last - 1)) if last else None
        if connection is not None:
            try:
                return await self._play(connection, move, last)
            except (OSError, WebSocketException, ServerRefusal):
                pass  # lost, or unknown to the server: a new session replays the episode
        return await self._play(await self._connect(), move, 0)

    async def _connect(self) -> ClientConnection:
        return await connect(
            self._url, proxy=self._proxy, open_timeout=None, close_timeout=CLOSE_TIMEOUT_S,
            max_size=MAX_MESSAGE_BYTES,
        )  # fmt: skip

    async def _play(
        self, connection: ClientConnection, move: EnvironmentRequest, first: int
    ) -> Observation:
        """Play the actions from `first` on (0: the reset) and return the last observation."""
        settled = False
        try:
            observation = await self._say(connection, move, first)
            for played in range(first + 1, len(move.actions) + 1):
                observation = await self._say(connection, move, played)
            settled = True
        finally:
            if not settled:
                connection.transport.abort()
        if observation.done:
            await _end(connection)
        else:
            await self._keep(connection, _key(move, len(move.actions)))
        return observation

    async def _say(
        self, connection: ClientConnection, move: EnvironmentRequest, played: int
    ) -> Observation:
        if played == 0:
            request = {"type": "reset", "data": {**move.task.arguments, "episode_id": move.task.id}}
        else:
            request = {"type": "step", "data": {self._action_key: move.actions[played - 1]}}
        await connection.send(json.dumps(request))
        reply = json.loads(await connection.recv())
        data = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(data, dict):
            raise ValueError(f"not an OpenEnv reply: {str(reply)[:200]}")
        if reply.get("type") == "error":
            raise ServerRefusal(
                f"{data.get('message', 'no reason')} ({data.get('code', 'no code')})"
            )
        observation = observed(data, opening=played == 0)
        self._compare(_key(move, played), observation, played)
        return observation

    def _compare(self, key: str, observation: Observation, played: int) -> None:
        said = _digest([(m.role, m.content) for m in observation.messages], observation.done)
        if self._seen.setdefault(key, said) != said:
            raise ReplayDiverged(
                f"after {played} actions it said something else than before; "
                "the same arguments and actions must give the same observations"
            )
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _take(self, key: str) -> ClientConnection | None:
        for connection, stands_at in self._waiting.items():
            if stands_at == key:
                del self._waiting[connection]
                return connection
        return None

    async def _keep(self, connection: ClientConnection, key: str) -> None:
        self._waiting[connection] = key
        if len(self._waiting) > MAX_WAITING:
            oldest, _ = self._waiting.popitem(last=False)
            await _end(oldest)


class ServerRefusal(Exception):
    """Signal that the server replied with an error."""


class ReplayDiverged(Exception):
    """Signal that a replayed action gave another observation than before."""


def _failed(kind: str, why: str) -> Observation:
    return Observation(done=True, error=f"{kind}: {why[:500]}")


async def _end(connection: ClientConnection) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await connection.close()
    except (OSError, WebSocketException):
        connection.transport.abort()


def _key(move: EnvironmentRequest, played: int) -> str:
    """Return the key of the episode after `played` of its actions."""
    return _digest(move.task.id, dict(move.task.arguments), move.actions[:played])


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
