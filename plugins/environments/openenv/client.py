"""Run episodes on any OpenEnv server, and recover from a lost connection or a restarted server.

    EnvironmentRequest(task, ("find surgeon in cardiology.",))
    --/ws--> Observation((AgentMessage("tool", ..),))

One /ws session is one episode (`plugins.environments.sessions`). This module implements
the wire protocol itself: OpenEnv's client silently reopens a lost connection and would then step a
session that was never reset.

A server that lists tools (RFC 003) is asked for them at each reset with action form tool; a call is
sent as its call_tool action. A reward may come with any step (RFC 004): `returns` says which count.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation
from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool, ToolAction
from cartridge_forge.plugins.chat.wire.foreign import count, items, read_json, stays, value_of
from cartridge_forge.plugins.environments.action_parsing import (
    BAD_ACTION,
    NoAction,
    action_in,
    with_tools_shown,
)
from cartridge_forge.plugins.environments.openenv.wire import called, observed, reward_of
from cartridge_forge.plugins.environments.sessions import (
    EnvironmentRefusal,
    ReplayedSessions,
    SessionLost,
    SessionsFull,
)
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.protocols.errors import DataError

MAX_MESSAGE_BYTES = 1 << 22
MOST_SHOWN = 500  # characters of a server's text in an error
MOST_SESSIONS = 100_000
CLOSE_TIMEOUT_S = 1.0
SCHEMA_TIMEOUT_S = 10.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
LIST_TOOLS = {"type": "list_tools"}
FULL_REMEDY = "raise max_concurrent_envs of the server, or set roles.environment.replicas: 1"
CAPACITY_REACHED = "CAPACITY_REACHED"  # a server's code where it takes no further session
VALIDATION_ERROR = "VALIDATION_ERROR"  # a server's code for an action that does not fit its schema


class OpenEnvClient(ReplayedSessions[ClientConnection]):
    """Send the moves of many concurrent episodes to the server of `spec`, in one event loop."""

    def __init__(self, spec: EnvironmentSpec, most_turns: int) -> None:
        super().__init__(spec, most_turns)
        assert spec.url is not None
        self._url = spec.url.rstrip("/")
        # A proxy cannot reach this machine's loopback.
        local = urlsplit(self._url).hostname in LOOPBACK
        self._proxy: Literal[True] | None = None if local else True
        self._known = spec.action != "text"  # whether an action's fields are the server's

    async def start(self) -> None:
        """Compare the server's action schema with the keys of `spec`. A server that does not answer
        now is no fault: episodes report it. Raises DataError for an action that the server would
        refuse whatever the student writes."""
        schema = await asyncio.to_thread(action_schema, self._url)
        if schema is not None:
            check_action(self._spec, schema)
            self._known = True

    async def _open(self, move: EnvironmentRequest) -> ClientConnection:
        try:
            return await SameOriginConnection(
                f"ws{self._url.removeprefix('http')}/ws", proxy=self._proxy, open_timeout=None,
                close_timeout=CLOSE_TIMEOUT_S, max_size=MAX_MESSAGE_BYTES,
            )  # fmt: skip
        except (OSError, WebSocketException) as error:
            raise SessionLost(f"{type(error).__name__}: {error}") from error

    async def _say(
        self, handle: ClientConnection, move: EnvironmentRequest, played: int
    ) -> tuple[Observation, float | None]:
        observation_key = self._spec.observation
        if played == 0:
            arguments = {**move.task.arguments, "episode_id": move.task.id}
            data = await self._ask(handle, "reset", arguments)
            opening = _observed(data, opening=True, observation_key=observation_key)
            if self._spec.action == "tool":
                tools = await self._tools(handle)
                opening = replace(opening, tools=tools or opening.tools)
            return with_tools_shown(opening, self._spec.show_tools), reward_of(data)
        try:
            action = self._action(move.actions[played - 1])
            data = await self._ask(handle, "step", action)
        except (NoAction, UnfitAction) as error:
            message = AgentMessage("tool", str(error))
            return Observation((message,), error_kind=BAD_ACTION), None
        data = called(data)
        is_call = isinstance(data.get("observation"), dict) and action.get("type") == "call_tool"
        observation = _observed(
            data, opening=False, observation_key=None if is_call else observation_key
        )
        return observation, reward_of(data)

    async def _tools(self, handle: ClientConnection) -> tuple[AgentTool, ...]:
        """Return the tools that a server lists."""
        listed = await self._ask(handle, "step", LIST_TOOLS)
        marks = listed.get("metadata")
        if isinstance(marks, dict) and "error" in marks:
            raise EnvironmentRefusal(f"it lists no tools: {marks['error']}")
        return _observed(listed, opening=True).tools

    def _action(self, text: str) -> dict[str, Any]:
        """Return the student's text as an action of the server. Raises NoAction."""
        if self._spec.action == "text":
            return {self._spec.action_key: action_in(text, "text")}
        action = action_in(text, self._spec.action)
        if isinstance(action, ToolAction):
            arguments = dict(action.arguments)
            return {"type": "call_tool", "tool_name": action.tool, "arguments": arguments}
        return dict(action)

    async def _ask(
        self, connection: ClientConnection, kind: str, data: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the data of the server's reply. Raises SessionLost, EnvironmentRefusal, and
        UnfitAction for a step that the server finds invalid."""
        try:
            with contextlib.suppress(ConnectionClosed):  # it may have said why before it closed
                await connection.send(json.dumps({"type": kind, "data": data}))
            reply = read_json(await connection.recv(), MAX_MESSAGE_BYTES)
        except (OSError, WebSocketException, ValueError) as error:
            raise SessionLost(f"{type(error).__name__}: {error}") from error
        content = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(content, dict):
            raise SessionLost(f"not an OpenEnv reply: {str(reply)[:200]}")
        if reply.get("type") != "error":
            return content
        code = str(content.get("code", "no code"))[:MOST_SHOWN]
        why = str(content.get("message", "no reason"))[:MOST_SHOWN]
        if code == CAPACITY_REACHED:
            raise SessionsFull(count(content.get("max_sessions"), MOST_SESSIONS) or 1, FULL_REMEDY)
        if code == VALIDATION_ERROR and kind == "step" and data is not LIST_TOOLS:
            if self._known:  # the keys fit, so the text does not: "left" for a number
                raise UnfitAction(_misfit(content))
            why = f"{why}: {_misfit(content)}"
        raise EnvironmentRefusal(f"{why} ({code})")

    async def _end(self, handle: ClientConnection) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await handle.close()
        except (OSError, WebSocketException):
            handle.transport.abort()

    def _drop(self, handle: ClientConnection) -> None:
        handle.transport.abort()


class SameOriginConnection(connect):
    """Connect over a WebSocket, and follow no redirection to another origin."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        target = super().process_redirect(exc)
        return exc if isinstance(target, str) and not stays(self.uri, target) else target


class SameOriginRedirects(urllib.request.HTTPRedirectHandler):
    """Follow no redirection to another origin: its status is the reply."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not stays(req.full_url, newurl):
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class UnfitAction(Exception):
    """Signal an action of the student that does not fit the server's schema."""


def _observed(
    data: Mapping[str, Any], opening: bool, observation_key: str | None = None
) -> Observation:
    try:
        return observed(data, opening, observation_key)
    except ValueError as error:
        raise EnvironmentRefusal(f"{error}; correct the environment's key observation") from error


def _misfit(data: Mapping[str, Any]) -> str:
    """Return what is wrong with an action, by the server's first complaint."""
    first = next(iter(items(data.get("errors"))), None)
    where = ".".join(map(str, items(value_of(first, "loc"))))[:MOST_SHOWN]
    why = str(value_of(first, "msg") or "it does not fit")[:MOST_SHOWN]
    return f"bad action: {where}: {why}." if where else f"bad action: {why}."


def action_schema(url: str) -> Mapping[str, Any] | None:
    """Return the JSON schema of a server's actions; None where it tells none."""
    local = urlsplit(url).hostname in LOOPBACK
    handlers: list[urllib.request.BaseHandler] = [SameOriginRedirects()]
    if local:
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(
            f"{url}/schema", timeout=SCHEMA_TIMEOUT_S
        ) as reply:
            schema = value_of(read_json(reply.read(MAX_MESSAGE_BYTES)), "action")
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return schema if isinstance(schema, dict) else None


def check_action(spec: EnvironmentSpec, schema: Mapping[str, Any]) -> None:
    """Raise DataError where no text of a student can be an action of this schema."""
    properties = schema.get("properties")
    fields = (
        {n: f for n, f in properties.items() if n != "metadata"}
        if isinstance(properties, dict)
        else {}
    )
    if spec.action != "text" or not fields:
        return
    missing = [n for n in items(schema.get("required")) if n not in (spec.action_key, "metadata")]
    if spec.action_key in fields and not missing:
        return
    named = ", ".join(sorted(fields))[:MOST_SHOWN]
    why = f"has no field {spec.action_key}" if spec.action_key not in fields else "needs more"
    remedy = "set action: tool" if "tool_name" in fields else "set action_key to its text field"
    raise DataError(
        f"the action of {spec.url} {why}: its fields are {named}; {remedy}, or action: json if the "
        "student writes them all"
    )
