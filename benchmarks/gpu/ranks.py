"""What a trainer's ranks save of a step: seconds of one process over those of the busiest rank.

    python -m benchmarks.gpu.ranks [--ranks 2] [--each 8]

Samples over four cartridges, `--each` of them, on the shipped reader and CPUs: one process; so many
ranks over gloo that divide the batch (roles.trainer.procs); and as many that divide the cartridges
(roles.trainer.replicas). In turns, one thread each. Processor time leaves out other users of the
cores and waiting; the busiest rank is what a step waits for where each has a core of its own. The
time by the clock is told beside it, which counts where no other program runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.meters import one_thread
from benchmarks.record import ROOT, benchmark
from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.losses.doc_kl import doc_batch
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.ranks import join, leave
from cartridge_forge.learning.teacher import TeacherDistribution, document_kv
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import Sample

READER = ROOT / "models" / "clinic-reader"
CARTRIDGES, TOKENS = 4, 64
PROMPT, RESPONSE, TOP = 32, 96, 20


ARMS = {"batch": "divide the batch", "cartridges": "divide the cartridges"}


def train(
    rank: int, world: int, arm: str, meeting: str, steps: int, cartridges: int, out: Path
) -> None:
    """Train a step to warm up and then `steps`; write the processor seconds of each, and those by
    the clock."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    one_thread()
    ranks = join(rank, world, meeting, apart=arm == "cartridges")
    draws = random.Random("ranks")
    model = load_model(str(READER))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draws.choices(range(5, 1400), k=count))

    names = [f"c{i}" for i in range(CARTRIDGES)]
    documents = {name: ids(2 * TOKENS) for name in names}
    kv_of = {name: document_kv(model, documents[name]) for name in ranks.cartridges(names)}
    bank = first_tokens(kv_of, TOKENS, 1)
    spec = TrainSpec(steps=99, row_tokens=256)
    trainer = CartridgeTrainer(model, bank, spec, ranks=ranks, names=names)
    version = trainer.begin("ranks", 99)
    samples = [
        Sample(f"{name}/{i}", name, ids(PROMPT), ids(RESPONSE), (), (version,) * RESPONSE)
        for name in names
        for i in range(cartridges)
    ]
    drawn = torch.randn(len(samples) * RESPONSE, TOP, generator=torch.Generator().manual_seed(0))
    indices = torch.arange(TOP, dtype=torch.int32).repeat(len(drawn), 1)
    teacher = TeacherDistribution(indices=indices, logprobs=drawn.log_softmax(-1) - 1.0)
    lasted = []
    for turn in range(steps + 1):
        start = time.process_time(), time.perf_counter()
        now = [Sample(s.id, s.cartridge, s.prompt_ids, s.response_ids, (),
                      (version + turn,) * RESPONSE) for s in samples]  # fmt: skip
        trainer.step(doc_batch(now, teacher), version + turn)
        lasted.append((time.process_time() - start[0], time.perf_counter() - start[1]))
    leave(ranks)
    out.write_text(json.dumps(lasted[1:]))


def run(world: int, steps: int, cartridges: int, arm: str = "batch") -> list[tuple[float, float]]:
    """Return each step's processor seconds, and seconds by the clock, of the rank that took the
    most."""
    with tempfile.TemporaryDirectory() as folder:
        spawned = multiprocessing.get_context("spawn")
        files = [Path(folder) / str(rank) for rank in range(world)]
        meeting = f"file://{folder}/meet"
        processes = [
            spawned.Process(target=train, args=(rank, world, arm, meeting, steps, cartridges, file))
            for rank, file in enumerate(files)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed")
        results = [json.loads(file.read_text()) for file in files]
    return [
        (max(cpu for cpu, _ in step), max(wall for _, wall in step))
        for step in zip(*results, strict=True)
    ]


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return how many times less the busiest rank takes, and all figures."""
    lasted: dict[str, list[tuple[float, float]]] = {"alone": [], **{arm: [] for arm in ARMS}}
    for _ in range(options.rounds):
        lasted["alone"] += run(1, options.steps, options.each)
        for arm in ARMS:
            lasted[arm] += run(options.ranks, options.steps, options.each, arm)
    figures = {}
    medians = {
        arm: [statistics.median(laps) for laps in zip(*steps, strict=True)]
        for arm, steps in lasted.items()
    }
    for arm, description in ARMS.items():
        for kind, one, most in zip(("CPU", "clock"), medians["alone"], medians[arm], strict=True):
            name = (
                f"one process over the busiest of {options.ranks} ranks that {description}, {kind}"
            )
            print(f"{name}: {one:.3f} s, {most:.3f} s: {one / most:.2f}x")
            figures[name] = one / most
    return figures, lasted


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--ranks": (2, "ranks"),
            "--each": (2, "samples of each cartridge"),
            "--steps": (5, "steps of a round"),
            "--rounds": (3, "rounds"),
        },
        quick={"rounds": 1},
    )
