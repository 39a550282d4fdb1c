"""A provider of our own on loopback, which the official SDKs talk to as to any other.

    with LocalProvider(rule, prices, faults=Faults(rate_limit=0.1, latency_s=0.2)) as provider:
        ...  base_url=provider.openai_url  ...  base_url=provider.anthropic_url  ...
    provider.money()   # nanodollars that it charged, by its own count

It answers by a rule of the caller's, fails at set rates, and keeps its own account of every call.
Whether a call fails is drawn from a hash of the seed, the model, the prompt and how often that
prompt came, so that it does not depend on the order in which K actors ask.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from protocols.replay import Usage
from protocols.replay_spec import PriceSpec
from replay.asgi import Receive, Send, read_body, respond, stream
from replay.local_wire import (
    PATHS,
    Answered,
    Asked,
    Wire,
    read_request,
    write_answer,
    write_error,
    write_stream,
)
from replay.loopback import Loopback
from replay.money import cost
from replay.prompt import ATTEMPT_HEADER

Rule = Callable[[Asked], str]

FREE = ("rate_limit", "server_error", "stall", "unauthorized")  # never charged


@dataclass(frozen=True)
class Faults:
    """How often each fault comes, as shares of all calls; they exclude one another.

    Charged like an answer: `cut_off` (the connection ends in the middle of the body), `malformed`
    (a body that is no JSON), `garbage` (words that are not what was asked for), `refuse`. Free:
    `rate_limit` (429 with Retry-After), `server_error` (500), `stall` (silence for `stall_s`).
    """

    rate_limit: float = 0.0
    server_error: float = 0.0
    stall: float = 0.0
    cut_off: float = 0.0
    malformed: float = 0.0
    garbage: float = 0.0
    refuse: float = 0.0
    latency_s: float = 0.0
    retry_after_s: float = 0.05
    stall_s: float = 30.0
    seed: int = 0

    def drawn(self, what: str) -> str:
        """The fault of this call, "" for none."""
        left = uniform(self.seed, what)
        for name in _RATES:
            left -= getattr(self, name)
            if left < 0:
                return name
        return ""


_RATES = tuple(f.name for f in fields(Faults) if not f.name.endswith(("_s", "seed")))


@dataclass(frozen=True)
class Served:
    """One call as the provider has it: `attempt` is the client's own name for it."""

    attempt: str
    wire: Wire
    model: str
    fault: str
    usage: Usage
    nanodollars: int
    prompt: str


def sometimes_right(right: Rule, wrong: Rule, probability: float, seed: int = 0) -> Rule:
    """A rule that is right with this probability, each model for itself, and always the same on
    the same prompt."""

    def rule(asked: Asked) -> str:
        drawn = uniform(seed, f"right/{asked.model}/{asked.system}/{asked.user}")
        return right(asked) if drawn < probability else wrong(asked)

    return rule


def uniform(seed: int, what: str) -> float:
    """A number in [0, 1) that seed and text decide."""
    digest = hashlib.sha256(f"{seed}/{what}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:7]) / 2**56


class LocalProvider(Loopback):
    """The server, in a thread of its own. `faults` may be set anew while it runs."""

    def __init__(
        self,
        rule: Rule,
        prices: Mapping[str, PriceSpec],
        faults: Faults | None = None,
        key: str | None = None,
    ) -> None:
        """`prices` by model. With `key`, any other API key is answered 401."""
        self.faults = faults or Faults()
        self.served: list[Served] = []
        self._rule, self._prices, self._key = rule, dict(prices), key
        self._times: Counter[str] = Counter()
        self._cached: set[str] = set()
        super().__init__(self._app, "local provider", ws="none")

    @property
    def anthropic_url(self) -> str:
        return self.url

    @property
    def openai_url(self) -> str:
        return f"{self.anthropic_url}/v1"

    def money(self) -> int:
        """Nanodollars charged so far."""
        return sum(served.nanodollars for served in self.served)

    async def _app(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        wire = PATHS.get(scope["path"])
        headers = {k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]}
        body = await read_body(receive)
        if wire is None or scope["method"] != "POST":
            return await respond(send, 404, write_error("chat", 404, "no such path"))
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and given != self._key:
            message = f"Incorrect API key provided: {given}"  # as real ones do
            return await respond(send, 401, write_error(wire, 401, message))
        try:
            asked = read_request(wire, body)
            prices = self._prices[asked.model]
        except (ValueError, KeyError, TypeError) as error:
            return await respond(send, 400, write_error(wire, 400, f"bad request: {error}"))
        prompt = f"{asked.model}/{asked.system}/{asked.user}"
        self._times[prompt] += 1
        faults = self.faults
        fault = faults.drawn(f"{self._times[prompt]}/{prompt}")
        await asyncio.sleep(faults.latency_s)
        said = self._say(asked, fault)
        usage = Usage(0, 0) if fault in FREE else said.usage
        self.served.append(
            Served(
                headers.get(ATTEMPT_HEADER.lower(), ""), wire, asked.model, fault, usage,
                cost(usage, prices), prompt,
            )
        )  # fmt: skip
        await self._answer(asked, said, fault, faults, receive, send)

    def _say(self, asked: Asked, fault: str) -> Answered:
        text = self._rule(asked)
        if fault == "garbage":
            text = "As I was saying: {"
        elif fault == "refuse":
            text = "I cannot help with that."
        words = text.encode()
        cut = _tokens(words) > asked.max_tokens
        if cut:
            words = words[: asked.max_tokens * 4]
        system = f"{asked.model}/{asked.system}"
        cached = _tokens(asked.system.encode()) if system in self._cached else 0
        self._cached.add(system)
        read = _tokens(f"{asked.system}{asked.user}".encode())
        usage = Usage(read - cached, _tokens(words), cached)
        return Answered(words.decode("utf-8", "ignore"), fault == "refuse", cut, usage)

    async def _answer(
        self, asked: Asked, said: Answered, fault: str, faults: Faults, receive: Receive, send: Send
    ) -> None:
        if fault == "rate_limit":
            wait = [(b"retry-after", f"{faults.retry_after_s:g}".encode())]
            return await respond(send, 429, write_error(asked.wire, 429, "slow down"), wait)
        if fault == "server_error":
            return await respond(send, 500, write_error(asked.wire, 500, "out of order"))
        if fault == "stall":
            return await _silence(receive, faults.stall_s)
        if asked.stream and asked.wire == "responses":
            return await respond(send, 400, write_error(asked.wire, 400, "no streaming here"))
        serial = len(self.served)
        if asked.stream:
            events = write_stream(asked, said, serial)
            kept = events[: len(events) // 2] if fault == "cut_off" else events
            return await stream(send, kept, whole=fault != "cut_off")
        body = write_answer(asked, said, serial)
        if fault == "malformed":
            body = body[: len(body) // 2]
        await respond(send, 200, body, cut=fault == "cut_off")


async def _silence(receive: Receive, seconds: float) -> None:
    """Say nothing, until the client goes or time is up."""
    try:
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        pass


def _tokens(data: bytes) -> int:
    """Its tokenizer: four bytes a token."""
    return math.ceil(len(data) / 4)
