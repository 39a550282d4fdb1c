"""What a trainer's ranks save of a step: processor seconds of the busiest rank, over those of one.

    python -m benchmarks.gpu.ranks [--ranks 2] [--each 8]

Samples over four cartridges, `--each` of them, on the shipped reader and CPUs: one process, then so
many ranks over gloo, in turns, one thread each. Processor time leaves out other users of the cores
and waiting; the busiest rank is what a step waits for where each has a core of its own.
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
from learning.cartridge.bank import first_tokens
from learning.model.distributed import join, leave
from learning.model.document_kv import document_kv
from learning.model.loading import load_model
from learning.scoring import TeacherDistribution
from learning.trainer import CartridgeTrainer
from protocols.spec.sections import TrainSpec
from protocols.types import Sample

READER = ROOT / "models" / "clinic-reader"
CARTRIDGES, TOKENS = 4, 64
PROMPT, RESPONSE, TOP = 32, 96, 20


def train(rank: int, world: int, meeting: str, steps: int, each: int, out: Path) -> None:
    """Train a step to warm up and then `steps`; write the processor seconds of each."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    one_thread()
    ranks = join(rank, world, meeting)
    draws = random.Random("ranks")
    model = load_model(str(READER))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draws.choices(range(5, 1400), k=count))

    names = [f"c{i}" for i in range(CARTRIDGES)]
    bank = first_tokens({name: document_kv(model, ids(2 * TOKENS)) for name in names}, TOKENS, 1)
    trainer = CartridgeTrainer(model, bank, TrainSpec(steps=99, row_tokens=256), ranks=ranks)
    version = trainer.begin("ranks", 99)
    samples = [
        Sample(f"{name}/{i}", name, ids(PROMPT), ids(RESPONSE), (), (version,) * RESPONSE)
        for name in names
        for i in range(each)
    ]
    drawn = torch.randn(len(samples) * RESPONSE, TOP, generator=torch.Generator().manual_seed(0))
    indices = torch.arange(TOP, dtype=torch.int32).repeat(len(drawn), 1)
    teacher = TeacherDistribution(indices=indices, logprobs=drawn.log_softmax(-1) - 1.0)
    lasted = []
    for turn in range(steps + 1):
        begun = time.process_time()
        now = [Sample(s.id, s.cartridge, s.prompt_ids, s.response_ids, (),
                      (version + turn,) * RESPONSE) for s in samples]  # fmt: skip
        trainer.step(now, teacher, version + turn)
        lasted.append(time.process_time() - begun)
    leave(ranks)
    out.write_text(json.dumps(lasted[1:]))


def run(world: int, steps: int, each: int) -> list[float]:
    """Return each step's processor seconds of the rank that took the most."""
    with tempfile.TemporaryDirectory() as folder:
        spawned = multiprocessing.get_context("spawn")
        files = [Path(folder) / str(rank) for rank in range(world)]
        meeting = f"file://{folder}/meet"
        processes = [
            spawned.Process(target=train, args=(rank, world, meeting, steps, each, file))
            for rank, file in enumerate(files)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed")
        told = [json.loads(file.read_text()) for file in files]
    return [max(step) for step in zip(*told, strict=True)]


def measure(asked: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return how many times less the busiest rank takes, and all figures."""
    alone, several = list[float](), list[float]()
    for _ in range(asked.rounds):
        alone += run(1, asked.steps, asked.each)
        several += run(asked.ranks, asked.steps, asked.each)
    one, most = statistics.median(alone), statistics.median(several)
    print(
        f"one process {one:.3f} s, of {asked.ranks} ranks at most {most:.3f} s: {one / most:.2f}x"
    )
    name = f"one process over the busiest of {asked.ranks} ranks"
    return {name: one / most}, {"alone": alone, "ranks": several}


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
