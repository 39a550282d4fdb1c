"""Call an external model once over the official SDKs; return every outcome as a TeacherReply.

The SDKs' own retries are off: callers retry, so that every attempt can be reserved and counted. A
caller that needs JSON sends its schema and validates the answer, without the SDKs' `parse`, which
raises for text that does not match and loses the usage with it.

Secrets: the key goes from the environment into the client only. Errors have codes of this module,
never a provider's text, which may repeat the key; in an answer the key is replaced.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx2
from pydantic import SecretStr

from protocols.secrets import read_secret
from protocols.spec.teacher_replay import OFFICIAL_URLS, Provider, ReplayTeacherSpec
from protocols.teacher_replay import AgentMessage, TeacherUsage
from teachers.budget import ANSWERED, reported
from teachers.prompts import (
    ANSWER_SCHEMA,
    ATTEMPT_HEADER,
    IDEMPOTENCY_HEADER,
    TeacherAnswer,
    TeacherClient,
    TeacherPrompt,
    TeacherReply,
)

# The provider did not get, or did not accept, the request: nothing to pay. A gateway's errors (502,
# 504, 52x) are not among them: the server behind it may have answered, and charged.
FREE_STATUS = (*range(400, 500), 500, 503, 529)
NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
LONGEST_RETRY_AFTER_S = 120.0
# All headers that an isolated client sends, besides x-stainless-*.
HEADERS = frozenset({
    "host", "user-agent", "accept", "accept-encoding", "connection", "content-type",
    "content-length", "transfer-encoding", "authorization", "anthropic-version",
})  # fmt: skip


class ApiClient:
    """Call one model of one server. An `isolated` client follows no redirections. To a host that is
    not the SDK's own it sends neither organisation nor $OPENAI_CUSTOM_HEADERS and the like, which
    the SDKs send to any host."""

    def __init__(
        self,
        provider: Provider,
        model: str,
        url: str,
        key: SecretStr,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        isolated: bool = False,
    ) -> None:
        self._model, self._key, self._timeout_s = model, key, timeout_s
        self._is_openai = provider == "openai"
        # The provider's own SDK alone: it takes a second to import, and actors use one.
        self._sdk: Any = importlib.import_module(provider)
        self._error = self._sdk.OpenAIError if self._is_openai else self._sdk.AnthropicError
        self._client = self._sdk.AsyncClient(
            api_key=key.get_secret_value(), base_url=url, timeout=timeout_s, max_retries=0,
            default_headers=headers,
            http_client=(
                self._sdk.DefaultAsyncHttpxClient(**_isolation(url, key)) if isolated else None
            ),
        )  # fmt: skip

    async def ask(
        self,
        messages: Sequence[AgentMessage],
        max_tokens: int,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> TeacherReply:
        """Make one attempt, within `timeout_s`. `body` has further fields, under the provider's own
        names. A tool's message is sent as the user's: the role "tool" is invalid without a call."""
        turns = [
            {"role": "user" if m.role == "tool" else m.role, "content": m.content} for m in messages
        ]
        more: Any = {"model": self._model, "extra_body": body, "extra_headers": headers}
        send, read_usage, read_reply = (
            (self._send_chat, _chat_usage, _chat_reply)
            if self._is_openai
            else (self._send_messages, _message_usage, _message_reply)
        )
        usage = None
        try:
            # The SDKs' timeout applies to each read: a slow body can exceed it without end.
            async with asyncio.timeout(self._timeout_s):
                answer = await send(turns, max_tokens, more)
            usage = read_usage(answer)
            reply = read_reply(answer)
            raw = reply.raw.replace(self._key.get_secret_value(), "[key]")
            return replace(reply, raw=raw, usage=usage, nanodollars=_reported(answer))
        except self._sdk.APIStatusError as error:
            return _by_status(error.status_code, error.response.headers)
        except self._sdk.APITimeoutError as error:
            return _by_cause(error, "timeout")
        except self._sdk.APIConnectionError as error:
            return _by_cause(error, "cut_off")
        except TimeoutError:
            return TeacherReply("timeout")
        except (ValueError, TypeError, AttributeError, IndexError, self._error):
            return TeacherReply("unreadable", usage=usage)  # the body is not JSON, or no message

    async def close(self) -> None:
        await self._client.close()

    async def _send_chat(self, turns: list[dict[str, str]], max_tokens: int, more: Any) -> Any:
        return await self._client.chat.completions.create(
            messages=turns, max_completion_tokens=max_tokens, **more
        )

    async def _send_messages(self, turns: list[dict[str, str]], max_tokens: int, more: Any) -> Any:
        system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
        return await self._client.messages.create(
            system=system or self._sdk.omit,
            messages=[turn for turn in turns if turn["role"] != "system"],
            max_tokens=max_tokens,
            timeout=self._timeout_s,  # without it the SDK refuses long answers without streaming
            **more,
        )


def connect(teacher: ReplayTeacherSpec) -> TeacherClient:
    """Return a client of the teacher, without connecting yet. Raises SpecError where the
    environment has no key for it, or none that a header can hold."""
    key = read_key(f"teacher {teacher.name}", teacher.key_env or "")
    url = teacher.base_url or OFFICIAL_URLS[teacher.provider]
    headers = {
        name: read_key(f"teacher {teacher.name}: headers.{name}", value).get_secret_value()
        for name, value in teacher.headers.items()
    }
    client = ApiClient(teacher.provider, teacher.model, url, key, teacher.timeout_s, headers)
    body: dict[str, Any] = {}
    if teacher.temperature is not None:
        body["temperature"] = teacher.temperature
    if teacher.provider == "openai":
        schema = {"name": TeacherAnswer.__name__, "schema": ANSWER_SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        body["output_config"] = {"format": {"type": "json_schema", "schema": ANSWER_SCHEMA}}

    async def attempt(prompt: TeacherPrompt, attempt_id: str, request: str) -> TeacherReply:
        messages = (AgentMessage("system", prompt.system), AgentMessage("user", prompt.user))
        headers = {ATTEMPT_HEADER: attempt_id, IDEMPOTENCY_HEADER: request}
        return await client.ask(messages, teacher.max_tokens, body, headers)

    return TeacherClient(attempt, client.close)


def read_key(who: str, key_env: str) -> SecretStr:
    """Return the API key under this name. Raises SpecError, without the key, where there is none
    or none that a header can hold."""
    return read_secret(who, key_env, "its API key", "or name another variable by key_env")


def _isolation(url: str, key: SecretStr) -> dict[str, Any]:
    """Return options of an SDK's HTTP client."""

    async def only_ours(request: httpx2.Request) -> None:
        for name in list(request.headers):
            if name not in HEADERS and not name.startswith("x-stainless-"):
                del request.headers[name]
        request.headers["authorization"] = f"Bearer {key.get_secret_value()}"

    hooks = [] if url in OFFICIAL_URLS.values() else [only_ours]
    return {"follow_redirects": False, "event_hooks": {"request": hooks}}


def _chat_reply(completion: Any) -> TeacherReply:
    choice = completion.choices[0]
    message, reason = choice.message, choice.finish_reason
    tokens = getattr(getattr(choice, "logprobs", None), "content", None) or []
    return TeacherReply(
        ANSWERED,
        str(message.content or message.refusal or ""),
        refused=bool(message.refusal) or reason == "content_filter",
        cut=reason == "length",
        logprobs=tuple(float(token.logprob) for token in tokens),
        top_logprobs=tuple(_likeliest(token.top_logprobs or ()) for token in tokens),
    )


def _message_reply(message: Any) -> TeacherReply:
    raw = "".join(block.text for block in message.content if block.type == "text")
    reason = message.stop_reason
    return TeacherReply(ANSWERED, raw, refused=reason == "refusal", cut=reason == "max_tokens")


def _likeliest(tokens: Sequence[Any]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(((str(t.token), float(t.logprob)) for t in tokens), key=lambda t: -t[1]))


def _chat_usage(completion: Any) -> TeacherUsage | None:
    """Read usage; `prompt_tokens` includes the cached tokens."""
    usage = getattr(completion, "usage", None)
    details = getattr(usage, "prompt_tokens_details", None)
    cached = getattr(details, "cached_tokens", None) or 0
    read: Any = getattr(usage, "prompt_tokens", None)
    written: Any = getattr(usage, "completion_tokens", None)
    if not _counts(read, written, cached) or read < cached:
        return None
    return TeacherUsage(read - cached, written, cached)


def _message_usage(message: Any) -> TeacherUsage | None:
    """Read usage; `input_tokens` excludes tokens read from a cache or written to one."""
    usage = getattr(message, "usage", None)
    cached = getattr(usage, "cache_read_input_tokens", None) or 0
    stored = getattr(usage, "cache_creation_input_tokens", None) or 0
    read: Any = getattr(usage, "input_tokens", None)
    written: Any = getattr(usage, "output_tokens", None)
    if not _counts(read, written, cached, stored):
        return None
    return TeacherUsage(read + stored, written, cached)


def _counts(*numbers: Any) -> bool:
    return all(isinstance(n, int) and n >= 0 for n in numbers)


def _reported(answer: Any) -> int | None:
    dollars = getattr(getattr(answer, "usage", None), "cost", None)
    if isinstance(dollars, int | float) and 0 <= dollars < float("inf"):
        return reported(dollars)
    return None


def _by_status(status: int, headers: Mapping[str, str]) -> TeacherReply:
    """Map a provider's HTTP error to whether it was free and may be retried."""
    return TeacherReply(
        "rate_limited" if status == 429 else f"http_{status}",
        free=status in FREE_STATUS,
        # Other errors (wrong key, model or request) would fail again.
        retriable=status >= 500 or status in (408, 409, 429),
        retry_after_s=_seconds(headers.get("retry-after")),
    )


def _by_cause(error: Exception, otherwise: str) -> TeacherReply:
    """Map a failed connection to whether it was free; `otherwise` is the code where it was not."""
    if isinstance(error.__cause__, NOT_SENT):
        return TeacherReply("unreachable", free=True)
    return TeacherReply(otherwise)


def _seconds(text: str | None) -> float:
    """Return Retry-After in seconds; 0 for a date or an invalid value, where the caller's backoff
    applies."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return min(seconds, LONGEST_RETRY_AFTER_S) if seconds > 0 else 0.0
