"""The door's throughput and time to first token, at work and from nothing.

    python -m benchmarks.serving [--requests 96] [--together 32] [--out serving.json]
    python -m benchmarks.serving --cold-start [--runs 5] [--generators 1] [--out cold_start.json]

At work: starts `forge serve` with the tiny reader, once with one generator and once with two, and
streams chat completions from it over TCP: one after the other, then `--together` at a time. Ratios
within one run say more than absolute figures, which depend on who else uses the cores.

From nothing: what a request waits that wakes a door.

    command  --door-->  first process of a generator  --generators-->  /ready is 200
             --first request-->  its first token

Starts the server anew each time and watches it from outside: no server knows when its own command
was given. Files are in the page cache after the first start, which is shown apart; neither the pull
of an image nor the weights of a large model are in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI

from benchmarks.meters import processor_seconds
from benchmarks.record import benchmark

CODE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
MESSAGES: list[Any] = [{"role": "user", "content": "List all findings of this patient."}]
TOKENS = 48
PATIENCE = 300.0
STEP = 0.01
# Imports of the server before it starts a process, and a generator's work before it is ready.
ALONE = {
    "door's imports": (
        "import cartridge_forge.forge_run.commands.serve, cartridge_forge.services.roles; "
        "import cartridge_forge.plugins.serve.app, uvicorn"
    ),
    "generator's imports": (
        "import cartridge_forge.actors.model, transformers.models.llama.modeling_llama"
    ),
    "generator's imports and model": (
        "import cartridge_forge.actors.model; "
        "from cartridge_forge.learning.model.loading import load_model; "
        "load_model('models/clinic-reader')"
    ),
}


@contextmanager
def server(generators: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a server process just started, with `generators` generators and `more` settings."""
    with tempfile.TemporaryDirectory() as directory:
        sets = [
            f"roles.generator.replicas={generators}", "http.listen=127.0.0.1:0", "spares=0",
            f"library={directory}/library", *more,
        ]  # fmt: skip
        words = [word for one in sets for word in ("--set", one)]
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, "serve", "meshes/serve.yaml", *words],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()


def address(process: subprocess.Popen[str]) -> str:
    """Return the address it listens on, `127.0.0.1:40123`, once it prints it."""
    assert process.stdout is not None
    line = next((line for line in process.stdout if "serving" in line), "")
    match = re.search(r"on http://(\S+);", line)
    if match is None:
        raise SystemExit("the server did not start")
    return match[1]


def client(address: str) -> AsyncOpenAI:
    http = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None), timeout=PATIENCE)
    return AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", http_client=http)


async def streamed(client: AsyncOpenAI, seed: int, most: int) -> tuple[float, int]:
    """Return seconds from a request to the first text of its stream, and the stream's tokens."""
    start, first, tokens = time.perf_counter(), 0.0, 0
    async for chunk in await client.chat.completions.create(
        model="clinic-reader", messages=MESSAGES, max_tokens=most, temperature=2,
        seed=seed, stream=True, stream_options={"include_usage": True},
    ):  # fmt: skip
        if not first and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - start
        if chunk.usage:
            tokens += chunk.usage.completion_tokens
    return first or time.perf_counter() - start, tokens


async def load(address: str, requests: int, together: int) -> dict[str, float]:
    """Return seconds to the first token (median, 95th percentile), and tokens per second in all."""
    room = asyncio.Semaphore(together)

    async def one(client: AsyncOpenAI, seed: int) -> tuple[float, int]:
        async with room:
            return await streamed(client, seed, TOKENS)

    async with client(address) as asking:
        await one(asking, 0)
        start = time.perf_counter()
        streams = await asyncio.gather(*(one(asking, i) for i in range(requests)))
        seconds = time.perf_counter() - start
    firsts, tokens = zip(*streams, strict=True)
    return {
        "requests_per_second": round(requests / seconds, 2),
        "tokens_per_second": round(sum(tokens) / seconds, 1),
        "first_token_ms_median": round(1e3 * statistics.median(firsts), 1),
        "first_token_ms_p95": round(1e3 * statistics.quantiles(firsts, n=20)[-1], 1),
    }


def at_work(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    pools: dict[int, dict[str, dict[str, float]]] = {}
    for generators in (1, 2):
        with server(generators) as process:
            at = address(process)
            one_at_a_time = asyncio.run(load(at, max(8, options.requests // 6), 1))
            together = asyncio.run(load(at, options.requests, options.together))
        pools[generators] = {"one_at_a_time": one_at_a_time, "together": together}
        print(generators, json.dumps(pools[generators]), flush=True)
    speeds = [pools[n]["together"]["tokens_per_second"] for n in (1, 2)]
    ratio = {f"{options.together} at a time, 2 generators over 1": speeds[1] / speeds[0]}
    return ratio, {"pools": pools}


# -- starting -------------------------------------------------------------------------------------


def start(generators: int) -> dict[str, float]:
    """Return seconds of each part of one start, and of a second request's first token. On a shared
    machine the processor seconds of its processes are the better measure."""
    start_time = time.perf_counter()
    with server(generators) as process:
        spawned = until(lambda: has_child(process.pid))
        door_cpu = cpu_seconds(process.pid)
        at = address(process)
        ready = until(lambda: is_ready(at))
        all_cpu = cpu_seconds(process.pid)
        first, second = asyncio.run(first_tokens(at))
    return {
        "door": spawned - start_time, "generators": ready - spawned, "first request": first,
        "in all": ready - start_time + first, "second request": second,
        "door, of the cores": door_cpu, "until ready, of the cores": all_cpu,
    }  # fmt: skip


def until(so: Callable[[], bool]) -> float:
    """Return the time.perf_counter at which the condition became true."""
    deadline = time.perf_counter() + PATIENCE
    while not so():
        if time.perf_counter() > deadline:
            raise SystemExit(f"it did not come up within {PATIENCE:g} s")
        time.sleep(STEP)
    return time.perf_counter()


def has_child(pid: int) -> bool:
    """Return whether it started a process of Monarch's."""
    return any(b"monarch" in Path(f"/proc/{c}/cmdline").read_bytes() for c in children(pid))


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def cpu_seconds(pid: int) -> float:
    """Return processor seconds of a process and all its descendants so far."""
    return processor_seconds(pid, reaped=True) + sum(map(cpu_seconds, children(pid)))


def is_ready(address: str) -> bool:
    try:
        return httpx2.get(f"http://{address}/ready", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


async def first_tokens(address: str) -> list[float]:
    """Return seconds to the first text of two requests, one after the other."""
    async with client(address) as asking:
        return [(await streamed(asking, 1, 8))[0] for _ in range(2)]


def import_seconds(code: str) -> float:
    """Return processor seconds of a fresh Python that runs `code`."""
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    )


def spread(values: list[float]) -> dict[str, float]:
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 2) for name, value in figures.items()}


def from_nothing(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Print and return the first start, the spread of `runs` more, and of the imports alone."""
    first, *starts = [start(options.generators) for _ in range(1 + options.runs)]
    results = {
        "first_start": {name: round(value, 2) for name, value in first.items()},
        "starts": {name: spread([one[name] for one in starts]) for name in first},
        "alone, of the cores": {
            name: spread([import_seconds(code) for _ in range(options.runs)])
            for name, code in ALONE.items()
        },
    }
    print(json.dumps(results, indent=1))
    return {}, results


if __name__ == "__main__":
    benchmark(
        __doc__,
        lambda options: from_nothing(options) if options.cold_start else at_work(options),
        {
            "--out": Path("serving.json"),
            "--requests": (96, "of each measurement"),
            "--together": (32, "requests in flight"),
            "--cold-start": (False, "from nothing, and not at work"),
            "--runs": (5, "starts, after a first one"),
            "--generators": (1, "of every start"),
        },
        config={"tokens": TOKENS},
    )
