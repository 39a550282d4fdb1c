"""Play the sessions of a user's environment, in the process that
`plugins.environments.python.client` starts with limits of time and memory.

    {"ask": "load", "factory": "guess:Guess", "folder": "/x", "arguments": {}}   -> {}
    {"ask": "reset", "session": "1", "arguments": {"seed": 7}}                   -> {"reply": ..}
    {"ask": "step", "session": "1", "action": "up"}                              -> {"reply": ..}
    {"ask": "close", "session": "1"}                                             -> {}

A reply has the form of OpenEnv: {"observation", "reward", "done", "metadata"}. What the user's code
raises is {"error": "ValueError: no such move (guess.py:12)"}; {"lost": true} is a session that this
process does not have.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import sys
import sysconfig
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

MOST_SESSIONS = 512  # the oldest is closed first, and replayed if needed again
INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib"))

_sessions: OrderedDict[str, Any] = OrderedDict()
_make: list[Callable[[], Any]] = []
_loop: list[asyncio.AbstractEventLoop] = []


def answer(request: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """Return the reply to one request; never raises for the user's code."""
    try:
        if request["ask"] == "load":
            return _load(request)
        if request["ask"] == "reset":
            return {"reply": _reset(request["session"], request["arguments"])}
        environment = _sessions.get(request["session"])
        if request["ask"] == "close":
            _close(request["session"])
            return {}
        if environment is None:
            return {"lost": True}
        return {"reply": _step(request["session"], environment, request["action"])}
    except (Exception, SystemExit) as error:
        return {"error": error_text(error)}


def error_text(error: BaseException) -> str:
    """Return an error with the file and line of the user's code that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        f for f in frames if f.filename != __file__ and not f.filename.startswith(INSTALLED)
    ]
    user_frames = [f for f in user_frames if not f.filename.startswith("<")]
    location = (
        f" ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})" if user_frames else ""
    )
    if isinstance(error, SyntaxError) and error.filename:
        location = f" ({Path(error.filename).name}:{error.lineno})"
        return f"SyntaxError: {error.msg}{location}"
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {text[:400]}{location}"
        if text
        else type(error).__name__ + location
    )


def _load(request: Mapping[str, Any]) -> dict[str, Any]:
    folder = request["folder"]
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    module, _, name = request["factory"].partition(":")
    factory = getattr(import_module(module), name)
    arguments = request["arguments"]
    _make[:] = [lambda: factory(**arguments)]
    environment = _make[0]()
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise TypeError(
                f"{request['factory']} makes a {type(environment).__name__}, which has "
                f"no method {method}"
            )
    parameters = inspect.signature(environment.reset).parameters
    if "seed" not in parameters and all(p.kind != p.VAR_KEYWORD for p in parameters.values()):
        raise TypeError("reset must take the keyword seed, which decides the task")
    _finish(environment)
    return {}


def _reset(session: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    environment = _make[0]()
    observation = _awaited(environment.reset(**arguments))
    info: Any = None
    if isinstance(observation, tuple) and len(observation) == 2:  # as Gymnasium has it
        observation, info = observation
    _sessions[session] = environment
    if len(_sessions) > MOST_SESSIONS:
        _close(next(iter(_sessions)))
    reply = _reply(observation, info)
    tools = getattr(environment, "tools", None)
    if tools and isinstance(reply["observation"], dict):
        reply["observation"].setdefault("tools", plain(tools))
    return reply


def _step(session: str, environment: Any, action: Any) -> dict[str, Any]:
    result = _awaited(environment.step(action))
    _sessions.move_to_end(session)
    if not isinstance(result, tuple):
        return _reply(result, None)
    match result:
        case (seen, reward, done):
            info: Any = None
        case (seen, reward, done, info):
            pass
        case (seen, reward, terminated, truncated, info):
            done = bool(terminated) or bool(truncated)
        case _:
            raise TypeError(
                f"step returned {len(result)} values: return (text, reward, done), the five of "
                "Gymnasium, or a mapping with observation, reward and done"
            )
    return _reply({"observation": seen, "reward": reward, "done": bool(done)}, info)


def _reply(value: Any, info: Any) -> dict[str, Any]:
    """Return what an environment returned in the form of OpenEnv: a text, a mapping with or without
    "observation", or an object with `reward` and `done`."""
    reply = plain(value)
    if isinstance(reply, dict) and "observation" in reply:
        fields = dict(reply)
    elif isinstance(reply, dict) and {"reward", "done"} & set(reply):
        inside = {k: v for k, v in reply.items() if k not in ("reward", "done", "metadata")}
        fields = {"observation": inside, **{k: v for k, v in reply.items() if k not in inside}}
    else:
        fields = {"observation": reply}
    observation = fields["observation"]
    if isinstance(observation, list) and all(isinstance(m, dict) for m in observation):
        observation = {"messages": observation}
    elif not isinstance(observation, dict):
        observation = {"text": observation if isinstance(observation, str) else str(observation)}
    metadata = fields.get("metadata") or plain(info)
    return {
        "observation": observation,
        "reward": fields.get("reward"),
        "done": bool(fields.get("done")),
        "metadata": metadata if isinstance(metadata, dict) else {},
    }


def plain(value: Any) -> Any:
    """Return a value as JSON has it; what has no such form becomes its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if callable(dumped := getattr(value, "model_dump", None)):  # pydantic
        return plain(dumped())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if callable(listed := getattr(value, "tolist", None)):  # NumPy
        return plain(listed())
    return str(value)


def _close(session: str) -> None:
    environment = _sessions.pop(session, None)
    if environment is not None:
        _finish(environment)


def _finish(environment: Any) -> None:
    close = getattr(environment, "close", None)
    if callable(close):
        _awaited(close())


def _awaited(value: Any) -> Any:
    if not inspect.isawaitable(value):
        return value

    async def result(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    if not _loop:
        _loop.append(asyncio.new_event_loop())
    return _loop[0].run_until_complete(result(value))
