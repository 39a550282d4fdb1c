"""Sample from external models through the official SDKs.

    request --at most `concurrency` at once--> one HTTP call, `timeout_s` --> result
                  ^-- backoff, or Retry-After <-- 429, 5xx, no reply (`attempts` in all)

Gemini and other servers of chat completions are provider "openai" with their `base_url`.

Abilities: "logprobs" and "top_logprobs" where the endpoint declares them. Not "continue", because
no API continues an assistant message. Not "until", because APIs cut a stop string out of the text
but bill its tokens, while with `StopCondition` text and tokens agree. Not "seed", because the seed
is sent but no provider guarantees it. Token ids are not returned. External models therefore serve
only strategies over whole responses.

A provider's usual key variable is sent only to that provider's own host. Redirects are not
followed, and values that the SDKs take from the environment go to no other host. Endpoints belong
to the operator: a server must never accept one from a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from cartridge_forge.plugins.chat.messages import TeacherUsage
from cartridge_forge.plugins.replay.budget import ANSWERED
from cartridge_forge.plugins.replay.clients import ApiClient, read_key
from cartridge_forge.plugins.replay.prompts import TeacherReply
from cartridge_forge.plugins.replay.spec import KEY_NAMES, OFFICIAL_URLS, Provider, open_url
from cartridge_forge.plugins.strategies.samplers.sampler import Ability, SampleRequest, SampleResult
from cartridge_forge.protocols.errors import DataError, RunError

LONGEST_BACKOFF_S = 30.0
MOST_TOP_LOGPROBS = 20  # limit of chat completions
# The (scheme, host) that a variable's key is for. Any other name is the operator's own.
KEY_HOSTS = {
    **{KEY_NAMES[p]: ("https", urlsplit(url).hostname) for p, url in OFFICIAL_URLS.items()},
    "GEMINI_API_KEY": ("https", "generativelanguage.googleapis.com"),
    "OPENROUTER_API_KEY": ("https", "openrouter.ai"),
}


@dataclass(frozen=True)
class ApiEndpoint:
    """Describe one model: `ApiEndpoint("openai", "gemini-2.5-flash", key_env="GEMINI_API_KEY",
    base_url="https://generativelanguage.googleapis.com/v1beta/openai")`.

    `base_url` defaults to the provider's server, `key_env` to its usual variable. `logprobs`
    declares that this model returns log-probabilities.
    """

    provider: Provider
    model: str
    base_url: str | None = None
    key_env: str | None = None
    logprobs: bool = False
    concurrency: int = 8
    timeout_s: float = 120.0
    attempts: int = 4
    backoff_s: float = 0.5


class ApiSampler:
    """Sample from an endpoint. Close it: `async with ApiSampler(endpoint) as sampler`.

    Raises DataError for an invalid endpoint or a request that it cannot serve, SpecError if the
    environment has no key, and RunError if a request gets no reply. No error repeats a provider's
    text, which may contain the key. Counts exclude the tokens of failed attempts.
    """

    def __init__(self, endpoint: ApiEndpoint) -> None:
        url, key = _checked(endpoint)
        self._endpoint = endpoint
        self._turns = asyncio.Semaphore(endpoint.concurrency)
        self._client = ApiClient(
            endpoint.provider, endpoint.model, url, key, endpoint.timeout_s, isolated=True
        )

    async def __aenter__(self) -> ApiSampler:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    @property
    def abilities(self) -> frozenset[Ability]:
        return frozenset({"logprobs", "top_logprobs"} if self._endpoint.logprobs else ())

    async def __call__(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        for ask in requests:
            self._check(ask)
        calls = [asyncio.create_task(self._answer(ask)) for ask in requests]
        try:
            return await asyncio.gather(*calls)
        finally:  # one failure fails all: cancel the others, so that they cost nothing
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _check(self, ask: SampleRequest) -> None:
        endpoint, sampling = self._endpoint, ask.sampling
        most = MOST_TOP_LOGPROBS if endpoint.logprobs else 0
        faults = {
            "goes on with a response, which no API does": bool(ask.begun.text),
            "ends by `until`, which no API does as defined": ask.until is not None,
            f"wants {ask.top_logprobs} top log-probabilities, and {most} are told": (
                ask.top_logprobs > most
            ),
            "has top_k, which this provider does not take": (
                sampling.top_k > 0 and endpoint.provider == "openai"
            ),
            "has a temperature over 1, which this provider does not take": (
                sampling.temperature > 1 and endpoint.provider == "anthropic"
            ),
        }
        for fault, is_present in faults.items():
            if is_present:
                raise DataError(f"ask {ask.id} to {endpoint.model} {fault}; use another backend")

    async def _answer(self, ask: SampleRequest) -> SampleResult:
        endpoint = self._endpoint
        body = _body(ask, endpoint)
        attempt = 0
        while True:
            attempt += 1
            async with self._turns:
                reply = await self._client.ask(ask.messages, ask.sampling.max_tokens, body)
            if reply.outcome == ANSWERED and reply.usage is not None:
                return self._read(ask, reply, reply.usage)
            if attempt == endpoint.attempts or not reply.retriable:
                # A reply without token counts cannot be charged to a budget.
                outcome = "unreadable" if reply.outcome == ANSWERED else reply.outcome
                raise RunError(
                    f"ask {ask.id} to {endpoint.model}: {outcome} at attempt {attempt} of "
                    f"{endpoint.attempts}; look at the provider's status, the key in its variable "
                    "and the model's name"
                )
            backoff = min(endpoint.backoff_s * 2 ** (attempt - 1), LONGEST_BACKOFF_S)
            await asyncio.sleep(max(backoff, reply.retry_after_s))

    def _read(self, ask: SampleRequest, reply: TeacherReply, usage: TeacherUsage) -> SampleResult:
        if self._endpoint.logprobs and usage.output_tokens and not reply.logprobs:
            raise DataError(
                f"endpoint {self._endpoint.model}: it told no log-probabilities; set logprobs to "
                "false, and use strategies that need none"
            )
        return SampleResult(
            reply.raw,
            usage.output_tokens,
            usage.input_tokens + usage.cached_tokens,
            "length" if reply.cut else "stop",
            logprobs=reply.logprobs,
            top_logprobs=reply.top_logprobs if ask.top_logprobs else (),
        )


def _checked(endpoint: ApiEndpoint) -> tuple[str, SecretStr]:
    """Return the URL and the key that is sent to it."""
    who = f"endpoint {endpoint.model}"
    if endpoint.provider not in OFFICIAL_URLS:
        providers = ", ".join(OFFICIAL_URLS)
        raise DataError(f"{who}: provider must be one of {providers}: got {endpoint.provider!r}")
    if min(endpoint.concurrency, endpoint.attempts) < 1 or endpoint.timeout_s <= 0:
        raise DataError(f"{who}: concurrency and attempts must be >= 1, and timeout_s > 0")
    official = OFFICIAL_URLS[endpoint.provider]
    try:
        url = open_url(endpoint.base_url or official, official, "give the key by key_env")
    except ValueError as error:
        raise DataError(f"{who}: base_url {error}") from None
    parts = urlsplit(url)
    key_env = endpoint.key_env or KEY_NAMES[endpoint.provider]
    owner = KEY_HOSTS.get(key_env, (parts.scheme, parts.hostname))
    if owner != (parts.scheme, parts.hostname):
        raise DataError(
            f"{who}: {key_env} is for {owner[0]}://{owner[1]}, and base_url is {parts.scheme}://"
            f"{parts.hostname}; name the variable of its own key by key_env"
        )
    return url, read_key(who, key_env)


def _body(ask: SampleRequest, endpoint: ApiEndpoint) -> dict[str, Any]:
    """Return the provider's own fields. The default 1 is not sent: some models refuse even that."""
    sampling = ask.sampling
    settings = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    body: dict[str, Any] = {name: value for name, value in settings.items() if value != 1.0}
    if endpoint.provider == "anthropic":
        return body | ({"top_k": sampling.top_k} if sampling.top_k else {})
    body["seed"] = ask.seed % 2**31
    if endpoint.logprobs:
        body["logprobs"] = True
    if ask.top_logprobs:
        body["top_logprobs"] = ask.top_logprobs
    return body
