"""Requests with a cartridge against requests with cached prompt tokens, on vLLM's own server.

    PYTHONPATH=.:tests/fakes python -m benchmarks.users.vllm_plugin [--rounds 60] [--tokens 64]

One stock server with our plugin, on the shipped reader, is asked over HTTP. Arms take turns in
every round, at each number of requests in flight:

    cartridge   a cartridge of P tokens is named
    none        nothing stands before the prompt
    prompt      P ordinary tokens stand before the prompt, in the prefix cache

The cartridge is the keys and values of those P tokens, so both arms compute and answer the same.
Prompts are new in every round and the same for all arms. Every other round is in reverse order.
Ratios are of two arms within a round. `by_processor_time` compares tokens per second of the
processor time of the server's processes, which other users of the cores hardly disturb.
The server's own count of cached prompt tokens must be that of the arm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from safetensors.torch import save_file
from vllm_server import StockServer, stock_server

from benchmarks.record import benchmark
from benchmarks.serving import client, cpu_seconds
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.protocols.files import REPOSITORY

READER = REPOSITORY / "models" / "clinic-reader"
BLOCK = 32  # tokens, of the tests' server
ARMS = ("cartridge", "none", "prompt")
NAME = "p"
HITS = "vllm:prefix_cache_hits_total"
# Turns are short, so that what else the machine does meets all arms of a round alike.
WAVES = 2
# The tests' server takes less at a step. And it forgets a prefix while the other arms have their
# turns, so that a turn would begin with a prefill.
OPTIONS = {"--max-num-batched-tokens": "2048", "--kv-cache-memory-bytes": "200000000"}

Ids = list[int]
Rounds = dict[str, list[float]]  # tokens per second of each round, by arm


def library(directory: Path, prefix: Ids) -> CartridgeStore:
    """Return a library of one cartridge: the keys and values of `prefix`."""
    store = CartridgeStore(directory, read_base(READER))
    with store.incoming() as file:
        save_file({"kv": document_kv(load_model(str(READER)), prefix)}, file)
        store.add(NAME, file, {})
    return store


async def ask(
    asking: AsyncOpenAI, arm: str, prefix: Ids, prompts: Sequence[Ids], new: int, together: int
) -> list[str]:
    """Return an arm's responses of `new` tokens to the prompts, asked `together` at a time."""
    room = asyncio.Semaphore(together)
    extra: dict[str, Any] = {"ignore_eos": True}
    if arm == "cartridge":
        extra["kv_transfer_params"] = {"cartridge": NAME}
    prefix_ids = prefix if arm == "prompt" else []

    async def one(prompt: Ids) -> str:
        async with room:
            completion = await asking.completions.create(
                model=READER.name, prompt=prefix_ids + prompt, max_tokens=new, temperature=0,
                extra_body=extra,
            )  # fmt: skip
        assert completion.usage is not None
        assert completion.usage.completion_tokens == new, "a request ended early"
        return completion.choices[0].text

    return await asyncio.gather(*map(one, prompts))


def cached_tokens(url: str) -> int:
    """Return how many prompt tokens the server has found in its prefix cache so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith(HITS)))


def drawn(draws: random.Random, count: int) -> Ids:
    """Return tokens that are no bytes: vLLM repeats a prompt that ends within a character."""
    return draws.choices(range(300, 1400), k=count)


async def rounds(
    server: StockServer, prefix: Ids, options: argparse.Namespace, together: int
) -> dict[str, Any]:
    """Return what `compared` says of the arms with `together` requests in flight."""
    draws, count, equal = random.Random(together), WAVES * together, 0
    speeds: Rounds = {arm: [] for arm in ARMS}
    by_processor: Rounds = {arm: [] for arm in ARMS}
    async with client(server.url.removeprefix("http://")) as asking:
        for turn in range(options.rounds + 1):
            prompts, texts = [drawn(draws, options.prompt) for _ in range(count)], {}
            for arm in ARMS if turn % 2 else reversed(ARMS):
                cached, spent = cached_tokens(server.url), cpu_seconds(server.process.pid)
                start = time.perf_counter()
                texts[arm] = await ask(asking, arm, prefix, prompts, options.new, together)
                seconds = time.perf_counter() - start
                spent = cpu_seconds(server.process.pid) - spent
                if not turn:  # it fills the prefix cache and opens the connections
                    continue
                cached = cached_tokens(server.url) - cached
                wanted = 0 if arm == "none" else count * options.tokens
                assert cached == wanted, f"{arm}: {cached} cached prompt tokens, {wanted} expected"
                speeds[arm].append(count * options.new / seconds)
                by_processor[arm].append(count * options.new / spent)
            if turn:
                equal += sum(map(str.__eq__, texts["cartridge"], texts["prompt"]))
    share = equal / (count * options.rounds)
    return {"equal_responses": round(share, 4), **compared(speeds, by_processor)}


def compared(speeds: Rounds, by_processor: Rounds) -> dict[str, Any]:
    """Return the median tokens/s of each arm, and the ratios of the cartridge's to the others'."""

    def ratios(round_rows: Rounds) -> dict[str, Any]:
        pairs = {
            arm: zip(round_rows["cartridge"], round_rows[arm], strict=True) for arm in ARMS[1:]
        }
        return {f"cartridge/{arm}": quartiles([a / b for a, b in p]) for arm, p in pairs.items()}

    return {
        "tokens_per_second": medians(speeds),
        "tokens_per_processor_second": medians(by_processor),
        "ratio": ratios(speeds),
        "by_processor_time": ratios(by_processor),
        "rounds": {arm: [round(x, 1) for x in s] for arm, s in speeds.items()},
    }


def medians(values_of: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {arm: round(statistics.median(values), 1) for arm, values in values_of.items()}


def quartiles(ratios: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "lower_quartile": round(low, 4), "median": round(middle, 4),
        "upper_quartile": round(high, 4),
    }  # fmt: skip


def measure(arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    if arguments.tokens % BLOCK:
        raise SystemExit(f"--tokens: whole blocks of {BLOCK} are shared, got {arguments.tokens}")
    # One thread, as our own engine has: with more, two small processes starve each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    results, ratio = {}, {}
    prefix = drawn(random.Random(0), arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        store = library(Path(folder, "library"), prefix)
        options = [word for option in OPTIONS.items() for word in option]
        with stock_server(READER, store.directory, Path(folder), *options) as server:
            for together in arguments.together:
                results_of = asyncio.run(rounds(server, prefix, arguments, together))
                print(together, json.dumps(results_of, indent=1), flush=True)
                results[str(together)] = results_of
                for kind in ("ratio", "by_processor_time"):
                    name = f"cartridge over prompt, {together} in flight, {kind}"
                    ratio[name] = results_of[kind]["cartridge/prompt"]["median"]
    return ratio, results


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--rounds": (60, "measured rounds, 2 or more"),
            "--tokens": (64, f"P, a multiple of {BLOCK}"),
            "--prompt": (24, "tokens of a prompt"),
            "--new": (48, "tokens of a response"),
            "--together": ([1, 8, 32], "requests in flight"),
        },
        config={"block_tokens": BLOCK, "threads": 1, "waves": WAVES, **OPTIONS},
    )
