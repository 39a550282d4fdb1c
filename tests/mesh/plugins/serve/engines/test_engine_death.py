"""A server of two generators, or one, whose engines die under load."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from openai import AsyncOpenAI, InternalServerError
from rooms.services.dying_engines import POISON, DyingGenerator
from serving_setup import END, MODEL, new_house
from vllm_replica import require_vllm

from cartridge_forge.plugins.serve.app import create_server
from cartridge_forge.plugins.serve.engine.pool_backend import PoolBackend
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.plugins import SHIPPED
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling, StopCondition
from cartridge_forge.services.mesh import open_generators
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.roles import ENGINE_GENERATOR

SERVE = str(Path(__file__).resolve().parents[5] / "meshes/serve.yaml")
PROMPT = [60, 77, 84, 226]
LIMIT = 60.0
VLLM_LIMIT = 400.0  # to start one on a busy machine
ENGINES = [
    pytest.param("torch", id="torch"),
    pytest.param("vllm", id="vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(1200)]),
]


@dataclass
class Live:
    url: str
    pool: Pool
    backend: PoolBackend
    notes: list[tuple[str, dict[str, Any]]]
    ready: list[int] = field(default_factory=list)  # statuses of /ready, one after the other

    def client(self) -> AsyncOpenAI:
        limits = httpx2.Limits(max_connections=None)
        http = httpx2.AsyncClient(limits=limits, timeout=VLLM_LIMIT)
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", http_client=http, max_retries=0
        )

    def events(self) -> list[tuple[str, str]]:
        return [(event, facts["replica"]) for event, facts in self.notes]


@asynccontextmanager
async def live(directory: Path, engine: str, replicas: int, restarts: int) -> AsyncIterator[Live]:
    """A server over generators that POISON kills, while /ready is asked all the time."""
    limit = VLLM_LIMIT if engine == "vllm" else LIMIT
    sets = [
        f"library={directory / 'library'}", f"generator.backend={engine}", "spares=0",
        f"roles.generator.replicas={replicas}", f"roles.generator.restarts={restarts}",
        f"spawn_timeout_s={VLLM_LIMIT}", "health.suspect_after_s=30", "health.dead_after_s=60",
        *(["generator.kv_gib=0.1"] if engine == "vllm" else []),
    ]  # fmt: skip
    spec = load_serve(SERVE, sets=sets).spec
    notes: list[tuple[str, dict[str, Any]]] = []
    service, pool = await open_generators(
        spec.model, spec.generator, spec.roles.generator, {"none": (1,)}, END,
        health=spec.health, spawn_timeout_s=spec.spawn_timeout_s, call_timeout_s=limit,
        note=lambda event, **facts: notes.append((event, facts)),
    )  # fmt: skip
    try:
        await service.ready()
        backend = PoolBackend(pool, limit)
        door = create_server(new_house(directory, backend, deadline_s=limit))
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        web = uvicorn.Server(uvicorn.Config(door.app, log_config=None, lifespan="off", ws="none"))
        web.capture_signals = nullcontext  # type: ignore[method-assign]
        serving = asyncio.create_task(web.serve(sockets=[listening]))
        found = Live(f"http://127.0.0.1:{listening.getsockname()[1]}", pool, backend, notes)
        asking = asyncio.create_task(keep_asking(found))
        try:
            yield found
        finally:
            asking.cancel()
            web.should_exit = True
            await serving
            await door.close()
    finally:
        await service.stop()


async def keep_asking(found: Live) -> None:
    async with httpx2.AsyncClient(timeout=VLLM_LIMIT) as http:
        while True:
            found.ready.append((await http.get(f"{found.url}/ready")).status_code)
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def _dying(monkeypatch: pytest.MonkeyPatch) -> None:
    (roles,) = (plugin.roles for plugin in SHIPPED if ENGINE_GENERATOR in plugin.roles)
    place = f"{DyingGenerator.__module__}:{DyingGenerator.__name__}"
    monkeypatch.setitem(roles, ENGINE_GENERATOR, place)


async def answered(client: AsyncOpenAI, seed: int, stream: bool) -> str:
    """The text of one completion."""
    wanted: Any = {"model": MODEL, "prompt": PROMPT, "seed": seed, "max_tokens": 60}
    if not stream:
        return (await client.completions.create(**wanted, temperature=1.5)).choices[0].text
    text = ""
    async for chunk in await client.completions.create(**wanted, temperature=1.5, stream=True):
        text += chunk.choices[0].text
    return text


def mapped_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(VLLM_LIMIT):
        while not true():  # noqa: ASYNC110 - another's state, without an event of its own
            await asyncio.sleep(0.005)


async def poison(client: AsyncOpenAI) -> tuple[str, str]:
    """The code, and whether to send it again, of the error that POISON gets."""
    with pytest.raises(InternalServerError) as refused:
        await client.completions.create(model=MODEL, prompt=[60, *POISON], max_tokens=4)
    error = refused.value
    assert error.status_code == 500, error
    assert "2 engines in turn died" in str(error)
    assert "no memory for this pass" in str(error)
    return str(error.code), error.response.headers["x-should-retry"]


def test_other_requests_are_answered_while_engines_die(tmp_path: Path) -> None:
    """A request that kills every engine, sent three times under load, ends two engines each time,
    the second when the first is replaced. A budget of three restarts is not spent by it."""
    times = 3

    async def scenario() -> None:
        async with (
            live(tmp_path, "torch", replicas=2, restarts=3) as found,
            found.client() as client,
        ):
            alone = [await answered(client, seed, False) for seed in range(8)]
            ended = asyncio.Event()
            answers: list[tuple[int, str]] = []

            async def load(worker: int) -> None:
                turn = worker
                while not ended.is_set():
                    seed = turn % 8
                    answers.append((seed, await answered(client, seed, turn % 3 == 0)))
                    turn += 4

            loading = [asyncio.create_task(load(worker)) for worker in range(4)]
            await until(lambda: len(answers) > 8)
            for _ in range(times):
                before = len(answers)
                assert await poison(client) == ("engine_died", "false")
                assert len(answers) > before, "nothing was answered while engines died"
                await found.pool.settled(VLLM_LIMIT)
            ended.set()
            await asyncio.gather(*loading)
            assert [text for seed, text in answers if text != alone[seed]] == []
            # There was a generator at all times, and the one that was lost last was back before
            # the next was.
            assert set(found.ready) == {200}
            assert [event for event, _ in found.events()] == ["replica_lost", "replica_back"] * (
                2 * times
            )
            lost = [facts for event, facts in found.notes if event == "replica_lost"]
            assert {facts["cause"] for facts in lost} == {"engine"}
            assert all("MemoryError: no memory" in facts["reason"] for facts in lost)
            status = found.pool.status()
            assert (status.engine_deaths, status.restarts) == (2 * times, 2 * times)

    asyncio.run(scenario())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_only_engine_is_replaced(engine: str, tmp_path: Path) -> None:
    """With one generator the server says that it is not ready, and what comes meanwhile waits."""
    if engine == "vllm":
        require_vllm()

    async def scenario() -> None:
        async with (
            live(tmp_path, engine, replicas=1, restarts=9) as found,
            found.client() as client,
        ):
            alone = await answered(client, 1, False)
            killing = asyncio.create_task(poison(client))
            await until(lambda: bool(found.notes))
            assert await answered(client, 1, False) == alone
            assert await answered(client, 1, True) == alone
            assert await killing == ("engine_died", "false")
            await found.pool.settled(VLLM_LIMIT)
            assert await answered(client, 1, False) == alone
            await until(lambda: found.ready[-1] == 200)
            pairs = zip([0, *found.ready], found.ready, strict=False)
            changes = [now for before, now in pairs if before != now]
            assert changes[:2] == [200, 503]  # that between the two deaths may last no time
            assert [event for event, _ in found.events()] == ["replica_lost", "replica_back"] * 2
            assert found.pool.status().engine_deaths == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_request_kills_no_engine(engine: str, tmp_path: Path) -> None:
    """Requests that no check of the HTTP API has seen, as a strategy could make them."""
    if engine == "vllm":
        require_vllm()
    none = PrefixRef("document/none", 0)

    def one(name: str, ids: tuple[int, ...] = (60, 77), **fields: Any) -> GenerateRequest:
        fields = {"sampling": Sampling(max_tokens=4), "seed": 1, **fields}
        return GenerateRequest(name, ids, none, **fields)

    bad = [
        (one("empty", ()), "empty prompt"),
        (one("beyond", (60, 10**6)), "token id 1000000 at 1"),
        (one("negative", (-1,)), "token id -1 at 0"),
        (one("none", sampling=Sampling(max_tokens=0)), "sampling.max_tokens 0"),
        (one("many", sampling=Sampling(max_tokens=10**12)), "sampling.max_tokens"),
        (one("cold", sampling=Sampling(-1.0, max_tokens=4)), "sampling.temperature -1.0"),
        (one("nan", sampling=Sampling(float("nan"), max_tokens=4)), "sampling.temperature nan"),
        (one("mass", sampling=Sampling(top_p=7.0, max_tokens=4)), "sampling.top_p 7.0"),
        (one("top", sampling=Sampling(top_k=-3, max_tokens=4)), "sampling.top_k -3"),
        (one("seed", seed=2**70), "seed"),
        (one("logprobs", top_logprobs=-2), "top_logprobs -2"),
        (one("draw", first_draw=-5), "first_draw -5"),
        (one("pattern", until=StopCondition(patterns=("(",))), "no regular expression"),
        (one("window", until=StopCondition(window=4, top=0)), "until.top 0"),
    ]

    async def scenario() -> None:
        async with live(tmp_path, engine, replicas=1, restarts=0) as found:
            process = found.pool.replicas[0].process
            assert process is not None
            pid = process.pid
            running = asyncio.create_task(found.backend.generate([one("good")]))
            for request, said in bad:
                with pytest.raises(DataError, match=said):
                    await found.backend.generate([request])
            (good,) = await running
            assert good.finish_reason in ("stop", "length")
            assert process.pid == pid
            assert found.notes == []

    asyncio.run(scenario())


def test_a_generator_out_of_memory_loses_nothing(tmp_path: Path) -> None:
    """A process that gets no more memory from the system, and requests that need some: whether its
    engine or the whole process dies of it, all are answered by the other one."""

    async def scenario() -> None:
        async with (
            live(tmp_path, "torch", replicas=2, restarts=5) as found,
            found.client() as client,
        ):

            async def ask() -> list[str]:
                reply = await client.completions.create(
                    model=MODEL, prompt=PROMPT * 30, max_tokens=24, n=32, seed=5, temperature=1.5
                )
                return [choice.text for choice in reply.choices]

            process = found.pool.replicas[0].process
            assert process is not None
            size = mapped_bytes(process.pid)
            resource.prlimit(process.pid, resource.RLIMIT_AS, (size, size))
            together = await asyncio.gather(*(ask() for _ in range(4)))
            assert ("replica_lost", "generator[0]") in found.events()
            await found.pool.settled(VLLM_LIMIT)
            assert together == [await ask()] * 4

    asyncio.run(scenario())
