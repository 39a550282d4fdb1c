"""vLLM with a cartridge against vLLM with ordinary prompt tokens, and how fast a publish is seen.

    python -m benchmarks.vllm_throughput [--rounds 21] [--requests 64] [--out vllm_throughput.json]

Throughput, tokens/s over whole calls, four arms in turns within every round, on the shipped reader:

    cartridge   P tokens of keys and values as the prefix
    prompt      P ordinary tokens before each prompt, in the prefix cache
    document    a whole document before each prompt, in the prefix cache
    embedded    the cartridge again, on the torch backend

Prompts are new in every round and the same for all arms. Ratios are of two arms within a round,
with their quartiles over the rounds, and of tokens per second of the replica's own processor time,
which other users of the cores hardly disturb.

Publish: from tensors in this process to the first token of a request on the new version, through
the tensor plane, for P = 64 on the reader and for the cartridge of a 3B model (28 layers, 8
key/value heads of 128, P = 2048 in bfloat16: 235 MB) on a random model that is as small as can be
around that cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from monarch.actor import this_host
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.meters import Laps, processor_seconds
from benchmarks.record import ROOT, benchmark
from cartridge_forge.actors.base import ModelSource, bootstrap
from cartridge_forge.actors.engine_generator import EngineGeneratorActor
from cartridge_forge.actors.generator import GeneratorActor
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    GenerateRequest,
    PrefixRef,
    PublishedCartridge,
    Sampling,
)
from cartridge_forge.services.planes.open import OwnedPlane, PlaneKind, open_plane
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.pool.service import Service

READER = ROOT / "models" / "clinic-reader"
READER_SHAPE = (4, 2, 32)  # layers, key/value heads, head size
SHAPE_3B = (28, 8, 128)
TOKENS_3B = 2048
BLOCK = 32
TIMEOUT = 600.0


Replica = Callable[..., Awaitable[Pool]]


@asynccontextmanager
async def opened(kind: PlaneKind) -> AsyncIterator[tuple[OwnedPlane, Replica]]:
    """Yield a plane, and a function that starts a generator of one thread in a new process, on
    vLLM, or on torch for gib 0."""
    store = this_host().spawn_procs(per_host={"procs": 1}, name="store", bootstrap=bootstrap(1))
    service = await Service.of(this_host(), call_timeout_s=TIMEOUT, spawn_timeout_s=TIMEOUT)
    plane = await open_plane(kind, store)

    async def replica(
        name: str, model: str, dtype: str, documents: dict[str, tuple[int, ...]], gib: float
    ) -> Pool:
        base = ModelSource(model, dtype, 1, documents, 1 << 30, plane)
        actor, args = (GeneratorActor, (base, frozenset[int](), 2))
        if gib:
            spec = GeneratorSpec(backend="vllm", block_tokens=BLOCK, kv_gib=gib)
            actor, args = EngineGeneratorActor, (*args, spec)
        pool = service.spawn(actor, role=name, args=args)
        await service.ready()
        return pool

    try:
        yield plane, replica
    finally:
        await plane.stop()
        await service.stop()
        await store.stop()


def cartridge(shape: tuple[int, int, int], tokens: int, dtype: str) -> Tensor:
    """Return random keys and values [L, 2, H_kv, P, D]."""
    layers, heads, size = shape
    stream = torch.Generator().manual_seed(0)
    kv = torch.randn((layers, 2, heads, tokens, size), generator=stream)
    return kv.to(getattr(torch, dtype))


async def throughput(
    plane: OwnedPlane, replica: Replica, options: argparse.Namespace
) -> dict[str, Any]:
    """Return tokens/s of each arm in every round, their medians and the ratios."""
    draws = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draws.choices(range(3, 1000), k=count))

    documents = {"prompt": ids(options.tokens), "document": ids(options.document), "none": (1,)}
    vllm = await replica("vllm", str(READER), "float32", documents, 0.5)
    embedded = await replica("embedded", str(READER), "float32", documents, 0)
    kv = cartridge(READER_SHAPE, options.tokens, "float32")
    snapshot = await put_cartridge(plane, 0, kv)
    for pool in (vllm, embedded):
        await pool.route("load", snapshot)
    arms = {
        "cartridge": (vllm, PrefixRef("cartridge/p", 0)),
        "prompt": (vllm, PrefixRef("document/prompt", 0)),
        "document": (vllm, PrefixRef("document/document", 0)),
        "embedded": (embedded, PrefixRef("cartridge/p", 0)),
    }
    pids = {pool.role: await pool.route("ready") for pool in (vllm, embedded)}
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    processor = dict.fromkeys(arms, 0.0)
    for turn in range(options.rounds + 1):
        prompts = [ids(options.prompt) for _ in range(options.requests)]
        # In random order: the process that follows another finds the processor's caches cold.
        for arm in draws.sample(list(arms), k=len(arms)):
            pool, ref = arms[arm]
            batch = [request(ref, p, options.new) for p in prompts]
            used, start = processor_seconds(pids[pool.role]), time.perf_counter()
            reply = await pool.route("generate", batch)
            seconds = time.perf_counter() - start
            tokens = sum(len(c.token_ids) for c in reply.completions)
            assert tokens == options.requests * options.new, "a request ended early"
            if turn:  # round 0 fills the prefix cache and grows heaps
                speeds[arm].append(tokens / seconds)
                processor[arm] += processor_seconds(pids[pool.role]) - used
    report = await vllm.route("shut_down")

    def ratio(a: str, b: str) -> dict[str, float]:
        ratios = [x / y for x, y in zip(speeds[a], speeds[b], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return {
            "lower_quartile": round(low, 3), "median": round(middle, 3),
            "upper_quartile": round(high, 3),
            "by_processor_time": round(processor[b] / processor[a], 3),
        }  # fmt: skip

    return {
        "tokens_per_second": {a: round(statistics.median(s), 1) for a, s in speeds.items()},
        "rounds": {a: [round(x, 1) for x in s] for a, s in speeds.items()},
        "ratio": {f"cartridge/{b}": ratio("cartridge", b) for b in arms if b != "cartridge"},
        "engine": {
            "start_seconds": round(report.start_seconds, 3),
            "first_token_seconds": round(report.first_token_seconds, 4),
            "stop_seconds": round(report.stop_seconds, 3),
            "loads": report.loads,
        },
    }


def request(ref: Any, prompt: Sequence[int], new: int) -> GenerateRequest:
    return GenerateRequest("r", tuple(prompt), ref, Sampling(temperature=0.0, max_tokens=new), 0)


async def put_cartridge(plane: OwnedPlane, version: int, kv: Tensor) -> CartridgeSnapshot:
    """Publish [L, 2, H_kv, P, D] as the one cartridge of a version."""
    packet = await plane.put(f"published/{version}", {"p": kv})
    return CartridgeSnapshot(version, (PublishedCartridge("p", version, packet),))


async def publishing(
    kind: PlaneKind, model: str, kv: Tensor, gib: float, times: int
) -> dict[str, Any]:
    """Return median milliseconds from tensors here to the first token on the new version."""
    dtype, runs = str(kv.dtype).removeprefix("torch."), []
    async with opened(kind) as (plane, replica):
        pool = await replica("published", model, dtype, {"none": (1,)}, gib)
        for version in range(times + 1):
            kv = kv * 1.01  # a new version needs a new tensor
            laps = Laps()
            snapshot = await put_cartridge(plane, version, kv)
            laps.done("put")
            await pool.route("load", snapshot)
            laps.done("load")
            first = request(PrefixRef("cartridge/p", version), (5, 6, 7, 8), 1)
            (completion,) = (await pool.route("generate", (first,))).completions
            laps.done("first_token")
            assert completion.versions == (version,), completion
            await plane.delete(*snapshot.packets)
            runs.append(laps.seconds | {"total": sum(laps.seconds.values())})
        report = await pool.route("shut_down")
    medians = {part: statistics.median(run[part] for run in runs[1:]) for part in runs[0]}
    return {
        "tokens": kv.shape[4],
        "dtype": dtype,
        "megabytes": round(kv.nbytes / 1e6, 2),
        "loads": report.loads,
        "milliseconds": {part: round(1e3 * value, 1) for part, value in medians.items()},
    }


def model_of_3b_cache(path: str) -> str:
    """Return a random Llama with the key/value shape of Llama-3.2-3B, otherwise minimal."""
    layers, heads, size = SHAPE_3B
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=size,
        max_position_embeddings=2 * TOKENS_3B,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


async def run(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.plane) as (plane, replica):
        result = await throughput(plane, replica, options)
    print(json.dumps(result, indent=1), flush=True)
    small = cartridge(READER_SHAPE, 64, "float32")
    large = cartridge(SHAPE_3B, TOKENS_3B, "bfloat16")
    published = {
        "reader": await publishing(options.plane, str(READER), small, 0.25, options.publishes)
    }
    with tempfile.TemporaryDirectory() as directory:
        model = model_of_3b_cache(directory)
        published["3b"] = await publishing(options.plane, model, large, 1.5, options.publishes)
    print(json.dumps(published, indent=1), flush=True)
    return {"throughput": result, "publish": published}


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    results = asyncio.run(run(options))
    ratio_of = results["throughput"]["ratio"]
    return {name: ratio["by_processor_time"] for name, ratio in ratio_of.items()}, results


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--out": Path("vllm_throughput.json"),
            "--rounds": (21, "measured rounds, 2 or more"),
            "--requests": (64, "requests in flight at once"),
            "--tokens": (64, "P of the cartridge"),
            "--document": (1024, "tokens of the document"),
            "--prompt": (24, "tokens of a prompt"),
            "--new": (48, "tokens of a response"),
            "--publishes": (5, "measured publishes of each size"),
            "--plane": {"choices": get_args(PlaneKind), "default": "shared_memory"},
        },
        config={"block_tokens": BLOCK, "threads": 1},
    )
