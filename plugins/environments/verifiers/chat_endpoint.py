"""Serve chat completions on loopback, with one secret base URL and one coroutine for each episode.

    with ChatEndpoint() as endpoint, endpoint.serving(answer) as url:
        AsyncOpenAI(base_url=url, api_key=endpoint.key).chat.completions.create(...)

Whole and streamed replies have the same content.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response

from cartridge_forge.plugins.chat.wire.openai_chat import HarnessRequest
from cartridge_forge.plugins.chat.wire.openai_replies import (
    ChatReply,
    write_completion,
    write_error,
    write_events,
)
from cartridge_forge.plugins.replay.fake_provider.server import LoopbackServer

MODEL = "student"
PATH = re.compile(r"/episodes/([\w-]+)/v1/chat/completions")

Answer = Callable[[HarnessRequest], Coroutine[Any, Any, ChatReply]]


class BadChatRequest(Exception):
    """Reject a request with status 400, which clients do not retry."""


@dataclass(frozen=True)
class RecordedEpisode:
    answer: Answer
    loop: asyncio.AbstractEventLoop
    under_way: set[Future[ChatReply]] = field(default_factory=set)


class ChatEndpoint(LoopbackServer):
    """Run the server in its own thread. Each `answer` is awaited in the event loop that called
    `serving`. A request with another key than `key` gets status 401."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self._episodes: dict[str, RecordedEpisode] = {}
        super().__init__(request_response(self._respond), "chat endpoint")

    @contextmanager
    def serving(self, answer: Answer) -> Iterator[str]:
        """Yield the base URL of a new episode. When the block ends, answers in progress are
        cancelled, and later requests get status 404."""
        name = secrets.token_urlsafe(24)
        episode = self._episodes[name] = RecordedEpisode(answer, asyncio.get_running_loop())
        try:
            yield f"{self.url}/episodes/{name}/v1"
        finally:
            del self._episodes[name]
            for work in list(episode.under_way):
                work.cancel()

    async def _respond(self, http: Request) -> Response:
        key = http.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            return _error(401, "incorrect API key")
        match = PATH.fullmatch(http.url.path)
        name = match.group(1) if match else ""
        episode = self._episodes.get(name)
        if episode is None or http.method != "POST":
            return _error(404, "no such path, or an episode that is over")
        try:
            request = HarnessRequest.model_validate_json(await http.body())
        except ValueError as error:
            return _error(400, f"bad request: {error}")
        work = asyncio.run_coroutine_threadsafe(episode.answer(request), episode.loop)
        episode.under_way.add(work)
        if name not in self._episodes:  # the other thread ended it meanwhile
            work.cancel()
        try:
            reply = await asyncio.wrap_future(work)
        except BadChatRequest as error:
            return _error(400, str(error))
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            return _error(500, "the episode was ended")
        except Exception:  # `answer` reports its own errors
            return _error(500, "no answer could be sampled")
        finally:
            episode.under_way.discard(work)
        serial = sum(m.role == "assistant" for m in request.messages)
        if request.stream:
            options = request.stream_options
            with_usage = bool(options is not None and options.include_usage)
            events = write_events(MODEL, reply, serial, with_usage)
            return Response(b"".join(events), media_type="text/event-stream")
        return _json(200, write_completion(MODEL, reply, serial))


def _error(status: int, why: str) -> Response:
    return _json(status, write_error(status, why))


def _json(status: int, body: dict[str, Any]) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")
