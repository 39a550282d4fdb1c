"""External models as a `Sampler`, over the official SDKs.

    ask --at most `concurrency` at once--> one HTTP call, `timeout_s` --> answer
              ^-- backoff, or Retry-After <-- 429, 5xx, no answer (`attempts` in all)

Gemini, and whoever else speaks chat completions, is provider "openai" with its `base_url`.

What they can, and what they cannot: log-probabilities where the endpoint says that its model has
them. No `continue`: an assistant's turn is never gone on with. No `until`: a stop string is cut out
of the text, whose tokens are paid and gone, while `Until` ends with it, and text and tokens agree.
No `seed`: it is sent, but promised to nobody. Token ids are not told. So they serve the strategies
that look at whole responses.

A key goes to the host that it is for, by name: the providers' usual variables to their own hosts
alone. Nothing is redirected, and what the SDKs add to every call out of the environment goes to no
other host. An endpoint is the operator's: a server never takes one from a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx2
import openai

from protocols.errors import DataError, RunError
from protocols.replay import Message
from protocols.replay_spec import KEY_NAMES, OFFICIAL_URLS, Provider, open_url
from replay.clients import by_cause, by_status, read_key
from replay.prompt import Reply
from strategies.port import Ability, Answer, Ask

LONGEST_BACKOFF_S = 30.0
MOST_TOP_LOGPROBS = 20  # of chat completions
# Whose key a variable holds, as (scheme, host). Any other name is the operator's own.
KEY_HOSTS = {
    **{KEY_NAMES[p]: ("https", urlsplit(url).hostname) for p, url in OFFICIAL_URLS.items()},
    "GEMINI_API_KEY": ("https", "generativelanguage.googleapis.com"),
    "OPENROUTER_API_KEY": ("https", "openrouter.ai"),
}

HEADERS = frozenset({
    "host", "user-agent", "accept", "accept-encoding", "connection", "content-type",
    "content-length", "transfer-encoding", "authorization", "anthropic-version",
})  # fmt: skip


@dataclass(frozen=True)
class Endpoint:
    """One model: `Endpoint("openai", "gemini-2.5-flash", key_env="GEMINI_API_KEY",
    base_url="https://generativelanguage.googleapis.com/v1beta/openai")`.

    Without `base_url` the provider's own server, without `key_env` its usual variable. `logprobs`
    says that this model tells log-probabilities.
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
    """A `Sampler` over an endpoint. Close it: `async with ApiSampler(endpoint) as sampler`.

    Raises DataError for an endpoint that is not sound or an ask that it cannot serve, SpecError
    where the environment has no key, and RunError where an ask is not answered; no error repeats a
    provider's words, which may hold the key. Tokens of attempts that failed are in no count.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        url, key = _checked(endpoint)
        self._endpoint = endpoint
        self._turns = asyncio.Semaphore(endpoint.concurrency)
        serve = _openai if endpoint.provider == "openai" else _anthropic
        self._say, self._close = serve(endpoint, url, key)

    async def __aenter__(self) -> ApiSampler:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def abilities(self) -> frozenset[Ability]:
        return frozenset({"logprobs", "top_logprobs"} if self._endpoint.logprobs else ())

    async def __call__(self, asks: Sequence[Ask]) -> list[Answer]:
        for ask in asks:
            self._check(ask)
        calls = [asyncio.create_task(self._answer(ask)) for ask in asks]
        try:
            return await asyncio.gather(*calls)
        finally:  # one that failed fails all, and what the others would say is not paid for
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _check(self, ask: Ask) -> None:
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
        for fault, there in faults.items():
            if there:
                raise DataError(f"ask {ask.id} to {endpoint.model} {fault}; use another backend")

    async def _answer(self, ask: Ask) -> Answer:
        endpoint = self._endpoint
        attempt = 0
        while True:
            attempt += 1
            async with self._turns:
                said = await self._attempt(ask)
            if isinstance(said, Answer):
                return said
            if attempt == endpoint.attempts or not said.retriable:
                raise RunError(
                    f"ask {ask.id} to {endpoint.model}: {said.outcome} at attempt {attempt} of "
                    f"{endpoint.attempts}; look at the provider's status, the key in its variable "
                    "and the model's name"
                )
            backoff = min(endpoint.backoff_s * 2 ** (attempt - 1), LONGEST_BACKOFF_S)
            await asyncio.sleep(max(backoff, said.retry_after_s))

    async def _attempt(self, ask: Ask) -> Answer | Reply:
        try:
            # The SDKs' timeout is for each wait; a body that drips can take for ever.
            async with asyncio.timeout(self._endpoint.timeout_s):
                return await self._say(ask)
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            return by_status(error.status_code, error.response.headers)
        except (openai.APIConnectionError, anthropic.APIConnectionError) as error:
            return by_cause(error)
        except TimeoutError:
            return Reply("timeout")
        except DataError:
            raise
        except (
            ValueError, TypeError, AttributeError, IndexError,
            openai.OpenAIError, anthropic.AnthropicError,
        ):  # fmt: skip
            return Reply("unreadable")  # a body that is no JSON, or no message


Say = Callable[[Ask], Awaitable[Answer]]
Close = Callable[[], Awaitable[None]]


def _checked(endpoint: Endpoint) -> tuple[str, str]:
    """The URL and the key that goes there."""
    who = f"endpoint {endpoint.model}"
    if endpoint.provider not in OFFICIAL_URLS:
        known = ", ".join(OFFICIAL_URLS)
        raise DataError(f"{who}: provider must be one of {known}: got {endpoint.provider!r}")
    if min(endpoint.concurrency, endpoint.attempts) < 1 or endpoint.timeout_s <= 0:
        raise DataError(f"{who}: concurrency and attempts must be >= 1, and timeout_s > 0")
    official = OFFICIAL_URLS[endpoint.provider]
    try:
        url = open_url(endpoint.base_url or official, official, "give the key by key_env")
    except ValueError as error:
        raise DataError(f"{who}: base_url {error}") from None
    place = urlsplit(url)
    key_env = endpoint.key_env or KEY_NAMES[endpoint.provider]
    owner = KEY_HOSTS.get(key_env, (place.scheme, place.hostname))
    if owner != (place.scheme, place.hostname):
        raise DataError(
            f"{who}: {key_env} is for {owner[0]}://{owner[1]}, and base_url is {place.scheme}://"
            f"{place.hostname}; name the variable of its own key by key_env"
        )
    return url, read_key(who, key_env)


def _openai(endpoint: Endpoint, url: str, key: str) -> tuple[Say, Close]:
    client = openai.AsyncOpenAI(
        api_key=key, base_url=url, timeout=endpoint.timeout_s, max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(**_discreet(url, key)),
    )  # fmt: skip

    async def say(ask: Ask) -> Answer:
        sampling = ask.sampling
        wanted: dict[str, Any] = {"logprobs": True} if endpoint.logprobs else {}
        if ask.top_logprobs:
            wanted["top_logprobs"] = ask.top_logprobs
        completion: Any = await client.chat.completions.create(
            model=endpoint.model,
            messages=[_turn(m) for m in ask.messages],
            max_completion_tokens=sampling.max_tokens,
            seed=ask.seed % 2**31,
            extra_body={**_unusual(ask), **wanted},
        )
        choice, usage = completion.choices[0], completion.usage
        told = getattr(choice.logprobs, "content", None) or []
        if endpoint.logprobs and not told and usage.completion_tokens:
            raise DataError(
                f"endpoint {endpoint.model}: it told no log-probabilities; set logprobs to false, "
                "and use strategies that need none"
            )
        return Answer(
            str(choice.message.content or choice.message.refusal or ""),
            _count(usage.completion_tokens),
            _count(usage.prompt_tokens),
            "length" if choice.finish_reason == "length" else "stop",
            logprobs=tuple(float(t.logprob) for t in told),
            top_logprobs=tuple(_likeliest(t.top_logprobs) for t in told if ask.top_logprobs),
        )

    return say, client.close


def _anthropic(endpoint: Endpoint, url: str, key: str) -> tuple[Say, Close]:
    client = anthropic.AsyncAnthropic(
        api_key=key, base_url=url, timeout=endpoint.timeout_s, max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(**_discreet(url, key)),
    )  # fmt: skip

    async def say(ask: Ask) -> Answer:
        top_k = {"top_k": ask.sampling.top_k} if ask.sampling.top_k else {}
        system = "\n\n".join(m.content for m in ask.messages if m.role == "system")
        message: Any = await client.messages.create(
            model=endpoint.model,
            system=system or anthropic.omit,
            messages=[_turn(m) for m in ask.messages if m.role != "system"],
            max_tokens=ask.sampling.max_tokens,
            extra_body={**_unusual(ask), **top_k},
            timeout=endpoint.timeout_s,
        )
        usage = message.usage
        cached = (usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
        return Answer(
            "".join(block.text for block in message.content if block.type == "text"),
            _count(usage.output_tokens),
            _count(usage.input_tokens) + sum(n or 0 for n in cached),
            "length" if message.stop_reason == "max_tokens" else "stop",
        )

    return say, client.close


def _discreet(url: str, key: str) -> dict[str, Any]:
    """Options of an HTTP client that takes nothing elsewhere: no redirections, and to a host that
    is not the SDK's own neither organisation nor $OPENAI_CUSTOM_HEADERS and its like, which the
    SDKs send to any host."""

    async def only_ours(request: httpx2.Request) -> None:
        for name in list(request.headers):
            if name not in HEADERS and not name.startswith("x-stainless-"):
                del request.headers[name]
        request.headers["authorization"] = f"Bearer {key}"

    hooks = [] if url in OFFICIAL_URLS.values() else [only_ours]
    return {"follow_redirects": False, "event_hooks": {"request": hooks}}


def _unusual(ask: Ask) -> dict[str, float]:
    """What differs from the providers' own default, 1: some models refuse to be told even that."""
    sampling = ask.sampling
    given = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    return {name: value for name, value in given.items() if value != 1.0}


def _turn(message: Message) -> Any:
    """There is no role "tool" without a call of one: what a tool said is the user's."""
    role = "user" if message.role == "tool" else message.role
    return {"role": role, "content": message.content}


def _likeliest(told: Sequence[Any]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(((str(t.token), float(t.logprob)) for t in told), key=lambda t: -t[1]))


def _count(tokens: Any) -> int:
    """Raises TypeError for none: without a count no budget holds."""
    if not isinstance(tokens, int) or tokens < 0:
        raise TypeError(f"expected a number of tokens, got {type(tokens).__name__}")
    return tokens
