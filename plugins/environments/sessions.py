"""Run episodes in sessions of an environment, and recover from sessions that are lost.

    EnvironmentRequest(task, ("find surgeon in cardiology.",))
    -- the session that stands there -->  Observation((AgentMessage("tool", ..),))

One session plays one episode. Idle sessions are keyed by task and actions played; the next action
of such an episode takes any session with its key, because equal actions must give equal
observations. Without one, or when the session is lost, a new session is reset with the task's
arguments and replays the earlier actions. Replayed observations must equal the first ones.

An environment may take only so many sessions at once. From its first refusal on, moves wait for
their turn, no session is kept idle, and each move replays its episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation
from cartridge_forge.plugins.environments.spec import EnvironmentSpec

MAX_WAITING = 256  # idle sessions; the oldest is closed first, and replayed if needed again
MAX_SEEN = 1 << 16  # digests of observations, to compare replays with
FULL_PAUSE_S = 0.05  # before an environment that had no room is asked again

S = TypeVar("S")


class EpisodeEnvironment(Protocol):
    """Play the moves of many concurrent episodes, in one event loop."""

    async def start(self) -> None:
        """Prepare to play. Raises DataError or RunError where that cannot succeed."""

    async def move(self, move: EnvironmentRequest) -> Observation:
        """Return the environment's reply to the last action, or to a reset if there is none. Never
        raises for a failure of the environment: `error` has it."""

    async def close(self) -> None:
        """Close every session."""


@dataclass
class PlayedSession(Generic[S]):
    """Hold a session, and the rewards of its steps so far: their sum and the last."""

    handle: S
    total: float = 0.0
    last: float | None = None


class SessionLost(Exception):
    """Signal that a session, or the whole environment, is gone."""


class EnvironmentRefusal(Exception):
    """Signal that the environment replied with an error."""


class SessionsFull(Exception):
    """Signal that the environment takes no session beside the `most` that it has; `remedy` says
    what to do."""

    def __init__(self, most: int, remedy: str) -> None:
        super().__init__(f"it takes {most} sessions at once, and others hold them: {remedy}")
        self.most = most


class ReplayDiverged(Exception):
    """Signal that a replayed action gave another observation than before."""


class ReplayedSessions(ABC, Generic[S]):
    """Keep the sessions of one environment. `most_turns` is when an episode ends whose rewards are
    those of its steps (`returns` sum or last), if it is not done before. `most_sessions` is how
    many the environment takes at once, None as long as it refused none."""

    def __init__(self, spec: EnvironmentSpec, most_turns: int) -> None:
        self._spec, self._most_turns = spec, most_turns
        self._waiting: OrderedDict[str, list[PlayedSession[S]]] = OrderedDict()
        self._seen: OrderedDict[str, str] = OrderedDict()
        self._room: asyncio.Semaphore | None = None  # once it refused a session
        self.most_sessions: int | None = None

    @abstractmethod
    async def _open(self, move: EnvironmentRequest) -> S:
        """Return a new session. Raises SessionLost where there is none to have."""

    @abstractmethod
    async def _say(
        self, handle: S, move: EnvironmentRequest, played: int
    ) -> tuple[Observation, float | None]:
        """Return the reply to action `played` of the move (0: the reset), without reward, and its
        reward. Raises SessionLost and EnvironmentRefusal, and SessionsFull for a reset."""

    @abstractmethod
    async def _end(self, handle: S) -> None:
        """Close a session that may go on."""

    @abstractmethod
    def _drop(self, handle: S) -> None:
        """Give up a session whose state is unknown."""

    async def start(self) -> None:
        return

    async def move(self, move: EnvironmentRequest) -> Observation:
        """Return the environment's reply. `error` begins with "environment_died" (session lost, or
        no reply within `timeout_s`), "environment_refused" (it replied with an error) or
        "environment_diverged" (a replay gave another observation). The time in which other moves
        have all sessions does not count."""
        try:
            return await self._in_turn(move)
        except TimeoutError:
            return failed("environment_died", f"no answer within {self._spec.timeout_s:g} s")
        except SessionLost as error:
            return failed("environment_died", str(error))
        except EnvironmentRefusal as error:
            return failed("environment_refused", str(error))
        except ReplayDiverged as error:
            return failed("environment_diverged", str(error))

    async def close(self) -> None:
        waiting, self._waiting = self._waiting, OrderedDict()
        ended = (self._end(s.handle) for sessions in waiting.values() for s in sessions)
        await asyncio.gather(*ended)

    async def _in_turn(self, move: EnvironmentRequest) -> Observation:
        if self._room is None:
            try:
                return await self._in_time(move)
            except SessionsFull as full:
                if self._room is None:
                    self.most_sessions, self._room = full.most, asyncio.Semaphore(full.most)
                    await self.close()  # idle sessions take the room of others
        async with self._room:
            until = time.monotonic() + self._spec.timeout_s
            while True:
                try:
                    return await self._in_time(move)
                except SessionsFull as full:  # another client has it, or it ends a session late
                    if time.monotonic() > until:
                        raise SessionLost(str(full)) from full
                await asyncio.sleep(FULL_PAUSE_S)

    async def _in_time(self, move: EnvironmentRequest) -> Observation:
        async with asyncio.timeout(self._spec.timeout_s):
            return await self._moved(move)

    async def _moved(self, move: EnvironmentRequest) -> Observation:
        last = len(move.actions)
        session = self._take(_key(move, last - 1)) if last else None
        if session is not None:
            try:
                return await self._play(session, move, last)
            except (SessionLost, EnvironmentRefusal):
                pass  # lost, or unknown to the environment: a new session replays the episode
        return await self._play(PlayedSession(await self._open(move)), move, 0)

    async def _play(
        self, session: PlayedSession[S], move: EnvironmentRequest, first: int
    ) -> Observation:
        """Play the actions from `first` on (0: the reset) and return the last observation."""
        settled = False
        try:
            observation = await self._step(session, move, first)
            for played in range(first + 1, len(move.actions) + 1):
                observation = await self._step(session, move, played)
            settled = True
        finally:
            if not settled:
                self._drop(session.handle)
        if observation.done or len(move.actions) >= self._most_turns:
            await self._end(session.handle)
        else:
            await self._keep(session, _key(move, len(move.actions)))
        return observation

    async def _step(
        self, session: PlayedSession[S], move: EnvironmentRequest, played: int
    ) -> Observation:
        observation, reward = await self._say(session.handle, move, played)
        self._compare(_key(move, played), observation, played)
        if reward is not None:
            session.total += reward
            session.last = reward
        match self._spec.returns:
            case "at_done":
                return replace(observation, reward=reward if observation.done else None)
            case "sum" | "last" as which:
                worth = session.total if which == "sum" else session.last
                is_done = observation.done or played >= self._most_turns
                return replace(observation, done=is_done, reward=worth if is_done else None)

    def _compare(self, key: str, observation: Observation, played: int) -> None:
        digest = _digest([(m.role, m.content) for m in observation.messages], observation.done)
        if self._seen.setdefault(key, digest) != digest:
            raise ReplayDiverged(
                f"after {played} actions it said something else than before; "
                "the same arguments and actions must give the same observations"
            )
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _take(self, key: str) -> PlayedSession[S] | None:
        sessions = self._waiting.get(key)
        if not sessions:
            return None
        session = sessions.pop(0)
        if not sessions:
            del self._waiting[key]
        return session

    async def _keep(self, session: PlayedSession[S], key: str) -> None:
        if self._room is not None:
            await self._end(session.handle)
            return
        self._waiting.setdefault(key, []).append(session)
        if sum(map(len, self._waiting.values())) > MAX_WAITING:
            oldest = self._take(next(iter(self._waiting)))
            assert oldest is not None
            await self._end(oldest.handle)


def failed(kind: str, why: str) -> Observation:
    """Return the observation of an episode that ends with a failure of its environment."""
    return Observation(done=True, error=f"{kind}: {why[:500]}")


def _key(move: EnvironmentRequest, played: int) -> str:
    """Return the key of the episode after `played` of its actions."""
    return _digest(move.task.id, dict(move.task.arguments), move.actions[:played])


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
