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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx2
from pydantic import SecretStr

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.wire.foreign import MOST_BYTES, stays
from cartridge_forge.plugins.replay.prompts import (
    ANSWER_SCHEMA,
    ATTEMPT_HEADER,
    IDEMPOTENCY_HEADER,
    TeacherAnswer,
    TeacherClient,
    TeacherPrompt,
    TeacherReply,
)
from cartridge_forge.plugins.replay.replies import (
    UNREADABLE,
    by_status,
    decoded,
    read_chat,
    read_message,
)
from cartridge_forge.plugins.replay.spec import OFFICIAL_URLS, Provider, ReplayTeacherSpec
from cartridge_forge.protocols.secrets import SHORTEST, read_secret

NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
# All headers that an isolated client sends, besides x-stainless-*.
HEADERS = frozenset({
    "host", "user-agent", "accept", "accept-encoding", "connection", "content-type",
    "content-length", "transfer-encoding", "authorization", "anthropic-version",
})  # fmt: skip


class ApiClient:
    """Call one model of one server, and follow no redirection to another origin. An `isolated`
    client follows none. To a host that is not the SDK's own it sends neither organisation nor
    $OPENAI_CUSTOM_HEADERS and the like, which the SDKs send to any host."""

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
        official = url in OFFICIAL_URLS.values()
        self._client = self._sdk.AsyncClient(
            api_key=key.get_secret_value(), base_url=url, timeout=timeout_s, max_retries=0,
            default_headers=headers,
            http_client=self._sdk.DefaultAsyncHttpxClient(
                follow_redirects=not isolated,
                event_hooks={
                    "request": [_only_ours(key)] if isolated and not official else [],
                    "response": [_refuse],
                },
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
        send, read = (
            (self._send_chat, read_chat) if self._is_openai else (self._send_messages, read_message)
        )
        try:
            # The SDKs' timeout applies to each read: a slow body can exceed it without end.
            async with asyncio.timeout(self._timeout_s):
                async with send(turns, max_tokens, more) as response:
                    content, headers = await _body(response.http_response), response.headers
            reply = read(decoded(content), headers)
            return replace(reply, raw=self._without_key(reply.raw))
        except self._sdk.APIStatusError as error:
            return by_status(error.status_code, error.response.headers)
        except self._sdk.APITimeoutError as error:
            return _by_cause(error, "timeout")
        except self._sdk.APIConnectionError as error:
            return _by_cause(error, "cut_off")
        except (TimeoutError, httpx2.TimeoutException):
            return TeacherReply("timeout")
        except httpx2.HTTPError:  # while the body was read
            return TeacherReply("cut_off")
        except self._error:
            return TeacherReply(UNREADABLE)

    def _without_key(self, text: str) -> str:
        """Return the text without the key. A short one, as local servers are given ("none",
        "test"), is a word and no secret."""
        key = self._key.get_secret_value()
        return text.replace(key, "[key]") if len(key) >= SHORTEST else text

    async def close(self) -> None:
        await self._client.close()

    def _send_chat(self, turns: list[dict[str, str]], max_tokens: int, more: Any) -> Any:
        return self._client.chat.completions.with_streaming_response.create(
            messages=turns, max_completion_tokens=max_tokens, **more
        )

    def _send_messages(self, turns: list[dict[str, str]], max_tokens: int, more: Any) -> Any:
        system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
        return self._client.messages.with_streaming_response.create(
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


async def _refuse(response: httpx2.Response) -> None:
    """Take the way from a redirection to another origin, so that it is the reply; and read no body
    of a failure, which has no bound and is not used."""
    location = response.headers.get("location", "")
    if response.has_redirect_location:
        if stays(str(response.url), location):
            return
        del response.headers["location"]
    if not response.is_success:
        await response.aclose()


async def _body(response: httpx2.Response) -> bytes:
    """Return a body, or as much of it as shows that it is too large."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MOST_BYTES:
            break
    return bytes(content)


def _only_ours(key: SecretStr) -> Callable[[httpx2.Request], Awaitable[None]]:
    """Return a hook that takes from a request what is not the client's."""

    async def only_ours(request: httpx2.Request) -> None:
        for name in list(request.headers):
            if name not in HEADERS and not name.startswith("x-stainless-"):
                del request.headers[name]
        request.headers["authorization"] = f"Bearer {key.get_secret_value()}"

    return only_ours


def _by_cause(error: Exception, otherwise: str) -> TeacherReply:
    """Map a failed connection to whether it was free; `otherwise` is the code where it was not."""
    if isinstance(error.__cause__, NOT_SENT):
        return TeacherReply("unreachable", free=True)
    return TeacherReply(otherwise)
