"""What a library of many cartridges costs: the router's choice, its index, lists, and the server.

    python -m benchmarks.users.library_size [--cartridges 1 10000] [--served] [--out FILE]

Makes libraries of so many tiny cartridges, each with the words of a page of its own, and measures
in each: a choice, BM25 itself over the same index, and what the choice takes beyond it; the first
choice, which reads the words; one after a cartridge has changed; `forge cartridges list` and a page
of `/v1/models`; the memory of the index, also of one that may read a hundred cartridges alone.

With `--served` it starts `forge serve` over each library, and tells how long it takes until it is
ready, and how long a plain request takes: calm, and beside two clients that ask twice a second, of
a cartridge that they name, of `auto` while the index is first read, and of `auto` then. Seconds are
of the processor, for others use it too, but those of requests, whose ratios are comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI

from benchmarks.meters import grown_mb
from benchmarks.record import benchmark
from benchmarks.serving import CODE, MESSAGES, address, client, cpu_seconds, is_ready, server, until
from cartridge_forge.plugins.documents.retrieval import count_terms
from cartridge_forge.plugins.library.formats import forge
from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile, Provenance
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.library.terms import write_terms
from cartridge_forge.plugins.serve.routing import CartridgeRouter
from cartridge_forge.protocols.records.run_files import TERMS

READER = Path("models/clinic-reader")
WORDS, COMMON, LENGTH = 20_000, 60, 250  # of all pages, those that most have, and of one page
CHOICES, CHANGES, PLAIN = 50, 10, 24  # measured of each
CLIENTS, PACE_S = 2, 0.5  # of others, each with a request so often
SHARE = 100  # cartridges of a key that may not use all


def page(number: int) -> str:
    """Return a page of English's distribution of words: a few stand in all, most in one of many."""
    rng = random.Random(f"page/{number}")
    rare = (f"w{int(WORDS * rng.random() ** 2)}" for _ in range(LENGTH))
    common = (f"c{int(COMMON * rng.random() ** 2)}" for _ in range(LENGTH))
    return " ".join([f"page{number}", *rare, *common])


def question(number: int) -> str:
    return f"c0 c1 c2 c5 {' '.join(page(number).split()[1:8])}?"


def make_library(folder: Path, cartridges: int, base: BaseModelInfo) -> CartridgeStore:
    """Return a library of so many cartridges, each of four tokens. Nothing is synced to disk."""
    library = CartridgeStore(folder, base)
    shape = (base.layers, 2, base.kv_heads, 4, base.head_dim)
    one = CartridgeFile(
        torch.zeros(shape), frozen=0, facts=Provenance(config_sha256=base.config_sha256)
    )
    file = folder / "kv.safetensors"
    forge.write_file(one, file)
    for number in range(cartridges):
        name = f"page_{number:05d}"
        version = folder / name / "1"
        version.mkdir(parents=True)
        os.link(file, version / forge.FILE)
        forge.write_manifest(version, forge.manifest_of(one, version / forge.FILE, name, 1))
        write_terms(version / TERMS, {name: [count_terms(page(number))]})
    file.unlink()
    return library


def seconds(call: Callable[[], Any]) -> float:
    """Return processor seconds of a call in this process."""
    start = time.process_time()
    call()
    return time.process_time() - start


def command_seconds(*words: str) -> float:
    """Return processor seconds of a `forge` command."""
    usages = [resource.getrusage(resource.RUSAGE_CHILDREN)]
    subprocess.run([sys.executable, "-c", CODE, *words], check=True, stdout=subprocess.DEVNULL)
    usages.append(resource.getrusage(resource.RUSAGE_CHILDREN))
    start, end = (usage.ru_utime + usage.ru_stime for usage in usages)
    return end - start


def of_library(library: CartridgeStore, cartridges: int, folder: Path) -> dict[str, Any]:
    """Return the figures of one library: seconds, or as they are named."""
    rng, router = random.Random(0), CartridgeRouter(library)
    first = seconds(lambda: router.choose(question(0)))
    questions = [question(rng.randrange(cartridges)) for _ in range(CHOICES)]
    bm25 = router.index.bm25
    bm25_only = statistics.median([seconds(lambda q=q: bm25.choose(q)) for q in questions])
    choice = statistics.median([seconds(lambda q=q: router.choose(q)) for q in questions])
    changes = []
    for number in range(CHANGES):
        name = library.folders()[number % cartridges]
        entry = library.newest(name)
        assert entry is not None
        library.describe(entry, [count_terms(f"{page(cartridges + number)} changed{number}")])
        changes.append(seconds(lambda n=number: router.choose(f"changed{n}")) - choice)
    few = set(library.folders()[:SHARE])
    sizes = [
        grown_mb(lambda p=permitted: CartridgeRouter(library, p).choose(question(0)))
        for permitted in (few.__contains__, None)
    ]

    def models_page() -> None:
        names, _ = router.page("", 1000)
        router.routed(names)
        [library.versions(name) for name in names]

    words = [w for s in (f"library={folder}", f"model.path={READER}") for w in ("--set", s)]
    listing = command_seconds("cartridges", "list", *words)
    return {
        "opened": round(seconds(lambda: CartridgeStore(folder, library.base)), 4),
        "first choice": round(first, 3),
        "choice, ms": round(1e3 * choice, 3),
        "BM25 itself, ms": round(1e3 * bm25_only, 3),
        "beyond BM25, ms": round(1e3 * (choice - bm25_only), 3),
        "after one change": round(statistics.median(changes), 4),
        f"index of {SHARE} permitted, MB": round(sizes[0], 1),
        "index, MB": round(sizes[1], 1),
        "page of models": round(seconds(models_page), 4),
        "forge cartridges list": round(listing, 2),
    }


async def latencies(asking: AsyncOpenAI, count: int) -> list[float]:
    """Return the seconds of plain requests, one after the other."""
    values = []
    for number in range(count):
        start = time.perf_counter()
        await asking.chat.completions.create(
            model="clinic-reader", messages=MESSAGES, max_tokens=16, temperature=0, seed=number
        )
        values.append(time.perf_counter() - start)
    return values


async def request_ratios(at: str, cartridges: int) -> dict[str, Any]:
    """Return the median of plain requests' seconds, calm, and the ratios to it beside two clients
    that name their cartridge, that ask `auto` while the index is first read, and afterwards."""
    async with client(at) as asking:

        async def ask(model: str, number: int, ended: asyncio.Event) -> None:
            while not ended.is_set():
                message: Any = {"role": "user", "content": question(number % cartridges)}
                start = time.perf_counter()
                await asking.chat.completions.create(model=model, messages=[message], max_tokens=1)
                await asyncio.sleep(PACE_S - (time.perf_counter() - start))
                number += CLIENTS

        async def measured(model: str) -> float:
            ended = asyncio.Event()
            clients = [asyncio.create_task(ask(model, n, ended)) for n in range(CLIENTS)]
            median = statistics.median(await latencies(asking, PLAIN))
            ended.set()
            await asyncio.gather(*clients)
            return median

        await latencies(asking, 4)
        calm = statistics.median(await latencies(asking, PLAIN))
        named = await measured("clinic-reader+page_00000")
        reading, steady = await measured("auto"), await measured("auto")
        calm_after = statistics.median(await latencies(asking, PLAIN))
    calm = statistics.mean([calm, calm_after])
    return {
        "plain request, calm": round(calm, 4),
        "beside two that name theirs, ratio": round(named / calm, 3),
        "beside auto, index being read": round(reading / calm, 3),
        "beside auto, ratio": round(steady / calm, 3),
    }


def of_server(folder: Path, cartridges: int) -> dict[str, Any]:
    start = time.perf_counter()
    with server(1, f"library={folder}") as process:
        at = address(process)
        ready = until(lambda: is_ready(at)) - start
        cpu = cpu_seconds(process.pid)
        return {
            "until ready": round(ready, 2), "until ready, of the cores": round(cpu, 2),
            **asyncio.run(request_ratios(at, cartridges)),
        }  # fmt: skip


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    base, results = read_base(READER), dict[str, dict[str, Any]]()
    for cartridges in options.cartridges:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            library = make_library(Path(folder), cartridges, base)
            figures = of_library(library, cartridges, Path(folder))
            if options.served:
                figures |= of_server(Path(folder), cartridges)
        for name, figure in figures.items():
            print(f"{cartridges:>6}  {name:<36} {figure}", flush=True)
        results[str(cartridges)] = figures
    return {}, results


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--cartridges": ([1, 10_000], "libraries of so many"),
            "--served": (False, "start a server over each, and measure requests"),
            "--folder": {"default": None, "help": "where the libraries are made for a while"},
        },
        quick={"cartridges": [1, 1000]},
    )
