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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from monarch.actor import this_host
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from actors.base import ModelSource, bootstrap
from actors.engine_generator import EngineGeneratorActor
from actors.model_actors import GeneratorActor
from benchmarks.record import ROOT, arguments, processor_seconds, provenance, write
from protocols.spec.sections import GeneratorSpec
from protocols.types import CartridgeSnapshot, GenerateRequest, PrefixRef, Sampling
from services.planes.open import OwnedPlane, open_plane
from services.pool.pool import Pool
from services.pool.service import Service

READER = ROOT / "models" / "clinic-reader"
READER_SHAPE = (4, 2, 32)  # layers, key/value heads, head size
SHAPE_3B = (28, 8, 128)
TOKENS_3B = 2048
BLOCK = 32
TIMEOUT = 600.0


@dataclass
class BenchPlacement:
    """Hold the host of the replicas, and the plane they read from."""

    plane: OwnedPlane
    service: Service


@asynccontextmanager
async def opened(kind: Any) -> AsyncIterator[BenchPlacement]:
    store = this_host().spawn_procs(per_host={"procs": 1}, name="store", bootstrap=bootstrap(1))
    service = await Service.of(this_host(), call_timeout_s=TIMEOUT, spawn_timeout_s=TIMEOUT)
    place = BenchPlacement(await open_plane(kind, store), service)
    try:
        yield place
    finally:
        await place.plane.stop()
        await service.stop()
        await store.stop()


async def replica(
    place: BenchPlacement,
    name: str,
    model: str,
    dtype: str,
    documents: dict[str, tuple[int, ...]],
    gib: float,
) -> Pool:
    """Start a generator of one thread in a new process: on vLLM, or on torch for gib 0."""
    base = ModelSource(model, dtype, 1, documents, 1 << 30, place.plane)
    common = (base, frozenset[int](), 2)
    if gib:
        spec = GeneratorSpec(backend="vllm", block_tokens=BLOCK, kv_gib=gib)
        pool = place.service.spawn(EngineGeneratorActor, role=name, args=(*common, spec))
    else:
        pool = place.service.spawn(GeneratorActor, role=name, args=common)
    await place.service.ready()
    return pool


def cartridge(shape: tuple[int, int, int], tokens: int, dtype: str) -> Tensor:
    """Return random keys and values [1, L, 2, H_kv, P, D]."""
    layers, heads, size = shape
    stream = torch.Generator().manual_seed(0)
    kv = torch.randn((1, layers, 2, heads, tokens, size), generator=stream)
    return kv.to(getattr(torch, dtype))


async def throughput(place: BenchPlacement, options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens/s of each arm in every round, their medians and the ratios."""
    draws = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draws.choices(range(3, 1000), k=count))

    documents = {"prompt": ids(options.tokens), "document": ids(options.document), "none": (1,)}
    vllm = await replica(place, "vllm", str(READER), "float32", documents, 0.5)
    embedded = await replica(place, "embedded", str(READER), "float32", documents, 0)
    kv = cartridge(READER_SHAPE, options.tokens, "float32")
    snapshot = CartridgeSnapshot(0, ("p",), await place.plane.put("throughput", {"kv": kv}))
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
            asked = [request(ref, p, options.new) for p in prompts]
            before, begun = processor_seconds(pids[pool.role]), time.perf_counter()
            done = await pool.route("generate", asked)
            seconds = time.perf_counter() - begun
            tokens = sum(len(c.token_ids) for c in done.completions)
            assert tokens == options.requests * options.new, "a request ended early"
            if turn:  # round 0 fills the prefix cache and grows heaps
                speeds[arm].append(tokens / seconds)
                processor[arm] += processor_seconds(pids[pool.role]) - before
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


async def publishing(
    place: BenchPlacement, name: str, model: str, dtype: str, kv: Tensor, gib: float, times: int
) -> dict[str, Any]:
    """Return median milliseconds from tensors here to the first token on the new version."""
    pool = await replica(place, name, model, dtype, {"none": (1,)}, gib)
    laps: dict[str, list[float]] = {"put": [], "load": [], "first_token": [], "total": []}
    for version in range(times + 1):
        kv = kv * 1.01  # a new version needs a new tensor
        marks = [time.perf_counter()]
        packet = await place.plane.put(f"{name}/{version}", {"kv": kv})
        marks.append(time.perf_counter())
        await pool.route("load", CartridgeSnapshot(version, ("p",), packet))
        marks.append(time.perf_counter())
        asked = request(PrefixRef("cartridge/p", version), (5, 6, 7, 8), 1)
        (completion,) = (await pool.route("generate", (asked,))).completions
        marks.append(time.perf_counter())
        assert completion.versions == (version,), completion
        await place.plane.delete(packet.key)
        if version:
            for lap, a, b in zip(laps, marks, marks[1:], strict=False):
                laps[lap].append(b - a)
            laps["total"].append(marks[-1] - marks[0])
    report = await pool.route("shut_down")
    return {
        "tokens": kv.shape[4],
        "dtype": dtype,
        "megabytes": round(kv.nbytes / 1e6, 2),
        "loads": report.loads,
        "milliseconds": {k: round(1e3 * statistics.median(v), 1) for k, v in laps.items()},
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
    results: dict[str, Any] = {}
    async with opened(options.plane) as place:
        results["throughput"] = await throughput(place, options)
        print(json.dumps(results["throughput"], indent=1), flush=True)
    async with opened(options.plane) as place:
        small = cartridge(READER_SHAPE, 64, "float32")
        results["publish"] = {
            "reader": await publishing(
                place, "reader", str(READER), "float32", small, 0.25, options.publishes
            )
        }
    with tempfile.TemporaryDirectory() as directory:
        model = model_of_3b_cache(directory)
        async with opened(options.plane) as place:
            large = cartridge(SHAPE_3B, TOKENS_3B, "bfloat16")
            results["publish"]["3b"] = await publishing(
                place, "large", model, "bfloat16", large, 1.5, options.publishes
            )
    print(json.dumps(results["publish"], indent=1), flush=True)
    return results


def main() -> None:
    parser = arguments(__doc__, "vllm_throughput")
    parser.set_defaults(out=Path("vllm_throughput.json"))
    for name, default, meaning in (
        ("rounds", 21, "measured rounds, 2 or more"),
        ("requests", 64, "requests in flight at once"),
        ("tokens", 64, "P of the cartridge"),
        ("document", 1024, "tokens of the document"),
        ("prompt", 24, "tokens of a prompt"),
        ("new", 48, "tokens of a response"),
        ("publishes", 5, "measured publishes of each size"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    parser.add_argument("--plane", choices=("shared_memory", "torchstore"), default="shared_memory")
    options = parser.parse_args()
    told = provenance("vllm_throughput", vars(options) | {"block_tokens": BLOCK, "threads": 1})
    results = asyncio.run(run(options))
    ratios = {
        name: ratio["by_processor_time"] for name, ratio in results["throughput"]["ratio"].items()
    }
    write(options.out, told, ratios, results)


if __name__ == "__main__":
    main()
