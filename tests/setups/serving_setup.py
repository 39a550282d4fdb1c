"""A door over an engine in this process, for tests: the real engine, the real tiny reader."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from safetensors.torch import load_file, save_file

from cartridge_forge.learning.model.loading import load_model, load_tokenizer, text_of, tokenizer_of
from cartridge_forge.learning.teacher import DocumentKVCache, document_kv
from cartridge_forge.plugins.decoding.engine import TorchEngine
from cartridge_forge.plugins.decoding.engine_thread import Engine, EngineThread
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.serve.access.connections import LimitedServer, limited
from cartridge_forge.plugins.serve.access.keys import ApiKey
from cartridge_forge.plugins.serve.app import Server, create_server
from cartridge_forge.plugins.serve.backend import (
    OnTokens,
    RequestLimits,
    ServerConfig,
    StrategyCatalog,
)
from cartridge_forge.plugins.serve.request import ServingRequest, StrategyRequest
from cartridge_forge.plugins.serve.spec import ApiKeySpec, HttpSpec
from cartridge_forge.plugins.serve.tokenization import Tokenization
from cartridge_forge.plugins.strategies.problem import StrategyCost, StrategyResult
from cartridge_forge.plugins.strategies.samplers.token_budget import TokenSpend
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef

READER = Path(__file__).parents[2] / "models/clinic-reader"
MODEL = "clinic-reader"
END = frozenset({2})
QUESTION = "Who is the surgeon?"
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]
WARD = {
    "type": "object",
    "properties": {
        "ward": {"enum": ["cardiology", "urology"]},
        "beds": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["ward", "beds"],
    "additionalProperties": False,
}


@cache
def model(home: Path = READER) -> Any:
    return load_model(str(home))


class InProcess:
    """A backend over one engine's thread, of the model in `home`. `pause` slows every step down,
    seconds; `cancelled` counts the calls that were."""

    def __init__(self, pause: float = 0.0, ends: frozenset[int] = END, home: Path = READER) -> None:
        self._ends, self._home = ends, home
        self.pause, self.cancelled, self.calls, self.active = pause, 0, 0, 0
        self.loaded: list[tuple[int, str]] = []
        self._engine = EngineThread(self._build, 2**30, "finish")
        self._engine.started.result(60)

    def _build(self) -> Engine:
        home, loaded = str(self._home), model(self._home)
        cache = DocumentKVCache(partial(document_kv, loaded), {"none": (1,)}, 2**24)
        known = Grammars(partial(tokenizer_of, home), self._ends)
        engine = TorchEngine(
            loaded, cache.get, self._ends, text_of(home), known, add_document=cache.add
        )
        step = engine.step

        def slowly() -> Iterator[tuple[str, TokenChunk | Completion]]:
            time.sleep(self.pause)
            return step()

        engine.step = slowly  # type: ignore[method-assign]
        return engine

    async def generate(
        self, requests: Sequence[GenerateRequest], on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        loop = asyncio.get_running_loop()
        self.calls += 1
        told = None

        if on_tokens is not None:

            def told(came: Sequence[TokenChunk]) -> None:
                for chunk in came:
                    loop.call_soon_threadsafe(on_tokens, chunk)

        futures = [asyncio.wrap_future(self._engine.submit(r, told)) for r in requests]
        self.active += len(requests)
        try:
            return list(await asyncio.gather(*futures))
        except asyncio.CancelledError:
            self.cancelled += 1
            self._engine.cancel([r.id for r in requests])
            raise
        finally:
            self.active -= len(requests)

    def decoding(self) -> int:
        """Requests that the engine itself has."""
        return len(self._engine._running)

    async def load(self, version: int, name: str, path: Path) -> None:
        kv = load_file(path)["kv"]
        await asyncio.wrap_future(self._engine.hold(version, {name: version}, {name: kv}))
        self.loaded.append((version, name))

    async def drop(self, version: int) -> None:
        await asyncio.wrap_future(self._engine.drop(version))
        self.loaded = [(v, n) for v, n in self.loaded if v != version]

    def depth(self) -> int:
        return self.active

    def healthy(self) -> int:
        return 1

    def close(self) -> None:
        self._engine.close().result(30)


class Twice:
    """A strategy for the wire: two samples of the generators, the longer one wins."""

    def __init__(self, backend: Any, texts: Tokenization) -> None:
        self._backend, self._texts = backend, texts

    def names(self) -> list[str]:
        return ["twice"]

    def cost(self, strategy: StrategyRequest) -> StrategyCost:
        if set(strategy.options) - {"pause"}:
            raise DataError(
                f"strategy {strategy.name} has no option {next(iter(strategy.options))}"
            )
        return StrategyCost(2, 2)

    async def run(self, asked: ServingRequest, prefix: PrefixRef) -> StrategyResult:
        assert asked.strategy is not None
        await asyncio.sleep(asked.strategy.options.get("pause", 0))
        ids = asked.prompts[0].ids
        sampled = [
            GenerateRequest(f"{asked.id}/{i}", ids, prefix, asked.sampling, asked.seed + i)
            for i in range(2)
        ]
        done = await self._backend.generate(sampled)
        best = max(done, key=lambda c: len(c.token_ids))
        tokens = sum(len(c.token_ids) for c in done)
        spent = TokenSpend(tokens, 2 * len(ids), 1, 2, 0.5)
        text = self._texts.decode(best.token_ids)
        votes = [len(c.token_ids) for c in done]
        return StrategyResult(text, text, spent, best.finish_reason, details={"votes": votes})


def an_api_key(name: str, secret: str, **spec: Any) -> ApiKey:
    return ApiKey.of(name, ApiKeySpec(env="IN_TESTS", **spec), secret)


def new_house(
    directory: Path,
    backend: Any,
    strategies: Callable[[Any, Tokenization], StrategyCatalog] = Twice,
    **more: Any,
) -> ServerConfig:
    texts = Tokenization(load_tokenizer(str(READER)))
    base = read_base(READER)
    limits = RequestLimits(max_tokens=512, context=base.context, max_choices=64)
    house = ServerConfig(
        MODEL, backend, texts, CartridgeStore(directory / "library", base),
        strategies(backend, texts),
        limits, END, HttpSpec(**{k: more.pop(k) for k in list(more) if k in HttpSpec.model_fields}),
    )  # fmt: skip
    return replace(house, **more)


def cartridge(seed: int = 0, tokens: int = 8, **shape: Any) -> torch.Tensor:
    """Keys and values as the tiny reader has them: of drawn tokens."""
    ids = torch.randint(6, 1400, (tokens,), generator=torch.Generator().manual_seed(seed))
    return document_kv(model(), (1, *ids.tolist()[1:]))


def add_cartridge(library: CartridgeStore, name: str, seed: int = 0, tokens: int = 8) -> None:
    with library.incoming() as file:
        save_file({"kv": cartridge(seed, tokens)}, file)
        library.add(name, file, {"seed": seed})


@dataclass
class Served:
    """A server in a thread of its own."""

    url: str
    door: Server
    house: ServerConfig
    backend: Any
    server: uvicorn.Server = field(repr=False, default=None)  # type: ignore[assignment]


@contextlib.contextmanager
def serving(
    directory: Path,
    pause: float = 0.0,
    ends: frozenset[int] = END,
    home: Path = READER,
    **more: Any,
) -> Iterator[Served]:
    """A door over an engine of its own, reached over TCP; `ends` end its responses."""
    backend = InProcess(pause, ends, home)
    house = new_house(directory, backend, **more)
    started: list[Server] = []
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server: list[uvicorn.Server] = []

    async def serve() -> None:
        door = create_server(house)
        started.append(door)
        config = uvicorn.Config(
            door.app, log_config=None, access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=2, **limited(house.http),
        )  # fmt: skip
        server.append(LimitedServer(config))
        await server[0].serve(sockets=[listening])
        await door.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not (server and server[0].started):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        yield Served(url, started[0], house, backend, server[0])
    finally:
        server[0].should_exit = True
        thread.join(20)
        listening.close()
        backend.close()
        assert not thread.is_alive(), "the server did not end"


def wait_until(true: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


def raw(served: Served, path: str, body: Any = None, method: str = "POST", **headers: str) -> Any:
    """(status, headers, body) by hand: what no client would send."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    connection.request(method, path, data if method in ("POST", "PUT") else None, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def refused(served: Served, path: str, body: Any, **headers: str) -> tuple[int, str, str]:
    status, _, content = raw(served, path, body, **headers)
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["param"], error["message"]
