"""Call one reward on episodes, in the process that `plugins.environments.rewards.workers` starts
for it.

A function is given what its parameters name: see `known_names`. One with a parameter `completions`
is called as TRL calls its reward functions, with lists of one. A call that takes too long is
interrupted where it is, so that the error names the line; where that does not help, the process
ends itself.

The verifiers of this package read the last text of an episode: its answer, a pattern or a JSON
schema. Each gives 1 or 0; None where the episode's row has no answer to compare with.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import json
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

from cartridge_forge.plugins.strategies.answers.extract import Form, extract, same_answer
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.packages import extra_command

Verify = Callable[[str, Any], float | None]  # of the last text and the row's answer


def verifier_of(name: str, options: Mapping[str, Any]) -> Verify:
    """Return the verifier of a spec's reward. Raises DataError for a schema that is none, and where
    jsonschema is not installed."""
    if name == "regex":
        return partial(_found, re.compile(options["pattern"], re.DOTALL))
    if name == "json_schema":
        return partial(_fits, _validator(options["json_schema"]))
    usual: dict[str, Form] = {"exact": "general", "math": "math"}
    form: Form = options["form"] or usual[name]
    return partial(_equal, form, "math" if name == "math" else form)


def _equal(form: Form, compared: Form, text: str, answer: Any) -> float | None:
    if answer is None:
        return None
    answer_given = extract(text, form)
    return float(
        answer_given is not None and same_answer(answer_given, str(answer).strip(), compared)
    )


def _found(pattern: re.Pattern[str], text: str, answer: Any) -> float:
    return float(pattern.search(text) is not None)


def _validator(schema: Mapping[str, Any]) -> Any:
    try:
        from jsonschema import exceptions, validators
    except ImportError:
        raise DataError(f"json_schema needs jsonschema; run `{extra_command('rewards')}`") from None
    kind = validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        raise DataError(f"json_schema is no JSON schema: {error.message}; correct it") from None
    return kind(schema)


def _fits(validator: Any, text: str, answer: Any) -> float:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator.is_valid(value))


GRACE_S = 2.0  # from the interrupt of a call to the end of its process
LONGEST = 300  # characters of an error
ITS_OWN = (
    "episode", "completion", "messages", "prompt", "environment_reward", "truncated",
    "prompts", "completions", "completion_ids",
)  # fmt: skip
Outcome = dict[str, Any]  # {"value": 1.0}, {"none": why} or {"error": why}


class TookTooLong(BaseException):
    """Interrupt a call. It is no Exception, so that `except Exception` does not catch it."""


def run(request: Mapping[str, Any], data: bytes) -> Any:
    """Answer a request of `RewardWorker`. Raises DataError for a function that cannot be used."""
    reward, columns = _Reward(request["reward"]), request.get("columns")
    if "episodes" not in request:
        reward.require(columns)
        return None
    return reward.judge(request["episodes"], request["seconds"], request["budget"])


def known_names(columns: Sequence[str]) -> list[str]:
    """Return the parameters that a function may have, of rows with these columns."""
    return sorted({*ITS_OWN, *columns})


class _Reward:
    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec, self._name = spec, spec["python"]
        if self._name is None:
            verify = verifier_of(spec["verifier"], spec)
            self._call: Callable[..., Any] = lambda completion, answer=None: verify(
                completion, answer
            )
        else:
            self._call = _imported(self._name, spec["folder"])
        try:
            self._asked = inspect.signature(self._call).parameters
        except (TypeError, ValueError):
            raise DataError(f"{self._name} has no signature to read; write a plain `def`") from None
        kinds = {p.kind for p in self._asked.values()}
        self._all = inspect.Parameter.VAR_KEYWORD in kinds
        if inspect.Parameter.POSITIONAL_ONLY in kinds or inspect.Parameter.VAR_POSITIONAL in kinds:
            raise DataError(f"{self._name} must take its arguments by name; remove / and *args")
        self._batched = "completions" in self._asked

    def require(self, columns: Sequence[str] | None) -> None:
        """Raise DataError where a parameter is none that can be given. Without `columns` the rows
        are not known yet."""
        needed = [
            name
            for name, p in self._asked.items()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        lacking = [name for name in needed if name not in known_names(columns or ())]
        if columns is not None and lacking:
            raise DataError(
                f"{self._name} asks for {lacking[0]!r}, which no row has; known are "
                f"{', '.join(known_names(columns))}"
            )

    def judge(
        self, episodes: Sequence[Mapping[str, Any]], seconds: float, budget: float
    ) -> list[Outcome]:
        """Return the outcome of each episode, `seconds` each, until `budget` seconds are over."""
        stop = time.monotonic() + budget
        if inspect.iscoroutinefunction(self._call):
            return asyncio.run(self._together(episodes, seconds))
        outcomes = []
        for episode in episodes:
            if time.monotonic() > stop:
                outcomes.append(_error(f"not called: the rewards of a step took over {budget:g} s"))
                continue
            try:
                with _at_most(seconds):
                    value = self._call(**self._arguments(episode))
                    outcomes.append(self._value(value))
            except BaseException as error:  # sys.exit too
                outcomes.append(self._fault(error, seconds))
        return outcomes

    async def _together(
        self, episodes: Sequence[Mapping[str, Any]], seconds: float
    ) -> list[Outcome]:
        async def one(episode: Mapping[str, Any]) -> Outcome:
            limit = asyncio.timeout(seconds)
            try:
                async with limit:
                    return self._value(await self._call(**self._arguments(episode)))
            except BaseException as error:
                if limit.expired():  # the cause is the cancellation, where the call stood
                    traceback = (error.__cause__ or error).__traceback__
                    return self._fault(TookTooLong().with_traceback(traceback), seconds)
                return self._fault(error, seconds)

        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=_nowhere())
        try:
            return list(await asyncio.gather(*map(one, episodes)))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _arguments(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        columns = episode["columns"]
        completion = episode["completion"]
        arguments: dict[str, Any] = {**columns, **{k: episode[k] for k in ITS_OWN if k in episode}}
        arguments["episode"] = dict(episode)
        if self._batched:
            chat = not episode["plain"]
            prompt = episode["opening"] if chat else episode["prompt"]
            arguments = {k: [v] for k, v in columns.items()} | {
                "prompts": [prompt],
                "completions": [[{"role": "assistant", "content": completion}]]
                if chat
                else [completion],
                "completion_ids": [episode["completion_ids"]],
            }
        missing = [
            name
            for name, p in self._asked.items()
            if name not in arguments and p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        if missing:
            raise TypeError(
                f"this episode has no {missing[0]!r}; it has {', '.join(sorted(arguments))}"
            )
        if not self._all:
            arguments = {name: value for name, value in arguments.items() if name in self._asked}
        elif not self._batched:
            arguments = {k: v for k, v in arguments.items() if k in self._asked or k in columns}
        return arguments

    def _value(self, value: Any) -> Outcome:
        if self._batched:
            if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 1:
                return {"none": f"gave {_shown(value)} for a list of one completion"}
            value = value[0]
        if value is None:
            return {"none": "gave None"}
        if hasattr(value, "item") and not isinstance(value, int | float):  # numpy's, torch's
            value = value.item()
        if not isinstance(value, int | float):
            return {"none": f"gave {_shown(value)}, which is no number"}
        return {"value": float(value)} if math.isfinite(value) else {"none": f"gave {value}"}

    def _fault(self, error: BaseException, seconds: float) -> Outcome:
        """Return the error with the file and line in the user's own code that it came from."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        folder = os.path.realpath(self._spec["folder"])
        own_frames = [
            f for f in frames if os.path.realpath(f.filename).startswith(folder)
        ] or frames
        where = (
            f"{os.path.basename(own_frames[-1].filename)}:{own_frames[-1].lineno}: "
            if own_frames
            else ""
        )
        if isinstance(error, TookTooLong):
            return {"error": f"{where}took longer than {seconds:g} s"}
        if isinstance(error, MemoryError):
            most = self._spec["memory_mib"]
            return {"error": f"{where}MemoryError: more than memory_mib ({most})", "worn": True}
        if isinstance(error, SystemExit):
            return {"error": f"{where}called sys.exit({error.code!r})"}
        return _error(f"{where}{type(error).__name__}: {error}")


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Interrupt what runs for longer; end the process GRACE_S later, from a thread in C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TookTooLong

    signal.signal(signal.SIGALRM, interrupt)
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=_nowhere())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


@lru_cache(maxsize=1)
def _nowhere() -> Any:
    return open(os.devnull, "w")


@lru_cache
def _imported(name: str, folder: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        function_object = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        is_missing = error.name is not None and module.split(".")[0] == error.name.split(".")[0]
        what = (
            f"there is no module {error.name}"
            if is_missing
            else f"it needs the module {error.name}"
        )
        raise DataError(
            f"{name} cannot be imported: {what}, in {folder} or installed; "
            + ("correct the name, or set folder" if is_missing else "install it")
        ) from None
    except BaseException as error:  # whatever the module's own code raises
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [f for f in frames if f.filename.startswith(str(Path(folder)))]
        at = own_frames[-1] if own_frames else None
        where = f"{os.path.basename(at.filename)}:{at.lineno}: " if at else ""
        if isinstance(error, SyntaxError):
            where = f"{os.path.basename(error.filename or module)}:{error.lineno}: "
        raise DataError(
            f"{name} cannot be imported: {where}{type(error).__name__}: {str(error)[:LONGEST]}"
        ) from None
    if function_object is None:
        raise DataError(f"{name}: its module has no {function}; correct the name")
    if not callable(function_object):
        raise DataError(f"{name} is {_shown(function_object)}, no function; name a function")
    return function_object


def _error(text: str) -> Outcome:
    return {"error": text[:LONGEST]}


def _shown(value: Any) -> str:
    try:
        return f"{type(value).__name__} {repr(value)[:60]}"
    except Exception:  # the user's own __repr__
        return type(value).__name__
