"""A training step against the straightforward one, per phase and whole, as documents grow:

    python -m benchmarks.step [--batches 4 8] [--documents 256 1024 4096] [--out step.json]

Both train the same cartridge of the tiny reader on the same samples with the same loss, in one
process of one thread; sampling, which is the same for both, is left out. `first` is our teacher's
first step, which reads the document; every later one has its keys and values. A row is refused
whose two gradients differ. The other step is `benchmarks/reference/seed_step.py`. Times are of this
process's work; compare ratios within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.setup import keep_freed_memory
from benchmarks.provenance import provenance
from benchmarks.reference.seed_step import KEEP_TOP, Phases, load_plain, seed_step
from learning.cartridge import CartridgeBank, first_tokens
from learning.losses import Teacher
from learning.model import document_kv, flush_denormals, load_model
from learning.prefixes import DocumentCache
from learning.scoring import prefixes_of, score_kept
from learning.step import new_optimizer
from learning.trainer import CartridgeTrainer, TrainerConfig
from protocols.types import Sample
from services.shared_memory import SharedMemoryPlane

MODEL = Path(__file__).parents[1] / "models" / "clinic-reader"
CARTRIDGE, PROMPT, RESPONSE = 32, 24, 32
FROZEN = 1
CONFIG = TrainerConfig(lr=0.2, warmup_steps=0, clip=1.0, row_tokens=256)
PHASES = ("teacher", "old log-probabilities", "train", "publish")


def samples_of(batch: int, vocabulary: int, version: int) -> list[Sample]:
    draws = random.Random(f"step/{batch}/{version}")

    def ids(n: int) -> tuple[int, ...]:
        return tuple(draws.choices(range(5, vocabulary), k=n))

    return [
        Sample(f"s{i}", "d", ids(PROMPT), ids(RESPONSE), (0.0,) * RESPONSE, (version,) * RESPONSE)
        for i in range(batch)
    ]


async def compare(
    plane: SharedMemoryPlane, document_tokens: int, batch: int, steps: int, path: Path
) -> dict[str, Any]:
    """Medians of `steps` steps of each, after our first; they take turns."""
    model, plain = load_model(str(MODEL)), load_plain(str(MODEL))
    vocabulary = model.config.vocab_size
    draws = random.Random(f"document/{document_tokens}")
    document = tuple(draws.choices(range(5, vocabulary), k=document_tokens))
    beginning = {"d": document_kv(model, document[: CARTRIDGE + 1])}
    trainer = CartridgeTrainer(model, first_tokens(beginning, CARTRIDGE, FROZEN), CONFIG)
    trainer.begin("ours", steps + 1)
    documents = DocumentCache(partial(document_kv, model), {"d": document}, 1 << 30)
    theirs = first_tokens(beginning, CARTRIDGE, FROZEN)
    optimizer = new_optimizer(theirs)

    async def ours(samples: list[Sample], version: int) -> tuple[float, float, Phases]:
        phases = Phases()
        prefixes = prefixes_of(samples, documents)
        teacher = Teacher(**score_kept(model, samples, prefixes, CONFIG.row_tokens, KEEP_TOP))
        phases.done("teacher")
        result = trainer.step(samples, teacher, version)
        phases.done("train")
        kv = trainer.snapshot(version + 1)[1]
        packet = await plane.put(f"{document_tokens}/{batch}/{version}", {"kv": kv})
        await plane.get(packet)
        phases.done("publish")
        await plane.delete(packet.key)
        return result.kl, result.grad_norm, phases

    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for version in range(steps + 1):
        samples = samples_of(batch, vocabulary, version)
        with torch.no_grad():
            theirs.trainable.copy_(trainer.bank.trainable)
        kl, norm, phases = await ours(samples, version)
        found["ours"].append(phases.seconds)
        if version == 0:
            continue  # reads the document, and loads what is lazy
        their_kl, their_norm, their_phases = seed_step(
            plain, theirs, optimizer, document, samples, lr=CONFIG.lr, clip=CONFIG.clip, path=path
        )
        found["theirs"].append(their_phases.seconds)
        check_same((kl, norm, trainer.bank), (their_kl, their_norm, theirs))
    row: dict[str, Any] = {"document": document_tokens, "batch": batch}
    row["first_teacher_ms"] = round(1e3 * found["ours"].pop(0)["teacher"], 1)
    for who, runs in found.items():
        row[who] = {
            phase: round(1e3 * statistics.median(run[phase] for run in runs), 2)
            for phase in PHASES
            if phase in runs[0]
        }
        row[who]["whole"] = round(1e3 * statistics.median(sum(run.values()) for run in runs), 2)
    row["ratio"] = round(row["theirs"]["whole"] / row["ours"]["whole"], 1)
    return row


def check_same(
    ours: tuple[float, float, CartridgeBank], theirs: tuple[float, float, CartridgeBank]
) -> None:
    """That both stepped along the same gradient, or the comparison would mean nothing."""
    gradients: list[Tensor] = []
    for _, _, bank in (ours, theirs):
        assert bank.trainable.grad is not None
        gradients.append(bank.trainable.grad)
    scale = gradients[1].abs().max().item()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-3 * scale)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=1e-5)


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['document']:>9}{row['batch']:>6}"]
    for who in ("theirs", "ours"):
        cells += [f"{row[who].get(phase, 0.0):>10.1f}" for phase in (*PHASES, "whole")]
    return "".join(cells) + f"{row['first_teacher_ms']:>10.1f}{row['ratio']:>8.1f}x"


def header() -> str:
    names = ("teacher", "old", "train", "publish", "whole")
    both = "".join(f"{name:>10}" for name in names)
    return (
        f"{'':15}{'-- straightforward, ms':<50}{'-- ours, ms':<50}\n"
        f"{'document':>9}{'batch':>6}{both}{both}{'first':>10}{'ratio':>9}"
    )


async def run(documents: list[int], batches: list[int], steps: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    keep_freed_memory()  # this and the next as the trainer's process does
    flush_denormals()
    plane = await SharedMemoryPlane.start()
    rows = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for batch in batches:
                for tokens in documents:
                    path = Path(folder) / "cartridge.safetensors"
                    rows.append(await compare(plane, tokens, batch, steps, path))
                    print(line(rows[-1]), flush=True)
    finally:
        await plane.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("step.json"))
    options = vars(parser.parse_args())
    out = options.pop("out")
    print(header())
    rows = asyncio.run(run(**options))
    told = provenance("benchmarks.step", {**options, "threads": 1, "model": MODEL.name})
    out.write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
