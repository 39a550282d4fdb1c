"""The door over a real pool: two generators in processes of their own, killed under load."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import gc
import json
import os
import re
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from openai import AsyncOpenAI
from safetensors.torch import save
from serving_setup import END, MODEL, QUESTION, add_cartridge, cartridge, new_house

from cartridge_forge.plugins.library.names import parse_cartridge
from cartridge_forge.plugins.serve.app import Server, create_server
from cartridge_forge.plugins.serve.engine.pool_backend import PoolBackend
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling
from cartridge_forge.services.mesh import open_generators
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.pool.service import Service

SERVE = str(Path(__file__).resolve().parents[4] / "meshes/serve.yaml")
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]


@dataclass
class Live:
    """A server and its pool, on one event loop with the tests' own clients."""

    runner: asyncio.Runner
    url: str
    pool: Pool
    door: Server
    notes: list[tuple[str, Any]]

    def client(self) -> AsyncOpenAI:
        limits = httpx2.Limits(max_connections=None)
        http = httpx2.AsyncClient(limits=limits, timeout=60)
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", http_client=http)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    directory = tmp_path_factory.mktemp("live")
    spec = load_serve(SERVE, sets=[f"library={directory / 'library'}"]).spec
    notes: list[tuple[str, Any]] = []

    async def start() -> tuple[Service, Pool, Server, uvicorn.Server, asyncio.Task[None], str]:
        def note(event: str, **facts: Any) -> None:
            notes.append((event, facts))

        service, pool = await open_generators(
            spec.model, spec.generator, spec.roles.generator, {"none": (1,)}, END,
            health=spec.health, spawn_timeout_s=spec.spawn_timeout_s,
            call_timeout_s=spec.http.deadline_s, spares=spec.spares, note=note,
        )  # fmt: skip

        await service.ready()
        service.keep_spares()
        house = new_house(directory, PoolBackend(pool, 60.0))
        add_cartridge(house.library, "p1", seed=1)
        door = create_server(house)
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(door.app, log_config=None, lifespan="off", ws="none")
        web = uvicorn.Server(config)
        web.capture_signals = nullcontext  # type: ignore[method-assign]
        task = asyncio.create_task(web.serve(sockets=[listening]))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        return service, pool, door, web, task, url

    async def stop() -> None:
        web.should_exit = True
        await task
        await door.close()
        await service.stop()

    with asyncio.Runner() as runner:
        service, pool, door, web, task, url = runner.run(start())
        yield Live(runner, url, pool, door, notes)
        runner.run(stop())


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - another's state, without an event of its own
            await asyncio.sleep(0.005)


async def streamed(client: AsyncOpenAI, seed: int, **more: Any) -> tuple[str, str | None, int]:
    """(text, why it ended, tokens sampled) of one stream."""
    text, reason, tokens = "", None, 0
    async for chunk in await client.chat.completions.create(
        messages=CHAT, seed=seed, stream=True, stream_options={"include_usage": True},
        **{"model": MODEL, "max_tokens": 12, **more},
    ):  # fmt: skip
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    return text, reason, tokens


def test_two_hundred_at_once_lose_nothing(live: Live) -> None:
    async def all_at_once() -> list[Any]:
        async with live.client() as client:
            names = [MODEL, f"{MODEL}+p1"]
            together = await asyncio.gather(
                *(streamed(client, i, model=names[i % 2]) for i in range(200))
            )
            alone = [await streamed(client, i, model=names[i % 2]) for i in range(0, 200, 20)]
            return [together, alone]

    together, alone = live.runner.run(all_at_once())
    assert len(together) == 200
    assert all(reason in ("stop", "length") and tokens for _, reason, tokens in together)
    assert together[::20] == alone


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, once what is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    kilobytes = re.findall(r"Pss_Anon:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())[0]
    return int(kilobytes) * 1024


def test_streams_that_have_ended_keep_no_memory(live: Live) -> None:
    """A port of Monarch that is opened for a stream and given up at its end keeps 9 kB of it."""
    backend = live.door.handler.config.backend
    prefix, sampling = PrefixRef("document/none", 0), Sampling(temperature=0.0, max_tokens=2)

    async def streams(count: int) -> None:
        for number in range(count):  # one after the other: between two of them nobody listens
            request = GenerateRequest(f"kept/{number}", (1, 100), prefix, sampling, 0)
            await backend.generate([request], lambda chunk: None)

    live.runner.run(streams(100))
    before = anonymous_bytes()
    live.runner.run(streams(400))
    assert anonymous_bytes() - before < 400 * 3000


def test_a_replica_killed_under_load_loses_nothing(live: Live) -> None:
    async def once(kill: bool) -> list[Any]:
        async with live.client() as client:
            asked = [
                asyncio.create_task(streamed(client, i, temperature=1.5, max_tokens=200))
                for i in range(30)
            ]
            if kill:
                await until(lambda: live.pool.replicas[0].ongoing >= 8)
                process = live.pool.replicas[0].process
                assert process is not None
                os.kill(process.pid, signal.SIGKILL)
            return await asyncio.gather(*asked)

    retries = live.pool.retries
    killed = live.runner.run(once(True))
    assert live.pool.retries > retries, "nobody was decoding there"
    assert killed == live.runner.run(once(False))
    assert "replica_lost" in [event for event, _ in live.notes]
    live.runner.run(live.pool.settled(60))


def test_a_replica_killed_while_documents_verify_loses_nothing(live: Live) -> None:
    """Another replica reads the document anew, drafts and verifies, and says the same."""
    library = live.door.handler.config.library
    library.keep_document(library.get(parse_cartridge("p1")), "the surgeon is doctor novak.")

    async def once(kill: bool) -> list[Any]:
        async with live.client() as client:
            asked = [
                asyncio.create_task(
                    streamed(
                        client, i, model=f"{MODEL}+p1", temperature=1.5, max_tokens=100,
                        extra_body={"forge": {"verify": [True, "after"][i % 2]}},
                    )
                )
                for i in range(24)
            ]  # fmt: skip
            if kill:
                await until(lambda: live.pool.replicas[0].ongoing >= 4)
                process = live.pool.replicas[0].process
                assert process is not None
                os.kill(process.pid, signal.SIGKILL)
            return await asyncio.gather(*asked)

    retries = live.pool.retries
    killed = live.runner.run(once(True))
    assert live.pool.retries > retries, "nobody was decoding there"
    assert killed == live.runner.run(once(False))
    live.runner.run(live.pool.settled(60))


def test_who_leaves_ends_the_decoding_in_the_replica(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave() -> None:
        async with live.client() as client:
            stream = await client.completions.create(
                model=MODEL, prompt=[60, 77, 84], max_tokens=512, temperature=2, n=8, stream=True
            )
            async for _ in stream:
                break
            await stream.close()
        await until(lambda: not live.door.handler.admission.pending and not live.pool.in_flight)

    spans: list[TraceSpan] = []
    monkeypatch.setattr(live.pool, "_observe", spans.append)
    live.runner.run(leave())
    ended = [(s.name, s.facts["outcome"]) for s in spans if s.name == "cancel"]
    assert ended.count(("cancel", "ok")) >= len(live.pool)


def test_a_cartridge_uploaded_while_it_serves(live: Live) -> None:
    async def use() -> list[Any]:
        async with httpx2.AsyncClient() as http:
            for seed in (5, 6):
                data = save({"kv": cartridge(seed)})
                added = await http.post(f"{live.url}/admin/cartridges/new", content=data)
                assert added.status_code == 201, added.text
        async with live.client() as client:
            return await asyncio.gather(
                *(streamed(client, 1, model=f"{MODEL}+new@{v}") for v in (1, 2, 1, 2))
            )

    one, two, again, twice = live.runner.run(use())
    assert (one, two) == (again, twice)
    # A replica that comes later has them too.
    process = live.pool.replicas[1].process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)

    async def settle() -> None:
        await until(lambda: process is not live.pool.replicas[-1].process)
        await live.pool.settled(60)

    live.runner.run(asyncio.wait_for(settle(), 60))
    assert live.runner.run(use())[0] == one


async def run(*words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode()


def test_curl(live: Live) -> None:
    body = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 9, "stream": True})
    code, said = live.runner.run(
        run(
            "curl", "-sN", f"{live.url}/v1/chat/completions", "-d", body,
            "-H", "content-type: application/json",
        )
    )  # fmt: skip
    assert code == 0
    events = said.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(e.removeprefix("data: ")) for e in events[:-2] if e[0] != ":"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert live.runner.run(run("curl", "-sf", f"{live.url}/ready"))[0] == 0


def test_a_client_of_tokasaurus(live: Live) -> None:
    """What its public clients send and read: plugins/serve/apis/tokasaurus.py says which."""

    async def ask(route: str, **body: Any) -> Any:
        async with httpx2.AsyncClient(base_url=live.url) as http:
            answer = await http.post(route, json=body)
            return answer.status_code, answer.json()

    local = [{"id": "p1", "source": "local", "force_redownload": True}]
    status, answer = live.runner.run(
        ask(
            "/custom/cartridge/completions", model="default", prompt=[4, 226, 60, 2, 5],
            max_tokens=6, temperature=1.0, top_p=1.0, n=2, seed=4, logprobs=3,
            logprobs_in_fingerprint=True, cartridges=local,
        )
    )  # fmt: skip
    assert (status, answer["object"]) == (200, "text_completion")
    assert [c["logprobs"] for c in answer["choices"]] == [None, None]
    assert answer["usage"]["prompt_tokens"] == 10  # once for each choice, as there
    told = json.loads(answer["system_fingerprint"])
    for i, ids in enumerate(told["completion_ids"]):
        chosen = unpacked(told["packed_chosen_logprobs"][i], "f")
        top_ids = unpacked(told["packed_topk_indices"][i], "i")
        top = unpacked(told["packed_topk_logprobs"][i], "f")
        assert len(chosen) == len(ids)
        assert len(top_ids) == len(top) == 3 * len(ids)
        for t, token in enumerate(ids):
            row = dict(zip(top_ids[3 * t : 3 * t + 3], top[3 * t : 3 * t + 3], strict=True))
            assert row.get(token, chosen[t]) == pytest.approx(chosen[t], abs=1e-5)
    chat: dict[str, Any] = {"model": "todo", "messages": CHAT, "max_completion_tokens": 9}
    chat |= {"temperature": 0, "apply_chat_template_overrides": {}, "cartridges": local}
    status, answer = live.runner.run(
        ask("/custom/cartridge/chat/completions", **chat, logprobs_in_fingerprint=True)
    )
    assert status == 200
    told = json.loads(answer["system_fingerprint"])
    assert told["completion_ids"][0][-1] == 2  # with the end token
    assert told["packed_topk_indices"] is None
    assert answer["choices"][0]["message"]["content"]
    for cartridges, said in (
        ([{"id": "x/y", "source": "wandb"}], "not from wandb"),
        ([{"id": "/etc/passwd", "source": "local"}], "add it to the library first"),
        ([{"id": "p9", "source": "local"}], "there is no cartridge p9"),
    ):
        refused = {**chat, "cartridges": cartridges}
        status, answer = live.runner.run(ask("/custom/cartridge/chat/completions", **refused))
        assert status == 400
        assert said in answer["error"]["message"]


def unpacked(text: str, kind: str) -> list[Any]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}{kind}", data))


def test_nobody_can_say_where_this_server_sends_its_key(live: Live) -> None:
    """There is nowhere that it sends anything: no field of a request names an address."""
    schema = json.dumps(live.door.api.openapi()["components"]["schemas"])
    for word in ("base_url", "api_key", "endpoint", "callback", "webhook"):
        assert word not in schema
