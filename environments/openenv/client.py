"""Episodes in any OpenEnv server, which survive the loss of a connection or of the server.

    Move(task, ("find surgeon in cardiology.",)) --/ws--> Observation((Message("tool", ..),))

One /ws session is one episode. A session waits under its task and the actions it has played, and
whoever plays the next action takes it up: where the same actions give the same observations,
sessions that stand alike are alike. For a move that finds none, or whose session is lost, a new one
is reset with the task's arguments and plays the earlier actions again; what it then says must be
what was said before.

The wire is spoken here because OpenEnv's client opens a lost connection anew in silence, and would
step a session that was never reset.
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

MAX_WAITING = 256  # sessions; the longest idle is closed first, and played again if it is missed
MAX_SEEN = 1 << 16  # observations remembered, to compare
MAX_MESSAGE_BYTES = 1 << 22
CLOSE_TIMEOUT_S = 1.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class OpenEnvClient:
    """Moves of many episodes at a time, in one event loop. `action_key` is the field of the
    server's action that holds the text."""

    def __init__(self, url: str, timeout_s: float = 30.0, action_key: str = "text") -> None:
        self._url = f"ws{url.rstrip('/').removeprefix('http')}/ws"
        # A proxy for the outside has no way to this machine's loopback.
        self._proxy: Literal[True] | None = None if urlsplit(url).hostname in LOOPBACK else True
        self._timeout_s, self._action_key = timeout_s, action_key
        self._waiting: OrderedDict[ClientConnection, str] = OrderedDict()
        self._seen: OrderedDict[str, str] = OrderedDict()

    async def move(self, move: EnvironmentRequest) -> Observation:
        """What the environment says to the last action, or to a reset.

        Never raises for the environment's sake: `error` then begins with "environment_died" (gone,
        or silent for `timeout_s`), "environment_refused" (it says that it cannot), or
        "environment_diverged" (played again, it said something else).
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
        """End every session that waits."""
        waiting, self._waiting = list(self._waiting), OrderedDict()
        await asyncio.gather(*(_end(connection) for connection in waiting))

    async def _moved(self, move: EnvironmentRequest) -> Observation:
        last = len(move.actions)
        connection = self._take(_key(move, last - 1)) if last else None
        if connection is not None:
            try:
                return await self._play(connection, move, last)
            except (OSError, WebSocketException, ServerRefusal):
                pass  # lost, or unknown there: another session plays the episode again
        return await self._play(await self._connect(), move, 0)

    async def _connect(self) -> ClientConnection:
        return await connect(
            self._url, proxy=self._proxy, open_timeout=None, close_timeout=CLOSE_TIMEOUT_S,
            max_size=MAX_MESSAGE_BYTES,
        )  # fmt: skip

    async def _play(
        self, connection: ClientConnection, move: EnvironmentRequest, first: int
    ) -> Observation:
        """The observation of the last action; plays those from `first` on (0: the reset)."""
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
    """The server says that it cannot."""


class ReplayDiverged(Exception):
    """Played again, the environment said something else."""


def _failed(kind: str, why: str) -> Observation:
    return Observation(done=True, error=f"{kind}: {why[:500]}")


async def _end(connection: ClientConnection) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await connection.close()
    except (OSError, WebSocketException):
        connection.transport.abort()


def _key(move: EnvironmentRequest, played: int) -> str:
    """Names the episode after `played` of its actions."""
    return _digest(move.task.id, dict(move.task.arguments), move.actions[:played])


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
