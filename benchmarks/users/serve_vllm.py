"""`forge serve` on vLLM against vLLM's own server: tokens a second and the first token.

    PYTHONPATH=.:tests/fakes python -m benchmarks.users.serve_vllm [--stream-interval 4]

Both servers stand at the same time, each with one engine on one thread, the shipped reader in
float32 and the same bounds of a step. They take turns in every round, in any order, at each number
of streams: chat completions over HTTP, sampled at temperature 2, streamed. No cartridge is named.
Ratios are of `forge serve` over vLLM's own within a round, medians over the rounds. vLLM sends a
stream's tokens in messages of `--stream-interval`, by default each for itself; `forge serve` sends
the first at once, and what follows every 20 ms (actors/engine_generator.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from vllm_server import stock_server

from benchmarks.record import benchmark
from benchmarks.serving import address, load, server
from benchmarks.users.vllm_plugin import READER, drawn, library

SIDES = ("forge", "vllm")
FIGURES = ("tokens_per_second", "first_token_ms_median")
BATCHED, SEQUENCES = 2048, 32  # the most tokens, and requests, of a step
CACHE = 200_000_000  # bytes
REQUESTS = 8  # of a turn with one stream; four a stream with more
OURS = (
    "generator.backend=vllm", f"generator.chunk_tokens={BATCHED}", "generator.kv_gib=0.2",
    "roles.generator.threads=1", f"roles.generator.max_ongoing={SEQUENCES}",
)  # fmt: skip
OPTIONS = {"--max-num-batched-tokens": str(BATCHED), "--kv-cache-memory-bytes": str(CACHE)}


def measure(arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    turns = random.Random(0)
    rounds: dict[int, list[dict[str, dict[str, float]]]] = {n: [] for n in arguments.streams}
    with tempfile.TemporaryDirectory() as folder, server(1, *OURS) as process:
        store = library(Path(folder, "library"), drawn(random.Random(0), 64))
        options = [word for option in OPTIONS.items() for word in option]
        options += ["--stream-interval", str(arguments.stream_interval)]
        at = {SIDES[0]: address(process)}
        with stock_server(READER, store.directory, Path(folder), *options) as stock:
            at[SIDES[1]] = stock.url.removeprefix("http://")
            for number in range(arguments.rounds + 1):
                for streams, stream_rounds in rounds.items():
                    requests = REQUESTS if streams == 1 else 4 * streams
                    one = {
                        side: asyncio.run(load(at[side], requests, streams))
                        for side in turns.sample(SIDES, k=2)
                    }
                    if number:  # the first opens connections and compiles
                        stream_rounds.append(one)
                        print(streams, json.dumps(one), flush=True)
    ratios = {
        f"{figure}, {streams} streams, over vLLM's own": statistics.median(
            one[SIDES[0]][figure] / one[SIDES[1]][figure] for one in pairs
        )
        for streams, pairs in rounds.items()
        for figure in FIGURES
    }
    return ratios, {str(streams): pairs for streams, pairs in rounds.items()}


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--rounds": (5, "measured rounds"),
            "--streams": ([1, 8, 32], "requests in flight"),
            "--stream-interval": (1, "tokens of a message of vLLM's own server"),
        },
        config={**OPTIONS, "requests": REQUESTS, "threads": 1},
    )
