"""Serve a fake provider on loopback, with OpenAI's and Anthropic's wire formats.

    with FakeProvider(rule, prices, faults=FaultRates(rate_limit=0.1, latency_s=0.2)) as provider:
        ...  base_url=provider.openai_url  ...  base_url=provider.url  ...
    provider.money()   # nanodollars charged, by its own count

/v1/chat/completions   OpenAI's
/v1/messages           Anthropic's

It answers by a rule of the caller's, fails at set rates, and counts every call. Whether a call
fails is drawn from a hash of the seed, the model, the prompt and how often that prompt was sent, so
that it does not depend on the order of concurrent calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import request_response

from cartridge_forge.plugins.chat.messages import TeacherUsage
from cartridge_forge.plugins.chat.wire.openai_replies import (
    ChatReply,
    write_completion,
    write_error,
)
from cartridge_forge.plugins.replay.budget import cost
from cartridge_forge.plugins.replay.fake_provider.server import LoopbackServer
from cartridge_forge.plugins.replay.prompts import ATTEMPT_HEADER, IDEMPOTENCY_HEADER
from cartridge_forge.plugins.replay.spec import PriceSpec

Wire = Literal["chat", "messages"]
PATHS: dict[str, Wire] = {"/v1/chat/completions": "chat", "/v1/messages": "messages"}
LIMITS = ("max_completion_tokens", "max_tokens")
FREE = ("rate_limit", "server_error", "stall")  # never charged


@dataclass(frozen=True)
class ProviderRequest:
    """Describe a request to the provider's rule, independent of its wire format."""

    model: str
    system: str
    user: str

    @property
    def prompt(self) -> str:
        return f"{self.model}/{self.system}/{self.user}"


Rule = Callable[[ProviderRequest], str]


@dataclass(frozen=True)
class FaultRates:
    """Set how often each fault occurs, as shares of all calls; faults exclude one another.

    Charged like an answer: `cut_off` (the connection ends in the middle of the body), `malformed`
    (a body that is not JSON), `garbage` (text in place of the answer format), `refuse`. Free:
    `rate_limit` (429 with Retry-After), `server_error` (500), `stall` (no response for `stall_s`).
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
        """Return the fault of this call, "" for none."""
        remaining = uniform(self.seed, what)
        for name in _RATES:
            remaining -= getattr(self, name)
            if remaining < 0:
                return name
        return ""


_RATES = tuple(f.name for f in fields(FaultRates) if not f.name.endswith(("_s", "seed")))


@dataclass(frozen=True)
class ServedCall:
    """Record one call on the provider's side; `attempt` is the client's id of it."""

    attempt: str
    wire: Wire
    model: str
    fault: str
    usage: TeacherUsage
    nanodollars: int
    prompt: str


def sometimes_right(right: Rule, wrong: Rule, probability: float, seed: int = 0) -> Rule:
    """Return a rule that is right with this probability, independently for each model, and always
    the same for the same prompt."""

    def rule(request: ProviderRequest) -> str:
        drawn = uniform(seed, f"right/{request.prompt}")
        return right(request) if drawn < probability else wrong(request)

    return rule


def uniform(seed: int, what: str) -> float:
    """Return a number in [0, 1) that depends on seed and text only."""
    digest = hashlib.sha256(f"{seed}/{what}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:7]) / 2**56


class FakeProvider(LoopbackServer):
    """Run the server. `rule` and `faults` may be replaced while it runs."""

    def __init__(
        self,
        rule: Rule,
        prices: Mapping[str, PriceSpec],
        faults: FaultRates | None = None,
        key: str | None = None,
        idempotent: bool = False,
    ) -> None:
        """Take `prices` by model. With `key`, any other API key is answered 401. An `idempotent`
        provider answers a request of the same idempotency key again, free of charge."""
        self.rule, self.faults = rule, faults or FaultRates()
        self.served: list[ServedCall] = []
        self._prices, self._key, self._idempotent = dict(prices), key, idempotent
        self._known: dict[str, asyncio.Task[ChatReply]] = {}  # by idempotency key
        self._times: Counter[str] = Counter()
        self._cached: set[str] = set()
        super().__init__(request_response(self._respond), "fake provider")

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def money(self) -> int:
        """Return the nanodollars charged so far."""
        return sum(served.nanodollars for served in self.served)

    async def _respond(self, http: Request) -> Response:
        wire = PATHS.get(http.url.path)
        body, headers = await http.body(), http.headers
        if wire is None or http.method != "POST":
            return _error("chat", 404, "no such path")
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and key != self._key:
            # Real providers repeat the key, too.
            return _error(wire, 401, f"Incorrect API key provided: {key}")
        try:
            request, max_tokens = read_request(json.loads(body))
            prices = self._prices[request.model]
        except (ValueError, KeyError, TypeError) as error:
            return _error(wire, 400, f"bad request: {error}")
        self._times[request.prompt] += 1
        faults = self.faults
        fault = faults.drawn(f"{self._times[request.prompt]}/{request.prompt}")
        request_id = headers.get(IDEMPOTENCY_HEADER, "") if self._idempotent else ""
        again = self._known.get(request_id)
        if again is None:
            again = asyncio.ensure_future(self._reply_late(request, max_tokens, fault))
            if request_id and fault not in FREE:
                self._known[request_id] = again
            paid = fault not in FREE
        else:
            fault, paid = "", False
        reply = await asyncio.shield(again)
        usage = reply.usage if paid else TeacherUsage(0, 0)
        self.served.append(
            ServedCall(
                headers.get(ATTEMPT_HEADER, ""), wire, request.model, fault, usage,
                cost(usage, prices), request.prompt,
            )
        )  # fmt: skip
        if fault == "rate_limit":
            wait = {"retry-after": f"{faults.retry_after_s:g}"}
            return _error(wire, 429, "slow down", wait)
        if fault == "stall":
            await _silence(http, faults.stall_s)
        if fault in ("server_error", "stall"):
            return _error(wire, 500, "out of order")
        write = _message if wire == "messages" else write_completion
        answer = json.dumps(write(request.model, reply, len(self.served))).encode()
        sent = answer[: len(answer) // 2] if fault in ("malformed", "cut_off") else answer
        body_of = _sent(sent, fault == "cut_off")
        return StreamingResponse(body_of, media_type="application/json")

    async def _reply_late(self, request: ProviderRequest, max_tokens: int, fault: str) -> ChatReply:
        await asyncio.sleep(self.faults.latency_s)
        return self._reply(request, max_tokens, fault)

    def _reply(self, request: ProviderRequest, max_tokens: int, fault: str) -> ChatReply:
        texts = {"garbage": "As I was saying: {", "refuse": "I cannot help with that."}
        words = (texts.get(fault) or self.rule(request)).encode()
        cut = _tokens(words) > max_tokens
        if cut:
            words = words[: max_tokens * 4]
        system = f"{request.model}/{request.system}"
        cached = _tokens(request.system.encode()) if system in self._cached else 0
        self._cached.add(system)
        read = _tokens(f"{request.system}{request.user}".encode())
        usage = TeacherUsage(read - cached, _tokens(words), cached)
        return ChatReply(words.decode("utf-8", "ignore"), fault == "refuse", cut, usage)


def read_request(plain: Any) -> tuple[ProviderRequest, int]:
    """Return a request and the most tokens of its answer. Raises ValueError, KeyError or TypeError
    for an invalid one."""
    if not isinstance(plain, dict) or not isinstance(plain.get("model"), str):
        raise ValueError("a request names its model")
    if plain.get("stream"):
        raise ValueError("no streaming here")
    system, user = [_text(plain.get("system") or "")], list[str]()
    for turn in plain.get("messages") or []:
        part = system if turn["role"] in ("system", "developer") else user
        part.append(_text(turn["content"]))
    limit = int([*(plain[k] for k in LIMITS if k in plain), 4096][0])
    request = ProviderRequest(plain["model"], "\n".join(filter(None, system)), "\n".join(user))
    return request, limit


async def _sent(body: bytes, cut_off: bool) -> AsyncIterator[bytes]:
    yield body
    if cut_off:
        raise ConnectionError("cut off, as drawn")  # makes the server end the connection


async def _silence(http: Request, seconds: float) -> None:
    """Wait until the client disconnects or time is up."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await http.receive())["type"] != "http.disconnect":
                pass


def _error(
    wire: Wire, status: int, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    body = write_error(status, message)
    if wire == "messages":
        body["type"] = "error"
    return Response(json.dumps(body), status, headers, "application/json")


def _message(model: str, reply: ChatReply, serial: int) -> dict[str, Any]:
    return {
        "id": f"msg_{serial}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [{"type": "text", "text": reply.text}],
        "stop_reason": "refusal" if reply.refused else "max_tokens" if reply.cut else "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": reply.usage.input_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.usage.cached_tokens,
            "output_tokens": reply.usage.output_tokens,
        },
    }


def _text(content: Any) -> str:
    """Return the text of content that is a string, or a list of blocks."""
    if isinstance(content, str):
        return content
    return "".join(str(block.get("text", "")) for block in content)


def _tokens(data: bytes) -> int:
    """Count tokens at four bytes each."""
    return math.ceil(len(data) / 4)
