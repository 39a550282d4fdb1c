"""Chat completions on loopback: an address for each episode, answered by a coroutine of its own.

    with ChatEndpoint() as endpoint, endpoint.serving(answer) as url:
        AsyncOpenAI(base_url=url, api_key=endpoint.key).chat.completions.create(...)

An episode's address is as hard to guess as the key. Whole answers and streams say the same.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from protocols.openai_chat import HarnessRequest
from replay.asgi import Receive, Send, read_body, respond, stream
from replay.local_wire import Answered, Asked, write_answer, write_error, write_stream
from replay.loopback import Loopback

MODEL = "student"
PATH = re.compile(r"/episodes/([\w-]+)/v1/chat/completions")

Answer = Callable[[HarnessRequest], Coroutine[Any, Any, Answered]]


class Refused(Exception):
    """What an episode does not answer, told as a 400: no client tries that again."""


@dataclass(frozen=True)
class _Episode:
    answer: Answer
    loop: asyncio.AbstractEventLoop
    under_way: set[Future[Answered]] = field(default_factory=set)


class ChatEndpoint(Loopback):
    """The server, in a thread of its own; answers are awaited in the event loop that they were
    given in. Any `key` but its own is answered 401."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self._episodes: dict[str, _Episode] = {}
        super().__init__(self._app, "chat endpoint", ws="none")

    @contextmanager
    def serving(self, answer: Answer) -> Iterator[str]:
        """The base URL of a new episode. At the end of the block answers that are under way are
        cancelled; whoever asks later is answered 404."""
        name = secrets.token_urlsafe(24)
        episode = self._episodes[name] = _Episode(answer, asyncio.get_running_loop())
        try:
            yield f"{self.url}/episodes/{name}/v1"
        finally:
            del self._episodes[name]
            for work in list(episode.under_way):
                work.cancel()

    async def _app(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        headers = {k.lower(): v for k, v in scope["headers"]}
        body = await read_body(receive)
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not hmac.compare_digest(given, self.key.encode()):
            return await _fail(send, 401, "incorrect API key")
        found = PATH.fullmatch(scope["path"])
        name = found.group(1) if found else ""
        episode = self._episodes.get(name)
        if episode is None or scope["method"] != "POST":
            return await _fail(send, 404, "no such path, or an episode that is over")
        try:
            request = HarnessRequest.model_validate_json(body)
        except ValueError as error:
            return await _fail(send, 400, f"bad request: {error}")
        work = asyncio.run_coroutine_threadsafe(episode.answer(request), episode.loop)
        episode.under_way.add(work)
        if name not in self._episodes:  # it ended meanwhile, in the other thread
            work.cancel()
        try:
            said = await asyncio.wrap_future(work)
        except Refused as error:
            return await _fail(send, 400, str(error))
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            return await _fail(send, 500, "the episode was ended")
        except Exception:  # the answer's own business, which told its caller
            return await _fail(send, 500, "no answer could be sampled")
        finally:
            episode.under_way.discard(work)
        with_usage = request.stream_options is not None and request.stream_options.include_usage
        asked = Asked("chat", MODEL, "", "", 0, bool(request.stream), bool(with_usage))
        serial = sum(m.role == "assistant" for m in request.messages)
        if request.stream:
            return await stream(send, write_stream(asked, said, serial), whole=True)
        await respond(send, 200, write_answer(asked, said, serial))


async def _fail(send: Send, status: int, why: str) -> None:
    await respond(send, status, write_error("chat", status, why))
