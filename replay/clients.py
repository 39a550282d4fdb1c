"""One attempt at one teacher, over the official SDKs: whatever happens comes back as a Reply.

The SDKs' own retries are off: the pool retries, so that every attempt has its reservation. Answers
are asked for by the schema of `TeacherAnswer` and validated by us, not by the SDKs' `parse`, which
raises for words that do not fit and drops the bill with them.

Secrets: the key goes from the environment into the client and nowhere else. Errors are named by
codes of ours, never by a provider's words, which may repeat the key; in an answer it is struck out.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import openai

from protocols.errors import SpecError
from protocols.replay import Usage
from protocols.replay_spec import TeacherSpec
from replay.books import ANSWERED
from replay.money import reported
from replay.prompt import (
    ANSWER_SCHEMA,
    ATTEMPT_HEADER,
    Client,
    Prompt,
    Reply,
    TeacherAnswer,
)

# The provider did not get, or did not take, the request: nothing to pay. A gateway's error (502,
# 504, 52x) is not among them: what stands behind it may have answered, and charged.
FREE_STATUS = (*range(400, 500), 500, 503, 529)
NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
LONGEST_RETRY_AFTER_S = 120.0


def connect(teacher: TeacherSpec) -> Client:
    """A client of the teacher, which nobody talks to yet.

    Raises SpecError where the environment has no key for it, or none that a header can hold.
    """
    key = read_key(f"teacher {teacher.name}", teacher.key_env or "")
    ask, close = (_openai if teacher.provider == "openai" else _anthropic)(teacher, key)

    async def attempt(prompt: Prompt, attempt_id: str) -> Reply:
        try:
            # The SDKs' timeout is for each wait; a body that drips can take for ever.
            async with asyncio.timeout(teacher.timeout_s):
                reply = await ask(prompt, {ATTEMPT_HEADER: attempt_id})
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            return by_status(error.status_code, error.response.headers)
        except (openai.APIConnectionError, anthropic.APIConnectionError) as error:
            return by_cause(error)
        except TimeoutError:
            return Reply("timeout")
        except (ValueError, openai.OpenAIError, anthropic.AnthropicError):
            return Reply("unreadable")  # a body that is no JSON, or no message
        return replace(reply, raw=reply.raw.replace(key, "[key]"))

    return Client(attempt, close)


def read_key(who: str, key_env: str) -> str:
    """The API key in this environment variable. Raises SpecError, without the key, where there is
    none or none that a header can hold."""
    key = os.environ.get(key_env, "")
    if not re.fullmatch(r"[!-~]+", key):
        raise SpecError(
            f"{who}: the environment variable {key_env} must hold its API key, got "
            f"{'something with blanks or beyond ASCII' if key else 'none'}; export it, or name "
            "another variable by key_env"
        )
    return key


Ask = Callable[[Prompt, dict[str, str]], Awaitable[Reply]]
Close = Callable[[], Awaitable[None]]


def _openai(teacher: TeacherSpec, key: str) -> tuple[Ask, Close]:
    client = openai.AsyncOpenAI(
        api_key=key, base_url=teacher.base_url, timeout=teacher.timeout_s, max_retries=0,
        default_headers=teacher.headers,
    )  # fmt: skip
    optional: Any = {} if teacher.temperature is None else {"temperature": teacher.temperature}
    schema: Any = {"name": TeacherAnswer.__name__, "schema": ANSWER_SCHEMA, "strict": True}

    async def ask(prompt: Prompt, headers: dict[str, str]) -> Reply:
        completion: Any = await client.chat.completions.create(
            model=teacher.model,
            messages=[
                {"role": "system", "content": prompt.system},
                {"role": "user", "content": prompt.user},
            ],
            max_completion_tokens=teacher.max_tokens,
            response_format={"type": "json_schema", "json_schema": schema},
            extra_headers=headers,
            extra_body=optional,
        )
        usage = _openai_usage(completion)
        try:
            choice = completion.choices[0]
            message = choice.message
            refused = bool(message.refusal) or choice.finish_reason == "content_filter"
            raw = str((message.refusal if refused else message.content) or "")
        except (AttributeError, IndexError, TypeError):
            return Reply("unreadable", usage=usage)
        return Reply(ANSWERED, raw, refused, usage, _reported(completion))

    return ask, client.close


def _anthropic(teacher: TeacherSpec, key: str) -> tuple[Ask, Close]:
    client = anthropic.AsyncAnthropic(
        api_key=key, base_url=teacher.base_url, timeout=teacher.timeout_s, max_retries=0,
        default_headers=teacher.headers,
    )  # fmt: skip
    optional: Any = {} if teacher.temperature is None else {"temperature": teacher.temperature}

    async def ask(prompt: Prompt, headers: dict[str, str]) -> Reply:
        message: Any = await client.messages.create(
            model=teacher.model,
            system=prompt.system,
            messages=[{"role": "user", "content": prompt.user}],
            max_tokens=teacher.max_tokens,
            output_config={"format": {"type": "json_schema", "schema": ANSWER_SCHEMA}},
            extra_headers=headers,
            extra_body=optional,
            timeout=teacher.timeout_s,
        )
        usage = _anthropic_usage(message)
        try:
            raw = "".join(block.text for block in message.content if block.type == "text")
            refused = message.stop_reason == "refusal"
        except (AttributeError, TypeError):
            return Reply("unreadable", usage=usage)
        return Reply(ANSWERED, raw, refused, usage, _reported(message))

    return ask, client.close


def _openai_usage(completion: Any) -> Usage | None:
    """`prompt_tokens` holds the cached ones too."""
    usage = getattr(completion, "usage", None)
    details = getattr(usage, "prompt_tokens_details", None)
    cached = getattr(details, "cached_tokens", None) or 0
    read: Any = getattr(usage, "prompt_tokens", None)
    written: Any = getattr(usage, "completion_tokens", None)
    if not _counts(read, written, cached) or read < cached:
        return None
    return Usage(read - cached, written, cached)


def _anthropic_usage(message: Any) -> Usage | None:
    """`input_tokens` holds neither those read from a cache nor those written to one."""
    usage = getattr(message, "usage", None)
    cached = getattr(usage, "cache_read_input_tokens", None) or 0
    stored = getattr(usage, "cache_creation_input_tokens", None) or 0
    read: Any = getattr(usage, "input_tokens", None)
    written: Any = getattr(usage, "output_tokens", None)
    if not _counts(read, written, cached, stored):
        return None
    return Usage(read + stored, written, cached)


def _counts(*numbers: Any) -> bool:
    return all(isinstance(n, int) and n >= 0 for n in numbers)


def _reported(answer: Any) -> int | None:
    dollars = getattr(getattr(answer, "usage", None), "cost", None)
    if isinstance(dollars, int | float) and 0 <= dollars < float("inf"):
        return reported(dollars)
    return None


def by_status(status: int, headers: Mapping[str, str]) -> Reply:
    """What a provider's error code means for the next attempt, and for the bill."""
    return Reply(
        "rate_limited" if status == 429 else f"http_{status}",
        free=status in FREE_STATUS,
        # Wrong key, wrong model, wrong request: the next attempt would be no better.
        retriable=status >= 500 or status in (408, 409, 429),
        retry_after_s=_seconds(headers.get("retry-after")),
    )


def by_cause(error: Exception) -> Reply:
    """The same of a connection that failed, as the SDKs tell it."""
    if isinstance(error.__cause__, NOT_SENT):
        return Reply("unreachable", free=True)
    if isinstance(error, openai.APITimeoutError | anthropic.APITimeoutError):
        return Reply("timeout")
    return Reply("cut_off")


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; a date or nonsense counts as none, the pool's own backoff holds."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return min(seconds, LONGEST_RETRY_AFTER_S) if seconds > 0 else 0.0
