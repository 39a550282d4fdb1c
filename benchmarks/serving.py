"""The door's throughput and time to first token, at pools of one and of two generators.

    python -m benchmarks.serving [--requests 96] [--together 32] [--out serving.json]

Starts `forge serve` with the tiny reader for each size, and streams chat completions from it over
TCP: one after the other, then `--together` at a time. Ratios within one run say more than absolute
figures, which depend on who else uses the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.record import provenance, write

QUESTION = "List all findings of this patient."
TOKENS = 48


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=96, help="of each measurement")
    parser.add_argument("--together", type=int, default=32, help="requests in flight")
    parser.add_argument("--out", type=Path, default=Path("serving.json"))
    return parser.parse_args()


@contextmanager
def served(replicas: int, directory: str) -> Iterator[str]:
    """The base URL of a server with so many generators."""
    code = "import sys; from forge_run.cli import forge; sys.exit(forge())"
    sets = [f"roles.generator.replicas={replicas}", "http.listen=127.0.0.1:0"]
    sets += [f"library={directory}/library", "spares=0"]
    words = [w for s in sets for w in ("--set", s)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "meshes/serve.yaml", *words],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = next((line for line in process.stdout if "serving" in line), "")
        found = re.search(r"on (http://\S+);", said)
        if found is None:
            raise SystemExit("the server did not start")
        yield f"{found[1]}/v1"
    finally:
        process.terminate()
        process.communicate()


async def measure(url: str, requests: int, together: int) -> dict[str, float]:
    """Seconds to the first token (median, 95th percentile), and tokens a second in all."""
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
                model="clinic-reader", messages=[{"role": "user", "content": QUESTION}],
                max_tokens=TOKENS, temperature=2, seed=seed, stream=True,
                stream_options={"include_usage": True},
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


def main() -> None:
    options = parse_arguments()
    told = provenance("serving", vars(options) | {"tokens": TOKENS})
    pools = {}
    for replicas in (1, 2):
        with tempfile.TemporaryDirectory() as directory, served(replicas, directory) as url:
            alone = asyncio.run(measure(url, max(8, options.requests // 6), 1))
            together = asyncio.run(measure(url, options.requests, options.together))
        pools[replicas] = {"one_at_a_time": alone, "together": together}
        print(replicas, json.dumps(pools[replicas]), flush=True)
    speeds = [pools[n]["together"]["tokens_per_second"] for n in (1, 2)]
    ratio = {f"{options.together} at a time, 2 generators over 1": speeds[1] / speeds[0]}
    write(options.out, told, ratio, {"pools": pools})


if __name__ == "__main__":
    main()
