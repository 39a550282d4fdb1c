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
import http.client
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

from benchmarks.record import arguments, processor_seconds, provenance, write

CODE = "import sys; from forge_run.cli import forge; sys.exit(forge())"
MESSAGES: list[Any] = [{"role": "user", "content": "List all findings of this patient."}]
TOKENS = 48
PATIENCE = 300.0
STEP = 0.01
# Imports of the server before it starts a process, and a generator's work before it is ready.
ALONE = {
    "door's imports": "import forge_run.commands.serve, services.roles, serving.app, uvicorn",
    "generator's imports": "import actors.model_actors, transformers.models.llama.modeling_llama",
    "generator's imports and model": (
        "import actors.model_actors; from learning.model.loading import load_model; "
        "load_model('models/clinic-reader')"
    ),
}


@contextmanager
def server(generators: int) -> Iterator[subprocess.Popen[str]]:
    """Yield a server process just started, with `generators` generators."""
    with tempfile.TemporaryDirectory() as directory:
        sets = [f"roles.generator.replicas={generators}", "http.listen=127.0.0.1:0", "spares=0"]
        words = [w for s in [*sets, f"library={directory}/library"] for w in ("--set", s)]
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
    said = next((line for line in process.stdout if "serving" in line), "")
    found = re.search(r"on http://(\S+);", said)
    if found is None:
        raise SystemExit("the server did not start")
    return found[1]


async def measure(url: str, requests: int, together: int) -> dict[str, float]:
    """Return seconds to the first token (median, 95th percentile), and tokens per second in all."""
    import httpx2
    from openai import AsyncOpenAI

    room = asyncio.Semaphore(together)
    firsts: list[float] = []
    tokens = 0

    async def one(client: AsyncOpenAI, seed: int) -> None:
        nonlocal tokens
        async with room:
            begun, first = time.perf_counter(), None
            async for chunk in await client.chat.completions.create(
                model="clinic-reader", messages=MESSAGES, max_tokens=TOKENS, temperature=2,
                seed=seed, stream=True, stream_options={"include_usage": True},
            ):  # fmt: skip
                if first is None and chunk.choices and chunk.choices[0].delta.content:
                    first = time.perf_counter() - begun
                if chunk.usage:
                    tokens += chunk.usage.completion_tokens
            firsts.append(first or time.perf_counter() - begun)

    limits = httpx2.Limits(max_connections=None)
    http = httpx2.AsyncClient(limits=limits, timeout=120)
    async with AsyncOpenAI(base_url=url, api_key="none", http_client=http) as client:
        await one(client, 0)
        firsts, tokens = [], 0
        begun = time.perf_counter()
        await asyncio.gather(*(one(client, i) for i in range(requests)))
        seconds = time.perf_counter() - begun
    return {
        "requests_per_second": round(requests / seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_ms_median": round(1e3 * statistics.median(firsts), 1),
        "first_token_ms_p95": round(1e3 * statistics.quantiles(firsts, n=20)[-1], 1),
    }


def at_work(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    pools = {}
    for generators in (1, 2):
        with server(generators) as process:
            url = f"http://{address(process)}/v1"
            alone = asyncio.run(measure(url, max(8, options.requests // 6), 1))
            together = asyncio.run(measure(url, options.requests, options.together))
        pools[generators] = {"one_at_a_time": alone, "together": together}
        print(generators, json.dumps(pools[generators]), flush=True)
    speeds = [pools[n]["together"]["tokens_per_second"] for n in (1, 2)]
    ratio = {f"{options.together} at a time, 2 generators over 1": speeds[1] / speeds[0]}
    return ratio, {"pools": pools}


# -- starting -------------------------------------------------------------------------------------


def start(generators: int) -> dict[str, float]:
    """Return seconds of each part of one start, and of a second request's first token. On a shared
    machine the processor seconds of its processes are the better measure."""
    begun = time.perf_counter()
    with server(generators) as process:
        spawned = until(lambda: has_child(process.pid))
        door_cpu = cpu_seconds(process.pid)
        at = address(process)
        ready = until(lambda: is_ready(at))
        all_cpu = cpu_seconds(process.pid)
        first, second = first_token(at), first_token(at)
    return {
        "door": spawned - begun, "generators": ready - spawned, "first request": first,
        "in all": ready - begun + first, "second request": second,
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
    asking = http.client.HTTPConnection(address, timeout=5)
    try:
        asking.request("GET", "/ready")
        return asking.getresponse().status == 200
    except OSError:
        return False
    finally:
        asking.close()


def first_token(address: str) -> float:
    """Return seconds from the request to the first text of its stream."""
    body = {
        "model": "clinic-reader", "stream": True, "max_tokens": 8, "temperature": 2, "seed": 1,
        "messages": MESSAGES,
    }  # fmt: skip
    asking = http.client.HTTPConnection(address, timeout=PATIENCE)
    begun = time.perf_counter()
    asking.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = asking.getresponse()
    taken = 0.0
    for line in iter(answer.readline, b""):
        if not taken and line.startswith(b"data: {"):
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            if choices and choices[0]["delta"].get("content"):
                taken = time.perf_counter() - begun
    asking.close()
    return taken


def alone(code: str) -> float:
    """Return processor seconds of a fresh Python that runs `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def spread(values: list[float]) -> dict[str, float]:
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 2) for name, value in figures.items()}


def from_nothing(generators: int, runs: int) -> dict[str, Any]:
    """Print and return the first start, the spread of `runs` more, and of the imports alone."""
    before = start(generators)
    starts = [start(generators) for _ in range(runs)]
    results = {
        "first_start": {name: round(value, 2) for name, value in before.items()},
        "starts": {name: spread([one[name] for one in starts]) for name in before},
        "alone, of the cores": {
            name: spread([alone(code) for _ in range(runs)]) for name, code in ALONE.items()
        },
    }
    print(json.dumps(results, indent=1))
    return results


def main() -> None:
    parser = arguments(__doc__, "serving")
    parser.set_defaults(out=Path("serving.json"))
    parser.add_argument("--requests", type=int, default=96, help="of each measurement")
    parser.add_argument("--together", type=int, default=32, help="requests in flight")
    parser.add_argument("--cold-start", action="store_true", help="from nothing, and not at work")
    parser.add_argument("--runs", type=int, default=5, help="starts, after a first one")
    parser.add_argument("--generators", type=int, default=1, help="of every start")
    options = parser.parse_args()
    told = provenance("serving", vars(options) | {"tokens": TOKENS})
    if options.cold_start:
        found = from_nothing(options.generators, options.runs)
        write(options.out, told, {}, found)
    else:
        write(options.out, told, *at_work(options))


if __name__ == "__main__":
    main()
